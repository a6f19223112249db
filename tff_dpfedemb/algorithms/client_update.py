"""What one virtual client computes: the local training, written once for all algorithms.

Xu et al., "Learning to Generate Image Embeddings with User-level Differential Privacy", CVPR 2023.
"""

import collections
from collections.abc import Callable

import tensorflow as tf
import tensorflow_federated as tff

from tff_dpfedemb.algorithms.hyperparameters import ClientTraining
from tff_dpfedemb.models import embedding_model as embedding_model_lib

# What each local seed is folded with, one number a purpose.
_KEEP, _HEAD, _RECONSTRUCTION, _TRAINING = range(4)


def _fold(seed: tf.Tensor, *data: tf.Tensor | int) -> tf.Tensor:
    """A seed for one purpose, derived from the virtual client's seed."""
    for number in data:
        seed = tf.random.experimental.stateless_fold_in(
            seed, tf.cast(number, tf.int64), alg=embedding_model_lib.PHILOX
        )
    return seed


def _permutation(seed: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    """A random order of range(size)."""
    return tf.argsort(
        tf.random.stateless_uniform(size[tf.newaxis], seed, alg=embedding_model_lib.PHILOX),
        stable=True,
    )


def build_client_update(
    model: embedding_model_lib.EmbeddingModel,
    training: ClientTraining,
    backbone: tf.keras.Model,
    global_head: bool = False,
) -> Callable[..., tuple[tuple[tf.Tensor, ...], collections.OrderedDict]]:
    """Builds the local training of a virtual client.

    Args:
        model: The architecture.
        training: How to train.
        backbone: A backbone of `model`, whose variables serve as working memory.
        global_head: False: the head is private, fresh, over the virtual client's own classes, and
            is thrown away. True: the head is over all training classes, comes with the backbone's
            weights, and its delta leaves the virtual client with theirs.

    Returns:
        A `tf.function` (initial_weights, frozen_weights, images, class_ids, seed) ->
        (delta, measurements):
        initial_weights: the backbone's trainable weights, a sequence of float32 tensors, and after
        them, where it is global, the head's kernel and bias;
        frozen_weights: the backbone's non-trainable weights, likewise;
        images: uint8, (n, height, width, channels), n >= 0; class_ids: int64, (n,); seed: int64,
        (2,). delta: initial minus final weights, all zero for an empty virtual client and
        where any of it, or its norm, is not finite. measurements: float32 scalars that may be
        summed over virtual clients.
    """
    backbone_optimizer = tff.learning.optimizers.build_sgdm(
        training.client_lr, training.client_momentum
    )
    head_optimizer = tff.learning.optimizers.build_sgdm(
        training.client_lr * training.head_lr_scale, training.client_momentum
    )
    batch_size = training.client_batch_size
    variables = tuple(backbone.trainable_variables)
    frozen = tuple(backbone.non_trainable_variables)

    def loss_and_correct(head, num_classes, embeddings, labels):
        scores = embedding_model_lib.logits(head, embeddings, num_classes)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores)
        hits = tf.equal(tf.argmax(scores, axis=1, output_type=tf.int32), labels)
        return tf.reduce_mean(losses), tf.math.count_nonzero(hits, dtype=tf.float32)

    def embed(images):
        return model.training_embeddings(backbone, images)

    def look_up(class_ids):
        """Labels, the number of classes, and whether the head has a row for each."""
        if global_head:
            labels, num_classes = tf.cast(class_ids, tf.int32), tf.constant(model.head_size)
            return labels, num_classes, tf.reduce_all(labels < num_classes)
        classes, labels = tf.unique(class_ids)
        num_classes = tf.shape(classes)[0]
        return labels, num_classes, num_classes <= model.head_size

    def specs(tensors):
        return tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), tensors)

    def reconstruct_head(head, num_classes, images, labels, seed):
        """Trains the head alone; the backbone's embeddings of a batch are constants."""
        n = tf.shape(labels)[0]
        state = head_optimizer.initialize(specs(head))
        steps_per_pass = (n + batch_size - 1) // batch_size
        steps = tf.where(n > 0, training.reconst_iters, 0)
        order = tf.range(n)
        for step in tf.range(steps):
            tf.autograph.experimental.set_loop_options(
                shape_invariants=[(order, tf.TensorShape([None]))]
            )
            place = step % steps_per_pass
            if tf.equal(place, 0):  # Not ==, which compares identities in a TFF graph.
                order = _permutation(_fold(seed, _RECONSTRUCTION, step), n)
            batch = order[place * batch_size : (place + 1) * batch_size]
            embeddings = tf.stop_gradient(embed(tf.gather(images, batch)))
            with tf.GradientTape() as tape:
                tape.watch(head)
                loss, _ = loss_and_correct(head, num_classes, embeddings, tf.gather(labels, batch))
            state, head = head_optimizer.next(state, head, tape.gradient(loss, head))
        return head

    @tf.function(autograph=True)
    def client_update(initial_weights, frozen_weights, images, class_ids, seed):
        initial_weights = tuple(initial_weights)
        initial_backbone = initial_weights[: len(variables)]
        for variable, value in zip(variables, initial_backbone, strict=True):
            variable.assign(value)
        for variable, value in zip(frozen, tuple(frozen_weights), strict=True):
            variable.assign(value)

        if tf.shape(class_ids)[0] > training.max_examples_per_client:
            kept = _permutation(_fold(seed, _KEEP), tf.shape(class_ids)[0])
            kept = tf.sort(kept[: training.max_examples_per_client])
            images, class_ids = tf.gather(images, kept), tf.gather(class_ids, kept)
        labels, num_classes, fits = look_up(class_ids)
        n = tf.shape(labels)[0]
        within = tf.debugging.Assert(fits, ["a virtual client holds more classes than head_size"])
        with tf.control_dependencies([within]):
            if global_head:
                head = embedding_model_lib.HeadWeights(
                    *map(tf.identity, initial_weights[len(variables) :])
                )
            else:
                head = model.initial_head(_fold(seed, _HEAD))
        if training.reconst_iters:
            head = reconstruct_head(head, num_classes, images, labels, seed)

        head_state = head_optimizer.initialize(specs(head))
        backbone_state = backbone_optimizer.initialize(specs(variables))
        loss_sum = correct_sum = tf.constant(0.0)
        for epoch in tf.range(training.client_epochs_per_round):
            order = _permutation(_fold(seed, _TRAINING, epoch), n)
            for start in tf.range(0, n, batch_size):
                batch = order[start : start + batch_size]
                batch_labels = tf.gather(labels, batch)
                with tf.GradientTape() as tape:
                    tape.watch(head)
                    loss, correct = loss_and_correct(
                        head, num_classes, embed(tf.gather(images, batch)), batch_labels
                    )
                weights = tuple(v.read_value() for v in variables)
                if training.reconst_iters:
                    gradients = tape.gradient(loss, variables)
                else:
                    gradients, head_gradients = tape.gradient(loss, (variables, head))
                    head_state, head = head_optimizer.next(head_state, head, head_gradients)
                backbone_state, weights = backbone_optimizer.next(
                    backbone_state, weights, gradients
                )
                for variable, value in zip(variables, weights, strict=True):
                    variable.assign(value)
                loss_sum += loss * tf.cast(tf.shape(batch)[0], tf.float32)
                correct_sum += correct

        final = tuple(v.read_value() for v in variables) + (tuple(head) if global_head else ())
        delta = tuple(a - b for a, b in zip(initial_weights, final, strict=True))
        norm = tf.linalg.global_norm(delta)
        # A norm that overflows would make clipping divide infinity by infinity.
        finite = tf.math.is_finite(norm)
        delta = tuple(tf.where(finite, d, tf.zeros_like(d)) for d in delta)

        def count(value):
            return tf.cast(value, tf.float32)

        def if_finite(value):
            return tf.where(finite & tf.math.is_finite(value), value, 0.0)

        measurements = collections.OrderedDict(
            loss_sum=if_finite(loss_sum),
            correct_sum=if_finite(correct_sum),
            examples_seen=if_finite(count(n * training.client_epochs_per_round)),
            examples=count(n),
            classes=count(tf.shape(tf.unique(labels)[0])[0]),
            update_norm_sum=if_finite(norm),
            non_finite=count(~finite),
            non_empty=count(n > 0),
        )
        return delta, measurements

    return client_update
