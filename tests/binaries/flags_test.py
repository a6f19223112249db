"""The binaries as a shell sees them: what they refuse, what they say, what they leave alone."""

import json
import os
import re
import subprocess
import sys
import tempfile

from absl.testing import absltest, parameterized

from tff_dpfedemb.privacy import ledger as ledger_lib
from tff_dpfedemb.privacy import plan as plan_lib
from tff_dpfedemb.privacy import statement as statement_lib

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(plan_lib.__file__)))

# Runs a binary as `python -m` does, and says at its end whether TensorFlow was imported.
_WITNESS = """
import atexit, runpy, sys
name = "tff_dpfedemb." + sys.argv.pop(1)
heavy = ("tensorflow", "tensorflow_federated", "dp_accounting")
atexit.register(lambda: print([m for m in heavy if m in sys.modules], file=sys.stderr))
runpy.run_module(name, run_name="__main__", alter_sys=True)
"""


def _run(binary: str, *arguments: str, folder: str) -> subprocess.CompletedProcess:
    """Runs a binary in a folder, to its end."""
    return subprocess.run(
        [sys.executable, "-m", f"tff_dpfedemb.{binary}", *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=300,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": _ROOT},
    )


def _entries(folder: str) -> list[str]:
    """Everything below a folder."""
    return sorted(os.path.join(d, n) for d, ds, fs in os.walk(folder) for n in [*ds, *fs])


# Each case: the binary, its flags, and for every line of the answer the words that it must hold.
_REFUSED = {
    "no_virtual_client": (
        "run_federated",
        ["--virtual_clients_per_round=0"],
        [["--virtual_clients_per_round=0", "at least 1"]],
    ),
    "no_clipping_at_zero": (
        "run_federated",
        ["--clip_norm=0"],
        [["--clip_norm=0", "above 0"]],
    ),
    "negative_clip": ("run_federated", ["--clip_norm=-1"], [["--clip_norm=-1", "above 0"]]),
    "noise_without_clip": (
        "run_federated",
        ["--clip_norm=none", "--noise_multiplier=0.5"],
        [["--noise_multiplier=0.5", "clip_norm"]],
    ),
    "more_than_everybody": (
        "run_federated",
        ["--num_users=100", "--virtual_clients_per_round=11", "--virtual_client_size=10"],
        [["--virtual_clients_per_round=11", "virtual_client_size=10", "100"]],
    ),
    "nan_noise": (
        "run_federated",
        ["--noise_multiplier=nan"],
        [["--noise_multiplier=nan", "at least 0"]],
    ),
    "infinite_noise": (
        "run_federated",
        ["--noise_multiplier=inf"],
        [["--noise_multiplier=inf", "at least 0"]],
    ),
    "negative_noise": (
        "run_federated",
        ["--noise_multiplier=-0.1"],
        [["--noise_multiplier=-0.1", "at least 0"]],
    ),
    "infinite_client_lr": ("run_federated", ["--client_lr=inf"], [["--client_lr=inf", "above 0"]]),
    "nan_server_lr": ("run_federated", ["--server_lr=nan"], [["--server_lr=nan", "above 0"]]),
    "momentum_of_one": (
        "run_federated",
        ["--client_momentum=1", "--server_momentum=nan"],
        [["--client_momentum=1", "below 1"], ["--server_momentum=nan", "below 1"]],
    ),
    "delta_0": ("run_federated", ["--delta=0"], [["--delta=0", "between 0 and 1"]]),
    "delta_1": ("run_federated", ["--delta=1"], [["--delta=1", "between 0 and 1"]]),
    "delta_2": ("run_federated", ["--delta=2"], [["--delta=2", "between 0 and 1"]]),
    "delta_nan": ("run_federated", ["--delta=nan"], [["--delta=nan", "between 0 and 1"]]),
    "no_users": ("run_federated", ["--num_users=0"], [["--num_users", "0", "1"]]),
    "no_rounds": ("run_federated", ["--total_rounds=0"], [["--total_rounds=0", "at least 1"]]),
    "small_head": ("run_federated", ["--head_size=3"], [["--head_size=3", "at least"]]),
    "negative_head": ("run_federated", ["--head_size=-1"], [["--head_size=-1", "at least"]]),
    "no_embedding": ("run_federated", ["--embedding_dim=0"], [["--embedding_dim=0", "at least 1"]]),
    "no_epochs": (
        "run_federated",
        ["--client_epochs_per_round=0", "--client_batch_size=0", "--max_examples_per_client=0"],
        [
            ["--client_epochs_per_round=0", "at least 1"],
            ["--client_batch_size=0", "at least 1"],
            ["--max_examples_per_client=0", "at least 1"],
        ],
    ),
    "no_checkpoints": (
        "run_federated",
        ["--rounds_per_checkpoint=0", "--rounds_per_eval=-1", "--reconst_iters=-1"],
        [
            ["--rounds_per_checkpoint=0", "at least 1"],
            ["--rounds_per_eval=-1", "at least 0"],
            ["--reconst_iters=-1", "at least 0"],
        ],
    ),
    "unknown_names": (
        "run_federated",
        ["--task=cats", "--model_backbone=vgg", "--sampling=all"],
        [
            ["--task=cats", "glyphs"],
            ["--model_backbone=vgg", "lenet", "small_cnn"],
            ["--sampling=all", "poisson"],
        ],
    ),
    "not_numbers": (
        "run_federated",
        ["--total_rounds=ten", "--client_lr=fast", "--delta=small", "--dry_run=maybe"],
        [
            ["--total_rounds=ten", "integer"],
            ["--client_lr=fast", "number"],
            ["--delta=small", "number", "none"],
            ["--dry_run=maybe", "true or false"],
        ],
    ),
    "separate_values": (
        "run_federated",
        ["--total_rounds", "ten", "--noise_multiplier", "-1", "--seed", "-1"],
        [["--total_rounds=ten", "integer"], ["--seed=-1", "non-negative", "none"]],
    ),
    "no_value": ("run_federated", ["--total_rounds"], [["--total_rounds", "alue"]]),
    "unknown_flag": (
        "run_federated",
        ["--total_round=1", "--noise=1"],
        [["total_round'", "total_rounds"], ["noise"]],
    ),
    "positional": (
        "run_federated",
        ["glyphs", "--total_rounds=1", "more"],
        [["'glyphs'", "--name=value"], ["'more'", "--name=value"]],
    ),
    "name_with_a_slash": (
        "run_federated",
        ["--experiment_name=a/b"],
        [["--experiment_name='a/b'", "without a path"]],
    ),
    "empty_name": ("run_federated", ["--experiment_name="], [["--experiment_name=''", "path"]]),
    "name_of_the_parent": (
        "run_federated",
        ["--experiment_name=.."],
        [["--experiment_name='..'", "path"]],
    ),
    "name_of_the_folder": (
        "run_federated",
        ["--experiment_name=."],
        [["--experiment_name='.'", "path"]],
    ),
    "too_long_a_name": (
        "run_federated",
        ["--experiment_name=" + 300 * "x"],
        [["--experiment_name", "200"]],
    ),
    "below_a_file": (
        "run_federated",
        ["--output_dir=a_file/runs"],
        [["--output_dir", "a_file", "not a folder"]],
    ),
    "in_the_kernel": ("run_federated", ["--output_dir=/proc/self/runs"], [["/proc/self"]]),
    "foreign_content": (
        "run_federated",
        ["--output_dir=.", "--experiment_name=holiday"],
        [["--experiment_name", "holiday", "not a run"]],
    ),
    "foreign_flags": (
        "run_federated",
        ["--output_dir=.", "--experiment_name=foreign"],
        [["--experiment_name", "flags.json", "not of a run"]],
    ),
    "foreign_flags_that_are_json": (
        "run_federated",
        ["--output_dir=.", "--experiment_name=foreign_json"],
        [["--experiment_name", "flags.json", "not of a run"]],
    ),
    "all_at_once": (
        "run_federated",
        [
            "--num_users=10",
            "--virtual_clients_per_round=0",
            "--noise_multiplier=nan",
            "--client_lr=0",
            "--server_lr=0",
            "--head_size=1",
            "--embedding_dim=-3",
            "--experiment_name=a/b",
        ],
        [
            ["--virtual_clients_per_round=0"],
            ["--noise_multiplier=nan"],
            ["--client_lr=0"],
            ["--server_lr=0"],
            ["--head_size=1"],
            ["--embedding_dim=-3"],
            ["--experiment_name='a/b'"],
        ],
    ),
    "privacy_plan": (
        "run_privacy",
        ["--num_users=0", "--clip_norm=0", "--delta=1", "--noise_multiplier=-inf"],
        [
            ["--num_users=0", "at least 1"],
            ["--clip_norm=0", "above 0"],
            ["--noise_multiplier=-inf", "at least 0"],
            ["--delta=1", "num_users^-1.1"],
        ],
    ),
    "privacy_no_ledger": (
        "run_privacy",
        ["--ledger=none.jsonl", "--delta=nan"],
        [["--ledger=none.jsonl", "ledger.jsonl"], ["--delta=nan", "between 0 and 1"]],
    ),
    "privacy_empty_ledger": ("run_privacy", ["--ledger=empty"], [["--ledger=empty"]]),
    "privacy_folder": ("run_privacy", ["--ledger=holiday"], [["--ledger=holiday"]]),
    "privacy_foreign_ledger": (
        "run_privacy",
        ["--ledger=a_file"],
        [["--ledger", "a_file, line 1", "not a ledger line"]],
    ),
    "privacy_unknown_flag": ("run_privacy", ["--client_lr=1"], [["client_lr"]]),
    "evaluation_no_model": ("run_evaluation", [], [["--model", "missing"]]),
    "evaluation_no_such_model": (
        "run_evaluation",
        ["--model=holiday", "--num_users=0", "--split=train"],
        [["--split=train", "validation", "test"]],
    ),
    "evaluation_foreign_folder": (
        "run_evaluation",
        ["--model=holiday", "--num_users=0"],
        [["--num_users", "0"], ["--model=holiday", "saved_model.pb"]],
    ),
    "evaluation_empty_model": ("run_evaluation", ["--model="], [["--model=", "saved_model.pb"]]),
}


_REFUSED |= {
    "no_cache": ("run_federated", ["--task=emnist"], [["--cache: is missing", "tasks.prepare"]]),
    "not_prepared": (
        "run_evaluation",
        ["--task=landmarks", "--cache=holiday", "--landmarks_split=gld23k", "--model=empty"],
        [
            ["--cache=holiday", "landmarks-gld23k-224 is not there", "tasks.prepare"],
            ["--model=empty"],
        ],
    ),
    "of_another_task": (
        "run_federated",
        ["--task=emnist", "--cache=holiday", "--examples_per_user=3", "--tfds_name=mnist"],
        [
            ["--examples_per_user=3", "--task=emnist does not take it"],
            ["--tfds_name=mnist", "--task=emnist does not take it"],
        ],
    ),
    "no_population": (
        "run_federated",
        ["--task=image_folder", "--cache=holiday"],
        [["--cache=holiday", "is not there"], ["--num_users: is missing", "state it"]],
    ),
    "nobody": (
        "run_federated",
        ["--task=emnist", "--cache=holiday", "--num_users=0"],
        [["--cache=holiday", "is not there"], ["--num_users=0", "at least 1"]],
    ),
    "target_and_noise": (
        "run_privacy",
        ["--target_epsilon=4", "--noise_multiplier=1"],
        [["--target_epsilon=4", "--noise_multiplier=1", "one of the two"]],
    ),
    "no_such_weights": (
        "run_federated",
        ["--pretrained=nowhere"],
        [["--pretrained=nowhere", "does not exist"]],
    ),
    "head_of_fedavg": (
        "run_federated",
        ["--algorithm=fedavg", "--head_size=700"],
        [["--head_size=700", "fedavg"]],
    ),
    "width_of_lenet": (
        "run_centralized",
        ["--model_backbone=lenet", "--backbone_alpha=0.5"],
        [["--backbone_alpha=0.5", "accepted is 1"]],
    ),
    "backbone_too_large": (
        "run_centralized",
        ["--model_backbone=mobilenet_v2"],
        [["--model_backbone='mobilenet_v2'", "at least 32 x 32", "not 28 x 28"]],
    ),
    "central": (
        "run_centralized",
        ["--learning_rate=0", "--momentum=1", "--total_steps=0", "--batch_size=-1", "--seed=-1"],
        [
            ["--learning_rate=0", "above 0"],
            ["--momentum=1", "below 1"],
            ["--total_steps=0", "at least 1"],
            ["--batch_size=-1", "at least 1"],
            ["--seed=-1", "from 0"],
        ],
    ),
    "central_folder": (
        "run_centralized",
        ["--output_dir=.", "--experiment_name=holiday"],
        [["--experiment_name", "holds something that is not a run"]],
    ),
}


class RefusalTest(parameterized.TestCase):
    """Bad input is named, all of it, before anything is loaded or written."""

    @parameterized.named_parameters((name, *case) for name, case in _REFUSED.items())
    def test_refused(self, binary: str, arguments: list[str], expected: list[list[str]]) -> None:
        folder = self.enterContext(tempfile.TemporaryDirectory())
        for name, content in (
            ("a_file", "{}\n"),
            ("empty", ""),
            ("holiday/beach.jpg", "sun"),
            ("foreign/flags.json", "not JSON"),
            ("foreign_json/flags.json", "[1, 2]"),
        ):
            os.makedirs(os.path.dirname(os.path.join(folder, name)), exist_ok=True)
            with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
                file.write(content)
        before = _entries(folder)
        done = subprocess.run(
            [sys.executable, "-c", _WITNESS, binary, *arguments],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=300,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": _ROOT},
        )
        *lines, imported = done.stderr.splitlines()
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertEmpty(done.stdout)
        self.assertLen(lines, len(expected), done.stderr)
        for line in lines:
            self.assertStartsWith(line, "error: ")
        for words in expected:
            self.assertLen([x for x in lines if all(w in x for w in words)], 1, (words, lines))
        # A ledger is read with the accountant's help.
        self.assertIn(imported, ("[]", "['dp_accounting']") if "ledger" in done.stderr else ("[]",))
        self.assertEqual(_entries(folder), before)

    def test_a_good_dry_run_passes_every_check_and_writes_nothing(self) -> None:
        folder = self.enterContext(tempfile.TemporaryDirectory())
        done = _run("run_federated", "--dry_run", folder=folder)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("Would create", done.stdout)
        self.assertIn("epsilon = ", done.stdout)
        self.assertEmpty(done.stderr)
        self.assertEmpty(_entries(folder))


class HelpTest(parameterized.TestCase):
    """--help says how to start."""

    @parameterized.parameters(
        (
            "run_federated",
            "task num_users virtual_clients_per_round virtual_client_size total_rounds clip_norm "
            "noise_multiplier delta sampling seed model_backbone client_lr client_momentum "
            "client_epochs_per_round client_batch_size max_examples_per_client head_lr_scale "
            "reconst_iters server_lr server_momentum rounds_per_eval rounds_per_checkpoint "
            "output_dir experiment_name dry_run",
        ),
        (
            "run_privacy",
            "num_users virtual_clients_per_round virtual_client_size total_rounds clip_norm "
            "noise_multiplier delta sampling ledger json",
        ),
        ("run_evaluation", "task num_users model split json"),
        (
            "run_centralized",
            "task cache model_backbone embedding_dim pretrained learning_rate momentum batch_size "
            "total_steps seed output_dir experiment_name dry_run",
        ),
    )
    def test_names_the_flags(self, binary: str, names: str) -> None:
        done = _run(binary, "--help", folder=self.enterContext(tempfile.TemporaryDirectory()))
        self.assertEqual(done.returncode, 0)
        self.assertIn(f"python -m tff_dpfedemb.{binary}", done.stdout)
        self.assertEmpty(done.stderr)
        for name in names.split():
            self.assertRegex(done.stdout, rf"--(\[no\])?{name}\b")


class PrivacyTest(parameterized.TestCase):
    """run_privacy prints what the accountant says, and with --json nothing else."""

    def _statement(self, *arguments: str) -> dict:
        folder = self.enterContext(tempfile.TemporaryDirectory())
        done = _run("run_privacy", "--json", *arguments, folder=folder)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEmpty(_entries(folder))
        return json.loads(done.stdout)

    def test_golden_value(self) -> None:
        # dp_accounting 0.4.3, PLD of a Poisson-sampled Gaussian, q = 256/3400, delta = 3400^-1.1.
        made = self._statement(
            "--num_users=3400",
            "--virtual_clients_per_round=32",
            "--virtual_client_size=8",
            "--total_rounds=200",
            "--noise_multiplier=0.62",
        )
        self.assertAlmostEqual(made["epsilon"], 104.9, delta=0.05)
        self.assertAlmostEqual(made["epsilon_per_virtual_client"], 17.57, delta=0.005)
        self.assertEqual(made["sensitivity_factor"], 2)
        self.assertAlmostEqual(made["delta"], 3400**-1.1)

    def test_no_noise_is_no_privacy(self) -> None:
        made = self._statement("--noise_multiplier=0")
        self.assertEqual(made["epsilon"], "inf")
        self.assertEqual(made["epsilon_per_virtual_client"], "inf")
        self.assertEmpty(made["covered"])

    def test_words_put_the_user_level_first(self) -> None:
        done = _run(
            "run_privacy",
            "--total_rounds=3",
            "--num_users=10000",
            folder=self.enterContext(tempfile.TemporaryDirectory()),
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        figures = re.findall(r"epsilon = (\S+)", done.stdout)
        self.assertGreater(float(figures[0]), float(figures[1]))
        self.assertLess(done.stdout.index("user level"), done.stdout.index("per virtual client"))

    def _ledger(self, folder: str) -> ledger_lib.Ledger:
        """A ledger of three rounds, one of them run twice."""
        plan = plan_lib.PrivacyPlan(
            population=1000,
            virtual_clients_per_round=4,
            virtual_client_size=2,
            total_rounds=3,
            clip_norm=1.0,
            noise_multiplier=1.5,
        )
        ledger = ledger_lib.Ledger(os.path.join(folder, "ledger.jsonl"), plan)
        for number in (0, 1, 1, 2):
            ledger.append(number)
        self._plan = plan
        return ledger

    def test_finds_the_noise_for_a_target(self) -> None:
        made = self._statement("--target_epsilon=4", "--num_users=100000")
        self.assertBetween(made["epsilon"], 3.98, 4.0)
        again = self._statement(
            f"--noise_multiplier={made['noise_multiplier']}", "--num_users=100000"
        )
        self.assertEqual(again, made)
        folder = self.enterContext(tempfile.TemporaryDirectory())
        done = _run("run_privacy", "--target_epsilon=4", "--num_users=100000", folder=folder)
        self.assertStartsWith(
            done.stdout, f"--noise_multiplier={made['noise_multiplier']:g} meets the target:\n"
        )
        refused = _run("run_privacy", "--target_epsilon=0", folder=folder)
        self.assertEqual(refused.returncode, 2)
        self.assertRegex(refused.stderr, r"^error: --target_epsilon=0.0: accepted are [^\n]*\n$")

    def test_states_a_ledger_whatever_the_other_flags(self) -> None:
        folder = self.enterContext(tempfile.TemporaryDirectory())
        ledger = self._ledger(folder)
        made = self._statement(f"--ledger={ledger.path}", "--noise_multiplier=9")
        self.assertEqual(made, statement_lib.make_statement(self._plan, ledger))
        self.assertEqual(made["rounds_repeated_after_a_crash"], 1)

    def test_delta_of_a_ledger_can_be_chosen(self) -> None:
        folder = self.enterContext(tempfile.TemporaryDirectory())
        ledger = self._ledger(folder)
        made = self._statement(f"--ledger={ledger.path}", "--delta=1e-7")
        self.assertEqual(made["delta"], 1e-7)
        self.assertEqual(made["epsilon"], ledger.epsilon(1e-7))
        self.assertGreater(made["epsilon"], ledger.epsilon(self._plan.target_delta))

    def test_a_torn_ledger_counts_its_last_round_and_stays_as_it_is(self) -> None:
        folder = self.enterContext(tempfile.TemporaryDirectory())
        ledger = self._ledger(folder)
        with open(ledger.path, "rb+") as file:
            file.truncate(os.path.getsize(ledger.path) - 20)
        with open(ledger.path, "rb") as file:
            content = file.read()
        done = _run("run_privacy", "--json", f"--ledger={ledger.path}", folder=folder)
        self.assertEqual(
            json.loads(done.stdout)["epsilon"], ledger.epsilon(self._plan.target_delta)
        )
        self.assertIn("torn", done.stderr)
        with open(ledger.path, "rb") as file:
            self.assertEqual(file.read(), content)

    def test_an_altered_ledger_is_refused(self) -> None:
        folder = self.enterContext(tempfile.TemporaryDirectory())
        ledger = self._ledger(folder)
        with open(ledger.path, encoding="utf-8") as file:
            lines = file.readlines()
        with open(ledger.path, "w", encoding="utf-8") as file:
            file.writelines([lines[0], *lines[2:]])
        done = _run("run_privacy", f"--ledger={ledger.path}", folder=folder)
        self.assertEqual(done.returncode, 2)
        self.assertEmpty(done.stdout)
        self.assertRegex(done.stderr, r"^error: --ledger: .*line 2.*altered\n$")


if __name__ == "__main__":
    absltest.main()
