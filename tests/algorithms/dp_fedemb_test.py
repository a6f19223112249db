"""The TFF process against an independent computation of the same rounds, and its laws."""

import dataclasses
import functools
import unittest

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
from absl.testing import absltest, parameterized

from tff_dpfedemb.algorithms import client_update, dp_fedemb
from tff_dpfedemb.algorithms.hyperparameters import ClientTraining
from tff_dpfedemb.data import sampling, virtual_clients
from tff_dpfedemb.models import embedding_model as embedding_model_lib
from tff_dpfedemb.privacy import aggregators
from tff_dpfedemb.privacy import plan as plan_lib
from tff_dpfedemb.runtime import worker as worker_lib

_IMAGE_SHAPE = (8, 8, 1)
_DIM = 8
_HEAD_SIZE = 29  # A number that no backbone weight's shape holds.
_DIVISOR = 8  # V; the rounds below have fewer virtual clients.
_INIT_SEED = 11

# Users with different numbers of examples, one of them with none.
_COUNTS = (3, 5, 0, 7, 2, 9, 4, 1)
_RNG = np.random.default_rng(0)
_USER = np.repeat(np.arange(len(_COUNTS)), _COUNTS)
_IMAGES = _RNG.integers(0, 256, (len(_USER), *_IMAGE_SHAPE)).astype(np.uint8)
# Ids at the ends of int64 and close together, as no head could index them.
_CLASS_IDS = _RNG.choice(np.array([-(2**63), -5, 0, 7, 2**40, 2**63 - 1], np.int64), len(_USER))

# 8 examples; a user without any; nobody; more than max_examples_per_client; a single example.
_COHORTS = (
    ([0, 1], [2], [], [3, 4, 5, 6], [7]),
    ([5, 7], [], [6]),
    ([1, 0], [3], [4, 2], [5, 6, 7]),
)

_JOINT = ClientTraining(
    client_lr=0.02,
    client_momentum=0.9,
    head_lr_scale=5.0,
    client_epochs_per_round=3,
    client_batch_size=3,
    max_examples_per_client=10,
)


def setUpModule():
    unittest.enterModuleContext(worker_lib.local_execution())
    unittest.addModuleCleanup(_process.cache_clear)


def _load_users(user_ids):
    rows = tf.ragged.constant(
        [np.flatnonzero(user == _USER).tolist() for user in range(len(_COUNTS))], dtype=tf.int64
    )
    rows = tf.gather(rows, user_ids).flat_values
    return tf.gather(_IMAGES, rows), tf.gather(_CLASS_IDS, rows)


def _model(backbone="small_cnn", head_size=_HEAD_SIZE):
    return embedding_model_lib.EmbeddingModel(backbone, _IMAGE_SHAPE, _DIM, head_size)


def _plan(clip_norm=None, noise_multiplier=0.0):
    return plan_lib.PrivacyPlan(
        population=1000,
        virtual_clients_per_round=_DIVISOR,
        virtual_client_size=2,
        total_rounds=3,
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
    )


@functools.cache
def _process(training=_JOINT, *, model=None, plan=None, server=(1.0, 0.0)):
    return dp_fedemb.build_dp_fedemb(
        model or _model(),
        training,
        virtual_clients.build_dataset_computation(_load_users, np.int64),
        aggregators.build_aggregation_factory(plan or _plan()),
        tff.learning.optimizers.build_sgdm(*server),
        _INIT_SEED,
    )


def _clients(cohort, seeds):
    return virtual_clients.client_arguments([np.array(c, np.int64) for c in cohort], seeds)


def _weights(process, state):
    return [np.asarray(w) for w in process.get_model_weights(state).trainable]


def _global_norm(tensors):
    return np.sqrt(sum(np.sum(np.square(t.astype(np.float64))) for t in tensors))


# The specification, once more, from NumPy and the Keras backbone alone.


def _fold(seed, *numbers):
    for number in numbers:
        seed = tf.random.experimental.stateless_fold_in(seed, np.int64(number), alg="philox")
    return seed


def _order(seed, n):
    return np.argsort(tf.random.stateless_uniform([n], seed, alg="philox"), kind="stable")


def _local_training(backbone, initial, images, class_ids, seed, t):
    """A virtual client's (delta, loss_sum, correct_sum)."""
    if len(class_ids) > t.max_examples_per_client:
        kept = np.sort(_order(_fold(seed, 0), len(class_ids))[: t.max_examples_per_client])
        images, class_ids = images[kept], class_ids[kept]
    numbers = {}
    labels = np.array([numbers.setdefault(c, len(numbers)) for c in class_ids.tolist()], np.int64)
    n, k = len(labels), len(numbers)

    kernel = tf.random.stateless_normal((_HEAD_SIZE, _DIM), _fold(seed, 1), alg="philox")[:k]
    head = [kernel.numpy() / np.sqrt(_DIM), np.zeros(k, np.float32)]
    head_velocity = [np.zeros_like(h) for h in head]
    weights = [w.copy() for w in initial]
    velocity = [np.zeros_like(w) for w in weights]

    def gradients(rows):
        """(loss, correct, gradients of the backbone, gradients of the head) of a batch."""
        backbone.set_weights(weights)
        one_hot = np.eye(k, dtype=np.float32)[labels[rows]]
        with tf.GradientTape() as tape:
            w, b = (tf.constant(h) for h in head)
            tape.watch((w, b))
            embeddings = backbone(images[rows].astype(np.float32) / 128 - 1, training=True)
            scores = tf.einsum("nd,kd->nk", embeddings, w) + b
            log_p = scores - tf.reduce_logsumexp(scores, axis=1, keepdims=True)
            loss = -tf.reduce_sum(one_hot * log_p) / len(rows)
        of_backbone, of_head = tape.gradient(loss, (backbone.trainable_variables, (w, b)))
        correct = np.sum(np.argmax(scores, axis=1) == labels[rows])
        return loss.numpy(), correct, [g.numpy() for g in of_backbone], [g.numpy() for g in of_head]

    def step(values, velocities, grads, lr):
        for value, v, g in zip(values, velocities, grads, strict=True):
            v *= t.client_momentum
            v += g
            value -= lr * v

    per_pass = -(-n // t.client_batch_size)
    for i in range(t.reconst_iters if n else 0):
        if i % per_pass == 0:
            order = _order(_fold(seed, 2, i), n)
        start = i % per_pass * t.client_batch_size
        grads = gradients(order[start : start + t.client_batch_size])
        step(head, head_velocity, grads[3], t.client_lr * t.head_lr_scale)

    loss_sum = correct_sum = 0.0
    for epoch in range(t.client_epochs_per_round):
        order = _order(_fold(seed, 3, epoch), n)
        for start in range(0, n, t.client_batch_size):
            rows = order[start : start + t.client_batch_size]
            loss, correct, of_backbone, of_head = gradients(rows)
            loss_sum, correct_sum = loss_sum + loss * len(rows), correct_sum + correct
            step(weights, velocity, of_backbone, t.client_lr)
            if not t.reconst_iters:
                step(head, head_velocity, of_head, t.client_lr * t.head_lr_scale)
    return [a - b for a, b in zip(initial, weights, strict=True)], loss_sum, correct_sum


def _reference_rounds(model, training, server, clip_norm):
    """The backbone weights after each round, with the sums of loss and hits."""
    backbone = model.build_backbone(_INIT_SEED)
    weights = backbone.get_weights()
    velocity = [np.zeros_like(w) for w in weights]
    for number, cohort in enumerate(_COHORTS):
        total = [np.zeros_like(w) for w in weights]
        loss_sum = correct_sum = 0.0
        for users, seed in zip(cohort, sampling.client_seeds(5, number, len(cohort)), strict=True):
            rows = np.concatenate([np.flatnonzero(u == _USER) for u in users] or [[]]).astype(int)
            delta, loss, correct = _local_training(
                backbone, weights, _IMAGES[rows], _CLASS_IDS[rows], seed, training
            )
            norm = _global_norm(delta)
            scale = 1.0 if clip_norm is None or norm <= clip_norm else clip_norm / norm
            total = [a + scale * d for a, d in zip(total, delta, strict=True)]
            loss_sum, correct_sum = loss_sum + loss, correct_sum + correct
        velocity = [server[1] * v + a / _DIVISOR for v, a in zip(velocity, total, strict=True)]
        weights = [w - server[0] * v for w, v in zip(weights, velocity, strict=True)]
        yield weights, loss_sum, correct_sum


class ReferenceTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("huge_clip", "small_cnn", {}, (0.7, 0.9), 1e9),
        ("clipped", "small_cnn", {}, (3.0, 0.5), 0.02),
        ("no_clip", "lenet", {"client_batch_size": 4}, (0.5, 0.9), None),
        (
            "one_batch_without_momentum",
            "small_cnn",
            {"client_batch_size": 100, "client_momentum": 0.0},
            (1.0, 0.0),
            None,
        ),
        ("reconstruction", "small_cnn", {"reconst_iters": 5}, (1.0, 0.9), None),
    )
    def test_rounds_are_what_the_definition_says(self, backbone, changes, server, clip_norm):
        model = _model(backbone)
        training = dataclasses.replace(_JOINT, **changes)
        process = _process(training, model=model, plan=_plan(clip_norm), server=server)
        state = process.initialize()
        before = model.build_backbone(_INIT_SEED).get_weights()
        for value, expected in zip(_weights(process, state), before, strict=True):
            np.testing.assert_array_equal(value, expected)
        expected = _reference_rounds(model, training, server, clip_norm)
        for number, (cohort, (weights, loss_sum, correct_sum)) in enumerate(
            zip(_COHORTS, expected, strict=True)
        ):
            seeds = sampling.client_seeds(5, number, len(cohort))
            state, metrics = process.next(state, _clients(cohort, seeds))
            actual = _weights(process, state)
            moved = [w - b for w, b in zip(weights, before, strict=True)]
            error = [a - w for a, w in zip(actual, weights, strict=True)]
            # Well below what any of an example, a step or a factor makes.
            self.assertLess(_global_norm(error), 2e-4 * _global_norm(moved))
            np.testing.assert_allclose(metrics["client_work"]["loss_sum"], loss_sum, rtol=1e-4)
            self.assertEqual(metrics["client_work"]["correct_sum"], correct_sum)

    def test_measurements_count_what_took_part(self):
        process = _process()
        seeds = sampling.client_seeds(5, 0, len(_COHORTS[0]))
        output = process.next(process.initialize(), _clients(_COHORTS[0], seeds))
        sums = output.metrics["client_work"]
        self.assertEqual(sums["examples"], 8 + 0 + 0 + 10 + 1)
        self.assertEqual(sums["examples_seen"], 3 * 19)
        self.assertEqual(sums["non_empty"], 3)
        self.assertEqual(sums["non_finite"], 0)


class IsolationTest(absltest.TestCase):
    """A virtual client's contribution is its own affair."""

    def _sum_of_deltas(self, process, cohort, seeds):
        state = process.initialize()
        moved = process.next(state, _clients(cohort, seeds)).state
        return [
            _DIVISOR * (a - b)
            for a, b in zip(_weights(process, state), _weights(process, moved), strict=True)
        ]

    def test_many_at_once_sum_to_each_alone(self):
        process = _process()
        rng = np.random.default_rng(3)
        cohort = [rng.permutation(8)[: rng.integers(0, 6)] for _ in range(24)]
        seeds = sampling.client_seeds(1, 0, len(cohort))
        together = self._sum_of_deltas(process, cohort, seeds)
        alone = [
            self._sum_of_deltas(process, [users], [seed])
            for users, seed in zip(cohort, seeds, strict=True)
        ]
        expected = [np.sum(parts, axis=0) for parts in zip(*alone, strict=True)]
        for value, reference in zip(together, expected, strict=True):
            np.testing.assert_allclose(value, reference, rtol=1e-4, atol=2e-5)

    def test_seed_and_users_decide_a_delta(self):
        process = _process()
        a, b = sampling.client_seeds(1, 0, 2)
        first = self._sum_of_deltas(process, [[0, 1]], [a])[0]
        again = self._sum_of_deltas(process, [[0, 1]], [a])[0]
        np.testing.assert_array_equal(first, again)
        for users, seed in (([0, 1], b), ([0, 3], a)):
            other = self._sum_of_deltas(process, [users], [seed])[0]
            self.assertGreater(_global_norm([first - other]), 0.1 * _global_norm([first]))

    def test_an_empty_round_moves_nothing(self):
        process = _process(plan=_plan(clip_norm=1.0))
        moved = self._sum_of_deltas(process, [[]], sampling.client_seeds(0, 0, 1))
        self.assertEqual(_global_norm(moved), 0.0)


class FrozenTest(absltest.TestCase):
    """Frozen convolutions are used as they are broadcast, and nobody changes them."""

    def test_only_the_others_are_trained(self):
        model = dataclasses.replace(_model(), trainable_conv=False)
        process = _process(model=model)
        state = process.initialize()
        rng = np.random.default_rng(4)
        before = process.get_model_weights(state)
        frozen = tuple(rng.normal(0, 0.3, w.shape).astype(np.float32) for w in before.non_trainable)
        self.assertLen(frozen, 6)  # Three convolutions, of kernel and bias.
        start = tff.learning.models.ModelWeights(before.trainable, frozen)
        state = process.set_model_weights(state, start)
        seeds = sampling.client_seeds(5, 0, len(_COHORTS[0]))
        after = process.get_model_weights(process.next(state, _clients(_COHORTS[0], seeds)).state)
        for value, expected in zip(after.non_trainable, frozen, strict=True):
            np.testing.assert_array_equal(value, expected)

        backbone = model.build_backbone()
        for variable, value in zip(backbone.non_trainable_variables, frozen, strict=True):
            variable.assign(value)
        update = client_update.build_client_update(model, _JOINT, backbone)
        total = [np.zeros_like(w) for w in before.trainable]
        for users, seed in zip(_COHORTS[0], seeds, strict=True):
            rows = np.concatenate([np.flatnonzero(u == _USER) for u in users] or [[]]).astype(int)
            delta, _ = update(before.trainable, frozen, _IMAGES[rows], _CLASS_IDS[rows], seed)
            total = [t + d.numpy() for t, d in zip(total, delta, strict=True)]
        self.assertGreater(_global_norm(total), 0.01)
        for a, b, t in zip(before.trainable, after.trainable, total, strict=True):
            np.testing.assert_allclose(a - b, t / _DIVISOR, rtol=1e-3, atol=1e-6)


class PrivateHeadTest(absltest.TestCase):
    """What leaves the virtual clients, by the types of the compiled process."""

    def _leaving(self, process):
        """The types of the values that go from clients to server."""
        found = []

        def visit(block):
            if isinstance(block, tff.framework.Call) and isinstance(
                block.function, tff.framework.Intrinsic
            ):
                signature = block.function.type_signature
                if "SERVER" in str(signature.result) and "CLIENTS" in str(signature.parameter):
                    first = signature.parameter
                    found.append(first[0] if isinstance(first, tff.StructType) else first)
            return block, False

        dominant = tff.framework.to_call_dominant(process.next.to_building_block())
        tff.framework.transform_postorder(dominant, visit)
        return found

    def test_only_backbone_weights_and_scalars_leave(self):
        process = _process(plan=_plan(clip_norm=1.0, noise_multiplier=1.0))
        shapes = [v.shape for v in _model().build_backbone().trainable_variables]
        leaving = [
            [leaf.shape for leaf in tff.structure.flatten(t.member)] for t in self._leaving(process)
        ]
        vectors = [s for s in leaving if any(len(shape) for shape in s)]
        self.assertEqual(vectors, [shapes])
        self.assertGreater(len(leaving), 1)  # The measurements, scalars.

    def test_no_head_in_state_or_metrics(self):
        process = _process(plan=_plan(clip_norm=1.0, noise_multiplier=1.0))
        for signature in (process.initialize.type_signature, process.next.type_signature):
            self.assertNotRegex(str(signature), rf"\b{_HEAD_SIZE}\b")


class BadUpdatesTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("nan", np.nan, 3), ("inf", np.inf, 3), ("overflowing_norm", 1e25, 2)
    )
    def test_a_broken_backbone_contributes_nothing_and_is_counted(self, poison, non_finite):
        # An empty virtual client's delta, nan - nan or inf - inf, is not finite either.
        process = _process(plan=_plan(clip_norm=1.0))
        state = process.initialize()
        weights = process.get_model_weights(state)
        broken = [w.copy() for w in weights.trainable]
        broken[-2][0, 0] = poison
        weights = tff.learning.models.ModelWeights(tuple(broken), ())
        state = process.set_model_weights(state, weights)
        output = process.next(state, _clients([[0, 1], [], [3]], sampling.client_seeds(0, 0, 3)))
        sums = output.metrics["client_work"]
        self.assertEqual(sums["non_finite"], non_finite)
        self.assertEqual(sums["non_empty"], 2)
        self.assertTrue(np.isfinite(list(sums.values())).all())
        for value, expected in zip(_weights(process, output.state), broken, strict=True):
            np.testing.assert_array_equal(value, expected)

    def test_a_huge_learning_rate_leaves_the_state_finite(self):
        process = _process(dataclasses.replace(_JOINT, client_lr=1e30))
        output = process.next(
            process.initialize(), _clients(_COHORTS[0], sampling.client_seeds(0, 0, 5))
        )
        self.assertGreaterEqual(output.metrics["client_work"]["non_finite"], 1)
        for value in _weights(process, output.state):
            self.assertTrue(np.isfinite(value).all())

    def test_more_classes_than_the_head_has_is_refused(self):
        classes = len(set(_CLASS_IDS[_USER == 5]))
        enough = _process(model=_model(head_size=classes))
        enough.next(enough.initialize(), _clients([[5]], sampling.client_seeds(0, 0, 1)))
        small = _process(model=_model(head_size=classes - 1))
        with self.assertRaisesRegex(Exception, "more classes than head_size"):
            small.next(small.initialize(), _clients([[5]], sampling.client_seeds(0, 0, 1)))


class NeighboursTest(parameterized.TestCase):
    """Released means of neighbouring populations, through the whole process."""

    @parameterized.named_parameters(
        ("user_in_a_shared_bin", [[0, 1], [3], []], [[0, 1], [3, 5], []], 2),
        ("user_in_an_empty_bin", [[0, 1], [3], []], [[0, 1], [3], [5]], 2),
        ("lone_user", [[0], [3]], [[0], [3], [5]], 1),
    )
    def test_one_user_moves_the_mean_by_at_most(self, fewer, more, factor):
        clip_norm = 1e-3
        process = _process(plan=_plan(clip_norm))
        released = []
        for cohort in (fewer, more):
            state = process.initialize()
            seeds = sampling.client_seeds(0, 0, len(cohort))
            moved = process.next(state, _clients(cohort, seeds)).state
            # The server's first step of rate 1 is the released mean.
            released.append(
                [
                    a - b
                    for a, b in zip(*(_weights(process, s) for s in (state, moved)), strict=True)
                ]
            )
        distance = _global_norm([a - b for a, b in zip(*released, strict=True)])
        bound = factor * clip_norm / _DIVISOR
        # Subtracting weights of about 1 leaves float32's rounding, 6e-8 a coordinate at most.
        rounding = 6e-8 * np.sqrt(sum(w.size for w in released[0]))
        self.assertLessEqual(distance, bound + rounding)
        self.assertGreater(distance, 0.1 * bound)


class InitialWeightsTest(absltest.TestCase):
    def test_untrained_weights_are_refused(self):
        class Normalised(embedding_model_lib.EmbeddingModel):
            def build_backbone(self, seed=0):
                del seed
                layers = [tf.keras.layers.BatchNormalization(), tf.keras.layers.Flatten()]
                return tf.keras.Sequential([tf.keras.Input(self.image_shape), *layers])

        with self.assertRaisesRegex(ValueError, "weights that are not trained by gradients"):
            _process(model=Normalised("lenet", _IMAGE_SHAPE, _DIM, _HEAD_SIZE))


if __name__ == "__main__":
    absltest.main()
