r"""Trains an image embedding model with user-level differential privacy (DP-FedEmb).

  python -m tff_dpfedemb.run_federated --output_dir=runs --experiment_name=first

writes the trained model, its privacy statement and its evaluation to runs/first. The same command
resumes a run that was stopped or killed. Exit status: 0 done, 2 bad flags or input, 3 stopped but
resumable, 1 anything else.
"""

import json
import os
import signal
import sys
from typing import Any

from absl import flags

from tasks.task import Task
from tff_dpfedemb import run_flags
from tff_dpfedemb.algorithms.hyperparameters import ClientTraining, ServerStep
from tff_dpfedemb.experiment import run_folder as run_folder_lib
from tff_dpfedemb.models import backbones
from tff_dpfedemb.privacy.plan import PrivacyPlan

FLAGS = flags.FLAGS

run_flags.define_task_flags()
run_flags.define_plan_flags()
flags.DEFINE_enum("model_backbone", "small_cnn", backbones.names(), "The backbone.")
flags.DEFINE_integer("embedding_dim", 128, "Length of the embedding.")
flags.DEFINE_integer(
    "head_size", 0, "Classes that a private head can tell apart; 0 for as many as are needed."
)
flags.DEFINE_float("client_lr", 0.05, "SGD learning rate of the backbone on a virtual client.")
flags.DEFINE_float("client_momentum", 0.9, "SGD momentum on a virtual client.")
flags.DEFINE_float("head_lr_scale", 4.0, "The head's learning rate, relative to the backbone's.")
flags.DEFINE_integer("client_epochs_per_round", 3, "Passes over a virtual client's examples.")
flags.DEFINE_integer("client_batch_size", 32, "Examples in a local step.")
flags.DEFINE_integer(
    "max_examples_per_client", 2048, "The most examples of a virtual client that are used."
)
flags.DEFINE_integer(
    "reconst_iters",
    0,
    "0: head and backbone train jointly. Otherwise the head alone trains for this many steps, and "
    "then the backbone alone.",
)
flags.DEFINE_float("server_lr", 0.5, "SGD learning rate of the server.")
flags.DEFINE_float("server_momentum", 0.9, "SGD momentum of the server.")
run_flags.define_optional(
    flags.IntegerParser(lower_bound=0),
    "seed",
    None,
    "Seed of cohorts, initial weights and local training. Who knows it knows who took part. none: "
    "drawn once and kept in a file that only you can read.",
)
flags.adopt_module_key_flags(run_flags)
flags.DEFINE_integer("rounds_per_eval", 10, "Rounds between validations; 0 for none.")
flags.DEFINE_integer(
    "rounds_per_checkpoint",
    1,
    "Rounds between checkpoints. A killed run repeats the rounds since the last, which costs "
    "privacy.",
)
flags.DEFINE_bool(
    "release_private_metrics",
    True,
    "Whether figures of the training users (loss, accuracy, ...), which the privacy statement does "
    "not cover, are shown and written.",
)
flags.DEFINE_string("output_dir", "runs", "Folder of runs.")
flags.DEFINE_string("experiment_name", "default", "The run's folder in --output_dir.")
flags.DEFINE_bool("dry_run", False, "Check everything, say what would be done, write nothing.")

# Flags that do not change what a run computes or releases, and the seed, which is kept apart: the
# others may be read by anybody.
_NOT_OF_THE_RUN = ("output_dir", "experiment_name", "dry_run", "seed")


def _defining_flags() -> dict[str, Any]:
    """The flags that make a run what it is."""
    ours = FLAGS.get_key_flags_for_module(sys.modules[__name__])
    return {f.name: f.value for f in ours if f.name not in _NOT_OF_THE_RUN}


def _build_training() -> ClientTraining:
    """How virtual clients train, from the flags."""
    return ClientTraining(
        client_lr=FLAGS.client_lr,
        client_momentum=FLAGS.client_momentum,
        head_lr_scale=FLAGS.head_lr_scale,
        client_epochs_per_round=FLAGS.client_epochs_per_round,
        client_batch_size=FLAGS.client_batch_size,
        max_examples_per_client=FLAGS.max_examples_per_client,
        reconst_iters=FLAGS.reconst_iters,
    )


def _largest_head(task: Task) -> int:
    """The most classes that one virtual client can hold."""
    return min(task.num_train_classes, FLAGS.max_examples_per_client)


def main() -> int:
    """Checks everything, then trains, exports, evaluates and states the privacy."""
    problems = run_flags.Problems()
    task = problems.attempt(run_flags.build_task)
    plan = problems.attempt(run_flags.build_plan)
    training = problems.attempt(_build_training)
    server = problems.attempt(lambda: ServerStep(FLAGS.server_lr, FLAGS.server_momentum))
    name = FLAGS.experiment_name
    folder = run_folder_lib.RunFolder(os.path.join(FLAGS.output_dir, name))
    flag_values = _defining_flags()
    problems.require(
        name == os.path.basename(name) and name not in ("", ".", "..") and len(name) <= 200,
        f"experiment_name={name!r}: accepted are names without a path, of at most 200 letters",
    )
    for flag, least in (("embedding_dim", 1), ("rounds_per_eval", 0), ("rounds_per_checkpoint", 1)):
        problems.require(
            FLAGS[flag].value >= least,
            f"{flag}={FLAGS[flag].value}: accepted are whole numbers of at least {least}",
        )
    if task is not None:
        problems.attempt(lambda: backbones.check(FLAGS.model_backbone, task.image_shape))
        problems.require(
            FLAGS.head_size == 0 or FLAGS.head_size >= _largest_head(task),
            f"head_size={FLAGS.head_size}: a virtual client can hold {_largest_head(task)} "
            "classes; accepted are at least that many, or 0 for as many as are needed",
        )
    problems.attempt(lambda: folder.check(flag_values, FLAGS.seed))
    problems.exit_if_any()

    if FLAGS.dry_run:
        return _dry_run(task, plan, folder)
    # Ends like a SIGINT; the training loop ends its rounds in its own way.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        seed = problems.attempt(lambda: folder.open(flag_values, FLAGS.seed))
        problems.exit_if_any()
        evaluation = _finished(plan, folder) or _train(task, plan, training, server, folder, seed)
    except KeyboardInterrupt as error:
        message = str(error) or "Stopped; everything is saved. The same command goes on from there."
        run_flags.leave(message, run_flags.RESUMABLE)
    _report(folder, evaluation)
    return run_flags.DONE


def _dry_run(task: Task, plan: PrivacyPlan, folder: run_folder_lib.RunFolder) -> int:
    """Says what a run would do."""
    from tff_dpfedemb.privacy import statement as statement_lib

    verb = "resume" if os.path.exists(folder.file("flags.json")) else "create"
    print(f"Would {verb} {folder.path}: task {task.name}, {plan.total_rounds} rounds.")
    print(statement_lib.in_words(statement_lib.make_statement(plan)))
    return run_flags.DONE


def _finished(plan: PrivacyPlan, folder: run_folder_lib.RunFolder) -> dict[str, Any] | None:
    """The evaluation of a run that is over, whole and accounted for; None of any other."""
    from tff_dpfedemb.privacy import ledger

    results = (folder.evaluation, folder.export, folder.privacy)
    if not all(map(os.path.exists, results)):
        return None
    try:
        if ledger.Ledger(folder.ledger, plan).num_rounds < plan.total_rounds:
            return None
    except ledger.LedgerError as error:
        run_flags.fail(f"error: {error}")
    with open(folder.evaluation, encoding="utf-8") as file:
        return json.load(file)


def _report(folder: run_folder_lib.RunFolder, evaluation: dict[str, Any]) -> None:
    """Prints what came out."""
    from tff_dpfedemb.evaluation import report
    from tff_dpfedemb.privacy import statement

    with open(folder.privacy, encoding="utf-8") as file:
        made = json.load(file)
    print(report.format_table(evaluation))
    print()
    print(statement.in_words(made))
    print()
    print(f"Model: {folder.export}  Statement: {folder.privacy}  Evaluation: {folder.evaluation}")


def _train(
    task: Task,
    plan: PrivacyPlan,
    training: ClientTraining,
    server: ServerStep,
    folder: run_folder_lib.RunFolder,
    seed: int,
) -> dict[str, Any]:
    """Trains in an open folder, states the privacy, exports; evaluates the export, last of all."""
    run_flags.be_quiet()
    import numpy as np
    import tensorflow_federated as tff

    from tff_dpfedemb import atomic
    from tff_dpfedemb.algorithms import dp_fedemb
    from tff_dpfedemb.data import virtual_clients
    from tff_dpfedemb.evaluation import evaluator
    from tff_dpfedemb.experiment import export as export_lib
    from tff_dpfedemb.experiment import training as training_lib
    from tff_dpfedemb.models import embedding_model as embedding_model_lib
    from tff_dpfedemb.models import exported
    from tff_dpfedemb.privacy import aggregators, ledger
    from tff_dpfedemb.runtime import worker as worker_lib

    init_seed = run_folder_lib.derive_public_seed(seed)
    model = embedding_model_lib.EmbeddingModel(
        backbone=FLAGS.model_backbone,
        image_shape=task.image_shape,
        embedding_dim=FLAGS.embedding_dim,
        head_size=FLAGS.head_size or _largest_head(task),
    )
    validation = evaluator.HeldOut(task, "validation")
    with worker_lib.local_execution() as worker:
        process = dp_fedemb.build_dp_fedemb(
            model,
            training,
            virtual_clients.build_dataset_computation(task.load_users, task.user_id_dtype),
            aggregators.build_aggregation_factory(plan),
            tff.learning.optimizers.build_sgdm(server.server_lr, server.server_momentum),
            init_seed,
        )
        try:
            trainer = training_lib.Trainer(
                process=process,
                task=task,
                plan=plan,
                folder=folder,
                seed=seed,
                worker=worker,
                options=training_lib.LoopOptions(
                    rounds_per_checkpoint=FLAGS.rounds_per_checkpoint,
                    rounds_per_eval=FLAGS.rounds_per_eval,
                    release_private_metrics=FLAGS.release_private_metrics,
                ),
                evaluate=lambda weights: validation.recalls(exported.with_weights(model, weights)),
            )
            state, made = trainer.run()
            weights = [np.asarray(w) for w in process.get_model_weights(state).trainable]
        except training_lib.StoppedError as error:
            run_flags.fail(str(error), run_flags.RESUMABLE)
        except ledger.LedgerError as error:
            run_flags.fail(f"error: {error}")
        except worker_lib.WorkerDiedError as error:
            run_flags.fail(
                f"error: {error}\nThe same command goes on from the last checkpoint.",
                run_flags.RESUMABLE,
            )

    export_lib.export(
        folder.export,
        model,
        weights,
        init_seed=init_seed,
        task_facts={"name": task.name, **task.describe()},
        statement=made,
    )
    try:
        evaluation = evaluator.evaluate_export(folder.export, task, "test")
    except ValueError as error:
        run_flags.fail(f"error: {error}", run_flags.FAILED)
    atomic.write_json(folder.evaluation, evaluation)
    return evaluation


if __name__ == "__main__":
    run_flags.run(main)
