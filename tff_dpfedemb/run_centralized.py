r"""Trains an image embedding model in one place, without privacy: baseline, or public pretraining.

  python -m tff_dpfedemb.run_centralized --output_dir=runs --experiment_name=public

trains backbone and a head over all training classes, evaluates and exports as run_federated does,
whose --pretrained takes the export. The same command resumes a run that was stopped or killed. Exit
status: 0 done, 2 bad flags or input, 3 stopped but resumable, 1 anything else.
"""

import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from absl import flags

from tasks import flags as task_flags
from tasks.task import Task
from tff_dpfedemb import command_line, run_flags
from tff_dpfedemb.algorithms.hyperparameters import CentralTraining
from tff_dpfedemb.experiment import outcome
from tff_dpfedemb.experiment.run_folder import RunFolder

if TYPE_CHECKING:
    from tff_dpfedemb.models.embedding_model import EmbeddingModel
    from tff_dpfedemb.models.pretrained import InitialWeights

FLAGS = flags.FLAGS

task_flags.define_task_flags()
run_flags.define_model_flags()
run_flags.define_run_flags()
for module in (task_flags, run_flags):
    flags.adopt_module_key_flags(module)
flags.DEFINE_float("learning_rate", 0.05, "SGD learning rate at the start; falls along a cosine.")
flags.DEFINE_float("momentum", 0.9, "SGD momentum.")
flags.DEFINE_integer("batch_size", 64, "Examples in a step.")
flags.DEFINE_integer("total_steps", 2000, "Training steps.")
flags.DEFINE_integer("shuffle_users", 64, "Users whose images are shuffled together, in memory.")
flags.DEFINE_integer("steps_per_eval", 500, "Steps between validations, about; 0 for none.")
flags.DEFINE_integer("steps_per_checkpoint", 200, "Steps between checkpoints, about.")
flags.DEFINE_integer("seed", 0, "Seed of initial weights and of the order of images.")


def main() -> int:
    """Checks everything, then trains, exports and evaluates."""
    problems = command_line.Problems()
    task = problems.attempt(task_flags.build_task)
    training = problems.attempt(
        lambda: CentralTraining(
            learning_rate=FLAGS.learning_rate,
            momentum=FLAGS.momentum,
            batch_size=FLAGS.batch_size,
            total_steps=FLAGS.total_steps,
        )
    )
    folder = run_flags.check_run_folder(problems)
    for flag, least in (
        ("shuffle_users", 1),
        ("steps_per_eval", 0),
        ("steps_per_checkpoint", 1),
        ("seed", 0),
    ):
        problems.require(
            least <= FLAGS[flag].value < 2**31,
            f"{flag}={FLAGS[flag].value}: accepted are whole numbers from {least} to 2^31",
        )
    problems.attempt(lambda: run_flags.check_model(task))
    flag_values = run_flags.defining_flags(sys.modules[__name__], task)
    problems.attempt(lambda: folder.check(flag_values, FLAGS.seed))
    problems.exit_if_any()
    if FLAGS.dry_run and not run_flags.starts_from_weights():
        return _dry_run(task, training, folder)
    command_line.be_quiet()
    model, start = run_flags.build_model(problems, task, task.num_train_classes)
    if FLAGS.dry_run:
        return _dry_run(task, training, folder)
    # Ends like a SIGINT; the training loop ends in its own way.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        problems.attempt(lambda: folder.open(flag_values, FLAGS.seed))
        problems.exit_if_any()
        evaluation = _finished(folder) or _train(task, training, folder, model, start)
    except KeyboardInterrupt:
        command_line.leave(
            "Stopped; the last checkpoint is kept. The same command goes on from there.",
            command_line.RESUMABLE,
        )
    outcome.report(folder, evaluation)
    return command_line.DONE


def _dry_run(task: Task, training: CentralTraining, folder: RunFolder) -> int:
    """Says what a run would do."""
    verb = "resume" if os.path.exists(folder.file("flags.json")) else "create"
    print(
        f"Would {verb} {folder.path}: task {task.name}, {task.num_train_classes:,} classes, "
        f"{training.total_steps} steps, without privacy."
    )
    return command_line.DONE


def _finished(folder: RunFolder) -> dict[str, Any] | None:
    """The evaluation of a run that is over, None of any other."""
    return outcome.read_evaluation(folder) if os.path.exists(folder.evaluation) else None


def _train(
    task: Task,
    training: CentralTraining,
    folder: RunFolder,
    model: "EmbeddingModel",
    start: "InitialWeights | None",
) -> dict[str, Any]:
    """Trains in an open folder and exports; evaluates the export, last of all."""
    from tff_dpfedemb import atomic
    from tff_dpfedemb.algorithms import centralized
    from tff_dpfedemb.evaluation import evaluator
    from tff_dpfedemb.experiment import central_training
    from tff_dpfedemb.experiment import export as export_lib
    from tff_dpfedemb.models import exported
    from tff_dpfedemb.privacy import statement
    from tff_dpfedemb.runtime import worker

    worker.forbid_stock_worker()
    trainer = centralized.CentralTrainer(model, training, FLAGS.seed, start)
    validation = evaluator.HeldOut(task, "validation")
    loop = central_training.CentralLoop(
        trainer=trainer,
        training=training,
        task=task,
        folder=folder,
        seed=FLAGS.seed,
        options=central_training.LoopOptions(
            shuffle_users=FLAGS.shuffle_users,
            steps_per_checkpoint=FLAGS.steps_per_checkpoint,
            steps_per_eval=FLAGS.steps_per_eval,
        ),
        evaluate=lambda backbone: validation.recalls(exported.EmbeddingModule(backbone)),
    )
    try:
        over = loop.run()
    except FloatingPointError as error:
        command_line.fail(f"error: {error}", command_line.FAILED)
    if not over:
        command_line.fail(
            f"Stopped after {trainer.steps} of {training.total_steps} steps; everything is saved. "
            "The same command goes on from there.",
            command_line.RESUMABLE,
        )
    made = statement.make_central_statement()
    atomic.write_json(folder.privacy, made)
    export_lib.export(
        folder.export,
        model,
        [v.numpy() for v in trainer.backbone.trainable_variables],
        [v.numpy() for v in trainer.backbone.non_trainable_variables],
        init_seed=FLAGS.seed,
        start=start,
        method="training in one place, without privacy,",
        task_facts={"name": task.name, **task.describe()},
        statement=made,
    )
    try:
        return outcome.evaluate(folder, task)
    except ValueError as error:
        command_line.fail(f"error: {error}", command_line.FAILED)


if __name__ == "__main__":
    command_line.run(main)
