"""Classes that are held out of training by a draw."""

from collections.abc import Mapping, Sequence

import numpy as np

# Fewer classes make no pair of two.
_LEAST = 2


def sizes(count: int, shares: Mapping[str, float]) -> dict[str, int]:
    """How many of some classes are held out, and how many are left.

    Args:
        count: How many classes there are.
        shares: What share of them is held out for what.

    Returns:
        A number for each entry of `shares`, at least 2, and "train": what is left.
    """
    held_out = {name: max(_LEAST, round(share * count)) for name, share in shares.items()}
    return held_out | {"train": count - sum(held_out.values())}


def draw(classes: Sequence[int], shares: Mapping[str, float], seed: int) -> dict[str, np.ndarray]:
    """Divides classes at random.

    Args:
        classes: Different numbers.
        shares: As in `sizes`.
        seed: Of the draw.

    Returns:
        int64 arrays, sorted, for the names that `sizes` returns; no class is in two of them.

    Raises:
        ValueError: What is lacking, in one line, where fewer than 2 would be left to train on.
    """
    numbers = sizes(len(classes), shares)
    if numbers["train"] < _LEAST:
        needed = len(classes) + _LEAST - numbers["train"]
        raise ValueError(
            f"has {len(classes)} classes; accepted are {needed} or more: "
            + ", ".join(f"{numbers[name]} are held out for {name}" for name in shares)
            + f", and {_LEAST} are trained on"
        )
    drawn = np.random.default_rng(seed).permutation(np.asarray(classes, np.int64))
    parts = np.split(drawn, np.cumsum(list(numbers.values()))[:-1])
    return {name: np.sort(part) for name, part in zip(numbers, parts, strict=True)}
