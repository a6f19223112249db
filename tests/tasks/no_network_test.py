"""Proof that fixtures, preparation and loading use no network.

Every command runs with a hook that reports and ends any use of a network by Python, and, where
namespaces are allowed, in a network namespace of its own, in which there is nothing to reach for
any code.
"""

import os
import shlex
import socket
import subprocess
import sys
import tempfile

from absl.testing import absltest, parameterized

import tasks

_ROOT = os.path.dirname(os.path.dirname(tasks.__file__))
_USED = 99

# Python imports a module of this name at its start. Sockets of the machine's own are let be.
_HOOK = f"""
import os, socket, sys

_EVENTS = ("socket.connect", "socket.sendto", "socket.sendmsg")
_NAMES = ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr")


def _watch(event, arguments):
    if event in _NAMES or (event in _EVENTS and arguments[0].family != socket.AF_UNIX):
        print("network:", event, arguments[1:], file=sys.stderr, flush=True)
        os._exit({_USED})


sys.addaudithook(_watch)
"""

_LOAD = """
import sys
import numpy as np
from tasks import registry

task = registry.build(sys.argv[1], cache=sys.argv[2])
images, class_ids = task.load_users(task.user_ids(np.arange(task.num_users)))
assert len(images) == len(class_ids) > 0
for split in ("validation", "test"):
    assert task.evaluation_set(split).images[:].shape[0] > 0
print(task.describe())
"""

_ISOLATE = ["unshare", "--map-root-user", "--net"]


def _can_isolate() -> bool:
    """Whether namespaces are allowed here."""
    try:
        return subprocess.run([*_ISOLATE, "true"], capture_output=True).returncode == 0
    except OSError:
        return False


class NoNetworkTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.isolate = _ISOLATE if _can_isolate() else []

    def setUp(self):
        super().setUp()
        self.folder = self.enterContext(tempfile.TemporaryDirectory())
        with open(os.path.join(self.folder, "sitecustomize.py"), "w") as file:
            file.write(_HOOK)

    def run_python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs Python without a network."""
        return subprocess.run(
            [*self.isolate, sys.executable, *arguments],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=120,
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([self.folder, _ROOT])},
        )

    @parameterized.parameters("digiface", "emnist", "image_folder", "inaturalist", "landmarks")
    def test_fixture_preparation_and_loading(self, task):
        written = self.run_python("-m", "tasks.fixtures", f"--task={task}", "--output=source")
        self.assertEqual(written.returncode, 0, written.stderr)
        # What is printed is what works.
        go_on = shlex.split(written.stdout.splitlines()[-1].partition(": ")[2])
        self.assertEqual(go_on[0], "python")
        prepared = self.run_python(*go_on[1:])
        self.assertEqual(prepared.returncode, 0, prepared.stderr)
        loaded = self.run_python("-c", _LOAD, task, "cache")
        self.assertEqual(loaded.returncode, 0, loaded.stderr)

    @parameterized.parameters(
        "socket.create_connection(('127.0.0.1', {port}))",
        "socket.socket(socket.AF_INET6).connect(('::1', {port}))",
        "socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))",
        "socket.getaddrinfo('localhost', {port})",
        "urllib.request.urlopen('http://127.0.0.1:{port}')",
    )
    def test_a_use_by_python_is_seen(self, use):
        code = f"import socket, urllib.request\ntry: {use.format(port=9)}\nexcept OSError: pass"
        done = self.run_python("-c", code)
        self.assertEqual(done.returncode, _USED, done.stderr)
        self.assertStartsWith(done.stderr, "network: socket.")

    def test_a_use_by_any_code_fails(self):
        if not self.isolate:
            self.skipTest("namespaces are not allowed here; the hook alone watches")
        code = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])), 9)"
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(server.getsockname()[1])
            # -I: without the hook.
            command = [sys.executable, "-I", "-c", code, port]
            self.assertEqual(subprocess.run(command).returncode, 0)
            isolated = subprocess.run([*self.isolate, *command], capture_output=True, text=True)
            self.assertEqual(isolated.returncode, 1)
            self.assertIn("unreachable", isolated.stderr)


if __name__ == "__main__":
    absltest.main()
