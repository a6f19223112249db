"""Child program that runs TFF's worker, shut off from the network, no longer than its parent.

    python -I -S _launcher.py PARENT_PID FOLDER ISOLATE WORKER_BINARY [FLAG...]

`worker.py` starts it. It imports the standard library alone, so that it is up in tens of
milliseconds and is single-threaded, as a new user namespace requires.

Standard input is a pipe whose end of file means that the parent is gone or wants an end. Standard
output takes one JSON line: {"refused": reason} if ISOLATE is 1 and the system does not allow it
(nothing was started then), else {"worker_pid": ..., "port": ...} once the worker accepts
connections. Standard error, shared with the worker, is the log. The exit status is the worker's,
128 plus the signal if one ended it, or 0 if the end was asked for. FOLDER is removed at the end.
"""

import asyncio
import ctypes
import fcntl
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1

_RELAY_BUFFER_BYTES = 1 << 20
_POLL_SECONDS = 0.02
_PARENT_POLL_SECONDS = 0.5

_libc = ctypes.CDLL(None, use_errno=True)


def _unshare(flags: int) -> None:
    """Moves this process into new namespaces."""
    if _libc.unshare(flags):
        error = ctypes.get_errno()
        raise OSError(error, f"unshare: {os.strerror(error)}")


def _isolate() -> None:
    """Moves this process into a network of its own, that holds a loopback device and no more."""
    if sys.platform != "linux":
        raise OSError(f"{sys.platform} has no network namespaces")
    user, group = os.geteuid(), os.getegid()
    try:
        # Root needs no user namespace, and inside one it could not read other users' files.
        _unshare(_CLONE_NEWNET)
    except PermissionError:
        _unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
        for name, line in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(line)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP))


def _free_port() -> int:
    """A TCP port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _start_worker(command: list[str]) -> subprocess.Popen:
    """Starts the worker so that the kernel ends it if this process ends in any way."""
    launcher = os.getpid()

    def die_with_launcher() -> None:
        if sys.platform == "linux":
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != launcher:
                os._exit(1)

    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        stderr=sys.stderr,
        preexec_fn=die_with_launcher,
    )


def _report(**fields: object) -> None:
    """Tells the parent."""
    os.write(1, json.dumps(fields).encode() + b"\n")


async def _connected(port: int) -> socket.socket:
    """A connection to the worker."""
    connection = socket.socket()
    try:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    except BaseException:
        connection.close()
        raise
    return connection


async def _pump(source: socket.socket, sink: socket.socket) -> None:
    """Copies what arrives at `source` to `sink` until either is closed."""
    loop = asyncio.get_running_loop()
    buffer = memoryview(bytearray(_RELAY_BUFFER_BYTES))
    while size := await loop.sock_recv_into(source, buffer):
        await loop.sock_sendall(sink, buffer[:size])
        await asyncio.sleep(0)  # A socket that is always ready must not starve the others.


async def _relay(client: socket.socket, port: int) -> None:
    """Joins `client` to the worker, until either closes the connection."""
    with client:
        try:
            worker = await _connected(port)
        except OSError:
            return
        with worker:
            pumps = [
                asyncio.create_task(_pump(client, worker)),
                asyncio.create_task(_pump(worker, client)),
            ]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)


async def _offer(folder: str, isolated: bool, worker_pid: int, port: int) -> None:
    """Waits for the worker, tells the parent, then relays to an isolated worker; never returns."""
    while True:
        try:
            (await _connected(port)).close()
            break
        except OSError:
            await asyncio.sleep(_POLL_SECONDS)
    if not isolated:
        _report(worker_pid=worker_pid, port=port)
        await asyncio.Event().wait()
    with socket.socket(socket.AF_UNIX) as listener:
        path = os.path.join(folder, "socket")
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen()
        listener.setblocking(False)
        _report(worker_pid=worker_pid, port=port)
        relays = set()
        while True:
            client, _ = await asyncio.get_running_loop().sock_accept(listener)
            relay = asyncio.create_task(_relay(client, port))
            relays.add(relay)  # The loop alone would not keep the task alive.
            relay.add_done_callback(relays.discard)


async def _orphaned(parent: int) -> None:
    """Returns when the parent is gone, even if a fork of it still holds its end of the pipe."""
    while os.getppid() == parent:
        await asyncio.sleep(_PARENT_POLL_SECONDS)


async def _serve(parent: int, folder: str, isolated: bool, command: list[str]) -> int:
    """Runs the worker until it ends, the parent ends, or the parent asks; returns the status."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(0, ended.set)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, ended.set)
    port = _free_port()
    worker = _start_worker([*command, f"--port={port}"])

    def on_child_signal() -> None:
        if worker.poll() is not None:
            ended.set()

    try:
        loop.add_signal_handler(signal.SIGCHLD, on_child_signal)
        on_child_signal()  # It may have ended before the handler was in place.
        tasks = [
            asyncio.create_task(ended.wait()),
            asyncio.create_task(_orphaned(parent)),
            asyncio.create_task(_offer(folder, isolated, worker.pid, port)),
        ]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        status = worker.poll()
    finally:
        worker.kill()
        worker.wait()
    for task in done:
        task.result()  # Raises what stopped the relay, if anything did.
    if status is None:
        return 0
    return status if status >= 0 else 128 - status


def main(arguments: list[str]) -> int:
    """Runs the program described at the top; returns its exit status."""
    parent, folder, isolate, *command = arguments
    try:
        if isolate == "1":
            try:
                _isolate()
            except OSError as error:
                _report(refused=error.strerror or str(error))
                return 0
        return asyncio.run(_serve(int(parent), folder, isolate == "1", command))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
