"""The baseline against DP-FedEmb, from which its head sets it apart, and against its definition."""

import functools
import unittest

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
from absl.testing import absltest, parameterized

from tff_dpfedemb.algorithms import client_update, dp_fedemb, fed_avg
from tff_dpfedemb.algorithms.hyperparameters import ClientTraining
from tff_dpfedemb.data import sampling, virtual_clients
from tff_dpfedemb.models import embedding_model as embedding_model_lib
from tff_dpfedemb.privacy import aggregators
from tff_dpfedemb.privacy import plan as plan_lib
from tff_dpfedemb.runtime import worker as worker_lib

_IMAGE_SHAPE = (8, 8, 1)
_DIM = 8
_CLASSES = 4
_DIVISOR = 4
_INIT_SEED = 11
_RNG = np.random.default_rng(0)
# Every user has every class, in order: remapping then changes nothing.
_PER_USER = 8
_IMAGES = _RNG.integers(0, 256, (5 * _PER_USER, *_IMAGE_SHAPE)).astype(np.uint8)
_CLASS_IDS = np.tile(np.arange(_CLASSES), 10).astype(np.int64)
_COHORTS = (([0, 1], [2], []), ([4], [3, 1]), ([2, 3, 4],))
_TRAINING = ClientTraining(
    client_lr=0.02,
    client_momentum=0.9,
    head_lr_scale=5.0,
    client_epochs_per_round=2,
    client_batch_size=3,
    max_examples_per_client=1000,
)


class _AlikeHeads(embedding_model_lib.EmbeddingModel):
    """Whose heads all start from the same weights, whatever the seed."""

    def initial_head(self, seed):
        return super().initial_head(tf.zeros_like(seed) + 7)


class _WithoutHead(tff.aggregators.UnweightedAggregationFactory):
    """Aggregates the backbone's part by another factory, and gives zeros for the head's."""

    def __init__(self, inner):
        self._inner = inner

    def create(self, value_type):
        kept = tff.to_type(tuple(value_type[: len(value_type) - 2]))
        head_type = tff.to_type(tuple(value_type[len(value_type) - 2 :]))
        inner = self._inner.create(kept)

        @tff.tensorflow.computation(value_type)
        def keep(value):
            return tuple(value[: len(value_type) - 2])

        @tff.tensorflow.computation(kept)
        def put_back(value):
            zeros = tuple(tf.zeros(t.shape, t.dtype) for t in head_type)
            return (*value, *zeros)

        @tff.federated_computation(
            inner.initialize.type_signature.result, tff.FederatedType(value_type, tff.CLIENTS)
        )
        def aggregate(state, value):
            output = inner.next(state, tff.federated_map(keep, value))
            result = tff.federated_map(put_back, output.result)
            return tff.templates.MeasuredProcessOutput(output.state, result, output.measurements)

        return tff.templates.AggregationProcess(inner.initialize, aggregate)


def setUpModule():
    unittest.enterModuleContext(worker_lib.local_execution())


def _load_users(user_ids):
    rows = tf.reshape(
        user_ids[:, tf.newaxis] * _PER_USER + tf.range(_PER_USER, dtype=tf.int64), [-1]
    )
    return tf.gather(_IMAGES, rows), tf.gather(_CLASS_IDS, rows)


def _model(cls=embedding_model_lib.EmbeddingModel):
    return cls("small_cnn", _IMAGE_SHAPE, _DIM, _CLASSES)


def _aggregation(clip_norm=None, noise_multiplier=0.0):
    return aggregators.build_aggregation_factory(
        plan_lib.PrivacyPlan(
            population=1000,
            virtual_clients_per_round=_DIVISOR,
            virtual_client_size=2,
            total_rounds=3,
            clip_norm=clip_norm,
            noise_multiplier=noise_multiplier,
        )
    )


def _rounds(build, aggregation, model, training=_TRAINING):
    """The weights and sums after each round."""
    process = build(
        model,
        training,
        virtual_clients.build_dataset_computation(_load_users, np.int64),
        aggregation,
        tff.learning.optimizers.build_sgdm(0.7, 0.9),
        _INIT_SEED,
    )
    state = process.initialize()
    yield process.get_model_weights(state), {}
    for number, cohort in enumerate(_COHORTS):
        seeds = sampling.client_seeds(5, number, len(cohort))
        clients = virtual_clients.client_arguments([np.array(c, np.int64) for c in cohort], seeds)
        state, metrics = process.next(state, clients)
        yield process.get_model_weights(state), metrics["client_work"]


class AgainstDpFedEmbTest(parameterized.TestCase):
    @parameterized.parameters((None, 0), (0.02, 0), (None, 3))
    def test_without_the_head_in_the_sum_both_are_the_same(self, clip_norm, reconst_iters):
        training = ClientTraining(**{**vars(_TRAINING), "reconst_iters": reconst_iters})
        model = _model(_AlikeHeads)
        ours = _rounds(dp_fedemb.build_dp_fedemb, _aggregation(clip_norm), model, training)
        baseline = _rounds(
            fed_avg.build_fed_avg, _WithoutHead(_aggregation(clip_norm)), model, training
        )
        before = None
        for (weights, sums), (with_head, baseline_sums) in zip(ours, baseline, strict=True):
            before = before or weights.trainable
            head = with_head.trainable[-2:]
            self.assertEqual([h.shape for h in head], [(_CLASSES, _DIM), (_CLASSES,)])
            for value, expected in zip(with_head.trainable[:-2], weights.trainable, strict=True):
                np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-7)
            for name in sums.keys() - {"update_norm_sum"}:  # The head's part is in it.
                np.testing.assert_allclose(baseline_sums[name], sums[name], rtol=1e-4)
        moved = max(np.abs(a - b).max() for a, b in zip(weights.trainable, before, strict=True))
        self.assertGreater(moved, 1e-3)  # Or all of this would be about nothing.

    def test_with_it_the_head_moves_and_the_backbone_differs(self):
        *_, (ours, _) = _rounds(dp_fedemb.build_dp_fedemb, _aggregation(), _model(_AlikeHeads))
        first, *_, (baseline, _) = _rounds(
            fed_avg.build_fed_avg, _aggregation(), _model(_AlikeHeads)
        )
        for a, b in zip(first[0].trainable[-2:], baseline.trainable[-2:], strict=True):
            self.assertGreater(np.abs(a - b).max(), 1e-3)
        self.assertGreater(np.abs(ours.trainable[0] - baseline.trainable[0]).max(), 1e-4)


class DefinitionTest(parameterized.TestCase):
    def test_a_round_is_the_clipped_mean_of_whole_deltas(self):
        clip_norm = 0.05
        model = _model()
        (before, _), (after, _), *_ = list(
            _rounds(fed_avg.build_fed_avg, _aggregation(clip_norm), model)
        )
        # After the process: Keras models do not outlive the graphs that TFF makes.
        backbone = model.build_backbone(_INIT_SEED)
        update = client_update.build_client_update(model, _TRAINING, backbone, global_head=True)
        total = [np.zeros_like(w) for w in before.trainable]
        seeds = sampling.client_seeds(5, 0, len(_COHORTS[0]))
        for users, seed in zip(_COHORTS[0], seeds, strict=True):
            images, class_ids = _load_users(tf.constant(users, tf.int64))
            delta, _ = update(before.trainable, (), images, class_ids, seed)
            # The clip norm is over backbone and head together.
            norm = np.sqrt(sum(np.sum(np.square(d)) for d in delta))
            scale = min(1.0, clip_norm / norm) if norm else 0.0
            total = [t + scale * d.numpy() for t, d in zip(total, delta, strict=True)]
        for a, b, t in zip(before.trainable, after.trainable, total, strict=True):
            np.testing.assert_allclose(a - b, 0.7 * t / _DIVISOR, rtol=2e-3, atol=2e-7)

    def test_noise_is_on_the_head_too(self):
        first, (second, _), *_ = _rounds(fed_avg.build_fed_avg, _aggregation(1e-6, 1e6), _model())
        kernel = (first[0].trainable[-2] - second.trainable[-2]).ravel()
        # Standard deviation 0.7 * z * C / V of 32 values; outside of these with probability 1e-9.
        self.assertBetween(kernel.std() / (0.7 / _DIVISOR), 0.35, 1.9)

    @functools.cached_property
    def _update(self):
        model = _model()
        return client_update.build_client_update(
            model, _TRAINING, model.build_backbone(), global_head=True
        )

    def _weights(self):
        model = _model()
        head = model.initial_head(tf.constant([0, 0]))
        return (*model.build_backbone(3).get_weights(), *(h.numpy() for h in head))

    def test_classes_keep_their_rows(self):
        images, class_ids = _IMAGES[:6], np.array([3, 3, 1, 1, 3, 1])
        delta, measurements = self._update(self._weights(), (), images, class_ids, np.array([0, 1]))
        self.assertEqual(measurements["classes"], 2)
        renamed, _ = self._update(self._weights(), (), images, 4 - class_ids, np.array([0, 1]))
        # Rows 1 and 3 gain; exchanged classes gain otherwise.
        self.assertFalse(np.allclose(delta[-1], renamed[-1], rtol=1e-2))
        self.assertLess(delta[-1][3], 0)
        self.assertLess(delta[-1][1], 0)
        self.assertGreater(delta[-1][0], 0)

    def test_a_class_that_the_head_lacks_is_refused(self):
        with self.assertRaisesRegex(Exception, "more classes than head_size"):
            self._update(self._weights(), (), _IMAGES[:1], np.array([_CLASSES]), np.array([0, 1]))


if __name__ == "__main__":
    absltest.main()
