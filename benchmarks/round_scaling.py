"""Seconds of a training round in a small and in a large population, for cohorts of equal size.

    python -m benchmarks.round_scaling --output=round_scaling.json

A round should cost the same wherever its users come from. Rounds of both populations alternate in
one process and one worker; sampling counts as part of the round. The figure that is judged is the
median of the ratios of neighbouring rounds, which a machine that slows down for a while moves
little.
"""

import itertools
import os
import time
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow_federated as tff
from absl import app, flags, logging

from tasks import registry
from tff_dpfedemb import atomic
from tff_dpfedemb.algorithms import dp_fedemb, hyperparameters
from tff_dpfedemb.data import sampling, virtual_clients
from tff_dpfedemb.models import embedding_model
from tff_dpfedemb.privacy import aggregators
from tff_dpfedemb.privacy import plan as plan_lib
from tff_dpfedemb.runtime import worker

_POPULATIONS = flags.DEFINE_multi_integer("population", [1_000, 10_000_000], "Two populations.")
_CLIENTS = flags.DEFINE_integer("virtual_clients_per_round", 8, "V.", lower_bound=1)
_SIZE = flags.DEFINE_integer("virtual_client_size", 8, "Users in a virtual client.", lower_bound=2)
_ROUNDS = flags.DEFINE_integer("rounds", 20, "Timed rounds of each population.", lower_bound=1)
_OUTPUT = flags.DEFINE_string("output", None, "JSON file of the figures.")


def _cohort(plan: plan_lib.PrivacyPlan, number: int) -> tuple[list[np.ndarray], float]:
    """A round's virtual clients, all of the same size, and the seconds of sampling.

    Sizes vary in training; here they would blur the comparison.
    """
    for seed in itertools.count():
        start = time.perf_counter()
        cohort = plan.sample(seed, number, plan.population)
        seconds = time.perf_counter() - start
        users = np.concatenate(cohort)
        if len(users) == _CLIENTS.value * _SIZE.value:
            return np.split(users, _CLIENTS.value), seconds
    raise AssertionError("never")


def _build_round(population: int) -> Callable[[int], float]:
    """A function that runs a round and returns its seconds."""
    task = registry.build("glyphs", num_users=population, examples_per_user=20, data_seed=0)
    plan = plan_lib.PrivacyPlan(
        population=population,
        virtual_clients_per_round=_CLIENTS.value,
        virtual_client_size=_SIZE.value,
        total_rounds=_ROUNDS.value,
        clip_norm=0.5,
        noise_multiplier=0.8,
    )
    process = dp_fedemb.build_dp_fedemb(
        embedding_model.EmbeddingModel("small_cnn", task.image_shape, 128, task.num_train_classes),
        hyperparameters.ClientTraining(
            client_lr=0.05,
            client_momentum=0.9,
            head_lr_scale=4.0,
            client_epochs_per_round=3,
            client_batch_size=32,
            max_examples_per_client=2048,
        ),
        virtual_clients.build_dataset_computation(task.load_users, task.user_id_dtype),
        aggregators.build_aggregation_factory(plan),
        tff.learning.optimizers.build_sgdm(0.5, 0.9),
    )
    state = process.initialize()

    def run_round(number: int) -> float:
        nonlocal state
        cohort, seconds = _cohort(plan, number)
        start = time.perf_counter()
        clients = virtual_clients.client_arguments(
            [task.user_ids(indices) for indices in cohort],
            sampling.client_seeds(0, number, len(cohort)),
        )
        state = process.next(state, clients).state
        return seconds + time.perf_counter() - start

    return run_round


def main(argv: list[str]) -> None:
    """Times the rounds, prints the ratio, writes the figures."""
    if len(argv) > 1 or len(_POPULATIONS.value) != 2:
        raise app.UsageError("accepted are flags, and two populations")
    logging.set_verbosity(logging.WARNING)
    small, large = _POPULATIONS.value
    with worker.local_execution():
        run_round = {population: _build_round(population) for population in (small, large)}
        seconds: dict[int, list[float]] = {small: [], large: []}
        for number in range(_ROUNDS.value + 1):
            # The order turns, so that neither population always follows the other.
            for population in (small, large) if number % 2 else (large, small):
                seconds[population].append(run_round[population](number))
    timed = {population: np.array(s[1:]) for population, s in seconds.items()}  # One to warm up.
    medians = {population: float(np.median(s)) for population, s in timed.items()}
    figures = {
        "virtual_clients_per_round": _CLIENTS.value,
        "virtual_client_size": _SIZE.value,
        "rounds": _ROUNDS.value,
        "median_seconds": {str(p): m for p, m in medians.items()},
        "median_ratio": float(np.median(timed[large] / timed[small])),
        "seconds": {str(p): s.tolist() for p, s in timed.items()},
    }
    for population, median in medians.items():
        print(f"{population:>12,} users: {median:.3f} s a round")
    print(f"median ratio {figures['median_ratio']:.3f} (target: at most 1.1)")
    if _OUTPUT.value:
        atomic.write_json(_OUTPUT.value, figures)


if __name__ == "__main__":
    app.run(main)
