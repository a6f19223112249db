import ctypes
import gc
import glob
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from unittest import mock

from absl.testing import absltest, parameterized

from tff_dpfedemb.runtime import _launcher, worker

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(worker.__file__)))
_WAIT_SECONDS = 20.0
_PR_CAPBSET_DROP = 24
_CAP_SYS_ADMIN = 21

# Starts a worker, prints its processes' ids, waits for a line, and goes on as the test says.
_PROGRAM = """
import os, signal, sys, threading, time
from tff_dpfedemb.runtime import worker
local = worker.LocalWorker(isolate={isolate})
{start}
print(local.isolated, *local.pids, flush=True)
sys.stdin.readline()
{end}
"""

_FORK = """
child = os.fork()
if child == 0:
    {child}
"""

# The true launcher, on a system that allows no namespaces.
_REFUSING_LAUNCHER = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("launcher", {path!r})
launcher = importlib.util.module_from_spec(spec)
spec.loader.exec_module(launcher)
def refuse(flags):
    raise PermissionError(1, "unshare: not here")
launcher._unshare = refuse
sys.exit(launcher.main(sys.argv[1:]))
"""

# A computation of some seconds is interrupted as by Ctrl-C, and another one is run after it.
_INTERRUPTED = """
import time, warnings
warnings.simplefilter("ignore")
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
from tff_dpfedemb.runtime import worker

@tff.tensorflow.computation
def endless():
    return tf.while_loop(lambda i: i < 1_000_000_000, lambda i: (i + 1,), (0,))

@tff.tensorflow.computation(np.int32)
def double(x):
    return 2 * x

with worker.local_execution(max_concurrent_computation_calls=2) as local:
    before = local.pids
    print(double(1), flush=True)
    try:
        endless()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    time.sleep(1.0)  # Enough for the worker to end if it was interrupted too.
    # The first context still waits for its call.
    with tff.framework.get_context_stack().install(local.execution_context()):
        print(double(2), local.pids == before, flush=True)
"""


def _isolation_refusal() -> str:
    """Why this system does not let the launcher isolate a worker, or ""."""
    program = f"import sys; sys.path.insert(0, {os.path.dirname(_launcher.__file__)!r})\n"
    program += "import _launcher; _launcher._isolate()"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, timeout=60
    )
    return done.stderr.strip().rpartition("\n")[2] if done.returncode else ""


_REFUSAL = _isolation_refusal()
_needs_isolation = unittest.skipIf(_REFUSAL, f"no isolation on this system: {_REFUSAL}")


def _gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _eventually(condition) -> bool:
    """Whether `condition` comes true in bounded time."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _open_files(pid: int) -> set[str]:
    """What a process's descriptors refer to."""
    return {os.readlink(path) for path in glob.glob(f"/proc/{pid}/fd/*")}


def _listening(net_of: int | str) -> dict[str, int]:
    """Inode and port of each listening TCP socket in the network that a process sees."""
    found = {}
    for protocol in ("tcp", "tcp6"):
        path = f"/proc/{net_of}/net/{protocol}"
        if os.path.exists(path):
            with open(path, encoding="ascii") as file:
                rows = [line.split() for line in file.readlines()[1:]]
            found |= {f"socket:[{r[9]}]": int(r[1].split(":")[1], 16) for r in rows if r[3] == "0A"}
    return found


def _own_addresses() -> list[str]:
    """Addresses of this machine, on which a service for all interfaces would answer."""
    addresses = ["127.0.0.1", "::1"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # Sends nothing.
            addresses.append(probe.getsockname()[0])
        except OSError:
            pass
    return addresses


def _drop_sys_admin() -> None:
    """Makes a test that root runs as powerless about namespaces as any user's."""
    ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, _CAP_SYS_ADMIN)


class WorkerTestCase(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        # Not `create_tempdir`, whose paths can be too long for a socket.
        self.folder = tempfile.mkdtemp(prefix="t")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.enter_context(mock.patch.object(tempfile, "tempdir", self.folder))

    def write_file(self, name, text):
        path = os.path.join(self.folder, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(path, 0o755)
        return path

    def assert_ended(self, pids):
        self.assertLen(pids, 2)
        for pid in pids:
            self.assertTrue(_eventually(lambda pid=pid: _gone(pid)), f"process {pid} lives on")

    def assert_no_folder(self):
        self.assertTrue(
            _eventually(lambda: not glob.glob(f"{self.folder}/tff_worker_*")),
            os.listdir(self.folder),
        )


class ExitTest(WorkerTestCase):
    def start_program(self, end, isolate=True, start="local.start()", **options):
        program = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM.format(isolate=isolate, start=start, end=end)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": _ROOT, "TMPDIR": self.folder},
            **options,
        )
        self.addCleanup(program.communicate)
        self.addCleanup(program.kill)
        isolated, *pids = program.stdout.readline().split()
        self.assertEqual(isolated, str(isolate and not _REFUSAL))
        pids = [int(pid) for pid in pids]
        for pid in pids:
            self.assertFalse(_gone(pid))
        self.assertLen(glob.glob(f"{self.folder}/tff_worker_*"), 1)
        return program, pids

    @parameterized.named_parameters(
        ("return", "assert 'tensorflow' not in sys.modules", 0),
        ("exception", "raise ValueError", 1),
        ("sys_exit", "sys.exit(7)", 7),
        ("os_exit", "os._exit(8)", 8),
        ("sigint", "os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
        ("sigterm", "os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("sigkill", "os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("return_open", "", 0, False),
        ("sigkill_open", "os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, False),
    )
    def test_nothing_is_left_after(self, end, status, isolate=True):
        program, pids = self.start_program(end, isolate)
        ours = {os.readlink(f"/proc/{program.pid}/fd/{number}") for number in range(3)}
        for pid in pids:
            self.assertEmpty(ours & _open_files(pid))
        program.communicate("\n", timeout=_WAIT_SECONDS)  # Reads both outputs to their ends.
        self.assertEqual(program.returncode, status)
        self.assert_ended(pids)
        self.assert_no_folder()

    def test_a_pipeline_ends_with_the_program(self):
        script = self.write_file(
            "program.py", _PROGRAM.format(isolate=True, start="local.start()", end="")
        )
        pipeline = subprocess.Popen(
            ["sh", "-c", f"{sys.executable} {script} | cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": _ROOT, "TMPDIR": self.folder},
        )
        pids = [int(pid) for pid in pipeline.stdout.readline().split()[1:]]
        with open(f"/proc/{pids[0]}/stat", encoding="ascii") as file:
            program = int(file.read().rpartition(")")[2].split()[1])
        os.kill(program, signal.SIGKILL)
        self.assertEqual(pipeline.communicate(timeout=_WAIT_SECONDS)[0], "")
        self.assert_ended(pids)
        self.assert_no_folder()

    def test_ends_though_a_fork_holds_the_pipe(self):
        end = _FORK.format(child="os.close(1); os.close(2); time.sleep(600)")
        end += "print(child, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
        program, pids = self.start_program(end)
        output, _ = program.communicate("\n", timeout=_WAIT_SECONDS)
        self.addCleanup(os.kill, int(output), signal.SIGKILL)
        self.assert_ended(pids)
        self.assertFalse(_gone(int(output)))
        self.assert_no_folder()

    def test_a_fork_that_exits_leaves_the_worker_alone(self):
        end = _FORK.format(child="sys.exit()") + "os.wait(); assert local.alive\n"
        end += "assert os.listdir(os.environ['TMPDIR'])\nlocal.restart()"
        program, pids = self.start_program(end)
        _, errors = program.communicate("\n", timeout=_WAIT_SECONDS)
        self.assertEqual(program.returncode, 0, errors)
        self.assert_ended(pids)

    def test_outlives_the_thread_that_started_it(self):
        start = "thread = threading.Thread(target=local.start); thread.start(); thread.join()"
        program, pids = self.start_program("assert local.alive", start=start)
        time.sleep(1.0)  # Twice the interval at which the launcher looks for its parent.
        _, errors = program.communicate("\n", timeout=_WAIT_SECONDS)
        self.assertEqual(program.returncode, 0, errors)
        self.assert_ended(pids)

    def test_launcher_ends_with_its_input(self):
        folder = os.path.join(self.folder, "tff_worker_")
        os.mkdir(folder)
        binary = self.write_file("binary", "#!/bin/sh\nexec sleep 600\n")
        launcher = subprocess.Popen(
            [sys.executable, _launcher.__file__, str(os.getpid()), folder, "0", binary],
            stdin=subprocess.PIPE,
        )
        self.addCleanup(launcher.kill)
        with self.assertRaises(subprocess.TimeoutExpired):
            launcher.wait(timeout=1.0)
        launcher.stdin.close()
        self.assertEqual(launcher.wait(timeout=_WAIT_SECONDS), 0)
        self.assert_no_folder()

    def test_launcher_killed(self):
        program, pids = self.start_program("assert not local.alive")
        os.kill(pids[0], signal.SIGKILL)
        self.assert_ended(pids)
        _, errors = program.communicate("\n", timeout=_WAIT_SECONDS)
        self.assertEqual(program.returncode, 0, errors)
        self.assert_no_folder()

    def test_worker_killed(self):
        program, pids = self.start_program("assert not local.alive")
        os.kill(pids[1], signal.SIGKILL)
        self.assert_ended(pids)
        self.assert_no_folder()
        self.assertIsNone(program.poll())

    @_needs_isolation
    def test_unprivileged(self):
        program, pids = self.start_program(
            "os.kill(os.getpid(), signal.SIGKILL)", preexec_fn=_drop_sys_admin
        )
        for namespace in ("user", "net"):
            self.assertNotEqual(
                os.readlink(f"/proc/{pids[1]}/ns/{namespace}"),
                os.readlink(f"/proc/self/ns/{namespace}"),
            )
        os.kill(pids[0], signal.SIGKILL)
        self.assert_ended(pids)
        program.communicate("\n", timeout=_WAIT_SECONDS)

    def test_ctrl_c_reaches_the_program_alone(self):
        program = subprocess.Popen(
            [sys.executable, "-c", _INTERRUPTED],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": _ROOT, "TMPDIR": self.folder},
            start_new_session=True,
        )
        self.addCleanup(program.kill)
        self.assertEqual(program.stdout.readline(), "2\n")
        time.sleep(1.0)
        os.killpg(program.pid, signal.SIGINT)
        output, _ = program.communicate(timeout=_WAIT_SECONDS)
        self.assertEqual(output, "interrupted\n4 True\n")
        self.assertEqual(program.returncode, 0)
        self.assert_no_folder()


class LifeTest(WorkerTestCase):
    def test_stop_start_restart(self):
        local = worker.LocalWorker()
        self.assertFalse(local.alive)
        self.assertEmpty(local.pids)
        local.stop()
        with local:
            first = local.pids
            self.assertTrue(local.alive)
            with self.assertRaisesRegex(RuntimeError, "already running"):
                local.start()
            local.restart()
            self.assert_ended(first)
            self.assertTrue(local.alive)
            local.stop()
            local.stop()
            self.assertFalse(local.alive)
            self.assert_no_folder()
            local.start()
        self.assertFalse(local.alive)
        self.assert_ended(local.pids)
        self.assert_no_folder()

    def test_ends_with_the_object(self):
        local = worker.LocalWorker()
        local.start()
        pids = local.pids
        del local
        gc.collect()
        self.assert_ended(pids)
        self.assert_no_folder()

    def test_stops_a_launcher_that_does_not_answer(self):
        self.enter_context(mock.patch.object(worker, "_STOP_TIMEOUT_SECONDS", 0.5))
        local = worker.LocalWorker()
        local.start()
        os.kill(local.pids[0], signal.SIGSTOP)
        local.stop()
        self.assert_ended(local.pids)
        self.assert_no_folder()

    @parameterized.named_parameters(
        ("exits", "exit 3", 60.0, worker.WorkerDiedError, "exited with status 3.*spoke thus"),
        ("is_killed", "kill -9 $$", 60.0, worker.WorkerDiedError, "SIGKILL.*spoke thus"),
        ("hangs", "exec sleep 600", 1.0, TimeoutError, r"within 1\.0 s.*spoke thus"),
    )
    def test_failed_start(self, behaviour, timeout, error, message):
        binary = self.write_file("binary", f"#!/bin/sh\necho spoke thus >&2\n{behaviour}\n")
        self.enter_context(mock.patch.object(worker, "_worker_binary", return_value=binary))
        local = worker.LocalWorker(start_timeout_seconds=timeout)
        with self.assertRaisesRegex(error, f"(?s){message}"):
            local.start()
        self.assertFalse(local.alive)
        self.assert_no_folder()

    def test_worker_that_cannot_be_executed(self):
        self.enter_context(mock.patch.object(worker, "_worker_binary", return_value="/no/such"))
        with self.assertRaisesRegex(worker.WorkerDiedError, "(?s)exited with status 1.*/no/such"):
            worker.LocalWorker().start()
        self.assert_no_folder()

    @parameterized.named_parameters(
        ("calls_zero", {"max_concurrent_computation_calls": 0}, "at least 1, got 0"),
        ("timeout_zero", {"start_timeout_seconds": 0.0}, "above 0, got 0.0"),
        ("timeout_nan", {"start_timeout_seconds": float("nan")}, "above 0, got nan"),
    )
    def test_bad_arguments(self, arguments, message):
        with self.assertRaisesRegex(ValueError, message):
            worker.LocalWorker(**arguments)

    @parameterized.named_parameters(("odd", "a b%20#?é"), ("long", "x" * 100))
    def test_temporary_folder(self, name):
        folder = os.path.join(self.folder, name)
        os.mkdir(folder)
        self.enter_context(mock.patch.object(tempfile, "tempdir", folder))
        with worker.LocalWorker() as local:
            self.assertTrue(local.alive)
            self.assertEqual(bool(os.listdir(folder)), name != "x" * 100)
        self.assertEmpty(os.listdir(folder))

    def test_no_temporary_folder(self):
        with (
            mock.patch.object(tempfile, "mkdtemp", side_effect=PermissionError(13, "Denied")),
            self.assertRaisesRegex(OSError, f"set TMPDIR .*{self.folder}: Denied; /tmp: Denied"),
        ):
            worker.LocalWorker().start()


class IsolationTest(WorkerTestCase):
    @_needs_isolation
    def test_nobody_else_reaches_the_worker(self):
        with worker.LocalWorker() as local, self.assertNoLogs(level="WARNING"):
            self.assertTrue(local.isolated)
            inside = _listening(local.pids[1])
            ports = [port for inode, port in inside.items() if inode in _open_files(local.pids[1])]
            self.assertNotEmpty(ports)
            outside = _listening("self")
            for pid in local.pids:
                self.assertEmpty(outside.keys() & _open_files(pid))
            for address in _own_addresses():
                with self.assertRaises(OSError):
                    socket.create_connection((address, ports[0]), timeout=1.0).close()
            path = local.target.removeprefix("unix:")
            self.assertEqual(os.stat(path).st_mode & 0o777, 0o600)
            self.assertEqual(os.stat(os.path.dirname(path)).st_mode & 0o777, 0o700)

    def test_where_isolation_is_refused(self):
        script = self.write_file("l.py", _REFUSING_LAUNCHER.format(path=_launcher.__file__))
        self.enter_context(mock.patch.object(worker, "_LAUNCHER", script))
        self.check_open(worker.LocalWorker(), "unshare: not here")

    def test_isolation_declined(self):
        self.check_open(worker.LocalWorker(isolate=False), "isolate=False")

    def check_open(self, local, reason):
        with self.assertLogs(level="WARNING") as logs:
            local.start()
        self.addCleanup(local.stop)
        self.assertFalse(local.isolated)
        port = local.target.removeprefix("127.0.0.1:")
        self.assertLen(logs.output, 1)
        self.assertRegex(logs.output[0], rf"port {port} of every .*{reason}.*max_user_namespaces")
        self.assertNotIn("\n", logs.output[0])
        # The checks of the isolated worker can fail: here they find it.
        self.assertNotEmpty(_listening("self").keys() & _open_files(local.pids[1]))
        socket.create_connection(("127.0.0.1", int(port)), timeout=1.0).close()
        local.stop()
        self.assert_ended(local.pids)
        self.assert_no_folder()


class ComputationTest(WorkerTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
        import numpy as np
        import tensorflow as tf
        import tensorflow_federated as tff

        cls.tf, cls.tff = tf, tff

        @tff.federated_computation(tff.FederatedType(np.int32, tff.CLIENTS))
        def federated_sum(values):
            return tff.federated_sum(values)

        @tff.tensorflow.computation
        def endless():
            return tf.while_loop(lambda i: i < 1_000_000_000, lambda i: (i + 1,), (0,))

        cls.federated_sum, cls.endless = federated_sum, endless

    def outcome(self, computation):
        """The exception that a call raises, within bounded time."""
        outcomes = []

        def run():
            with self.tff.framework.get_context_stack().install(self.context):
                try:
                    outcomes.append(computation())
                except BaseException as error:
                    outcomes.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(_WAIT_SECONDS)
        self.assertFalse(thread.is_alive(), "the call hangs")
        return outcomes[0]

    @parameterized.parameters(True, False)
    def test_computes(self, isolate):
        stack = self.tff.framework.get_context_stack()
        before = stack.current
        with worker.local_execution(isolate=isolate) as local:
            self.assertIsNot(stack.current, before)
            self.assertEqual(type(self).federated_sum([1, 2, 39]), 42)
            self.assertTrue(local.alive)
        self.assertIs(stack.current, before)
        self.assertFalse(local.alive)

    def test_large_values_pass(self):
        import numpy as np

        @self.tff.tensorflow.computation(self.tff.TensorType(np.int32, [None]))
        def reverse(x):
            return x[::-1]

        values = np.arange(3_000_000, dtype=np.int32)
        with worker.local_execution():
            np.testing.assert_array_equal(reverse(values), values[::-1])

    @parameterized.named_parameters(("launcher", 0, "launcher"), ("worker", 1, "ended by SIGKILL"))
    def test_death_while_computing(self, which, message):
        with worker.LocalWorker() as local:
            self.context = local.execution_context()
            self.assertEqual(self.outcome(lambda: type(self).federated_sum([1, 2])), 3)
            killer = threading.Timer(1.0, os.kill, (local.pids[which], signal.SIGKILL))
            killer.start()
            for _ in range(2):  # In flight, and afterwards.
                error = self.outcome(type(self).endless)
                self.assertIsInstance(error, worker.WorkerDiedError)
                self.assertRegex(str(error), message)
            local.restart()
            self.assertEqual(self.outcome(lambda: type(self).federated_sum([3, 4])), 7)
            self.context = local.execution_context()
            self.assertEqual(self.outcome(lambda: type(self).federated_sum([5])), 5)

    def test_a_stopped_worker_says_so(self):
        with worker.LocalWorker() as local:
            self.context = local.execution_context()
        error = self.outcome(lambda: type(self).federated_sum([1]))
        self.assertIsInstance(error, worker.WorkerDiedError)
        self.assertIn("was stopped", str(error))

    def test_errors_of_a_computation_are_not_deaths(self):
        @self.tff.tensorflow.computation
        def read_nothing():
            return self.tf.io.read_file("/no/such/file")

        with worker.LocalWorker() as local:
            self.context = local.execution_context()
            error = self.outcome(read_nothing)
            self.assertIn("/no/such/file", str(error))
            self.assertNotIsInstance(error, worker.WorkerDiedError)
            self.assertTrue(local.alive)

    def test_changing_numbers_of_clients_do_not_fill_the_worker(self):
        with worker.local_execution() as local:

            def threads():
                return len(os.listdir(f"/proc/{local.pids[1]}/task"))

            counts = []
            for clients in range(1, 81):
                self.assertEqual(type(self).federated_sum([1] * clients), clients)
                counts.append(threads())
        # Two threads for each number of clients if nothing is given back.
        self.assertLess(counts[79] - counts[19], 60)

    @parameterized.parameters(False, True)
    def test_deterministic_ops(self, deterministic):
        @self.tff.tensorflow.computation
        def noise():
            return self.tf.random.normal([1])

        with worker.LocalWorker(deterministic_ops=deterministic) as local:
            self.context = local.execution_context()
            outcome = self.outcome(noise)
            self.assertEqual(isinstance(outcome, Exception), deterministic, outcome)


if __name__ == "__main__":
    absltest.main()
