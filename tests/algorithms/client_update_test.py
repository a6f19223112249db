"""Laws of local training; the process test compares its numbers with a reference."""

import dataclasses
import functools

import hypothesis
import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized
from hypothesis import strategies as st

from tff_dpfedemb.algorithms import client_update
from tff_dpfedemb.algorithms.hyperparameters import ClientTraining
from tff_dpfedemb.models.embedding_model import EmbeddingModel

_HEAD_SIZE = 6
_MODEL = EmbeddingModel("lenet", (8, 8, 1), 8, _HEAD_SIZE)
_TRAINING = ClientTraining(
    client_lr=0.02,
    client_momentum=0.9,
    head_lr_scale=5.0,
    client_epochs_per_round=2,
    client_batch_size=4,
    max_examples_per_client=16,
)
_SEED = np.array([3, 4], np.int64)
_RNG = np.random.default_rng(0)
_IMAGES = _RNG.integers(0, 256, (20, 8, 8, 1)).astype(np.uint8)
_CLASS_IDS = np.array([0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 5, 0, 0, 1, 2, 5, 3, 4, 1], np.int64)


def tearDownModule():
    _update.cache_clear()  # TensorFlow's functions complain if they outlive the interpreter.


@functools.cache
def _update(training=_TRAINING):
    update = client_update.build_client_update(_MODEL, training, _MODEL.build_backbone())
    return update.get_concrete_function(
        tuple(tf.TensorSpec(w.shape) for w in _weights()),
        (),
        tf.TensorSpec([None, *_MODEL.image_shape], tf.uint8),
        tf.TensorSpec([None], tf.int64),
        tf.TensorSpec([2], tf.int64),
    )


@functools.cache
def _weights():
    return tuple(_MODEL.build_backbone(7).get_weights())


def _run(images=_IMAGES, class_ids=_CLASS_IDS, seed=_SEED, *, weights=None, training=_TRAINING):
    """A virtual client's delta, flat, and its measurements."""
    arguments = (weights or _weights(), (), images, np.asarray(class_ids, np.int64), seed)
    delta, measurements = _update(training)(*tf.nest.map_structure(tf.constant, arguments))
    flat = np.concatenate([d.numpy().ravel() for d in delta])
    return flat, {k: float(v) for k, v in measurements.items()}


class ClassIdsTest(parameterized.TestCase):
    @hypothesis.settings(max_examples=20, deadline=None)
    @hypothesis.given(
        st.lists(
            st.integers(-(2**63), 2**63 - 1), min_size=_HEAD_SIZE, max_size=_HEAD_SIZE, unique=True
        )
    )
    # Equal as int32, and as float64.
    @hypothesis.example([0, 2**32, -(2**32), -(2**63), 2**53, 2**53 + 1])
    def test_only_which_examples_share_a_class_matters(self, names):
        expected, measurements = _run()
        actual, renamed = _run(class_ids=np.array(names, np.int64)[_CLASS_IDS])
        np.testing.assert_array_equal(actual, expected)
        self.assertEqual(renamed, measurements)

    def test_joining_two_classes_matters(self):
        joined = np.where(_CLASS_IDS == 5, 4, _CLASS_IDS)
        self.assertFalse(np.array_equal(_run(class_ids=joined)[0], _run()[0]))

    def test_more_classes_than_the_head_has_is_refused(self):
        fits, _ = _run(_IMAGES[:_HEAD_SIZE], np.arange(_HEAD_SIZE))
        self.assertGreater(np.linalg.norm(fits), 0)
        with self.assertRaisesRegex(Exception, "more classes than head_size"):
            _run(_IMAGES[: _HEAD_SIZE + 1], np.arange(_HEAD_SIZE + 1))


class OrderTest(parameterized.TestCase):
    @parameterized.parameters(0, 3)
    def test_examples_of_one_batch_have_no_order(self, reconst_iters):
        # Two users who show the same classes in the same order, either first.
        training = dataclasses.replace(_TRAINING, client_batch_size=16, reconst_iters=reconst_iters)
        a, b = np.arange(5), np.arange(5, 10)
        expected, _ = _run(*(x[np.r_[a, b]] for x in (_IMAGES, _CLASS_IDS)), training=training)
        actual, _ = _run(*(x[np.r_[b, a]] for x in (_IMAGES, _CLASS_IDS)), training=training)
        self.assertGreater(np.linalg.norm(expected), 0.01)
        np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-5)

    @parameterized.parameters(0, 1, 2)
    def test_the_kept_examples_are_a_uniform_subset(self, odd):
        # Of three examples two are kept, and the odd one is not among them one time in three:
        # binomial(60, 1/3), outside of these bounds with probability 3e-4 (the seeds are fixed).
        training = dataclasses.replace(_TRAINING, max_examples_per_client=2)
        class_ids = np.eye(3, dtype=np.int64)[odd]
        classes = []
        for i in range(60):
            _, measurements = _run(_IMAGES[:3], class_ids, np.array([i, 0]), training=training)
            self.assertEqual(measurements["examples"], 2)
            classes.append(measurements["classes"])
        self.assertBetween(classes.count(1.0), 8, 34)


class MemoryTest(parameterized.TestCase):
    """The variables that are local training's working memory remember nothing."""

    def test_a_delta_does_not_depend_on_earlier_virtual_clients(self):
        expected, _ = _run(_IMAGES[:9], _CLASS_IDS[:9])
        _run(_IMAGES[9:], _CLASS_IDS[9:], np.array([8, 8], np.int64))
        _run(weights=tuple(np.full_like(w, np.nan) for w in _weights()))
        actual, _ = _run(_IMAGES[:9], _CLASS_IDS[:9])
        np.testing.assert_array_equal(actual, expected)

    def test_the_seed_matters(self):
        other = np.array([3, 5], np.int64)
        self.assertFalse(np.allclose(_run()[0], _run(seed=other)[0], rtol=0.1))


class DegenerateTest(parameterized.TestCase):
    @parameterized.parameters(0, 3)
    def test_an_empty_virtual_client_changes_nothing(self, reconst_iters):
        training = dataclasses.replace(_TRAINING, reconst_iters=reconst_iters)
        delta, measurements = _run(_IMAGES[:0], [], training=training)
        np.testing.assert_array_equal(delta, 0)
        self.assertEqual(set(measurements.values()), {0.0})

    def _assert_counted_as_not_finite(self, delta, measurements):
        np.testing.assert_array_equal(delta, 0)
        self.assertEqual(measurements["non_finite"], 1)
        self.assertEqual(measurements["non_empty"], 1)
        for name in ("loss_sum", "correct_sum", "examples_seen", "update_norm_sum"):
            self.assertEqual(measurements[name], 0, name)

    @parameterized.parameters(np.nan, np.inf, -np.inf)
    def test_broken_weights_give_zeros(self, poison):
        weights = [w.copy() for w in _weights()]
        weights[-2][0, 0] = poison
        self._assert_counted_as_not_finite(*_run(weights=tuple(weights)))

    def test_divergence_gives_zeros(self):
        training = dataclasses.replace(_TRAINING, client_lr=1e30)
        self._assert_counted_as_not_finite(*_run(training=training))

    def test_finite_entries_whose_norm_overflows_give_zeros(self):
        # One step of one batch: the delta is the learning rate times a gradient.
        step = dataclasses.replace(_TRAINING, client_epochs_per_round=1, client_batch_size=16)
        unit, _ = _run(training=dataclasses.replace(step, client_lr=1.0))
        self.assertBetween(np.abs(unit).max(), 1e-3, 1e3)
        large, measurements = _run(training=dataclasses.replace(step, client_lr=1e15))
        np.testing.assert_allclose(large, 1e15 * unit, rtol=1e-2, atol=1e15 * 1e-6)
        self.assertEqual(measurements["non_finite"], 0)
        overflowing = dataclasses.replace(step, client_lr=1e25)  # Entries of at most 1e28.
        self._assert_counted_as_not_finite(*_run(training=overflowing))


if __name__ == "__main__":
    absltest.main()
