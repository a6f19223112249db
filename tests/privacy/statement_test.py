"""Tests of the privacy statement: the words say what the numbers say, and never more."""

import json
import os
import re
import tempfile

from absl.testing import absltest, parameterized
from hypothesis import given
from hypothesis import strategies as st

from tff_dpfedemb.privacy import ledger as ledger_lib
from tff_dpfedemb.privacy import plan as plan_lib
from tff_dpfedemb.privacy import statement as statement_lib


def make_plan(**changes):
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


class StatementTest(parameterized.TestCase):
    def test_numbers(self):
        made = statement_lib.make_statement(make_plan())
        self.assertAlmostEqual(made["epsilon"], 104.9, delta=0.05)
        self.assertAlmostEqual(made["epsilon_per_virtual_client"], 17.57, delta=0.005)
        self.assertAlmostEqual(made["delta"], 3400**-1.1)
        self.assertEqual(made["relation"], "ADD_OR_REMOVE_ONE")
        self.assertEqual(made["sampling"], "poisson")
        self.assertEqual(made["noise_multiplier"], 0.62)
        self.assertEqual(made["sensitivity_factor"], 2)
        self.assertEqual(made["effective_noise_multiplier"], 0.31)
        self.assertEqual(made["clip_norm"], 1.0)
        self.assertAlmostEqual(made["sampling_probability"], 256 / 3400)
        self.assertEqual(made["rounds"], 200)
        json.dumps(made, allow_nan=False)

    def test_words_put_the_user_first_and_name_everything(self):
        made = statement_lib.make_statement(make_plan())
        words = statement_lib.in_words(made)
        self.assertNotIn("\n", words)
        for figure in ("105", "17.6", "V = 32", "C = 1", "z = 0.62", "s = 2", "z/s = 0.31"):
            self.assertIn(figure, words)
        for term in ("one user", "ADD_OR_REMOVE_ONE", "q = 0.07529", "200 rounds", "3,400 users"):
            self.assertIn(term, words)
        self.assertLess(words.index("epsilon = 105"), words.index("17.6"))
        self.assertIn("Not covered: training metrics", words)
        self.assertIn("not a guarantee for a user with company", words)
        summary = statement_lib.summary(made).splitlines()
        self.assertIn("epsilon = 105", summary[0])
        self.assertIn("17.6 per virtual client (s = 1)", summary[1])

    def test_lone_users_have_one_figure(self):
        made = statement_lib.make_statement(make_plan(virtual_client_size=1))
        self.assertEqual(made["sensitivity_factor"], 1)
        self.assertEqual(made["epsilon"], made["epsilon_per_virtual_client"])
        self.assertNotIn("per virtual client", statement_lib.in_words(made))
        self.assertLen(statement_lib.summary(made).splitlines(), 1)

    @parameterized.parameters((1.0,), (None,))
    def test_without_noise_nothing_is_promised(self, clip_norm):
        made = statement_lib.make_statement(make_plan(noise_multiplier=0.0, clip_norm=clip_norm))
        self.assertEqual(made["epsilon"], "inf")
        self.assertEqual(made["covered"], [])
        words = statement_lib.in_words(made)
        self.assertIn("no privacy guarantee", words)
        self.assertNotIn("differentially private", words)
        self.assertNotIn("Covered:", words.replace("Not covered:", ""))
        json.dumps(made, allow_nan=False)

    def test_of_a_ledger(self):
        with tempfile.TemporaryDirectory() as folder:
            plan = make_plan(total_rounds=30)
            ledger = ledger_lib.Ledger(os.path.join(folder, "ledger.jsonl"), plan)
            for number in (0, 1, 2, 1, 2):
                ledger.append(number)
            now = statement_lib.make_statement(plan, ledger)
            later = statement_lib.make_statement(plan, ledger, planned_rounds=30)
        once = statement_lib.make_statement(make_plan(total_rounds=30))
        self.assertEqual((now["status"], now["rounds"]), ("final", 3))
        self.assertEqual(now["rounds_repeated_after_a_crash"], 2)
        self.assertEqual(now["epsilon"], ledger.epsilon(plan.target_delta))
        self.assertIn("2 in all", statement_lib.in_words(now))
        self.assertEqual((later["status"], later["rounds"]), ("planned", 30))
        self.assertLess(now["epsilon"], later["epsilon"])
        self.assertLess(once["epsilon"], later["epsilon"])

    def test_central_training_promises_nothing(self):
        made = json.loads(json.dumps(statement_lib.make_central_statement(), allow_nan=False))
        self.assertEqual((made["epsilon"], made["delta"], made["covered"]), ("inf", None, []))
        words = statement_lib.in_words(made)
        self.assertIn("There is no privacy guarantee: epsilon is infinite.", words)
        self.assertNotIn("Covered", words.replace("Not covered", ""))

    @given(st.floats(1e-12, 1e12))
    def test_figures_are_rounded_up_and_close(self, value):
        shown = float(statement_lib.figure(value))
        self.assertGreaterEqual(shown, value * (1 - 1e-12))
        self.assertLessEqual(shown, value * 1.0101)

    def test_words_agree_with_numbers(self):
        made = statement_lib.make_statement(make_plan(noise_multiplier=1.9, total_rounds=50))
        shown = re.search(
            r"epsilon = ([\d.e+-]+) at delta = ([\d.e+-]+)", statement_lib.in_words(made)
        )
        self.assertGreaterEqual(float(shown[1]), made["epsilon"])
        self.assertGreaterEqual(float(shown[2]), made["delta"])


if __name__ == "__main__":
    absltest.main()
