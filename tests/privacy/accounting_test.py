"""Golden values, laws, and a second accountant.

Golden values without another source are for dp_accounting 0.4.3, computed independently of this
package from dp_accounting's own accountants, at the parameters of the EMNIST example of Xu et al.
(CVPR 2023): 3,400 users, 32 virtual clients of 8, 200 rounds, z = 0.62.
"""

import math

import dp_accounting
import numpy as np
from absl.testing import absltest, parameterized
from dp_accounting.pld import pld_privacy_accountant
from dp_accounting.rdp import rdp_privacy_accountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tff_dpfedemb.privacy import accounting, plan

_Q, _DELTA = 256 / 3400, 3400**-1.1


def stock_accountant(event, rounds):
    """dp_accounting's own PLD accountant, on its own fine interval."""
    accountant = pld_privacy_accountant.PLDAccountant(
        dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    )
    return accountant.compose(event, rounds)


def gaussian_delta(sigma, epsilon):
    """The exact delta of a Gaussian mechanism: Balle and Wang, ICML 2018, theorem 5."""
    a = 1 / (2 * sigma)
    return stats.norm.cdf(a - epsilon * sigma) - math.exp(epsilon) * stats.norm.cdf(
        -a - epsilon * sigma
    )


class GoldenValuesTest(parameterized.TestCase):
    @parameterized.parameters((1, 17.57, 0.005), (2, 104.9, 0.05))
    def test_emnist_example(self, factor, golden, tolerance):
        epsilon = accounting.epsilon({(_Q, 0.62 / factor): 200}, _DELTA)
        self.assertAlmostEqual(epsilon, golden, delta=tolerance)

    def test_emnist_example_by_rdp_is_looser(self):
        accountant = rdp_privacy_accountant.RdpAccountant(
            neighboring_relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
        )
        accountant.compose(accounting.round_event(_Q, 0.62), 200)
        by_rdp = accountant.get_epsilon(_DELTA)
        self.assertGreater(by_rdp, accounting.epsilon({(_Q, 0.62): 200}, _DELTA))
        # 20.03 with this release's orders, which other releases may change.
        self.assertAlmostEqual(by_rdp, 20.03, delta=0.1)

    @parameterized.parameters(
        (256 / 3400, 200, 3400, 2, 2.019),
        (256 / 3400, 200, 3400, 4, 1.270),
        (256 / 3400, 200, 3400, 8, 0.877),
        (1024 / 1e5, 400, 1e5, 2, 0.866),
        (1024 / 1e5, 400, 1e5, 4, 0.688),
        (1024 / 1e5, 400, 1e5, 8, 0.548),
        (4096 / 1e6, 1000, 1e6, 2, 0.794),
        (4096 / 1e6, 1000, 1e6, 4, 0.647),
        (4096 / 1e6, 1000, 1e6, 8, 0.522),
    )
    def test_noise_that_gives_a_target(self, q, rounds, population, target, noise):
        # Noise is known to three digits: epsilon at half a digit to either side brackets it.
        delta = population**-1.1
        self.assertLessEqual(accounting.epsilon({(q, noise + 0.0006): rounds}, delta), target)
        self.assertGreaterEqual(accounting.epsilon({(q, noise - 0.0006): rounds}, delta), target)

    def test_three_gaussians_of_variance_three(self):
        # Balle and Wang, ICML 2018: three releases at sigma^2 = 3 are one at sigma = 1.
        delta = gaussian_delta(1.0, 1.0)
        self.assertAlmostEqual(delta, 0.126936, delta=1e-6)
        self.assertAlmostEqual(accounting.epsilon({(1.0, 3**0.5): 3}, delta), 1.0, delta=1e-3)
        self.assertAlmostEqual(
            stock_accountant(dp_accounting.GaussianDpEvent(3**0.5), 3).get_delta(1.0),
            delta,
            places=5,
        )

    def test_three_sampled_gaussians(self):
        # Also dp_accounting's own test value for these parameters.
        delta = stock_accountant(accounting.round_event(0.2, 0.5), 3).get_delta(1.0)
        self.assertAlmostEqual(delta, 0.15594, delta=1e-3)
        self.assertAlmostEqual(accounting.epsilon({(0.2, 0.5): 3}, delta), 1.0, delta=1e-3)


class SecondAccountantTest(parameterized.TestCase):
    @parameterized.parameters(
        (_Q, 0.31, 200, _DELTA),
        (256e-6, 0.4, 40, 1e6**-1.1),
        (0.01, 1.5, 300, 1e-5),
        (1.0, 5.0, 10, 1e-5),
    )
    def test_equals_the_stock_accountant_from_above(self, q, noise, rounds, delta):
        stock = stock_accountant(accounting.round_event(q, noise), rounds).get_epsilon(delta)
        ours = accounting.epsilon({(q, noise): rounds}, delta)
        self.assertGreaterEqual(ours, stock - 1e-6)
        self.assertLess(ours, stock * (1 + 3e-4) + 1e-4)

    def test_monte_carlo_of_one_sampled_round(self):
        """The hockey-stick divergence itself, by sampling; false alarm below 1e-6 (5 sigma)."""
        q, noise, epsilon, n = 0.3, 0.7, 1.0, 2_000_000
        rng = np.random.default_rng(1)
        x = rng.normal((rng.random(n) < q).astype(float), noise)
        loss = np.log(1 - q + q * np.exp((2 * x - 1) / (2 * noise**2)))
        terms = np.maximum(0.0, 1 - np.exp(epsilon - loss))
        error = 5 * terms.std() / n**0.5
        delta = terms.mean()
        self.assertGreaterEqual(accounting.epsilon({(q, noise): 1}, delta - error), epsilon)
        self.assertLessEqual(accounting.epsilon({(q, noise): 1}, delta + error), epsilon + 1e-3)


class LawsTest(parameterized.TestCase):
    @settings(deadline=None, max_examples=6)
    @given(
        q=st.floats(1e-4, 0.5),
        noise=st.floats(0.7, 5.0),
        rounds=st.integers(1, 50),
        more=st.floats(1.05, 3.0),
    )
    def test_monotone(self, q, noise, rounds, more):
        def epsilon(q, noise, rounds):
            return accounting.epsilon({(q, noise): rounds}, 1e-6)

        base = epsilon(q, noise, rounds)
        slack = 1e-4 * base + 1e-6
        self.assertLessEqual(epsilon(q, noise * more, rounds), base + slack)
        self.assertGreaterEqual(epsilon(min(1.0, q * more), noise, rounds), base - slack)
        self.assertGreaterEqual(epsilon(q, noise, rounds + 5), base - slack)

    def test_rounds_add_up_however_they_are_listed(self):
        together = accounting.epsilon({(0.01, 0.8): 30}, 1e-6)
        noises = (0.8, 0.8000001)
        apart = accounting.epsilon({(0.01, noises[0]): 10, (0.01, noises[1]): 20}, 1e-6)
        self.assertAlmostEqual(together, apart, delta=2e-4 * together)

    def test_no_noise_is_infinite_and_no_rounds_is_zero(self):
        self.assertEqual(accounting.epsilon({(0.1, 0.0): 1, (0.1, 5.0): 3}, 1e-6), math.inf)
        self.assertEqual(accounting.epsilon({}, 1e-6), 0.0)
        self.assertEqual(accounting.epsilon({(0.0, 0.0): 4}, 1e-6), 0.0)

    def test_next_to_no_noise_is_infinite_and_soon_said(self):
        self.assertEqual(accounting.epsilon({(0.1, 1e-9): 1}, 1e-6), math.inf)
        self.assertGreater(accounting.epsilon({(0.1, 0.011): 1}, 1e-6), 1000)

    def test_plan_and_accountant_agree(self):
        p = plan.PrivacyPlan(3400, 32, 8, 20, 1.0, 2.0)
        stock = pld_privacy_accountant.PLDAccountant(
            dp_accounting.NeighboringRelation[p.relation]
        ).compose(p.dp_event())
        ours = accounting.epsilon({(_Q, 1.0): 20}, _DELTA)
        self.assertAlmostEqual(ours, stock.get_epsilon(_DELTA), delta=3e-4 * ours)


class RepeatedRoundsTest(absltest.TestCase):
    def test_combined_noise(self):
        self.assertEqual(accounting.combined_noise_multiplier([0.4]), 0.4)
        self.assertAlmostEqual(accounting.combined_noise_multiplier([2.0, 2.0]), 2 / 2**0.5)
        self.assertAlmostEqual(accounting.combined_noise_multiplier([3.0, 4.0]), 12 / 5)
        self.assertEqual(accounting.combined_noise_multiplier([3.0, 0.0]), 0.0)

    def test_a_repeated_cohort_costs_more_than_a_fresh_one(self):
        noise = 0.8
        repeated = accounting.epsilon(
            {(0.01, accounting.combined_noise_multiplier([noise, noise])): 1}, 1e-6
        )
        fresh = accounting.epsilon({(0.01, noise): 2}, 1e-6)
        self.assertGreater(repeated, fresh * 1.05)

    def test_monte_carlo_of_two_releases_of_one_cohort(self):
        """Two noisy sums of one sample; false alarm below 1e-6 (5 sigma)."""
        q, noise, epsilon, n = 0.2, 1.0, 1.0, 2_000_000
        rng = np.random.default_rng(2)
        mean = (rng.random(n) < q).astype(float)
        x, y = rng.normal(mean, noise), rng.normal(mean, noise)
        loss = np.log(1 - q + q * np.exp((2 * x - 1 + 2 * y - 1) / (2 * noise**2)))
        terms = np.maximum(0.0, 1 - np.exp(epsilon - loss))
        error = 5 * terms.std() / n**0.5
        combined = {(q, accounting.combined_noise_multiplier([noise, noise])): 1}
        self.assertGreaterEqual(accounting.epsilon(combined, terms.mean() - error), epsilon)
        # Counted as two samples, the loss would be under-reported.
        self.assertLess(accounting.epsilon({(q, noise): 2}, terms.mean() - error), epsilon)


if __name__ == "__main__":
    absltest.main()
