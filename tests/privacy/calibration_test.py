"""Calibration: the target is met, and hardly more than met."""

import dataclasses

from absl.testing import absltest, parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from tff_dpfedemb.privacy import accounting, calibration
from tff_dpfedemb.privacy.plan import PrivacyPlan


def _plan(population, clients, size, rounds, clip_norm=1.0):
    return PrivacyPlan(population, clients, size, rounds, clip_norm, 0.0)


def _epsilon(plan, z):
    plan = dataclasses.replace(plan, noise_multiplier=z)
    key = (plan.sampling_probability, plan.effective_noise_multiplier)
    return accounting.epsilon({key: plan.total_rounds}, plan.target_delta)


class CalibrationTest(parameterized.TestCase):
    # dp_accounting 0.4.3, computed once by bisection apart from this code: z/s.
    @parameterized.parameters(
        ((3_400, 32, 8, 200), 2, 2.019),
        ((3_400, 32, 8, 200), 4, 1.270),
        ((3_400, 32, 8, 200), 8, 0.877),
        ((100_000, 64, 16, 400), 2, 0.866),
        ((100_000, 64, 16, 400), 4, 0.688),
        ((100_000, 64, 16, 400), 8, 0.548),
        ((1_000_000, 128, 32, 1000), 2, 0.794),
        ((1_000_000, 128, 32, 1000), 4, 0.647),
        ((1_000_000, 128, 32, 1000), 8, 0.522),
    )
    def test_known_values(self, arguments, target, expected):
        plan = _plan(*arguments)
        z = calibration.noise_multiplier(plan, target)
        self.assertAlmostEqual(z / 2 / expected, 1, delta=0.002)
        self.assertLessEqual(_epsilon(plan, z), target)

    @settings(max_examples=8, deadline=None)
    @given(
        clients=st.integers(1, 60),
        size=st.sampled_from([1, 2, 9]),
        rounds=st.integers(1, 300),
        target=st.floats(0.05, 60),
    )
    def test_meets_the_target_and_hardly_more(self, clients, size, rounds, target):
        plan = _plan(20_000, clients, size, rounds)
        z = calibration.noise_multiplier(plan, target)
        self.assertEqual(z, float(f"{z:.4g}"))
        self.assertLessEqual(_epsilon(plan, z), target)
        self.assertGreater(_epsilon(plan, z * 0.997), target)

    def test_a_target_that_hardly_any_noise_meets(self):
        plan = _plan(1_000_000, 4, 2, 1)
        z = calibration.noise_multiplier(plan, 1e6)
        self.assertLessEqual(_epsilon(plan, z), 1e6)
        self.assertLess(z, 0.03)

    @parameterized.parameters(0.0, -1.0, float("nan"), float("inf"))
    def test_targets_that_cannot_be(self, target):
        with self.assertRaisesRegex(ValueError, "^target_epsilon=.*accepted are numbers above 0"):
            calibration.noise_multiplier(_plan(1000, 2, 2, 2), target)

    def test_without_clipping_there_is_no_noise_to_find(self):
        with self.assertRaisesRegex(ValueError, "accepted only with a clip_norm"):
            calibration.noise_multiplier(_plan(1000, 2, 2, 2, None), 1.0)


if __name__ == "__main__":
    absltest.main()
