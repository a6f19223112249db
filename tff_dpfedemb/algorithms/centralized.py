"""Training in one place, without privacy: the baseline, and public pretraining."""

import tensorflow as tf

from tff_dpfedemb.algorithms.hyperparameters import CentralTraining
from tff_dpfedemb.models import embedding_model as embedding_model_lib
from tff_dpfedemb.models import layers, pretrained

_HEAD_STREAM = 0x43454E54


class CentralTrainer(tf.Module):
    """A backbone and a head over all classes, trained batch by batch.

    Attributes:
        backbone: The Keras model in training.
        optimizer: Whose `iterations` count the steps.
    """

    def __init__(
        self,
        model: embedding_model_lib.EmbeddingModel,
        training: CentralTraining,
        seed: int,
        start: pretrained.InitialWeights | None = None,
    ):
        """Builds everything.

        Args:
            model: The architecture; `head_size` is the number of classes.
            training: How it is trained.
            seed: Seed of fresh weights.
            start: The backbone's weights to start from; None for fresh ones.
        """
        super().__init__()
        self._model, self._training = model, training
        self.backbone = model.build_backbone(seed)
        if start is not None:
            layers.assign_weights(self.backbone, start.trainable, start.non_trainable)
        head = model.initial_head(tf.constant([seed, _HEAD_STREAM]))
        self._head = embedding_model_lib.HeadWeights(*map(tf.Variable, head))
        self.optimizer = tf.keras.optimizers.SGD(
            tf.keras.optimizers.schedules.CosineDecay(training.learning_rate, training.total_steps),
            training.momentum,
        )
        self._variables = [*self.backbone.trainable_variables, *self._head]
        self.optimizer.build(self._variables)
        self.train = tf.function(
            self._train,
            input_signature=[
                tf.TensorSpec([None, *model.image_shape], tf.uint8),
                tf.TensorSpec([None], tf.int64),
                tf.TensorSpec([2], tf.int64),
            ],
        )

    @property
    def steps(self) -> int:
        """Steps behind us."""
        return int(self.optimizer.iterations)

    def _train(
        self, images: tf.Tensor, class_ids: tf.Tensor, seed: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """One pass over some images in random order, or less where the last step comes first.

        Args:
            images: uint8, (n, height, width, channels).
            class_ids: int64, (n,), each below `head_size`.
            seed: int64, (2,), of the order.

        Returns:
            Sum of losses, number of right classes, and number of examples seen, float32 scalars.
        """
        size = self._training.batch_size
        n = tf.shape(class_ids)[0]
        order = tf.argsort(
            tf.random.stateless_uniform([n], seed, alg=embedding_model_lib.PHILOX), stable=True
        )
        left = self._training.total_steps - tf.cast(self.optimizer.iterations, tf.int32)
        losses = correct = seen = tf.constant(0.0)
        for step in tf.range(tf.minimum((n + size - 1) // size, left)):
            batch = order[step * size : (step + 1) * size]
            labels = tf.gather(class_ids, batch)
            with tf.GradientTape() as tape:
                embeddings = self._model.training_embeddings(
                    self.backbone, tf.gather(images, batch)
                )
                scores = embedding_model_lib.logits(
                    self._head, embeddings, tf.constant(self._model.head_size)
                )
                each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores)
                loss = tf.reduce_mean(each)
            gradients = tape.gradient(loss, self._variables)
            self.optimizer.apply_gradients(zip(gradients, self._variables, strict=True))
            losses += tf.reduce_sum(each)
            hits = tf.equal(tf.argmax(scores, axis=1), labels)
            correct += tf.math.count_nonzero(hits, dtype=tf.float32)
            seen += tf.cast(tf.shape(batch)[0], tf.float32)
        return losses, correct, seen
