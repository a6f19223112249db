"""The loop of central training: groups of users, checkpoints, metrics; stops and resumes."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import tensorflow as tf

from tasks import task as task_lib
from tff_dpfedemb import progress as progress_lib
from tff_dpfedemb.algorithms import centralized
from tff_dpfedemb.experiment import metrics as metrics_lib
from tff_dpfedemb.experiment import run_folder as run_folder_lib
from tff_dpfedemb.experiment import stopping

# Groups loaded ahead of the one that is trained on.
_AHEAD = 1


@dataclasses.dataclass(frozen=True)
class LoopOptions:
    """What the loop does besides training.

    Attributes:
        shuffle_users: Users whose images are shuffled together, >= 1.
        steps_per_checkpoint: Steps between checkpoints, about, >= 1.
        steps_per_eval: Steps between evaluations on validation classes, about; 0 for none.
    """

    shuffle_users: int
    steps_per_checkpoint: int
    steps_per_eval: int


def user_group(num_users: int, group_size: int, seed: int, number: int) -> np.ndarray:
    """The users of a group: each pass over all users has an order of its own.

    Args:
        num_users: Number of users.
        group_size: Users in a group; the last of a pass may have fewer.
        seed: Non-negative.
        number: The group's number, from 0, over all passes.

    Returns:
        int64 array of indices of users.
    """
    per_pass = math.ceil(num_users / group_size)
    order = _order_of_pass(num_users, seed, number // per_pass)
    place = number % per_pass
    return order[place * group_size : (place + 1) * group_size].astype(np.int64)


@functools.lru_cache(maxsize=1)
def _order_of_pass(num_users: int, seed: int, number: int) -> np.ndarray:
    """A random order of all users, kept for the groups that are cut out of it."""
    return np.random.default_rng([seed, number]).permutation(num_users)


class CentralLoop:
    """Trains on a task's training images, in a run folder."""

    def __init__(
        self,
        *,
        trainer: centralized.CentralTrainer,
        training: centralized.CentralTraining,
        task: task_lib.Task,
        folder: run_folder_lib.RunFolder,
        seed: int,
        options: LoopOptions,
        evaluate: Callable[[tf.keras.Model], Mapping[str, float]] | None = None,
    ):
        """Prepares a run, and goes back to its newest checkpoint if there is one.

        Args:
            trainer: What is trained.
            training: How; of which the loop reads the number of steps.
            task: Whose training images are read.
            folder: An open run folder.
            seed: Seed of the order of images.
            options: What the loop does besides.
            evaluate: From the backbone to figures of held-out classes, by name.
        """
        self._trainer, self._training, self._task = trainer, training, task
        self._seed, self._options, self._evaluate = seed, options, evaluate
        self._group = tf.Variable(0, dtype=tf.int64)
        self._manager = tf.train.CheckpointManager(
            tf.train.Checkpoint(trainer=trainer, group=self._group),
            folder.file("checkpoints"),
            max_to_keep=2,
        )
        self._manager.restore_or_initialize()
        self._metrics = metrics_lib.Metrics(folder.metrics, folder.file("tensorboard"), "step")
        self._held_out: Mapping[str, float] = {}

    def _groups(self) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
        """Images and class ids of one group after another, from where the checkpoint is."""

        def users() -> Iterator[np.ndarray]:
            number = int(self._group)
            while True:
                group = user_group(
                    self._task.num_users, self._options.shuffle_users, self._seed, number
                )
                yield self._task.user_ids(group)
                number += 1

        id_type = tf.string if self._task.user_id_dtype is np.bytes_ else tf.int64
        groups = tf.data.Dataset.from_generator(
            users, output_signature=tf.TensorSpec([None], id_type)
        )
        return iter(groups.map(self._task.load_users).prefetch(_AHEAD))

    def run(self) -> bool:
        """Trains to the end, or until a signal asks to stop.

        Returns:
            Whether the end was reached. What was done is saved either way.

        Raises:
            KeyboardInterrupt: If a second signal came; the last checkpoint stands.
            FloatingPointError: If the loss is not finite; the last checkpoint stands.
        """
        total = self._training.total_steps
        saved = evaluated = shown = self._trainer.steps
        groups = self._groups()
        progress = progress_lib.Progress(total, shown, unit="step")
        try:
            with stopping.StopRequest("group of users") as stop:
                while self._trainer.steps < total and not stop.requested:
                    images, class_ids = next(groups)
                    started = time.monotonic()
                    order_seed = tf.stack([tf.constant(self._seed, tf.int64), self._group])
                    losses, correct, seen = map(
                        float, self._trainer.train(images, class_ids, order_seed)
                    )
                    self._group.assign_add(1)
                    if not seen:
                        continue
                    if not math.isfinite(losses):
                        raise FloatingPointError(
                            f"the loss is not finite after step {self._trainer.steps}; "
                            "a smaller learning rate may help"
                        )
                    steps = self._trainer.steps
                    values = {
                        "loss": losses / seen,
                        "accuracy": correct / seen,
                        "examples_per_second": seen / (time.monotonic() - started),
                    }
                    due = self._options.steps_per_eval
                    if self._evaluate and due and (steps // due > evaluated // due):
                        self._held_out = self._evaluate(self._trainer.backbone)
                        values |= {f"validation/{k}": v for k, v in self._held_out.items()}
                        evaluated = steps
                    self._metrics.write_row(values, steps)
                    self._metrics.write_events(values, steps)
                    if steps - saved >= self._options.steps_per_checkpoint:
                        self._manager.save()
                        saved = steps
                    shown_values = {
                        "loss": f"{values['loss']:.3f}",
                        "accuracy": f"{values['accuracy']:.3f}",
                        "examples/s": f"{values['examples_per_second']:.0f}",
                        **{k: f"{v:.3f}" for k, v in self._held_out.items()},
                    }
                    progress.update(shown_values, steps - shown)
                    shown = steps
        finally:
            progress.close()
        if saved < self._trainer.steps:
            self._manager.save()
        return self._trainer.steps >= total
