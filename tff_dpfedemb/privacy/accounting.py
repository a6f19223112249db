"""Epsilon from rounds, by dp_accounting's privacy loss distributions.

Rounds of a Poisson-sampled Gaussian compose. A round that is run again, after a crash, draws the
same cohort again: two releases from one sample reveal more than two releases from two samples. They
count as one sampled release with the smaller noise that both give together, sigma / sqrt(2).
"""

import functools
import math
from collections.abc import Iterable, Mapping

import dp_accounting
from dp_accounting.pld import privacy_loss_distribution as pld

ACCOUNTANT = "dp_accounting privacy loss distribution (PLD)"

# The interval on which losses are rounded up. Finer costs time and changes nothing that is printed.
_INTERVAL = 1e-4
# Below this noise losses spread wider, and the interval with them: a bound at most 1e-4 (relative)
# above that of the fine interval, in a tenth of the time.
_COARSE_BELOW = 1.0
# Below this noise epsilon is above 10^4 and says nothing: it is reported as infinite.
LEAST_NOISE = 0.01


def round_event(sampling_probability: float, noise_multiplier: float) -> dp_accounting.DpEvent:
    """The event of one round.

    Args:
        sampling_probability: q in [0, 1].
        noise_multiplier: Standard deviation of the noise over the sensitivity (z / s).
    """
    return dp_accounting.PoissonSampledDpEvent(
        sampling_probability, dp_accounting.GaussianDpEvent(noise_multiplier)
    )


@functools.lru_cache(maxsize=8)
def _one_round(
    sampling_probability: float, noise_multiplier: float, interval: float
) -> pld.PrivacyLossDistribution:
    """The privacy loss of one round, kept because building it costs more than composing it."""
    return pld.from_gaussian_mechanism(
        standard_deviation=noise_multiplier,
        sampling_prob=sampling_probability,
        value_discretization_interval=interval,
    )


def combined_noise_multiplier(noise_multipliers: Iterable[float]) -> float:
    """The noise multiplier of one Gaussian release that equals several of the same vector.

    Independent Gaussian releases add their precisions: sigma^-2 = sum of sigma_i^-2.
    """
    multipliers = list(noise_multipliers)
    if 0 in multipliers:
        return 0.0
    if len(multipliers) == 1:
        return multipliers[0]
    return sum(m**-2 for m in multipliers) ** -0.5


def epsilon(
    rounds: Mapping[tuple[float, float], int], delta: float, *, coarseness: float = 1.0
) -> float:
    """The epsilon of several rounds under ADD_OR_REMOVE_ONE.

    Args:
        rounds: How many rounds were run with each (sampling probability, noise multiplier over
            sensitivity).
        delta: The failure probability, in (0, 1).
        coarseness: How many times the usual interval losses are rounded up to, at least 1: more is
            quicker, and a looser bound.

    Returns:
        Epsilon, an upper bound; infinity without noise, 0 without rounds.
    """
    rounds = {key: count for key, count in rounds.items() if count and key[0] > 0}
    if not rounds:
        return 0.0
    if any(noise < LEAST_NOISE for _, noise in rounds):
        return math.inf
    smallest = min(noise for _, noise in rounds)
    interval = coarseness * _INTERVAL * max(1.0, (_COARSE_BELOW / smallest) ** 2)
    parts = (
        _one_round(probability, noise, interval).self_compose(count)
        for (probability, noise), count in sorted(rounds.items())
    )
    total = functools.reduce(lambda a, b: a.compose(b), parts)
    return float(total.get_epsilon_for_delta(delta))
