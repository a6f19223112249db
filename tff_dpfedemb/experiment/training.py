"""The training loop: sample, record, compute, save, report; stops and resumes without loss."""

import collections
import copy
import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow_federated as tff
from absl import logging

from tasks import task as task_lib
from tff_dpfedemb import atomic
from tff_dpfedemb import progress as progress_lib
from tff_dpfedemb.data import sampling, virtual_clients
from tff_dpfedemb.experiment import checkpoints as checkpoints_lib
from tff_dpfedemb.experiment import metrics as metrics_lib
from tff_dpfedemb.experiment import run_folder as run_folder_lib
from tff_dpfedemb.experiment import stopping
from tff_dpfedemb.privacy import ledger as ledger_lib
from tff_dpfedemb.privacy import plan as plan_lib
from tff_dpfedemb.privacy import statement as statement_lib
from tff_dpfedemb.runtime import worker as worker_lib

# How often a round is tried before the run stops: a worker that dies again and again is broken.
_ATTEMPTS = 3
# About how many times a run computes its running epsilon, which takes a tenth of a second.
_EPSILON_COMPUTATIONS = 50


class StoppedError(Exception):
    """The run was asked to stop; it is saved and can go on."""


@dataclasses.dataclass(frozen=True)
class LoopOptions:
    """What the loop does besides training.

    Attributes:
        rounds_per_checkpoint: Rounds between checkpoints, >= 1. A killed run repeats the rounds
            since its last checkpoint, and the ledger counts them again.
        rounds_per_eval: Rounds between evaluations on validation classes; 0 for none.
        release_private_metrics: Whether figures of the training users, which the guarantee does
            not cover, are written and shown.
    """

    rounds_per_checkpoint: int = 1
    rounds_per_eval: int = 10
    release_private_metrics: bool = True


class _RunningEpsilon:
    """Epsilon so far: never below the truth, and computed at most some fifty times a run."""

    def __init__(self, ledger: ledger_lib.Ledger, plan: plan_lib.PrivacyPlan):
        self._ledger, self._plan = ledger, plan
        self._rounds = self._repeats = -1
        self._value = 0.0

    def __call__(self) -> float:
        """An epsilon that covers every round started so far, and perhaps a few to come."""
        rounds, repeats = (
            self._ledger.num_rounds,
            len(self._ledger.entries) - self._ledger.num_rounds,
        )
        if rounds > self._rounds or repeats != self._repeats:
            total = self._plan.total_rounds
            self._repeats = repeats
            self._rounds = max(rounds, min(total, rounds + total // _EPSILON_COMPUTATIONS))
            self._value = self._ledger.epsilon(self._plan.target_delta, planned_rounds=self._rounds)
        return self._value


class Trainer:
    """Trains a process on a task under a privacy plan, in a run folder."""

    def __init__(
        self,
        *,
        process: tff.learning.templates.LearningProcess,
        task: task_lib.Task,
        plan: plan_lib.PrivacyPlan,
        folder: run_folder_lib.RunFolder,
        seed: int,
        worker: worker_lib.LocalWorker,
        options: LoopOptions,
        evaluate: Callable[[Any], Mapping[str, float]] | None = None,
        start: Callable[[Any], Any] | None = None,
    ):
        """Prepares a run.

        Args:
            process: Takes (user_ids, seed) structures, one a virtual client.
            task: Whose users are sampled.
            plan: From which cohorts, ledger and statement follow.
            folder: An open run folder.
            seed: The secret seed of cohorts and local training.
            worker: The running worker of TFF's current context; restarted where it dies.
            options: What the loop does besides.
            evaluate: From TFF's model weights to figures of held-out classes, by name.
            start: From the process' initial model weights to those that the run starts from.
        """
        self._process, self._task, self._plan = process, task, plan
        self._folder, self._seed, self._worker = folder, seed, worker
        self._options, self._evaluate = options, evaluate
        self._start = start
        self.ledger = ledger_lib.Ledger(folder.ledger, plan)
        if self.ledger.repaired:
            logging.warning(
                "The ledger's last line was torn by a crash; its round is counted as started."
            )
        self._checkpoints = checkpoints_lib.Checkpoints(folder.file("checkpoints"))
        self._metrics = metrics_lib.Metrics(folder.metrics, folder.file("tensorboard"), "round")
        self._epsilon = _RunningEpsilon(self.ledger, plan)
        self._held_out: Mapping[str, float] = {}

    def _write_statement(self) -> dict[str, Any]:
        """Writes the statement of the started rounds."""
        made = statement_lib.make_statement(self._plan, self.ledger)
        atomic.write_json(self._folder.privacy, made)
        return made

    def _write_bound(self, done: int) -> None:
        """Writes the statement that will hold once every round from `done` on is run (again).

        It stands until the run ends: whatever is killed when, no file is left behind that promises
        too much.
        """
        ahead = copy.copy(self.ledger)
        again = range(done, self.ledger.num_rounds)
        ahead.entries = ahead.entries + [
            ledger_lib.Entry.from_plan(self._plan, number) for number in again
        ]
        total = self._plan.total_rounds
        made = statement_lib.make_statement(self._plan, ahead, planned_rounds=total)
        atomic.write_json(self._folder.privacy, {**made, "status": "planned"})

    def _load(self) -> tuple[Any, int]:
        """The newest state; stops where the ledger does not account for it."""
        initial = self._process.initialize()
        if self._start is not None:
            fresh = self._process.get_model_weights(initial)
            initial = self._process.set_model_weights(initial, self._start(fresh))
        state, rounds = self._checkpoints.latest(initial)
        if rounds > self.ledger.num_rounds:
            raise ledger_lib.LedgerError(
                f"{self.ledger.path}: has {self.ledger.num_rounds} rounds where the checkpoint has "
                f"{rounds}; lines are missing, and no epsilon can be stated"
            )
        return state, rounds

    def _attempt(self, state: Any, number: int) -> Any:
        """Computes a round, recorded before it starts; a round whose worker died is tried again."""
        cohort = self._plan.sample(self._seed, number, self._task.num_users)
        clients = virtual_clients.client_arguments(
            [self._task.user_ids(indices) for indices in cohort],
            sampling.client_seeds(self._seed, number, len(cohort)),
        )
        for attempt in range(1, _ATTEMPTS + 1):
            self.ledger.append(number)
            try:
                return self._process.next(state, clients)
            except worker_lib.WorkerDiedError as error:
                if attempt == _ATTEMPTS:
                    raise
                logging.warning("%s Starting it again, and round %d.", error, number)
                self._write_bound(number)
                self._worker.restart()

    def run(self) -> tuple[Any, dict[str, Any]]:
        """Trains to the end.

        Returns:
            The final state and the final privacy statement.

        Raises:
            StoppedError: If a signal asked for it; everything is saved.
            KeyboardInterrupt: If a second one did, in the middle of a round; the same.
            LedgerError: If ledger and checkpoint do not fit.
        """
        total = self._plan.total_rounds
        state, done = self._load()
        if done < total:
            self._write_bound(done)
            state = self._run_rounds(state, done)
        return state, self._write_statement()

    def _run_rounds(self, state: Any, done: int) -> Any:
        """Runs the rounds from `done` on."""
        total = self._plan.total_rounds
        saved = done
        stopped: type[BaseException] = StoppedError
        progress = progress_lib.Progress(total, done)
        try:
            with stopping.StopRequest() as stop:
                try:
                    while done < total and not stop.requested:
                        started = time.monotonic()
                        output = self._attempt(state, done)
                        state, done = output.state, done + 1
                        values = self._measure(output.metrics, time.monotonic() - started)
                        self._metrics.write_row(values, done - 1)
                        # Before the evaluation: a round that is lost in it would be run again,
                        # which costs privacy.
                        if done % self._options.rounds_per_checkpoint == 0:
                            self._checkpoints.save(state, done)
                            saved = done
                        if held_out := self._validate(state, done):
                            values |= held_out
                            self._metrics.write_row(values, done - 1)
                        self._metrics.write_events(values, done - 1)
                        progress.update(self._shown(values))
                except KeyboardInterrupt:
                    stopped = KeyboardInterrupt
                finally:
                    if saved < done:
                        self._checkpoints.save(state, done)
        finally:
            progress.close()
        if done < total:
            self._write_statement()
            raise stopped(
                f"Stopped after {done} of {total} rounds; everything is saved. "
                "The same command goes on from there."
            )
        return state

    def _measure(self, metrics: Mapping[str, Any], seconds: float) -> dict[str, float]:
        """What is recorded of a round."""
        values: dict[str, float] = collections.OrderedDict(epsilon=self._epsilon())
        if self._options.release_private_metrics:
            sums = {k: float(v) for k, v in metrics["client_work"].items()}
            seen, clients = sums["examples_seen"], sums["non_empty"]
            values |= {
                "not_private/loss": sums["loss_sum"] / max(seen, 1),
                "not_private/accuracy": sums["correct_sum"] / max(seen, 1),
                "not_private/examples": sums["examples"],
                "not_private/examples_per_second": seen / seconds,
                "not_private/seconds": seconds,
                "not_private/update_norm": sums["update_norm_sum"] / max(clients, 1),
                "not_private/classes_per_virtual_client": sums["classes"] / max(clients, 1),
                "not_private/non_empty_virtual_clients": clients,
                "not_private/non_finite_updates": sums["non_finite"],
            }
        return values

    def _validate(self, state: Any, done: int) -> dict[str, float]:
        """Figures of held-out classes, in the rounds in which they are due."""
        every = self._options.rounds_per_eval
        if self._evaluate is None or not every or done % every:
            return {}
        self._held_out = self._evaluate(self._process.get_model_weights(state))
        return {f"validation/{k}": v for k, v in self._held_out.items()}

    def _shown(self, values: Mapping[str, float]) -> dict[str, str]:
        """What the progress shows of a round."""
        shown = {}
        if self._options.release_private_metrics:
            shown["loss"] = f"{values['not_private/loss']:.3f}"
            shown["examples/s"] = f"{values['not_private/examples_per_second']:.0f}"
        shown["epsilon"] = statement_lib.figure(values["epsilon"])
        return shown | {k: f"{v:.3f}" for k, v in self._held_out.items()}
