"""Percentile bootstrap over classes.

Images of one class are not independent, so classes are what is drawn again. A class drawn w times
counts w times. Beyond `MAX_GROUPS` classes, classes are put into that many groups at random, and
the groups are drawn: the cost is then independent of the number of classes, and since the groups
are random, an interval has the same coverage, only with `MAX_GROUPS` units to judge the spread by.

Source: Efron and Tibshirani, An Introduction to the Bootstrap, 1993, section 13.3.
"""

import numpy as np

MAX_GROUPS = 256
LEVEL = 0.95


def class_groups(num_classes: int, seed: int) -> np.ndarray:
    """The group that each class is resampled with.

    Args:
        num_classes: Number of classes.
        seed: Seed of the grouping.

    Returns:
        int64 array of shape (num_classes,) in [0, min(num_classes, MAX_GROUPS)); the groups'
        sizes differ by at most 1.
    """
    groups = np.arange(num_classes) % MAX_GROUPS
    return np.random.default_rng([seed, 0]).permutation(groups)


def resample_counts(num_groups: int, replicates: int, seed: int) -> np.ndarray:
    """How often each group is drawn in each bootstrap replicate.

    Args:
        num_groups: Number of groups, all drawn with replacement.
        replicates: Number of replicates.
        seed: Seed of the draws.

    Returns:
        int64 array of shape (replicates, num_groups), rows summing to num_groups.
    """
    rng = np.random.default_rng([seed, 1])
    return rng.multinomial(num_groups, np.full(num_groups, 1 / num_groups), size=replicates)


def percentile_interval(values: np.ndarray) -> tuple[float | None, float | None]:
    """The central 95 % of replicates.

    Args:
        values: Array of shape (replicates,); NaN where a replicate is undefined.

    Returns:
        Low and high end; None, None where fewer than half of the replicates are defined.
    """
    defined = values[np.isfinite(values)]
    if 2 * len(defined) < len(values) or not len(defined):
        return None, None
    low, high = np.quantile(defined, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
