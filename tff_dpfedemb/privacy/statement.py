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
    "the sequence of aggregated weights (the backbone's, and those of a head where it is "
    "aggregated too): every checkpoint and every export, and whatever is computed from them",
)
NOT_COVERED = (
    "training metrics, progress output and event files (loss, accuracy, examples, update norms)",
    "private heads, which never leave a virtual client",
    "who took part in a round, and the sampling seed: whoever learns it knows who took part",
    "held-out users' and held-out classes' images used for evaluation",
    "the data behind pretrained starting weights, where there are any",
    "the choice of hyper-parameters on private data",
    "side channels of floating-point arithmetic, and the generators of noise (TensorFlow's) and "
    "cohorts (NumPy's), which are not cryptographic",
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


def make_central_statement() -> dict[str, Any]:
    """The statement of a model that was trained on all images in one place."""
    return {
        "status": "final",
        "training": "central",
        "unit": "none",
        "epsilon": "inf",
        "delta": None,
        "covered": [],
        "not_covered": ["everything: all images were read in one place, nothing was noised"],
    }


def figure(value: float | str) -> str:
    """A privacy figure as words show it: three digits, rounded up, never promising too much.

    Args:
        value: Epsilon or delta, at least 0; infinity also as the string "inf".
    """
    number = float(value)
    if math.isinf(number):
        return "infinite"
    if number == 0:
        return "0"
    unit = 10.0 ** (math.floor(math.log10(number)) - 2)
    return f"{math.ceil(number / unit) * unit:.3g}"


def summary(statement: Mapping[str, Any]) -> str:
    """The guarantee in one line, and below it the published convention, labelled as what it is."""
    s = statement
    lines = [
        f"epsilon = {figure(s['epsilon'])} at delta = {figure(s['delta'])}, "
        f"user level (unit: {s['unit']})"
    ]
    if s["virtual_client_size"] > 1:
        lines.append(
            f"epsilon = {figure(s['epsilon_per_virtual_client'])} per virtual client (s = 1): the "
            "convention of many published figures, not a guarantee for a user with company"
        )
    return "\n".join(lines)


def _promise(s: Mapping[str, Any]) -> str:
    """What is guaranteed."""
    if s["epsilon"] == "inf":
        return "There is no privacy guarantee: epsilon is infinite."
    return (
        f"The trained backbone {'will be' if s['status'] == 'planned' else 'is'} differentially "
        f"private for a user with epsilon = {figure(s['epsilon'])} at delta = "
        f"{figure(s['delta'])} (relation {s['relation']}, unit: {s['unit']})."
    )


def _cohort(s: Mapping[str, Any]) -> str:
    """Who takes part, and in which company."""
    rounds = f"each of {s['rounds']} rounds" if s["rounds"] != 1 else "the one round"
    drawn = (
        f"In {rounds}, every one of {s['population']:,} users takes part with probability q = "
        f"{s['sampling_probability']:.4g}, independently"
    )
    clients, size = s["virtual_clients_per_round"], s["virtual_client_size"]
    if size == 1:
        return f"{drawn}; each is a virtual client alone, V = {clients} of them expected."
    return (
        f"{drawn}, and joins one of V = {clients} virtual clients at random, {size} users in each "
        "on average."
    )


def _mechanism(s: Mapping[str, Any]) -> str:
    """What happens to the updates."""
    if s["clip_norm"] is None:
        return "The virtual clients' updates are neither clipped nor noised."
    clipped = (
        f"Each virtual client's update is clipped to an L2 norm of C = {s['clip_norm']:g}, the "
        "updates are summed"
    )
    if s["noise_multiplier"] == 0:
        return f"{clipped} and divided by V; no noise is added (z = 0)."
    return (
        f"{clipped}, Gaussian noise of standard deviation z * C with z = "
        f"{s['noise_multiplier']:g} is added, and the result is divided by V."
    )


def _sensitivity(s: Mapping[str, Any]) -> str:
    """Why the noise counts for less than it seems."""
    effective = f"the noise counts as z/s = {s['effective_noise_multiplier']:g}"
    if s["sensitivity_factor"] == 1:
        return f"A user alone moves the sum by at most C, so s = 1, and {effective}."
    return (
        "One user can turn a virtual client's update into any other, which moves the sum by up to "
        f"2C, so s = 2, and {effective}. Counted per virtual client (s = 1), as published figures "
        f"often are, epsilon would read {figure(s['epsilon_per_virtual_client'])}; that is not a "
        "guarantee for a user with company."
    )


def in_words(statement: Mapping[str, Any]) -> str:
    """The statement as one paragraph of plain words."""
    s = statement
    if s.get("training") == "central":
        return f"{_promise(s)} Not covered: {'; '.join(s['not_covered'])}."
    parts = [_promise(s), _cohort(s), _mechanism(s)]
    if s["noise_multiplier"] > 0:
        parts.append(_sensitivity(s))
    if s["rounds_repeated_after_a_crash"]:
        parts.append(
            f"Rounds started again after an interruption, {s['rounds_repeated_after_a_crash']} in "
            "all, are counted each time."
        )
    if s["covered"]:
        parts.append(f"Covered: {'; '.join(s['covered'])}.")
    parts.append(f"Not covered: {'; '.join(s['not_covered'])}.")
    if s["epsilon"] != "inf":
        parts.append(f"Accountant: {s['accountant']}.")
    return " ".join(parts)
