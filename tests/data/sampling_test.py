"""Statistical tests of the sampler. Each states the rate at which it fails by chance."""

import numpy as np
from absl.testing import absltest, parameterized
from scipy import stats

from tff_dpfedemb.data import sampling

# Each test below fails by chance with this probability over the choice of seeds, which are fixed.
_FALSE_ALARM = 1e-6


def cohorts(rounds, population=60, q=0.2, bins=4, seed=7):
    return [
        sampling.poisson_virtual_clients(
            population=population,
            sampling_probability=q,
            num_bins=bins,
            seed=seed,
            round_number=r,
        )
        for r in range(rounds)
    ]


def inclusion(drawn, population):
    """Matrix of rounds by users: who took part."""
    taken = np.zeros((len(drawn), population), bool)
    for row, cohort in zip(taken, drawn, strict=True):
        row[np.concatenate(cohort)] = True
    return taken


class PoissonTest(parameterized.TestCase):
    @parameterized.parameters((4,), (None,))
    def test_inclusion_frequency_is_q_for_every_user(self, bins):
        rounds, population, q = 20_000, 60, 0.2
        counts = inclusion(cohorts(rounds, population, q, bins), population).sum(axis=0)
        p_values = [stats.binomtest(int(c), rounds, q).pvalue for c in counts]
        self.assertGreater(min(p_values), _FALSE_ALARM / population)

    def test_frequency_test_can_fail(self):
        rounds, q = 20_000, 0.2
        counts = inclusion(cohorts(rounds, 60, q), 60).sum(axis=0)
        wrong = [stats.binomtest(int(c), rounds, q * 1.1).pvalue for c in counts]
        self.assertLess(min(wrong), _FALSE_ALARM / 60)

    def test_cohort_size_is_binomial(self):
        rounds, population, q = 20_000, 60, 0.2
        sizes = [sum(map(len, cohort)) for cohort in cohorts(rounds, population, q)]
        edges = np.arange(5, 20)
        observed = np.histogram(sizes, bins=[-1, *(edges + 0.5), population + 1])[0]
        cumulative = stats.binom.cdf([*edges, population], population, q)
        expected = np.diff([0.0, *cumulative]) * rounds
        self.assertGreater(stats.chisquare(observed, expected).pvalue, _FALSE_ALARM)

    def test_users_are_pairwise_independent(self):
        rounds, population, q = 20_000, 60, 0.2
        taken = inclusion(cohorts(rounds, population, q), population).astype(float)
        standardised = (taken - q) / np.sqrt(q * (1 - q))
        correlation = standardised.T @ standardised / np.sqrt(rounds)
        pairs = correlation[np.triu_indices(population, 1)]
        bound = stats.norm.isf(_FALSE_ALARM / 2 / len(pairs))
        self.assertLess(np.abs(pairs).max(), bound)
        # A fixed-size sample of the same mean would show here: all correlations share a sign.
        self.assertLess(abs(pairs.mean()) * np.sqrt(len(pairs)), stats.norm.isf(_FALSE_ALARM / 2))

    def test_rounds_are_independent(self):
        rounds, population, q = 20_000, 60, 0.2
        taken = inclusion(cohorts(rounds, population, q), population).astype(float)
        standardised = (taken - q) / np.sqrt(q * (1 - q))
        lagged = (standardised[1:] * standardised[:-1]).sum() / np.sqrt((rounds - 1) * population)
        self.assertLess(abs(lagged), stats.norm.isf(_FALSE_ALARM / 2))

    def test_bins_are_uniform_and_independent_of_company(self):
        bins, population = 4, 60
        drawn = cohorts(20_000, population, bins=bins)
        sizes = np.array([[len(b) for b in cohort] for cohort in drawn])
        self.assertGreater(stats.chisquare(sizes.sum(axis=0)).pvalue, _FALSE_ALARM)
        # Bins of one round, thinned out of a Poisson-like cohort, are all but uncorrelated:
        # exactly, Binomial(60, q/4) each with covariance -60 (q/4)^2. Chunks would be equal.
        covariance = np.cov(sizes[:, 0], sizes[:, 1])[0, 1]
        self.assertAlmostEqual(covariance, -60 * 0.05**2, delta=0.15)
        self.assertAlmostEqual(sizes[:, 0].var(), 60 * 0.05 * 0.95, delta=0.25)

    def test_seed_and_round_change_the_cohort(self):
        def draw(seed, round_number):
            (cohort,) = sampling.poisson_virtual_clients(
                population=10**6,
                sampling_probability=1e-4,
                num_bins=1,
                seed=seed,
                round_number=round_number,
            )
            return frozenset(cohort.tolist())

        self.assertLen({draw(s, r) for s in range(3) for r in range(3)}, 9)

    def test_costs_nothing_per_user(self):
        cohort = sampling.poisson_virtual_clients(
            population=10**15, sampling_probability=1e-13, num_bins=3, seed=0, round_number=0
        )
        self.assertLen(cohort, 3)

    @parameterized.parameters(0.0, 1.0)
    def test_extreme_probabilities(self, q):
        cohort = sampling.poisson_virtual_clients(
            population=50, sampling_probability=q, num_bins=3, seed=0, round_number=0
        )
        self.assertEqual(sorted(np.concatenate(cohort)), list(range(50)) if q else [])


class ClientSeedsTest(absltest.TestCase):
    def test_differ_by_seed_round_and_client(self):
        seeds = [
            tuple(s.tolist())
            for a in range(4)
            for b in range(4)
            for s in sampling.client_seeds(a, b, 5)
        ]
        self.assertLen(set(seeds), 4 * 4 * 5)

    def test_do_not_depend_on_the_number_of_clients(self):
        few, many = sampling.client_seeds(3, 4, 2), sampling.client_seeds(3, 4, 9)
        self.assertEqual([s.tolist() for s in few], [s.tolist() for s in many[:2]])


if __name__ == "__main__":
    absltest.main()
