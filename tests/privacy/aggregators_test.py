"""The aggregation that a plan promises, through TFF: what it bounds, divides by and adds."""

import functools
import unittest

import dp_accounting
import hypothesis
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
from absl.testing import absltest, parameterized
from hypothesis import strategies as st
from scipy import stats

from tff_dpfedemb.privacy import aggregators
from tff_dpfedemb.privacy import plan as plan_lib
from tff_dpfedemb.runtime import worker as worker_lib

# Several tensors, two of them alike: each must get noise of its own.
_SHAPES = ((20, 10), (20, 10), (30,), ())
_SIZES = tuple(int(np.prod(shape)) for shape in _SHAPES)
_V = 4
_CLIP = 0.5

# The probability that a right program fails NoiseTest, all its tests together.
_FALSE_ALARM = 1e-4
_NOISE_TESTS = 12


def setUpModule():
    global _worker
    _worker = unittest.enterModuleContext(worker_lib.local_execution())
    unittest.addModuleCleanup(_process.cache_clear)


def _plan(clip_norm, noise_multiplier=0.0, virtual_client_size=2):
    return plan_lib.PrivacyPlan(
        population=1000,
        virtual_clients_per_round=_V,
        virtual_client_size=virtual_client_size,
        total_rounds=3,
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
    )


@functools.cache
def _process(plan):
    types = tff.to_type([tff.TensorType(np.float32, shape) for shape in _SHAPES])
    return aggregators.build_aggregation_factory(plan).create(types)


def _unflatten(vector):
    parts = np.split(np.asarray(vector, np.float32), np.cumsum(_SIZES)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, _SHAPES, strict=True)]


def _flatten(structure):
    return np.concatenate([np.ravel(x) for x in tff.structure.flatten(structure)])


def _release(plan, vectors):
    process = _process(plan)
    output = process.next(process.initialize(), [_unflatten(v) for v in vectors])
    return _flatten(output.result).astype(np.float64)


def _vectors(rng, count, exponents):
    """Vectors of norms 10^exponent."""
    vectors = rng.standard_normal((count, sum(_SIZES)))
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True) * 10.0 ** exponents[:, None]


class ReleasedMeanTest(parameterized.TestCase):
    @parameterized.parameters(1, 3, 4, 6)
    def test_divides_by_the_plan_and_not_by_who_came(self, count):
        vectors = _vectors(np.random.default_rng(0), count, np.full(count, -1.0))
        for plan in (_plan(None), _plan(_CLIP)):
            np.testing.assert_allclose(
                _release(plan, vectors), vectors.sum(axis=0) / _V, rtol=1e-5, atol=1e-8
            )

    def test_without_clipping_nothing_is_clipped(self):
        vectors = _vectors(np.random.default_rng(0), 3, np.array([3.0, 0.0, 6.0]))
        np.testing.assert_allclose(
            _release(_plan(None), vectors), vectors.sum(axis=0) / _V, rtol=1e-5, atol=1e-3
        )

    def test_clips_over_all_tensors_together_and_keeps_directions(self):
        vectors = _vectors(np.random.default_rng(0), 3, np.array([3.0, np.log10(_CLIP) - 0.1, 0.0]))
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        expected = (vectors * np.minimum(1, _CLIP / norms)).sum(axis=0) / _V
        np.testing.assert_allclose(_release(_plan(_CLIP), vectors), expected, rtol=1e-5, atol=1e-8)

    def test_a_zero_update_stays_zero(self):
        np.testing.assert_array_equal(_release(_plan(_CLIP), np.zeros((2, sum(_SIZES)))), 0)


# Where the squares of float32 sum to a finite number; local training zeroes what is beyond.
_EXPONENTS = st.floats(-20, 18.9)


class SensitivityTest(parameterized.TestCase):
    """Neighbouring populations through the real aggregation, without noise.

    The released mean, times V, is the sum; float32 may round it by a few parts in 10^7.
    """

    _TOLERANCE = 1 + 1e-5

    def _distance(self, virtual_client_size, one, other):
        plan = _plan(_CLIP, virtual_client_size=virtual_client_size)
        return _V * np.linalg.norm(_release(plan, one) - _release(plan, other)), plan

    @hypothesis.settings(max_examples=40, deadline=None)
    @hypothesis.given(
        st.integers(0, 2**32),
        st.lists(_EXPONENTS, min_size=_V, max_size=_V),
        _EXPONENTS,
        st.booleans(),
    )
    def test_a_changed_virtual_client(self, seed, exponents, exponent, opposite):
        rng = np.random.default_rng(seed)
        one = _vectors(rng, _V, np.array(exponents))
        other = one.copy()
        changed = rng.integers(_V)
        # The opposite of a clipped vector is the farthest that it can get.
        other[changed] = -one[changed] if opposite else _vectors(rng, 1, np.array([exponent]))
        distance, plan = self._distance(2, one, other)
        self.assertLessEqual(distance, plan.sensitivity_factor * _CLIP * self._TOLERANCE)

    def test_a_changed_virtual_client_can_reach_the_bound(self):
        one = _vectors(np.random.default_rng(0), _V, np.full(_V, 2.0))
        distance, plan = self._distance(2, one, np.concatenate([-one[:1], one[1:]]))
        self.assertAlmostEqual(distance, plan.sensitivity_factor * _CLIP, delta=1e-5)
        self.assertEqual(plan.sensitivity_factor, 2)

    @hypothesis.settings(max_examples=25, deadline=None)
    @hypothesis.given(st.integers(0, 2**32), st.lists(_EXPONENTS, min_size=2, max_size=6))
    def test_a_lone_user_who_comes_or_goes(self, seed, exponents):
        vectors = _vectors(np.random.default_rng(seed), len(exponents), np.array(exponents))
        distance, plan = self._distance(1, vectors, vectors[1:])
        self.assertLessEqual(distance, plan.sensitivity_factor * _CLIP * self._TOLERANCE)
        self.assertEqual(plan.sensitivity_factor, 1)

    def test_a_lone_user_can_reach_the_bound(self):
        vectors = _vectors(np.random.default_rng(0), 3, np.full(3, 2.0))
        self.assertAlmostEqual(self._distance(1, vectors, vectors[1:])[0], _CLIP, delta=1e-5)


class NoiseTest(parameterized.TestCase):
    """The noise of many rounds, each of which released zeros otherwise.

    Every test has its share of _FALSE_ALARM (Bonferroni).
    """

    _ROUNDS = 250
    _MULTIPLIER = 1.5
    _SCALE = _MULTIPLIER * _CLIP / _V

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.plan = _plan(_CLIP, cls._MULTIPLIER)
        process = _process(cls.plan)
        state = process.initialize()
        rounds = []
        # A cohort of two: dividing by it, or noise for each client, would show.
        zeros = [_unflatten(np.zeros(sum(_SIZES)))] * 2
        for _ in range(cls._ROUNDS):
            output = process.next(state, zeros)
            state = output.state
            rounds.append(_flatten(output.result))
        cls.state = state
        cls.noise = np.array(rounds, np.float64)

    def _assert_standard_normal(self, statistic, tests=1):
        """Whether a statistic that is about standard normal is what chance allows."""
        allowed = stats.norm.isf(_FALSE_ALARM / _NOISE_TESTS / tests / 2)
        self.assertLess(np.max(np.abs(statistic)), allowed)

    def test_mean_is_zero(self):
        self._assert_standard_normal(self.noise.mean() / self._SCALE * np.sqrt(self.noise.size))

    def test_standard_deviation_is_z_c_over_v(self):
        n = self.noise.size
        ratio = np.mean(np.square(self.noise)) / self._SCALE**2
        self._assert_standard_normal((ratio - 1) / np.sqrt(2 / n))

    def test_kurtosis_is_a_gaussians(self):
        self._assert_standard_normal(
            (stats.kurtosis(self.noise, axis=None, fisher=False) - 3)
            / np.sqrt(24 / self.noise.size)
        )

    def test_each_tensor_has_that_scale(self):
        places = np.split(self.noise, np.cumsum(_SIZES)[:-1], axis=1)
        for part in places[:-1]:
            ratio = np.mean(np.square(part)) / self._SCALE**2
            self._assert_standard_normal((ratio - 1) / np.sqrt(2 / part.size), tests=3)
        scalar = np.sum(np.square(places[-1])) / self._SCALE**2
        low, high = stats.chi2.interval(1 - _FALSE_ALARM / _NOISE_TESTS, self._ROUNDS)
        self.assertBetween(scalar, low, high)

    @parameterized.parameters((1.0, True), (2 / 3, False), (3 / 2, False))
    def test_kolmogorov_smirnov(self, factor, same):
        sample = self.noise.ravel()
        p_value = stats.kstest(sample, stats.norm(0, factor * self._SCALE).cdf).pvalue
        if same:
            self.assertGreater(p_value, _FALSE_ALARM / _NOISE_TESTS)
        else:
            self.assertLess(p_value, 1e-12)

    def _assert_uncorrelated(self, one, other):
        products = (one * other).ravel() / self._SCALE**2
        self._assert_standard_normal(products.sum() / np.sqrt(products.size))

    def test_tensors_of_one_shape_are_independent(self):
        size = _SIZES[0]
        self._assert_uncorrelated(self.noise[:, :size], self.noise[:, size : 2 * size])

    @parameterized.parameters(1, 2)
    def test_rounds_are_independent(self, lag):
        self._assert_uncorrelated(self.noise[lag:], self.noise[:-lag])

    def test_coordinates_are_independent(self):
        self._assert_uncorrelated(self.noise[:, 1:], self.noise[:, :-1])
        # Any two coordinates: the largest of all correlations, each normal in many rounds.
        products = self.noise.T @ self.noise / self._SCALE**2 / np.sqrt(self._ROUNDS)
        pairs = products[np.triu_indices(len(products), 1)]
        # That far out, sums of 250 products reach 4 % beyond the normal law (Cramer's bound).
        self._assert_standard_normal(pairs / 1.1, tests=pairs.size)

    def test_no_number_comes_twice(self):
        # Float32 has some 10^7 values where the noise lies: a few chance repeats, no stretches.
        self.assertLen(np.unique(self.noise, axis=0), self._ROUNDS)
        self.assertGreater(len(np.unique(self.noise)), 0.9 * self.noise.size)

    def test_state_carries_the_gaussian_event(self):
        event = tff.aggregators.differential_privacy.extract_dp_event_from_state(self.state)
        self.assertIsInstance(event, dp_accounting.GaussianDpEvent)
        self.assertAlmostEqual(float(event.noise_multiplier), self._MULTIPLIER, places=5)


class StreamTest(parameterized.TestCase):
    """Where the noise comes from."""

    def test_another_worker_and_a_fixed_seed_give_other_noise(self):
        # A seed that a notebook sets for its own needs must not make the noise known.
        plan = _plan(_CLIP, 2.0)
        vectors = np.zeros((1, sum(_SIZES)))
        first = []
        for _ in range(2):
            _worker.restart()
            tf.random.set_seed(1)
            np.random.seed(1)
            _process.cache_clear()
            first.append([_release(plan, vectors) for _ in range(3)])
        released = np.concatenate(first)
        correlations = np.corrcoef(released)[np.triu_indices(len(released), 1)]
        # Fifteen pairs of 431 numbers; false alarm below 1e-5.
        self.assertLess(np.abs(correlations).max(), stats.norm.isf(1e-5 / 30) / np.sqrt(431))


if __name__ == "__main__":
    absltest.main()
