"""Runs as processes: to the end, killed, stopped, resumed, disturbed."""

import csv
import glob
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import pytest
from absl.testing import absltest

from tff_dpfedemb.privacy import ledger as ledger_lib
from tff_dpfedemb.privacy import plan as plan_lib
from tff_dpfedemb.privacy import statement as statement_lib

pytestmark = pytest.mark.slow

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(plan_lib.__file__)))
_WAIT_SECONDS = 300.0
_POLL_SECONDS = 0.002
_ROUNDS = 6
_FLAGS = (
    "--num_users=1000",
    "--virtual_clients_per_round=2",
    "--virtual_client_size=2",
    "--examples_per_user=8",
    "--client_epochs_per_round=1",
    "--rounds_per_eval=0",
    "--seed=1",
)
_EXACT = (*_FLAGS, f"--total_rounds={_ROUNDS}", "--noise_multiplier=0")
_NOISY_ROUNDS = 3
_NOISY = (*_FLAGS, f"--total_rounds={_NOISY_ROUNDS}", "--noise_multiplier=1")
_NOISY_PLAN = plan_lib.PrivacyPlan(
    population=1000,
    virtual_clients_per_round=2,
    virtual_client_size=2,
    total_rounds=_NOISY_ROUNDS,
    clip_norm=0.5,
    noise_multiplier=1.0,
)


def _environment(**more: str) -> dict[str, str]:
    """The environment of a shell that has not heard of TensorFlow, which sets its log level."""
    kept = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    return {**kept, "PYTHONPATH": _ROOT, **more}


def _processes(marker: str) -> dict[int, str]:
    """Running processes with `marker` in their environment, and their programs."""
    found = {}
    for folder in glob.glob("/proc/[0-9]*"):
        try:
            with open(f"{folder}/environ", "rb") as file:
                if marker.encode() not in file.read():
                    continue
            with open(f"{folder}/cmdline", "rb") as file:
                program = file.read().split(b"\0")[0].decode()
        except OSError:
            continue
        if program:
            found[int(os.path.basename(folder))] = program
    return found


def _wait_for(condition: Callable[[], object], seconds: float = _WAIT_SECONDS) -> None:
    """Waits until something is so."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("It never came to be.")
        time.sleep(_POLL_SECONDS)


class _Run:
    """A run's folder, and the processes that are started in it."""

    started: ClassVar[list[subprocess.Popen]] = []

    def __init__(self, scratch: str, name: str, flags: tuple[str, ...]):
        self.scratch, self.name, self.flags = scratch, name, flags
        self.folder = os.path.join(scratch, "runs", name)
        # The worker's socket is made here, and its processes have the path in their environment.
        self.temporary = tempfile.mkdtemp(prefix="t", dir=scratch)
        self._errors = os.path.join(self.temporary, "stderr")
        self.process: subprocess.Popen | None = None
        self.moments: set[tuple[str, bytes]] = set()

    def file(self, *name: str) -> str:
        """A path in the run's folder."""
        return os.path.join(self.folder, *name)

    def start(self, *more: str) -> None:
        """Starts a process, with its standard output in a pipe and its errors in a file."""
        flags = [f"--output_dir={os.path.dirname(self.folder)}", f"--experiment_name={self.name}"]
        with open(self._errors, "w", encoding="utf-8") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tff_dpfedemb.run_federated", *self.flags, *flags, *more],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=self.scratch,
                env=_environment(TMPDIR=self.temporary),
            )
        self.started.append(self.process)

    def observe(self) -> None:
        """Keeps what the folder says of privacy now, if both files are of the same moment."""
        try:
            with open(self.file("privacy.json"), encoding="utf-8") as file:
                stated = file.read()
            with open(self.file("ledger.jsonl"), "rb") as file:
                ledger = file.read()
            with open(self.file("privacy.json"), encoding="utf-8") as file:
                if stated == file.read():
                    self.moments.add((stated, ledger))
        except FileNotFoundError:
            pass

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Waits for a condition and halts the process while it holds."""

        def halted() -> bool:
            self.observe()
            assert self.process.poll() is None, self.errors()
            if not condition():
                return False
            os.kill(self.process.pid, signal.SIGSTOP)
            _wait_for(lambda: self._state() == "T")
            if condition():
                return True
            os.kill(self.process.pid, signal.SIGCONT)
            return False

        _wait_for(halted)
        self.observe()

    def _state(self) -> str:
        """The process's state, one letter."""
        with open(f"/proc/{self.process.pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0]

    def signal(self, *numbers: int) -> None:
        """Lets the process go on, and sends it signals."""
        os.kill(self.process.pid, signal.SIGCONT)
        # A halted process's signals go to any thread, and would not wake the main one.
        _wait_for(lambda: self._state() != "T")
        for number in numbers:
            os.kill(self.process.pid, number)

    def end(self) -> tuple[int, str, str]:
        """Waits for the end of the process and of all that it started; status and outputs."""

        def ended() -> bool:
            self.observe()
            return self.process.poll() is not None

        _wait_for(ended)
        self.observe()
        # The pipe must end with the process: nobody that lives on may hold it.
        out, _ = self.process.communicate(timeout=30)
        _wait_for(lambda: not _processes(self.temporary), 30)
        left = [n for n in os.listdir(self.temporary) if n.startswith("tff_worker")]
        assert not left, left
        return self.process.returncode, out, self.errors()

    def errors(self) -> str:
        """What the process has written to standard error."""
        with open(self._errors, encoding="utf-8") as file:
            return file.read()

    def kill_when(self, condition: Callable[[], object], *more: str) -> None:
        """Starts a process and kills it as soon as something is so."""
        self.start(*more)
        self.wait_until(condition)
        self.process.kill()
        status, _, err = self.end()
        assert status == -signal.SIGKILL, (status, err)

    def finish(self) -> tuple[str, str]:
        """Runs a process to a good end; its outputs."""
        self.start()
        status, out, err = self.end()
        assert status == 0, (status, err)
        return out, err

    def workers(self) -> list[int]:
        """The ids of running workers."""
        found = _processes(self.temporary).items()
        return [pid for pid, program in found if program.endswith("worker_binary")]

    def rounds(self) -> list[int]:
        """The rounds of the ledger, one a whole line."""
        try:
            with open(self.file("ledger.jsonl"), encoding="utf-8") as file:
                return [json.loads(x)["round"] for x in file if x.endswith("\n")]
        except FileNotFoundError:
            return []

    def checkpoints(self) -> list[str]:
        """What is in the folder of checkpoints."""
        path = self.file("checkpoints")
        return sorted(os.listdir(path)) if os.path.isdir(path) else []

    def metrics(self) -> list[dict[str, str]]:
        """The rows of metrics.csv."""
        with open(self.file("metrics.csv"), encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))

    def json(self, name: str) -> dict:
        """A JSON file of the folder."""
        with open(self.file(name), encoding="utf-8") as file:
            return json.load(file)

    def weights(self) -> dict[str, np.ndarray]:
        """The exported variables."""
        import tensorflow as tf

        reader = tf.train.load_checkpoint(self.file("export", "variables", "variables"))
        names = [n for n in reader.get_variable_to_shape_map() if n.endswith("VARIABLE_VALUE")]
        return {name: reader.get_tensor(name) for name in names}

    def leftovers(self) -> list[str]:
        """What half-written things there are in the folder."""
        names = [n for _, ds, fs in os.walk(self.folder) for n in [*ds, *fs]]
        return [n for n in names if n.startswith(".") or "_temp" in n or "partial" in n]


class _RunTest(absltest.TestCase):
    """What is the same in all: an uninterrupted run to compare with."""

    scratch: str
    whole: _Run
    whole_output: tuple[str, str]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        if not hasattr(_RunTest, "whole"):
            _RunTest.scratch = tempfile.mkdtemp(prefix="run")
            _RunTest.whole = _Run(_RunTest.scratch, "whole", _EXACT)
            _RunTest.whole_output = _RunTest.whole.finish()

    def assert_same_weights(self, run: _Run) -> None:
        """Bit for bit those of the uninterrupted run."""
        expected, got = self.whole.weights(), run.weights()
        self.assertNotEmpty(expected)
        self.assertEqual(expected.keys(), got.keys())
        for name, value in expected.items():
            np.testing.assert_array_equal(value, got[name], err_msg=name)

    def assert_whole(self, run: _Run, rounds: int) -> None:
        """Every file is there, nothing half-written is, every round has one row."""
        self.assertEmpty(run.leftovers())
        self.assertContainsSubset(
            {
                *("flags.json", "privacy.json", "ledger.jsonl", "metrics.csv", "tensorboard"),
                *("checkpoints", "export", "evaluation.json"),
            },
            set(os.listdir(run.folder)),
        )
        self.assertEqual([int(row["round"]) for row in run.metrics()], list(range(rounds)))
        self.assertEqual(run.checkpoints()[-1], f"round_{rounds}")


def tearDownModule() -> None:
    """Ends what a failed test left running, and removes what all tests share."""
    for process in _Run.started:
        process.kill()
        process.communicate()
    if hasattr(_RunTest, "scratch"):
        shutil.rmtree(_RunTest.scratch)


class WholeRunTest(_RunTest):
    """A run that nothing happens to, and what can be done with its folder afterwards."""

    def test_leaves_the_folder_of_the_contract(self) -> None:
        self.assert_whole(self.whole, _ROUNDS)
        self.assertEqual(self.whole.rounds(), list(range(_ROUNDS)))
        self.assertEqual(self.whole.checkpoints(), [f"round_{_ROUNDS - 1}", f"round_{_ROUNDS}"])
        flags = self.whole.json("flags.json")
        self.assertEqual(flags["total_rounds"], _ROUNDS)
        self.assertNotIn("seed", flags)
        self.assertEqual(os.stat(self.whole.file("secret_seed")).st_mode & 0o777, 0o600)
        made = self.whole.json("privacy.json")
        self.assertEqual((made["epsilon"], made["status"]), ("inf", "final"))
        self.assertEqual(self.whole.json("export/privacy.json"), made)

    def test_prints_the_table_and_the_statement_and_is_quiet_otherwise(self) -> None:
        out, err = self.whole_output
        self.assertRegex(
            out, r"recall@FAR=0.1 .*\n-+\ntrained .*\nuntrained backbone .*\nraw pixels"
        )
        self.assertIn("There is no privacy guarantee", out)
        self.assertIn(self.whole.file("export"), out)
        shown = [part for part in re.split(r"[\r\n]", err) if part.strip()]
        self.assertEmpty([part for part in shown if not part.startswith("round:")])

    def test_export_loads_without_this_software(self) -> None:
        import tensorflow as tf

        model = tf.saved_model.load(self.whole.file("export"))
        embeddings = model(tf.zeros((3, 28, 28, 1), tf.uint8)).numpy()
        np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, atol=1e-6)

    def test_the_same_command_again_tells_the_same(self) -> None:
        before = self.whole.weights()
        out, err = self.whole.finish()
        self.assertEqual(out, self.whole_output[0])
        self.assertEmpty(err)
        self.assertEqual(self.whole.rounds(), list(range(_ROUNDS)))
        for name, value in self.whole.weights().items():
            np.testing.assert_array_equal(value, before[name])

    def test_run_evaluation_prints_the_same_as_json_and_nothing_else(self) -> None:
        done = self._tool("run_evaluation", f"--model={self.whole.file('export')}", "--json")
        self.assertEqual(json.loads(done.stdout), self.whole.json("evaluation.json"))
        self.assertEmpty(done.stderr)

    def test_run_privacy_of_the_ledger_prints_the_same(self) -> None:
        done = self._tool("run_privacy", f"--ledger={self.whole.file('ledger.jsonl')}", "--json")
        self.assertEqual(json.loads(done.stdout), self.whole.json("privacy.json"))

    def test_other_flags_are_refused_by_name(self) -> None:
        self.whole.start("--total_rounds=7", "--client_lr=0.125")
        status, out, err = self.whole.end()
        self.assertEqual((status, out), (2, ""))
        self.assertLen(err.splitlines(), 1)
        self.assertIn("total_rounds was 6 and is 7", err)
        self.assertIn("client_lr was 0.05 and is 0.125", err)

    def test_another_seed_is_refused_and_not_told(self) -> None:
        self.whole.start("--seed=2")
        status, out, err = self.whole.end()
        self.assertEqual((status, out), (2, ""))
        self.assertRegex(err, r"^error: --seed: .* another seed; .*\n$")

    def test_a_ledger_of_too_few_rounds_stops_the_run(self) -> None:
        run = self._copy("shortened")
        with open(run.file("ledger.jsonl"), encoding="utf-8") as file:
            lines = file.readlines()
        with open(run.file("ledger.jsonl"), "w", encoding="utf-8") as file:
            file.writelines(lines[:-1])
        run.start()
        status, out, err = run.end()
        self.assertEqual((status, out), (2, ""))
        self.assertRegex(err, r"^error: .*has 5 rounds where the checkpoint has 6;.*\n$")
        self.assertEqual(run.rounds(), list(range(_ROUNDS - 1)))
        self.assertEqual(run.checkpoints(), self.whole.checkpoints())
        self.assertEqual(run.metrics(), self.whole.metrics())

    def _copy(self, name: str) -> _Run:
        """Another run with the same content."""
        run = _Run(self.scratch, name, _EXACT)
        shutil.copytree(self.whole.folder, run.folder)
        return run

    def _tool(self, module: str, *flags: str) -> subprocess.CompletedProcess:
        """Runs another binary to a good end."""
        return subprocess.run(
            [sys.executable, "-m", f"tff_dpfedemb.{module}", *flags],
            capture_output=True,
            text=True,
            check=True,
            cwd=self.scratch,
            env=_environment(),
            timeout=_WAIT_SECONDS,
        )


class KilledRunTest(_RunTest):
    """SIGKILL at the worst moments costs repeated rounds, and nothing else."""

    def test_without_noise_the_weights_are_the_same_bit_for_bit(self) -> None:
        run = _Run(self.scratch, "killed", (*_EXACT, "--rounds_per_checkpoint=2"))
        # In the first round.
        run.kill_when(run.rounds)
        self.assertEmpty(run.checkpoints())
        self.assertEqual(run.rounds(), [0])
        # In the second round after a checkpoint.
        run.kill_when(lambda: run.rounds()[-1] == 3)
        self.assertEqual(run.checkpoints(), ["round_2"])
        self.assertEqual(run.rounds(), [0, 0, 1, 2, 3])
        # While a checkpoint is written.
        run.kill_when(lambda: any("temp" in name for name in run.checkpoints()))
        self.assertNotIn("round_4", run.checkpoints())
        self.assertEqual(run.rounds(), [0, 0, 1, 2, 3, 2, 3])
        # While the export is written.
        run.kill_when(lambda: glob.glob(run.file(".export.*", "export", "variables")))
        self.assertFalse(os.path.exists(run.file("export")))
        self.assertNotEmpty(run.leftovers())
        run.finish()
        self.assertEqual(run.rounds(), [0, 0, 1, 2, 3, 2, 3, 2, 3, 4, 5])
        self.assert_whole(run, _ROUNDS)
        self.assert_same_weights(run)
        self.assertEqual(run.json("evaluation.json"), self.whole.json("evaluation.json"))
        self.assertEqual(run.json("privacy.json")["rounds_repeated_after_a_crash"], 5)

    def test_with_noise_the_ledger_counts_and_the_statement_never_promises_too_much(self) -> None:
        run = _Run(self.scratch, "noisy", _NOISY)
        last = _NOISY_ROUNDS - 1

        def in_last_round() -> bool:
            return len(run.rounds()) > lines and run.rounds()[-1] == last

        lines = 0
        run.kill_when(in_last_round)
        lines = len(run.rounds())
        run.start()
        run.wait_until(in_last_round)
        for pid in run.workers():
            os.kill(pid, signal.SIGKILL)
        run.signal()
        status, _, err = run.end()
        self.assertEqual(status, 0, err)
        self.assertEqual(run.rounds(), [*range(_NOISY_ROUNDS), last, last])
        self.assert_whole(run, _NOISY_ROUNDS)

        made = run.json("privacy.json")
        self.assertEqual(made["status"], "final")
        self.assertEqual(made["rounds_repeated_after_a_crash"], 2)
        self.assertGreater(made["epsilon"], statement_lib.make_statement(_NOISY_PLAN)["epsilon"])
        self.assertEqual(
            made["epsilon"], ledger_lib.Ledger(run.file("ledger.jsonl")).epsilon(made["delta"])
        )
        self.assertEqual(
            [row["not_private/examples"] for row in run.metrics()],
            [row["not_private/examples"] for row in self.whole.metrics()[:_NOISY_ROUNDS]],
        )
        # What a reader of the folder could have seen at any time.
        self.assertGreater(len(run.moments), 2 * _NOISY_ROUNDS)
        for stated, ledger in run.moments:
            path = os.path.join(self.scratch, "moment.jsonl")
            with open(path, "wb") as file:
                file.write(ledger)
            made = json.loads(stated)
            seen = ledger_lib.Ledger(path)
            self.assertGreaterEqual(
                made["epsilon"], seen.epsilon(made["delta"]), (made["status"], len(seen.entries))
            )


class StoppedRunTest(_RunTest):
    """SIGINT and SIGTERM end a run in order, whenever they come."""

    def test_stops_at_any_time_and_goes_on(self) -> None:
        run = _Run(self.scratch, "stopped", _EXACT)

        with self.subTest("while it starts; nobody else may run there"):
            run.start()
            run.wait_until(lambda: os.path.exists(run.file("flags.json")))
            other = _Run(self.scratch, "stopped", _EXACT)
            other.start()
            status, out, err = other.end()
            self.assertEqual((status, out), (2, ""))
            self.assertRegex(err, r"^error: --experiment_name: another process is running .*\n$")
            run.signal(signal.SIGINT)
            self._assert_stopped(run, "The same command goes on")

        with self.subTest("in the first round, which is finished"):
            run.start()
            run.wait_until(run.rounds)
            run.signal(signal.SIGTERM)
            self._assert_stopped(run, "SIGTERM", "after 1 of 6 rounds", "The same command goes on")
            self.assertEqual(run.checkpoints(), ["round_1"])
            self.assertEqual([row["round"] for row in run.metrics()], ["0"])
            self.assertEqual(run.json("privacy.json")["rounds"], 1)

        with self.subTest("while it exports"):
            run.start()
            run.wait_until(lambda: glob.glob(run.file(".export.*", "export")))
            run.signal(signal.SIGTERM)
            self._assert_stopped(run, "The same command goes on")
            self.assertEmpty(run.leftovers())
            self.assertEqual(run.json("privacy.json")["status"], "final")

        run.finish()
        self.assertEqual(run.rounds(), list(range(_ROUNDS)))
        self.assert_whole(run, _ROUNDS)
        self.assert_same_weights(run)

    def test_a_second_signal_drops_the_round_in_hand(self) -> None:
        # A round of hours: only dropped does it end.
        run = _Run(self.scratch, "dropped", (*_EXACT, "--client_epochs_per_round=10000000"))
        run.start()
        run.wait_until(run.rounds)
        run.signal(signal.SIGINT)
        _wait_for(lambda: "again drops the round" in run.errors())
        run.signal(signal.SIGINT)
        self._assert_stopped(run, "after 0 of 6 rounds", "The same command goes on")
        self.assertEqual(run.rounds(), [0])
        self.assertEmpty(run.checkpoints())
        self.assertEqual(run.json("privacy.json")["rounds"], 1)

    def _assert_stopped(self, run: _Run, *words: str) -> None:
        status, out, err = run.end()
        self.assertEqual((status, out), (3, ""), err)
        for word in words:
            self.assertIn(word, err)
        self.assertNotIn("Traceback", err)


class DisturbedRunTest(_RunTest):
    """A worker that dies costs a repeated round; private figures stay away where they should."""

    def test_worker_dies_in_a_run_without_private_metrics(self) -> None:
        run = _Run(
            self.scratch,
            "quiet",
            (*_EXACT, "--release_private_metrics=false", "--rounds_per_eval=3"),
        )
        run.start()
        run.wait_until(lambda: run.rounds()[-1:] == [2])
        (worker,) = run.workers()
        os.kill(worker, signal.SIGKILL)
        run.signal()
        status, _, err = run.end()
        self.assertEqual(status, 0, err)
        self.assertIn("worker was ended by SIGKILL", err)
        self.assertEqual(run.rounds(), [0, 1, 2, 2, 3, 4, 5])
        self.assert_whole(run, _ROUNDS)
        self.assert_same_weights(run)

        rows = run.metrics()
        self.assertEqual(list(rows[0]), ["round", "epsilon", "validation/recall@FAR=0.1"])
        self.assertEqual(
            [bool(row["validation/recall@FAR=0.1"]) for row in rows], [False, False, True] * 2
        )
        self.assertEqual(self._tensorboard_tags(run), {"epsilon", "validation/recall@FAR=0.1"})
        for word in ("loss", "accuracy", "examples", "norm"):
            self.assertNotIn(word, err)
        self.assertIn("epsilon", err)

    def _tensorboard_tags(self, run: _Run) -> set[str]:
        """Names of everything in the event files."""
        import tensorflow as tf

        return {
            value.tag
            for path in glob.glob(run.file("tensorboard", "*"))
            for event in tf.compat.v1.train.summary_iterator(path)
            for value in event.summary.value
        }

    def test_private_metrics_are_labelled(self) -> None:
        names = set(self.whole.metrics()[0])
        self.assertContainsSubset({"not_private/loss", "not_private/examples"}, names)
        labelled = {name for name in names if name.startswith("not_private/")}
        self.assertEqual(names - labelled, {"round", "epsilon"})
        self.assertEqual(self._tensorboard_tags(self.whole), names - {"round"})


if __name__ == "__main__":
    absltest.main()
