"""Resident memory of Python and of the worker over many short rounds of varying cohorts.

python -m benchmarks.memory_over_rounds --virtual_client_size=1

Prints a table, and as its last line the same as JSON. Growth is from the round `--warm_up_rounds`,
before which the worker's allocator reaches its plateau.
"""

import json
import time

import numpy as np
import tensorflow_federated as tff
from absl import app, flags

from tasks import registry
from tff_dpfedemb.algorithms import dp_fedemb
from tff_dpfedemb.algorithms.hyperparameters import ClientTraining
from tff_dpfedemb.data import sampling, virtual_clients
from tff_dpfedemb.models import backbones, embedding_model
from tff_dpfedemb.privacy import aggregators
from tff_dpfedemb.privacy import plan as plan_lib
from tff_dpfedemb.runtime import worker as worker_lib

_ROUNDS = flags.DEFINE_integer("rounds", 120, "Rounds.", lower_bound=2)
_WARM_UP = flags.DEFINE_integer("warm_up_rounds", 40, "Rounds before growth is measured.")
_EVERY = flags.DEFINE_integer("rounds_per_row", 10, "Rounds between rows.", lower_bound=1)
_CLIENTS = flags.DEFINE_integer("virtual_clients_per_round", 8, "V.", lower_bound=1)
_SIZE = flags.DEFINE_integer(
    "virtual_client_size",
    4,
    "Users in a virtual client; with 1 their number varies.",
    lower_bound=1,
)
_BACKBONE = flags.DEFINE_enum("model_backbone", "small_cnn", backbones.names(), "The backbone.")


def resident_megabytes(pid: int | str = "self") -> float:
    """The resident memory of a process in MB; Linux only."""
    with open(f"/proc/{pid}/status", encoding="utf-8") as file:
        (line,) = (line for line in file if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


def main(argv: list[str]) -> None:
    """Prints the figures."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    task = registry.build("glyphs", num_users=100_000)
    plan = plan_lib.PrivacyPlan(
        population=task.num_users,
        virtual_clients_per_round=_CLIENTS.value,
        virtual_client_size=_SIZE.value,
        total_rounds=_ROUNDS.value,
        clip_norm=1.0,
        noise_multiplier=1.0,
    )
    model = embedding_model.EmbeddingModel(
        _BACKBONE.value, task.image_shape, 128, task.num_train_classes
    )
    training = ClientTraining(
        client_lr=0.01,
        client_momentum=0.9,
        head_lr_scale=1.0,
        client_epochs_per_round=1,
        client_batch_size=32,
        max_examples_per_client=2048,
    )
    rows = []
    with worker_lib.local_execution() as worker:
        process = dp_fedemb.build_dp_fedemb(
            model,
            training,
            virtual_clients.build_dataset_computation(task.load_users, task.user_id_dtype),
            aggregators.build_aggregation_factory(plan),
            tff.learning.optimizers.build_sgdm(0.1, 0.9),
        )
        state = process.initialize()
        print(f"{'round':>5} {'clients':>7} {'python MB':>9} {'worker MB':>9} {'seconds':>7}")
        started = time.monotonic()
        for number in range(_ROUNDS.value):
            cohort = plan.sample(0, number, plan.population)
            state = process.next(
                state,
                virtual_clients.client_arguments(
                    [task.user_ids(users) for users in cohort],
                    sampling.client_seeds(0, number, len(cohort)),
                ),
            ).state
            row = {
                "round": number + 1,
                "clients": len(cohort),
                "python_mb": round(resident_megabytes(), 1),
                "worker_mb": round(resident_megabytes(worker.pids[1]), 1),
                "seconds": round(time.monotonic() - started, 1),
            }
            rows.append(row)
            if number == 0 or row["round"] % _EVERY.value == 0:
                print(
                    f"{row['round']:5} {row['clients']:7} {row['python_mb']:9.1f} "
                    f"{row['worker_mb']:9.1f} {row['seconds']:7.1f}",
                    flush=True,
                )
    settled = rows[min(_WARM_UP.value, len(rows) - 1) :]
    print(
        json.dumps(
            {
                "rounds": len(rows),
                "virtual_clients_per_round": plan.virtual_clients_per_round,
                "virtual_client_size": plan.virtual_client_size,
                "growth_from_round": settled[0]["round"],
                **{
                    f"{name}_growth_mb_per_round": round(
                        np.polyfit([r["round"] for r in settled], [r[name] for r in settled], 1)[0],
                        3,
                    )
                    for name in ("python_mb", "worker_mb")
                },
                "rows": [r for r in rows if r["round"] == 1 or r["round"] % _EVERY.value == 0],
            }
        )
    )


if __name__ == "__main__":
    app.run(main)
