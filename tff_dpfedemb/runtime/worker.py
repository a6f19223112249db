"""TFF's C++ worker, kept private to the program that uses it and gone when that program is gone.

TFF runs every computation in a child process that, as TFF starts it, outlives Python, holds its
standard output open, and accepts TensorFlow graphs from anybody who reaches a port that is open on
all interfaces. `LocalWorker` starts the same program with another life: it listens in a network
namespace of its own, reached through a Unix socket that only this user can open, and ends with
this process however this process ends. There it has no network: it reads local files only.
"""

import collections
import contextlib
import importlib.util
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
import weakref
from collections.abc import Iterator, Mapping
from typing import IO, Any

import grpc
from absl import logging

_LAUNCHER = os.path.join(os.path.dirname(__file__), "_launcher.py")
_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),
)
_MAX_EXECUTORS = 8
_MAX_SOCKET_PATH_BYTES = 107
_LOG_TAIL_BYTES = 2000
_STOP_TIMEOUT_SECONDS = 5.0
_POLL_SECONDS = 0.2
_REMEDY = (
    "enable user namespaces (sysctl user.max_user_namespaces above 0, "
    "kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0; in a "
    "container --cap-add SYS_ADMIN or a seccomp profile that allows unshare), or close the port "
    "in a firewall"
)


class WorkerDiedError(RuntimeError):
    """The worker that was to run a computation is not running."""


class LocalWorker:
    """A TFF worker process on this machine, as a context manager.

    Starting, stopping and restarting belong to one thread at a time; computations may come from
    any. A worker that is neither stopped nor left by `with` ends with this object or this process.
    """

    def __init__(
        self,
        *,
        max_concurrent_computation_calls: int | None = None,
        isolate: bool = True,
        deterministic_ops: bool = False,
        start_timeout_seconds: float = 60.0,
    ) -> None:
        """Prepares a worker; starts nothing.

        Args:
            max_concurrent_computation_calls: How many clients the worker runs at a time, at least
                1; None for the number of cores that this process may use.
            isolate: Whether the worker gets a network namespace of its own. False, or a system
                that does not allow it, leaves it open on a port of every interface, with a
                warning.
            deterministic_ops: Whether TensorFlow refuses operations that may differ from run to
                run. It then also refuses random operations without a seed, and with them the
                noise of TF Privacy's queries.
            start_timeout_seconds: Bound on each start, in seconds.

        Raises:
            ValueError: If an argument is out of its range.
        """
        if max_concurrent_computation_calls is None:
            max_concurrent_computation_calls = _usable_cores()
        if max_concurrent_computation_calls < 1:
            raise ValueError(
                "max_concurrent_computation_calls must be at least 1, got "
                f"{max_concurrent_computation_calls}."
            )
        if not start_timeout_seconds > 0:
            raise ValueError(f"start_timeout_seconds must be above 0, got {start_timeout_seconds}.")
        self._max_concurrent_computation_calls = max_concurrent_computation_calls
        self._isolate = isolate
        self._deterministic_ops = deterministic_ops
        self._start_timeout_seconds = start_timeout_seconds
        self._process: subprocess.Popen | None = None
        self._cleanup: weakref.finalize | None = None
        self._log: IO[bytes] | None = None
        self._channel: grpc.Channel | None = None
        self._stub: Any = None
        self._isolated = False
        self._target = ""
        self._worker_pid = 0
        self._absence = "was not started"

    def __enter__(self) -> "LocalWorker":
        """Starts the worker."""
        self.start()
        return self

    def __exit__(self, *unused_exception: object) -> None:
        """Stops the worker."""
        self.stop()

    @property
    def alive(self) -> bool:
        """Whether the worker is running."""
        return self._process is not None and self._process.poll() is None

    @property
    def isolated(self) -> bool:
        """Whether the worker, as last started, is out of everybody else's reach."""
        return self._isolated

    @property
    def pids(self) -> tuple[int, ...]:
        """Ids of the launcher's and the worker's process, as last started."""
        return (self._process.pid, self._worker_pid) if self._process else ()

    @property
    def target(self) -> str:
        """The gRPC target of the worker, as last started."""
        return self._target

    def start(self) -> None:
        """Starts the worker and waits until it answers.

        Raises:
            RuntimeError: If it is already running.
            OSError: If no folder can hold its socket.
            TimeoutError: If it does not answer in time.
            WorkerDiedError: If it ends while starting.
        """
        if self.alive:
            raise RuntimeError("The worker is already running.")
        self.stop()
        deadline = time.monotonic() + self._start_timeout_seconds
        try:
            reason = self._launch(self._isolate, deadline)
            if reason:
                self.stop()
                self._launch(False, deadline)
            if not self._isolated:
                logging.warning(
                    "TFF's worker accepts connections from anybody on port %s of every network "
                    "interface (%s). To shut it off: %s.",
                    self._target.rpartition(":")[2],
                    reason or "isolate=False",
                    _REMEDY,
                )
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends the worker and removes its folder, within seconds; does nothing if it has ended."""
        if self._cleanup is None or not self._cleanup.alive:
            return
        asked = self.alive
        self._cleanup()
        self._absence = "was stopped" if asked else self._cause()
        self._channel = self._stub = None

    def restart(self) -> None:
        """Stops the worker if it is still running, and starts it anew.

        Execution contexts made before serve the new worker.
        """
        self.stop()
        self.start()

    def execution_context(self) -> Any:
        """A `tff.framework.SyncExecutionContext` that runs computations in this worker.

        Its computations raise `WorkerDiedError` while the worker is not running.
        """
        import tensorflow_federated as tff  # Takes seconds, and starting needs none of it.

        created: collections.deque[dict[Any, int]] = collections.deque()

        def stack(cardinalities: Mapping[Any, int]) -> Any:
            self._require_alive()
            # TFF forgets executors without telling the worker, which then keeps two threads and
            # half a megabyte for each: too much where the number of clients changes every round.
            if len(created) == _MAX_EXECUTORS:
                factory.clean_up_executor(created.popleft())
            created.append(dict(cardinalities))
            if self._stub is None:
                self._stub = tff.framework.RemoteExecutorGrpcStub(self._channel)
            executor = tff.framework.RemoteExecutor(self._stub)
            executor.set_cardinalities({tff.CLIENTS: 0, **cardinalities})
            return executor

        factory = tff.framework.ResourceManagingExecutorFactory(stack)
        return tff.framework.SyncExecutionContext(
            executor_fn=factory,
            compiler_fn=tff.backends.native.desugar_and_transform_to_native,
            transform_args=tff.tensorflow.transform_args,
            transform_result=tff.tensorflow.transform_result,
        )

    def _launch(self, isolate: bool, deadline: float) -> str:
        """Starts one launcher; returns why isolation was refused, or "" once the worker answers."""
        folder = _private_folder()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (outlives this call, has no name)
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", _LAUNCHER),
                *(str(os.getpid()), folder, str(int(isolate)), _worker_binary()),
                f"--max_concurrent_computation_calls={self._max_concurrent_computation_calls}",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            bufsize=0,
            env={
                **os.environ,
                "TF_CPP_MIN_LOG_LEVEL": "3",
                "TF_DETERMINISTIC_OPS": str(int(self._deterministic_ops)),
                # With an arena a thread, memory creeps up for hundreds of rounds.
                "MALLOC_ARENA_MAX": os.environ.get("MALLOC_ARENA_MAX", "2"),
            },
            start_new_session=True,  # Ctrl-C in the terminal is ours to handle.
        )
        self._cleanup = weakref.finalize(self, _end, self._process, folder, os.getpid())
        report = self._read_report(deadline)
        if "refused" in report:
            return report["refused"]
        self._worker_pid = report["worker_pid"]
        self._isolated = isolate
        if isolate:
            self._target = "unix:" + urllib.parse.quote(os.path.join(folder, "socket"))
        else:
            self._target = f"127.0.0.1:{report['port']}"
        self._channel = grpc.insecure_channel(self._target, _CHANNEL_OPTIONS)
        ready = grpc.channel_ready_future(self._channel)
        while True:
            with contextlib.suppress(grpc.FutureTimeoutError):
                ready.result(timeout=_POLL_SECONDS)
                return ""
            self._require_time(deadline)

    def _read_report(self, deadline: float) -> dict[str, Any]:
        """The launcher's one line."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not selector.select(timeout=_POLL_SECONDS):
                self._require_time(deadline)
        line = self._process.stdout.readline()
        if not line:
            self._process.wait(timeout=_STOP_TIMEOUT_SECONDS)
            self._require_alive()
        return json.loads(line)

    def _require_time(self, deadline: float) -> None:
        """Raises if the worker has ended or `deadline` has passed."""
        self._require_alive()
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"TFF's worker did not answer within {self._start_timeout_seconds} s."
                + self._log_tail()
            )

    def _require_alive(self) -> None:
        """Raises if the worker is not running."""
        if self.alive:
            return
        self.stop()
        raise WorkerDiedError(f"TFF's worker {self._absence}.{self._log_tail()}")

    def _cause(self) -> str:
        """How the worker ended by itself."""
        status = self._process.returncode
        if status < 0:
            return f"ended because its launcher was ended by {_signal_name(-status)}"
        if status > 128:
            return (
                f"was ended by {_signal_name(status - 128)} "
                "(SIGKILL is what the system sends when memory runs out)"
            )
        return f"exited with status {status}"

    def _log_tail(self) -> str:
        """The end of the worker's log, ready to be appended to a message."""
        if self._log is None:
            return ""
        descriptor = self._log.fileno()
        start = max(0, os.fstat(descriptor).st_size - _LOG_TAIL_BYTES)
        tail = os.pread(descriptor, _LOG_TAIL_BYTES, start).decode(errors="replace").strip()
        return f" The end of its log:\n{tail}" if tail else ""


@contextlib.contextmanager
def local_execution(
    *,
    max_concurrent_computation_calls: int | None = None,
    isolate: bool = True,
    deterministic_ops: bool = False,
    start_timeout_seconds: float = 60.0,
) -> Iterator[LocalWorker]:
    """Runs this thread's TFF computations in a worker of their own while the context is open.

    Args:
        max_concurrent_computation_calls: As for `LocalWorker`.
        isolate: As for `LocalWorker`.
        deterministic_ops: As for `LocalWorker`.
        start_timeout_seconds: As for `LocalWorker`.

    Yields:
        The running `LocalWorker`.

    Raises:
        What `LocalWorker` and its `start` raise.
    """
    import tensorflow_federated as tff

    with (
        LocalWorker(
            max_concurrent_computation_calls=max_concurrent_computation_calls,
            isolate=isolate,
            deterministic_ops=deterministic_ops,
            start_timeout_seconds=start_timeout_seconds,
        ) as worker,
        tff.framework.get_context_stack().install(worker.execution_context()),
    ):
        yield worker


def forbid_stock_worker() -> None:
    """Makes computations outside of `local_execution` fail, where TFF would start its own worker.

    That one listens on all network interfaces; and it complains, unused, when Python ends.
    """
    import tensorflow_federated as tff

    class Refusal(tff.framework.SyncContext):
        """Computes nothing."""

        def invoke(self, comp: Any, arg: Any) -> Any:
            raise RuntimeError("TFF computations are run inside of local_execution only")

    tff.framework.set_default_context(Refusal())


def _usable_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _signal_name(number: int) -> str:
    """The name of a signal, or its number if it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _worker_binary() -> str:
    """The path of TFF's worker, found without importing TFF."""
    package = importlib.util.find_spec("tensorflow_federated").submodule_search_locations[0]
    return os.path.join(package, "data", "worker_binary")


def _private_folder() -> str:
    """A new folder of mode 0700 whose path leaves room for a socket's."""
    problems = []
    for parent in (tempfile.gettempdir(), "/tmp"):
        try:
            folder = tempfile.mkdtemp(prefix="tff_worker_", dir=parent)
        except OSError as error:
            problems.append(f"{parent}: {error.strerror}")
            continue
        if len(os.fsencode(os.path.join(folder, "socket"))) <= _MAX_SOCKET_PATH_BYTES:
            return folder
        os.rmdir(folder)
        problems.append(f"{parent}: longer than the {_MAX_SOCKET_PATH_BYTES} bytes of a socket")
    raise OSError(
        "No folder for the worker's socket; set TMPDIR to a short path that can be written. "
        "Tried " + "; ".join(problems) + "."
    )


def _end(process: subprocess.Popen, folder: str, owner: int) -> None:
    """Ends a launcher, which ends its worker, and removes the folder if the launcher could not."""
    if os.getpid() != owner:
        return  # A fork of the owner must not end the owner's worker.
    process.stdin.close()
    process.terminate()  # A fork of this process may hold the pipe open.
    try:
        process.wait(timeout=_STOP_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout=_STOP_TIMEOUT_SECONDS)
    process.stdout.close()
    shutil.rmtree(folder, ignore_errors=True)
