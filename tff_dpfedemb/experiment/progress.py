"""The progress of a run, on standard error: a bar in a terminal, now and then a line elsewhere."""

import sys
from collections.abc import Mapping

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


class Progress:
    """Shows how much is done, what the last of it brought, and the time left."""

    def __init__(self, total: int, done: int, unit: str = "round"):
        """Starts at `done` of `total` units."""
        terminal = sys.stderr.isatty()
        self._bar = tqdm.tqdm(
            total=total,
            initial=done,
            desc=unit,
            unit=unit,
            file=sys.stderr if terminal else _Lines(),
            dynamic_ncols=terminal,
            mininterval=0.1 if terminal else 20,
            maxinterval=10 if terminal else 60,
            ascii=not terminal,
        )

    def update(self, values: Mapping[str, str], more: int = 1) -> None:
        """So many more, with what to show of them."""
        self._bar.set_postfix(values, refresh=False)
        self._bar.update(more)

    def close(self) -> None:
        """Ends the bar's line."""
        self._bar.close()
