"""Tests of the ledger, on files that are cut, altered and shuffled."""

import json
import os
import tempfile

from absl.testing import absltest, parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from tff_dpfedemb.privacy import accounting, plan
from tff_dpfedemb.privacy import ledger as ledger_lib


def make_plan(**changes):
    values = {
        "population": 10_000,
        "virtual_clients_per_round": 4,
        "virtual_client_size": 5,
        "total_rounds": 20,
        "clip_norm": 1.0,
        "noise_multiplier": 1.6,
        **changes,
    }
    return plan.PrivacyPlan(**values)


class LedgerTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = os.path.join(folder.name, "ledger.jsonl")
        self.plan = make_plan()

    def write(self, *rounds):
        ledger = ledger_lib.Ledger(self.path, self.plan)
        for number in rounds:
            ledger.append(number)
        return ledger

    def lines(self):
        with open(self.path, "rb") as file:
            return file.read().splitlines(keepends=True)

    def overwrite(self, *lines):
        with open(self.path, "wb") as file:
            file.writelines(lines)

    def test_line_is_on_disk_when_append_returns(self):
        self.write(0)
        (line,) = self.lines()
        record = json.loads(line)
        self.assertEqual(record["round"], 0)
        self.assertEqual(record["noise_multiplier"], 1.6)
        self.assertEqual(record["sensitivity_factor"], 2)
        self.assertEqual(record["clip_norm"], 1.0)
        self.assertEqual(record["sampling_probability"], 0.002)
        self.assertEqual(
            record["event"],
            "PoissonSampledDpEvent(sampling_probability=0.002, "
            "event=GaussianDpEvent(noise_multiplier=0.8))",
        )

    def test_is_synced_before_append_returns(self):
        synced = []
        original = os.fsync
        self.enter_context(
            absltest.mock.patch.object(
                os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_size), original(fd))
            )
        )
        self.write(0, 1)
        self.assertIn(os.path.getsize(self.path), synced)

    def test_ledger_equals_plan(self):
        ledger = self.write(*range(20))
        expected = accounting.epsilon({(0.002, 0.8): 20}, self.plan.target_delta)
        self.assertEqual(ledger.epsilon(self.plan.target_delta), expected)
        without_factor = accounting.epsilon({(0.002, 1.6): 20}, self.plan.target_delta)
        self.assertEqual(ledger.epsilon(self.plan.target_delta, user_level=False), without_factor)
        self.assertLess(without_factor, expected)

    def test_read_without_a_plan_says_the_same(self):
        written = self.write(0, 1, 1, 2)
        read = ledger_lib.Ledger(self.path)
        self.assertEqual(read.rounds(), written.rounds())
        with self.assertRaisesRegex(ledger_lib.LedgerError, "without a plan"):
            read.append(3)

    def test_repeated_round_counts_as_less_noise_on_one_cohort(self):
        ledger = self.write(0, 1, 0, 1, 1, 2)
        self.assertEqual(ledger.num_rounds, 3)
        self.assertEqual(
            {k: round(v, 12) for k, v in ledger.rounds().items()},
            {(0.002, 0.8 / 2**0.5): 1, (0.002, 0.8 / 3**0.5): 1, (0.002, 0.8): 1},
        )

    def test_planned_rounds_are_counted_once(self):
        ledger = self.write(0, 0)
        self.assertEqual(sum(ledger.rounds(planned_rounds=20).values()), 20)
        self.assertEqual(ledger.rounds(planned_rounds=20)[0.002, 0.8], 19)

    def test_resumed_equals_uninterrupted(self):
        for start in range(0, 20, 3):
            self.write(*range(start, min(start + 3, 20)))
        self.assertEqual(ledger_lib.Ledger(self.path).rounds(), {(0.002, 0.8): 20})

    def test_rounds_cannot_be_skipped(self):
        ledger = self.write(0)
        with self.assertRaises(ledger_lib.LedgerError):
            ledger.append(2)
        self.assertLen(self.lines(), 1)

    @parameterized.named_parameters(
        ("missing", lambda lines: [lines[0], *lines[2:]]),
        ("missing_first", lambda lines: lines[1:]),
        ("repeated", lambda lines: [lines[0], lines[0], *lines[1:]]),
        ("reordered", lambda lines: [lines[1], lines[0], *lines[2:]]),
        ("torn_in_the_middle", lambda lines: [lines[0], lines[1][:40] + b"\n", *lines[2:]]),
        ("not_json", lambda lines: [b"hello\n", *lines[1:]]),
        ("empty_line", lambda lines: [lines[0], b"\n", *lines[1:]]),
        ("less_noise_than_said", lambda lines: [lines[0].replace(b"1.6", b"9.6"), *lines[1:]]),
        ("json_of_another_kind", lambda lines: [*lines, b"[1, 2]\n"]),
    )
    def test_damage_is_noticed(self, damage):
        self.write(0, 1, 2, 3)
        self.overwrite(*damage(self.lines()))
        with self.assertRaisesRegex(ledger_lib.LedgerError, "line"):
            ledger_lib.Ledger(self.path)

    def test_line_of_another_run_is_noticed(self):
        self.write(0, 1)
        ours = self.lines()
        os.remove(self.path)
        self.plan = make_plan(noise_multiplier=3.2)
        self.write(0, 1)
        self.overwrite(ours[0], self.lines()[1])
        with self.assertRaisesRegex(ledger_lib.LedgerError, "line 2"):
            ledger_lib.Ledger(self.path)

    def test_ledger_of_another_plan_is_refused(self):
        self.write(0)
        with self.assertRaisesRegex(ledger_lib.LedgerError, "not of this run's privacy plan"):
            ledger_lib.Ledger(self.path, make_plan(virtual_client_size=4))

    @settings(deadline=None, max_examples=60)
    @given(cut=st.integers(1, 10**6), repeats=st.booleans())
    def test_torn_last_line_is_counted(self, cut, repeats):
        if os.path.exists(self.path):
            os.remove(self.path)
        rounds = [0, 1, 1] if repeats else [0, 1, 2]
        self.write(*rounds)
        whole = self.lines()
        kept = whole[-1][: cut % (len(whole[-1]) - 1) + 1]
        self.overwrite(*whole[:-1], kept)
        started = accounting.epsilon({(0.002, 0.8): 3}, self.plan.target_delta)
        read_only = ledger_lib.Ledger(self.path)
        self.assertTrue(read_only.repaired)
        self.assertEqual(self.lines()[-1], kept, "reading alone must not write")
        resumed = ledger_lib.Ledger(self.path, self.plan)
        self.assertTrue(resumed.repaired)
        for ledger in (read_only, resumed, ledger_lib.Ledger(self.path)):
            self.assertLen(ledger.entries, 3)
            self.assertGreaterEqual(
                ledger.epsilon(self.plan.target_delta), started if not repeats else 0
            )
        resumed.append(resumed.num_rounds)
        self.assertFalse(ledger_lib.Ledger(self.path).repaired)

    def test_torn_only_line(self):
        self.write(0)
        self.overwrite(self.lines()[0][:50])
        with self.assertRaisesRegex(ledger_lib.LedgerError, "only line is torn"):
            ledger_lib.Ledger(self.path)
        self.assertEqual(ledger_lib.Ledger(self.path, self.plan).num_rounds, 1)

    def test_no_file_is_no_rounds(self):
        ledger = ledger_lib.Ledger(self.path)
        self.assertEqual((ledger.num_rounds, ledger.epsilon(1e-6)), (0, 0.0))


if __name__ == "__main__":
    absltest.main()
