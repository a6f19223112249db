"""Progress on standard error: a bar in a terminal, now and then a line elsewhere."""

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import tqdm


class _Lines:
    """Turns a bar that is drawn over itself into lines, for logs."""

    def write(self, text: str) -> None:
        """Writes what is drawn, if anything."""
        if text.strip():
            sys.stderr.write(text.strip() + "\n")

    def flush(self) -> None:
        """Flushes standard error."""
        sys.stderr.flush()


def bar(
    *,
    total: int,
    desc: str,
    unit: str,
    iterable: Iterable[Any] | None = None,
    done: int = 0,
    scale: bool = False,
    shown: bool = True,
) -> tqdm.tqdm:
    """A progress bar.

    Args:
        total: How many units there are.
        desc: What they are, as the bar begins.
        unit: What one of them is.
        iterable: What the bar counts as it is gone through; without, its `update` counts.
        done: How many are done already.
        scale: Whether large numbers are shown with k, M and G.
        shown: Whether it is worth showing.
    """
    terminal = sys.stderr.isatty()
    return tqdm.tqdm(
        iterable,
        total=total,
        initial=done,
        desc=desc,
        unit=unit,
        unit_scale=scale,
        disable=not shown,
        file=sys.stderr if terminal else _Lines(),
        dynamic_ncols=terminal,
        mininterval=0.1 if terminal else 20,
        maxinterval=10 if terminal else 60,
        ascii=not terminal,
    )


class Progress:
    """Shows how much is done, what the last of it brought, and the time left."""

    def __init__(self, total: int, done: int, unit: str = "round"):
        """Starts at `done` of `total` units."""
        self._bar = bar(total=total, done=done, desc=unit, unit=unit)

    def update(self, values: Mapping[str, str], more: int = 1) -> None:
        """So many more, with what to show of them."""
        self._bar.set_postfix(values, refresh=False)
        self._bar.update(more)

    def close(self) -> None:
        """Ends the bar's line."""
        self._bar.close()
