"""The privacy plan of a run: one frozen value from which everything private is derived.

The sampler, the sensitivity, the aggregator, the accountant's event and the printed statement all
come from the same `PrivacyPlan`, so that they cannot disagree. Its fields are public information;
data and random state are arguments of its methods. TensorFlow and dp_accounting are imported by
the methods that need them: a plan is checked before anything heavy is loaded.
"""

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

from tff_dpfedemb.data import sampling as sampling_lib

if TYPE_CHECKING:
    import dp_accounting

SAMPLINGS = ("poisson",)

# Norms are clipped in float32, whose squares end near the square of this.
_MAX_CLIP_NORM = 1e18


def default_delta(population: int) -> float:
    """The failure probability used where none is given, population^-1.1."""
    return float(population) ** -1.1


@dataclasses.dataclass(frozen=True)
class PrivacyPlan:
    """Public parameters of a privately trained run.

    Attributes:
        population: Public number N of users that can take part.
        virtual_clients_per_round: V, the public and fixed divisor of the noisy sum.
        virtual_client_size: Expected number m of users in a virtual client. With 1, a virtual
            client is exactly one user by construction, and V is their expected number.
        total_rounds: T.
        clip_norm: C, the L2 bound on a virtual client's update over all weights together, or None
            for no clipping.
        noise_multiplier: z; the noise on the sum has standard deviation z * C in each coordinate.
            Zero for no noise, and then no privacy.
        delta: The failure probability of the guarantee; population^-1.1 if None.
        sampling: "poisson": every user takes part in a round with probability q = V*m/N,
            independently, and goes to one of V bins, independently and uniformly.

    Raises:
        ValueError: If a value is impossible; one line for each, naming the field, the value and
            what is accepted.
    """

    population: int
    virtual_clients_per_round: int
    virtual_client_size: int
    total_rounds: int
    clip_norm: float | None
    noise_multiplier: float
    delta: float | None = None
    sampling: str = "poisson"

    def __post_init__(self) -> None:
        problems = _problems(self)
        if problems:
            raise ValueError("\n".join(problems))
        if self.delta is None:
            object.__setattr__(self, "delta", default_delta(self.population))

    @property
    def target_delta(self) -> float:
        """The failure probability of the guarantee."""
        assert self.delta is not None  # Filled in by __post_init__.
        return self.delta

    @property
    def sampling_probability(self) -> float:
        """q, the probability that a user takes part in a round."""
        return self.virtual_clients_per_round * self.virtual_client_size / self.population

    @property
    def relation(self) -> str:
        """The neighbouring relation, named as dp_accounting names it."""
        return "ADD_OR_REMOVE_ONE"

    @property
    def sensitivity_factor(self) -> int:
        """s: adding or removing one user moves the clipped sum by at most s * C.

        With several users in a virtual client one of them turns a clipped vector into another
        anywhere in the ball, a distance of up to 2C; alone, a user adds or removes one vector.
        """
        return 1 if self.virtual_client_size == 1 else 2

    @property
    def effective_noise_multiplier(self) -> float:
        """z / s, the noise relative to the sensitivity."""
        return self.noise_multiplier / self.sensitivity_factor

    def sample(self, seed: int, round_number: int, num_users: int) -> list[np.ndarray]:
        """The virtual clients of a round, each an int64 array of user indices.

        Args:
            seed: Secret, non-negative.
            round_number: In [0, total_rounds).
            num_users: How many users there truly are. Each takes part with the probability that
                follows from the stated population, so the guarantee does not depend on this.

        Returns:
            `virtual_clients_per_round` arrays, some possibly empty; with virtual_client_size 1
            one array of one user for every sampled user, and empty ones up to a multiple of 16.
        """
        alone = self.virtual_client_size == 1
        return sampling_lib.poisson_virtual_clients(
            population=num_users,
            sampling_probability=self.sampling_probability,
            num_bins=None if alone else self.virtual_clients_per_round,
            seed=seed,
            round_number=round_number,
        )

    def round_event(self) -> "dp_accounting.DpEvent":
        """The dp_accounting event of one round, relative to the user-level sensitivity."""
        from tff_dpfedemb.privacy import accounting

        return accounting.round_event(self.sampling_probability, self.effective_noise_multiplier)

    def dp_event(self) -> "dp_accounting.DpEvent":
        """The dp_accounting event of the whole run, every round run once."""
        import dp_accounting

        return dp_accounting.SelfComposedDpEvent(self.round_event(), self.total_rounds)


def _is_whole(value: object) -> bool:
    """Whether a value is an integer and not a truth value."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    """Whether a value is a finite number."""
    return (
        isinstance(value, (int, float, np.number))
        and not isinstance(value, bool)
        and math.isfinite(value)
    )


def _problems(plan: PrivacyPlan) -> list[str]:
    """One line for each value that cannot be."""
    problems = []

    def refuse(field: str, accepted: str) -> None:
        problems.append(f"{field}={getattr(plan, field)!r}: accepted are {accepted}")

    counts = ("population", "virtual_clients_per_round", "virtual_client_size", "total_rounds")
    for field in counts:
        if not _is_whole(getattr(plan, field)) or getattr(plan, field) < 1:
            refuse(field, "whole numbers of at least 1")
    if plan.clip_norm is not None and not (
        _is_number(plan.clip_norm) and 0 < plan.clip_norm <= _MAX_CLIP_NORM
    ):
        refuse("clip_norm", f"numbers above 0, at most {_MAX_CLIP_NORM:g}, or none for no clipping")
    if not (_is_number(plan.noise_multiplier) and plan.noise_multiplier >= 0):
        refuse("noise_multiplier", "numbers of at least 0")
    elif plan.noise_multiplier > 0 and plan.clip_norm is None:
        refuse(
            "noise_multiplier",
            "only 0 where no clip_norm is set, since noise without clipping bounds nothing",
        )
    if plan.delta is not None and not (_is_number(plan.delta) and 0 < plan.delta < 1):
        refuse("delta", "numbers between 0 and 1, or none for population^-1.1")
    elif plan.delta is None and plan.population == 1:
        refuse("delta", "numbers between 0 and 1 where the population is 1")
    if plan.sampling not in SAMPLINGS:
        refuse("sampling", " or ".join(SAMPLINGS))
    if not problems and plan.sampling_probability > 1:
        problems.append(
            f"virtual_clients_per_round={plan.virtual_clients_per_round} times "
            f"virtual_client_size={plan.virtual_client_size} is {plan.sampling_probability:.4g} "
            f"times the population of {plan.population}: accepted are products of at most that"
        )
    return problems
