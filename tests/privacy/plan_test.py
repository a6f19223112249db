"""Tests of the privacy plan."""

import dataclasses
import subprocess
import sys

import numpy as np
from absl.testing import absltest, parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from tff_dpfedemb.privacy import plan as plan_lib


def make(**changes):
    values = {
        "population": 3400,
        "virtual_clients_per_round": 32,
        "virtual_client_size": 8,
        "total_rounds": 200,
        "clip_norm": 1.0,
        "noise_multiplier": 0.62,
        **changes,
    }
    return plan_lib.PrivacyPlan(**values)


class PlanTest(parameterized.TestCase):
    def test_derived_values(self):
        plan = make()
        self.assertAlmostEqual(plan.sampling_probability, 256 / 3400, places=15)
        self.assertEqual(plan.sensitivity_factor, 2)
        self.assertEqual(plan.effective_noise_multiplier, 0.31)
        self.assertAlmostEqual(plan.target_delta, 3400**-1.1, places=15)
        self.assertEqual(plan.relation, "ADD_OR_REMOVE_ONE")

    @parameterized.parameters((1, 1), (2, 2), (64, 2))
    def test_only_lone_users_have_factor_one(self, size, factor):
        self.assertEqual(make(virtual_client_size=size).sensitivity_factor, factor)

    def test_given_delta_is_kept(self):
        self.assertEqual(make(delta=1e-5).target_delta, 1e-5)

    def test_is_frozen_and_holds_public_values_only(self):
        plan = make()
        with self.assertRaises(dataclasses.FrozenInstanceError):
            plan.noise_multiplier = 3.0
        self.assertNoCommonElements(
            {f.name for f in dataclasses.fields(plan)}, {"seed", "users", "user_ids"}
        )

    @parameterized.named_parameters(
        ("no_population", {"population": 0}, "population=0"),
        ("no_clients", {"virtual_clients_per_round": 0}, "virtual_clients_per_round=0"),
        ("fraction_of_clients", {"virtual_clients_per_round": 2.5}, "virtual_clients_per_round"),
        ("no_size", {"virtual_client_size": -1}, "virtual_client_size=-1"),
        ("no_rounds", {"total_rounds": 0}, "total_rounds=0"),
        ("truth_value", {"total_rounds": True}, "total_rounds=True"),
        ("clip_zero", {"clip_norm": 0.0}, "clip_norm=0.0"),
        ("clip_infinite", {"clip_norm": float("inf")}, "clip_norm=inf"),
        ("clip_beyond_float32", {"clip_norm": 1e39}, "clip_norm=1e+39"),
        ("clip_nan", {"clip_norm": float("nan")}, "clip_norm=nan"),
        ("noise_negative", {"noise_multiplier": -0.1}, "noise_multiplier=-0.1"),
        ("noise_nan", {"noise_multiplier": float("nan")}, "noise_multiplier=nan"),
        ("noise_infinite", {"noise_multiplier": float("inf")}, "noise_multiplier=inf"),
        ("noise_without_clip", {"clip_norm": None}, "noise_multiplier=0.62"),
        ("delta_zero", {"delta": 0.0}, "delta=0.0"),
        ("delta_one", {"delta": 1.0}, "delta=1.0"),
        ("delta_of_nobody", {"population": 1, "virtual_clients_per_round": 1}, "delta=None"),
        ("sampling", {"sampling": "chunks"}, "sampling='chunks'"),
        ("more_than_everybody", {"population": 255}, "times virtual_client_size=8"),
    )
    def test_refuses(self, changes, named):
        with self.assertRaises(ValueError) as caught:
            make(**changes)
        self.assertIn(named, str(caught.exception))
        self.assertIn("accepted", str(caught.exception))

    def test_names_every_problem_at_once(self):
        with self.assertRaises(ValueError) as caught:
            make(population=0, clip_norm=-1.0, delta=2.0)
        self.assertLen(str(caught.exception).splitlines(), 3)

    def test_everybody_every_round_is_accepted(self):
        self.assertEqual(make(population=256).sampling_probability, 1.0)

    def test_imports_nothing_heavy(self):
        code = (
            "import sys, tff_dpfedemb.privacy.plan as p;"
            "p.PrivacyPlan(10, 2, 2, 1, 1.0, 1.0).sample(0, 0, 10);"
            "assert not {'tensorflow', 'dp_accounting'} & set(sys.modules)"
        )
        subprocess.run([sys.executable, "-c", code], check=True)

    @settings(deadline=None, max_examples=50)
    @given(
        population=st.integers(1, 10**7),
        clients=st.integers(1, 40),
        size=st.integers(1, 40),
        seed=st.integers(0, 2**128),
        round_number=st.integers(0, 10**6),
    )
    def test_cohorts(self, population, clients, size, seed, round_number):
        if clients * size > population or population == 1:
            return
        plan = make(
            population=population, virtual_clients_per_round=clients, virtual_client_size=size
        )
        cohort = plan.sample(seed, round_number, plan.population)
        users = [user for virtual_client in cohort for user in virtual_client]
        self.assertLen(set(users), len(users), "a user is in two virtual clients")
        self.assertTrue(all(0 <= user < population for user in users))
        if size == 1:
            self.assertLessEqual({len(c) for c in cohort}, {0, 1})
            self.assertEqual(len(cohort) % 16, 0)
            self.assertLess(len(cohort) - max(1, len(users)), 16)
        else:
            self.assertLen(cohort, clients)
        again = plan.sample(seed, round_number, plan.population)
        self.assertEqual([c.tolist() for c in cohort], [c.tolist() for c in again])

    @parameterized.parameters(300, 1000, 3000)
    def test_each_true_user_takes_part_with_the_stated_probability(self, num_users):
        # Whatever the data hold, q follows from the stated population of 1,000 alone.
        plan = make(population=1000, virtual_clients_per_round=10, virtual_client_size=10)
        counts = np.zeros(num_users)
        for round_number in range(400):
            for users in plan.sample(7, round_number, num_users):
                counts[users] += 1
        # Binomial(400, 0.1) for each user: a deviation of 6 standard deviations of any of 3,000
        # users has a probability below 1e-5, and so has one of the total.
        self.assertLess(np.abs(counts - 40).max(), 6 * 6)
        total, expected = counts.sum(), 40 * num_users
        self.assertLess(abs(total - expected), 6 * np.sqrt(0.9 * expected))


if __name__ == "__main__":
    absltest.main()
