"""From a wanted epsilon to the noise that gives it."""

import dataclasses
import math

from scipy import optimize

from tff_dpfedemb.privacy import accounting
from tff_dpfedemb.privacy.plan import PrivacyPlan

# The noise is found to this relative precision, and then rounded up.
_PRECISION = 1e-4
_DIGITS = 4
_LARGEST_NOISE, _LARGEST_EPSILON = 1e6, 1e9
# How loose the bound is with which the search begins, and how far off it may have led.
_COARSENESS, _MARGIN = 20.0, 0.003


def noise_multiplier(plan: PrivacyPlan, target_epsilon: float) -> float:
    """The least noise multiplier z with which a plan's rounds, each run once, meet a target.

    Args:
        plan: Whose own noise multiplier does not matter.
        target_epsilon: The user-level epsilon at the plan's delta that must not be exceeded.

    Returns:
        z, of four digits, rounded up.

    Raises:
        ValueError: One line, if the target cannot be.
    """
    if not (math.isfinite(target_epsilon) and target_epsilon > 0):
        raise ValueError(f"target_epsilon={target_epsilon!r}: accepted are numbers above 0")
    if plan.clip_norm is None:
        raise ValueError(
            f"target_epsilon={target_epsilon:g}: accepted only with a clip_norm, without which "
            "noise bounds nothing"
        )

    def excess(log_z: float, coarseness: float) -> float:
        noisy = dataclasses.replace(plan, noise_multiplier=math.exp(log_z))
        key = (noisy.sampling_probability, noisy.effective_noise_multiplier)
        rounds = {key: noisy.total_rounds}
        epsilon = accounting.epsilon(rounds, noisy.target_delta, coarseness=coarseness)
        # Bounded, since with next to no noise epsilon is infinite.
        return min(epsilon, _LARGEST_EPSILON) - target_epsilon

    low = math.log(accounting.LEAST_NOISE * plan.sensitivity_factor)
    high = math.log(_LARGEST_NOISE)
    if excess(high, _COARSENESS) > 0:
        raise ValueError(
            f"target_epsilon={target_epsilon:g}: no noise multiplier up to {_LARGEST_NOISE:g} "
            "gives it; accepted are larger ones"
        )
    if excess(low, _COARSENESS) > 0:
        # The loose bound brings us near; the tight one is wanted only there.
        near = optimize.brentq(excess, low, high, args=(_COARSENESS,), xtol=_PRECISION)
        low = near - _MARGIN
        while excess(low, 1.0) <= 0:
            low -= _MARGIN
        high = near + 10 * _PRECISION
        low = optimize.brentq(excess, low, high, args=(1.0,), xtol=_PRECISION)
    z = _round_up(math.exp(low))
    while excess(math.log(z), 1.0) > 0:
        z = _round_up(z * (1 + _PRECISION))
    return z


def _round_up(value: float) -> float:
    """A number of four digits that is not below `value`."""
    unit = 10.0 ** (math.floor(math.log10(value)) - _DIGITS + 1)
    rounded = float(f"{math.ceil(value / unit) * unit:.{_DIGITS}g}")
    return rounded if rounded >= value else float(f"{rounded + unit:.{_DIGITS}g}")
