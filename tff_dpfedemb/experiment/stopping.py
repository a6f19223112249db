"""How a run stops when it is asked to: after the work in hand, or at once when asked again."""

import signal
import sys
from types import FrameType

_WAKE_SECONDS = 0.5


class StopRequest:
    """Watches SIGINT and SIGTERM while inside the block.

    The first signal asks for a stop after the work in hand; the second raises KeyboardInterrupt,
    which drops it.

    Attributes:
        requested: Whether a stop was asked for.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, work: str = "round") -> None:
        """Watches while `work` after `work` is done; the word is for messages."""
        self.requested = False
        self._work = work

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        print(
            f"\n{signal.Signals(number).name}: stopping after this {self._work}; again drops the "
            f"{self._work}.",
            file=sys.stderr,
            flush=True,
        )

    def __enter__(self) -> "StopRequest":
        self._previous = {s: signal.signal(s, self._handle) for s in self._SIGNALS}
        # The kernel may hand a signal to one of TensorFlow's threads, and Python then sees it only
        # when the main thread, which waits for the round, is woken.
        self._previous[signal.SIGALRM] = signal.signal(signal.SIGALRM, lambda *unused: None)
        signal.setitimer(signal.ITIMER_REAL, _WAKE_SECONDS, _WAKE_SECONDS)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
