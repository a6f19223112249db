"""The privacy statement: what was promised, in numbers and in plain words.

One function makes the record, another the paragraph, so that the words cannot say what the numbers
do not.
"""

import math
from collections.abc import Mapping
from typing import Any

from tff_dpfedemb.privacy import accounting
from tff_dpfedemb.privacy.ledger import Ledger
from tff_dpfedemb.privacy.plan import PrivacyPlan

COVERED = (
    "the sequence of backbone weights: every checkpoint and every export, and whatever is computed from them",
)
NOT_COVERED = (
    "training metrics, progress output and event files (loss, accuracy, examples, update norms)",
    "the private heads, which never leave a virtual client",
    "who took part in a round, and the sampling seed: whoever learns it knows who took part",
    "held-out users' and held-out classes' images used for evaluation",
    "the choice of hyper-parameters on private data",
    "side channels of floating-point arithmetic, and TensorFlow's noise generator, which is not cryptographic",
)


def jsonable(value: float | None) -> float | str | None:
    """A number as JSON holds it; infinity becomes the string "inf"."""
    return "inf" if value is not None and math.isinf(value) else value


def make_statement(
    plan: PrivacyPlan, ledger: Ledger | None = None, *, planned_rounds: int = 0
) -> dict[str, Any]:
    """The privacy statement of a run as a JSON-serialisable record.

    Args:
        plan: The run's plan.
        ledger: The rounds that were started. None: the statement is about `plan.total_rounds`
            rounds that were not run.
        planned_rounds: With a ledger, rounds up to this number are counted even if they have not
            been started: the bound that will hold once they are.

    Returns:
        A dictionary; `epsilon` is the user-level figure, infinite ones are the string "inf".
    """
    delta = plan.target_delta
    if ledger is None:
        rounds = plan.total_rounds
        attempts = rounds
        status = "planned"

        def epsilon(noise: float) -> float:
            return accounting.epsilon({(plan.sampling_probability, noise): rounds}, delta)

        user_level = epsilon(plan.effective_noise_multiplier)
        virtual_client_level = epsilon(plan.noise_multiplier)
    else:
        rounds = max(ledger.num_rounds, planned_rounds)
        attempts = len(ledger.entries) + rounds - ledger.num_rounds
        status = "planned" if planned_rounds > ledger.num_rounds else "final"
        user_level = ledger.epsilon(delta, planned_rounds=planned_rounds)
        virtual_client_level = ledger.epsilon(
            delta, user_level=False, planned_rounds=planned_rounds
        )
    private = math.isfinite(user_level) and rounds > 0
    return {
        "status": status,
        "unit": "one user, with all of that user's training examples",
        "relation": plan.relation,
        "sampling": plan.sampling,
        "epsilon": jsonable(user_level),
        "delta": delta,
        "epsilon_per_virtual_client": jsonable(virtual_client_level),
        "noise_multiplier": plan.noise_multiplier,
        "sensitivity_factor": plan.sensitivity_factor,
        "effective_noise_multiplier": plan.effective_noise_multiplier,
        "clip_norm": plan.clip_norm,
        "virtual_clients_per_round": plan.virtual_clients_per_round,
        "virtual_client_size": plan.virtual_client_size,
        "population": plan.population,
        "sampling_probability": plan.sampling_probability,
        "rounds": rounds,
        "rounds_repeated_after_a_crash": attempts - rounds,
        "accountant": accounting.ACCOUNTANT,
        "covered": list(COVERED) if private else [],
        "not_covered": list(NOT_COVERED),
    }


def _figure(value: float | str) -> str:
    """A privacy figure, rounded up so that the words never promise more than the number."""
    if value == "inf":
        return "infinite"
    number = float(value)
    if number == 0:
        return "0"
    digits = 2 - math.floor(math.log10(abs(number)))
    return f"{math.ceil(number * 10**digits - 1e-9) / 10**digits:g}"


def in_words(statement: Mapping[str, Any]) -> str:
    """The statement as one paragraph of plain words."""
    s = statement
    population, size = s["population"], s["virtual_client_size"]
    clients = s["virtual_clients_per_round"]
    rounds = f"{s['rounds']} round" + ("" if s["rounds"] == 1 else "s")
    who = (
        f"In each of {rounds}, every one of {population:,} users takes part with probability "
        f"q = {s['sampling_probability']:.4g}, independently"
    )
    if size == 1:
        grouping = f"; each is a virtual client alone, V = {clients} of them expected"
    else:
        grouping = f", and joins one of V = {clients} virtual clients at random, {size} users in each on average"
    if s["clip_norm"] is None:
        mechanism = "Their updates are neither clipped nor noised"
    else:
        mechanism = f"Each virtual client's update is clipped to an L2 norm of C = {s['clip_norm']:g}, the updates are summed, "
        if s["noise_multiplier"] == 0:
            mechanism += f"and divided by V; no noise is added (z = 0)"
        else:
            mechanism += f"Gaussian noise of z = {s['noise_multiplier']:g} times C is added, and the result is divided by V"
    if s["epsilon"] == "inf":
        promise = "There is no privacy guarantee: epsilon is infinite."
    else:
        verb = "will be" if s["status"] == "planned" else "is"
        promise = (
            f"The trained backbone {verb} differentially private for a user with "
            f"epsilon = {_figure(s['epsilon'])} at delta = {_figure(s['delta'])} "
            f"(relation {s['relation']}, unit: {s['unit']})."
        )
    factor = (
        "a user alone in a virtual client moves the sum by at most C, so s = 1"
        if s["sensitivity_factor"] == 1
        else "one user can turn a virtual client's update into any other, which moves the sum by up to 2C, so s = 2"
    )
    parts = [
        promise,
        f"{who}{grouping}. {mechanism}.",
    ]
    if s["noise_multiplier"] > 0:
        parts.append(
            f"Since {factor}, and the noise counts as z/s = {s['effective_noise_multiplier']:g}. "
            f"Counted per virtual client (s = 1), as published figures often are, epsilon would read "
            f"{_figure(s['epsilon_per_virtual_client'])}; that is not a guarantee for a user with company."
            if size > 1
            else f"Since {factor}."
        )
    if s["rounds_repeated_after_a_crash"]:
        parts.append(
            f"{s['rounds_repeated_after_a_crash']} rounds were started again after an interruption and are counted each time."
        )
    if s["covered"]:
        parts.append(f"Covered: {'; '.join(s['covered'])}.")
    parts.append(f"Not covered: {'; '.join(s['not_covered'])}.")
    if s["epsilon"] != "inf":
        parts.append(f"Accountant: {s['accountant']}.")
    return " ".join(parts)
