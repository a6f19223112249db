r"""Trains an image embedding model with user-level differential privacy (DP-FedEmb).

  python -m tff_dpfedemb.run_federated --output_dir=runs --experiment_name=first

writes the trained model, its privacy statement and its evaluation to runs/first. The same command
resumes a run that was stopped or killed. Exit status: 0 done, 2 bad flags or input, 3 stopped but
resumable, 1 anything else.
"""

import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from absl import flags

from tasks import flags as task_flags
from tasks.task import Task
from tff_dpfedemb import command_line, run_flags
from tff_dpfedemb.algorithms.hyperparameters import ClientTraining, ServerStep
from tff_dpfedemb.experiment import outcome
from tff_dpfedemb.experiment import run_folder as run_folder_lib
from tff_dpfedemb.privacy.plan import PrivacyPlan

if TYPE_CHECKING:
    from tff_dpfedemb.models.embedding_model import EmbeddingModel
    from tff_dpfedemb.models.pretrained import InitialWeights

FLAGS = flags.FLAGS

_METHODS = {
    "dp_fedemb": "DP-FedEmb (Xu et al., CVPR 2023)",
    "fedavg": "DP federated averaging, head included",
}

task_flags.define_task_flags()
run_flags.define_plan_flags()
run_flags.define_model_flags()
run_flags.define_run_flags()
for module in (task_flags, run_flags):
    flags.adopt_module_key_flags(module)
flags.DEFINE_enum(
    "algorithm",
    "dp_fedemb",
    ["dp_fedemb", "fedavg"],
    "dp_fedemb: private heads, only the backbone is aggregated. fedavg, the baseline: the whole "
    "model with one head over all training classes is aggregated.",
)
flags.DEFINE_integer(
    "head_size",
    0,
    "dp_fedemb: classes that a private head can tell apart; 0 for as many as are needed.",
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
command_line.define_optional(
    flags.IntegerParser(lower_bound=0),
    "seed",
    None,
    "Seed of cohorts, initial weights and local training. Who knows it knows who took part. none: "
    "drawn once and kept in a file that only you can read.",
)
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
    """The most classes that a head must tell apart."""
    if FLAGS.algorithm == "fedavg":
        return task.num_train_classes
    return min(task.num_train_classes, FLAGS.max_examples_per_client)


def _note_population(task: Task, population: int) -> None:
    """Says so where the data hold another number of users than the one that is accounted."""
    if task.num_users != population:
        print(
            f"note: the data hold {task.num_users:,} users; accounted is the stated population of "
            f"{population:,} (--num_users), by which each takes part with probability V*m/N.",
            file=sys.stderr,
        )


def _check_pretraining(task: Task, plan: PrivacyPlan) -> None:
    """Refuses to promise privacy where the starting weights have seen the very users.

    Raises:
        ValueError: One line.
    """
    if FLAGS.pretrained is None or plan.noise_multiplier == 0:
        return
    from tff_dpfedemb.models import exported

    facts = (exported.read_facts(FLAGS.pretrained) or {}).get("task", {})
    if facts.get("name") != task.name:
        return
    ours = task.describe()
    mark = "fingerprint" if "fingerprint" in ours else "data_seed"
    if facts.get(mark) == ours[mark]:
        raise ValueError(
            f"pretrained={FLAGS.pretrained}: was trained on these very data, so that no epsilon of "
            "this run would be true of their users; accepted are weights from other, public data "
            "(of glyphs, another --data_seed), or --noise_multiplier=0, which promises nothing"
        )
    print(
        f"note: {FLAGS.pretrained} was trained on --task={task.name} too, on other data than "
        "these; this run's epsilon is true only of users who are not in them.",
        file=sys.stderr,
    )


def main() -> int:
    """Checks everything, then trains, exports, evaluates and states the privacy."""
    problems = command_line.Problems()
    task = problems.attempt(task_flags.build_task)
    population = problems.attempt(task_flags.population)
    # Where the population is not known, the rest is still checked.
    plan = problems.attempt(
        lambda: run_flags.build_plan(10**9 if population is None else population)
    )
    training = problems.attempt(_build_training)
    server = problems.attempt(lambda: ServerStep(FLAGS.server_lr, FLAGS.server_momentum))
    folder = run_flags.check_run_folder(problems)
    for flag, least in (("rounds_per_eval", 0), ("rounds_per_checkpoint", 1)):
        problems.require(
            FLAGS[flag].value >= least,
            f"{flag}={FLAGS[flag].value}: accepted are whole numbers of at least {least}",
        )
    problems.attempt(lambda: run_flags.check_model(task))
    if task is not None:
        problems.require(
            task.has_users,
            f"task={FLAGS.task}: these data do not say whose images they are, so nothing can be "
            "private at user level; accepted are data with users, or run_centralized",
        )
        problems.require(
            FLAGS.head_size == 0 or FLAGS.head_size >= _largest_head(task),
            f"head_size={FLAGS.head_size}: a virtual client can hold {_largest_head(task)} "
            "classes; accepted are at least that many, or 0 for as many as are needed",
        )
        problems.require(
            FLAGS.head_size == 0 or FLAGS.algorithm != "fedavg",
            f"head_size={FLAGS.head_size}: --algorithm=fedavg has a row for each training class; "
            "accepted is 0",
        )
    flag_values = run_flags.defining_flags(sys.modules[__name__], task)
    problems.attempt(lambda: folder.check(flag_values, FLAGS.seed))
    problems.exit_if_any()
    _note_population(task, plan.population)

    if FLAGS.dry_run and not run_flags.starts_from_weights():
        return _dry_run(task, plan, folder)
    command_line.be_quiet()
    problems.attempt(lambda: _check_pretraining(task, plan))
    problems.exit_if_any()
    model, start = run_flags.build_model(problems, task, FLAGS.head_size or _largest_head(task))
    if FLAGS.dry_run:
        return _dry_run(task, plan, folder)
    # Ends like a SIGINT; the training loop ends its rounds in its own way.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        seed = problems.attempt(lambda: folder.open(flag_values, FLAGS.seed))
        problems.exit_if_any()
        evaluation = _finished(plan, folder) or _train(
            task, plan, training, server, folder, seed, model, start
        )
    except KeyboardInterrupt as error:
        message = str(error) or "Stopped; everything is saved. The same command goes on from there."
        command_line.leave(message, command_line.RESUMABLE)
    outcome.report(folder, evaluation)
    return command_line.DONE


def _dry_run(task: Task, plan: PrivacyPlan, folder: run_folder_lib.RunFolder) -> int:
    """Says what a run would do."""
    from tff_dpfedemb.privacy import statement as statement_lib

    verb = "resume" if os.path.exists(folder.file("flags.json")) else "create"
    print(f"Would {verb} {folder.path}: task {task.name}, {plan.total_rounds} rounds.")
    print(statement_lib.in_words(statement_lib.make_statement(plan)))
    return command_line.DONE


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
        command_line.fail(f"error: {error}")
    return outcome.read_evaluation(folder)


def _train(
    task: Task,
    plan: PrivacyPlan,
    training: ClientTraining,
    server: ServerStep,
    folder: run_folder_lib.RunFolder,
    seed: int,
    model: "EmbeddingModel",
    start: "InitialWeights | None",
) -> dict[str, Any]:
    """Trains in an open folder, states the privacy, exports; evaluates the export, last of all."""
    import tensorflow_federated as tff

    from tff_dpfedemb.algorithms import dp_fedemb, fed_avg
    from tff_dpfedemb.data import virtual_clients
    from tff_dpfedemb.evaluation import evaluator
    from tff_dpfedemb.experiment import export as export_lib
    from tff_dpfedemb.experiment import training as training_lib
    from tff_dpfedemb.models import exported
    from tff_dpfedemb.privacy import aggregators, ledger
    from tff_dpfedemb.runtime import worker as worker_lib

    worker_lib.forbid_stock_worker()
    init_seed = run_folder_lib.derive_public_seed(seed)
    validation = evaluator.HeldOut(task, "validation")

    def with_start(fresh: Any) -> Any:
        # The baseline's head, which comes last, starts fresh.
        head = fresh.trainable[len(start.trainable) :]
        return tff.learning.models.ModelWeights((*start.trainable, *head), start.non_trainable)

    def backbone_of(weights: Any) -> tuple[list[Any], list[Any]]:
        # The baseline's head, which comes last, stays behind.
        trained = weights.trainable[:-2] if FLAGS.algorithm == "fedavg" else weights.trainable
        return list(trained), list(weights.non_trainable)

    with worker_lib.local_execution() as worker:
        build = fed_avg.build_fed_avg if FLAGS.algorithm == "fedavg" else dp_fedemb.build_dp_fedemb
        process = build(
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
                evaluate=lambda weights: validation.recalls(
                    exported.with_weights(model, *backbone_of(weights))
                ),
                start=None if start is None else with_start,
            )
            state, made = trainer.run()
            weights = backbone_of(process.get_model_weights(state))
        except training_lib.StoppedError as error:
            command_line.fail(str(error), command_line.RESUMABLE)
        except ledger.LedgerError as error:
            command_line.fail(f"error: {error}")
        except worker_lib.WorkerDiedError as error:
            command_line.fail(
                f"error: {error}\nThe same command goes on from the last checkpoint.",
                command_line.RESUMABLE,
            )

    export_lib.export(
        folder.export,
        model,
        *weights,
        init_seed=init_seed,
        start=start,
        method=_METHODS[FLAGS.algorithm],
        task_facts={"name": task.name, **task.describe()},
        statement=made,
    )
    try:
        return outcome.evaluate(folder, task)
    except ValueError as error:
        command_line.fail(f"error: {error}", command_line.FAILED)


if __name__ == "__main__":
    command_line.run(main)
