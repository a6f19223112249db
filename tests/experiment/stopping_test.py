"""The first signal asks, the second one drops the round."""

import contextlib
import io
import os
import signal
import threading
import time

from absl.testing import absltest, parameterized

from tff_dpfedemb.experiment import stopping


class StopRequestTest(parameterized.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.said = self.enterContext(contextlib.redirect_stderr(io.StringIO()))

    @parameterized.parameters(signal.SIGINT, signal.SIGTERM)
    def test_first_signal_asks_and_says_so(self, number: signal.Signals) -> None:
        with stopping.StopRequest() as stop:
            self.assertFalse(stop.requested)
            os.kill(os.getpid(), number)
            self.assertTrue(stop.requested)
        self.assertIn(f"{number.name}: stopping after this round", self.said.getvalue())

    def test_second_signal_drops_the_round_whichever_it_is(self) -> None:
        with stopping.StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            with self.assertRaises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
            self.assertTrue(stop.requested)

    def test_signal_that_another_thread_receives_is_seen_while_the_main_thread_waits(self) -> None:
        seen, done = [], threading.Event()

        def receive() -> None:
            time.sleep(1)  # Until the main thread waits, and runs no code of its own.
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
            deadline = time.monotonic() + 20
            while not stop.requested and time.monotonic() < deadline:
                time.sleep(0.01)
            seen.append(stop.requested)
            done.set()

        with stopping.StopRequest() as stop:
            threading.Thread(target=receive).start()
            done.wait()
        self.assertEqual(seen, [True])
        self.assertEqual(signal.getitimer(signal.ITIMER_REAL), (0.0, 0.0))

    @parameterized.parameters(signal.SIGINT, signal.SIGTERM)
    def test_handlers_are_put_back(self, number: signal.Signals) -> None:
        caught = []
        previous = signal.signal(number, lambda *unused: caught.append(1))
        self.addCleanup(signal.signal, number, previous)
        with contextlib.suppress(ValueError), stopping.StopRequest():
            raise ValueError
        os.kill(os.getpid(), number)
        self.assertEqual(caught, [1])


if __name__ == "__main__":
    absltest.main()
