"""Files are whole or absent, whatever happens while they are written."""

import json
import os
import signal
import subprocess
import sys
import tempfile

from absl.testing import absltest, parameterized

from tff_dpfedemb import atomic

_ROOT = os.path.dirname(os.path.dirname(atomic.__file__))

# Writes a file or a folder and kills itself before the block ends.
_KILLED = """
import os, signal, sys
from tff_dpfedemb import atomic
with atomic.replacing(sys.argv[1]) as new:
    if sys.argv[2] == "folder":
        os.mkdir(new)
        new = os.path.join(new, "part")
    with open(new, "w") as file:
        file.write("half")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
"""


def _read(*path: str) -> str:
    with open(os.path.join(*path), encoding="utf-8") as file:
        return file.read()


class AtomicTest(parameterized.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = self.enterContext(tempfile.TemporaryDirectory())
        self.path = os.path.join(self.folder, "thing")

    def test_writes_and_replaces_a_file(self) -> None:
        atomic.write_text(self.path, "ä\n")
        atomic.write_text(self.path, "b\n")
        self.assertEqual(_read(self.path), "b\n")
        self.assertEqual(os.listdir(self.folder), ["thing"])

    def test_the_old_file_stands_until_the_block_ends(self) -> None:
        atomic.write_text(self.path, "old")
        with atomic.replacing(self.path) as new:
            with open(new, "w", encoding="utf-8") as file:
                file.write("new")
            self.assertEqual(_read(self.path), "old")
        self.assertEqual(_read(self.path), "new")

    @parameterized.parameters(ValueError, KeyboardInterrupt)
    def test_an_exception_leaves_the_old_file_and_nothing_else(self, kind: type) -> None:
        atomic.write_text(self.path, "old")
        with self.assertRaises(kind), atomic.replacing(self.path) as new:
            with open(new, "w", encoding="utf-8") as file:
                file.write("half")
            raise kind
        self.assertEqual(_read(self.path), "old")
        self.assertEqual(os.listdir(self.folder), ["thing"])

    def test_a_folder_replaces_a_folder_whole(self) -> None:
        for name in ("first", "second"):
            with atomic.replacing(self.path) as new:
                os.makedirs(os.path.join(new, "sub"))
                atomic.write_text(os.path.join(new, "sub", name), name)
        self.assertEqual(os.listdir(self.path), ["sub"])
        self.assertEqual(os.listdir(os.path.join(self.path, "sub")), ["second"])
        self.assertEqual(os.listdir(self.folder), ["thing"])

    def test_an_exception_leaves_the_old_folder(self) -> None:
        os.mkdir(self.path)
        atomic.write_text(os.path.join(self.path, "a"), "old")
        with self.assertRaises(ValueError), atomic.replacing(self.path) as new:
            os.mkdir(new)
            raise ValueError
        self.assertEqual(_read(self.path, "a"), "old")

    def test_a_block_that_writes_nothing_is_an_error(self) -> None:
        atomic.write_text(self.path, "old")
        with self.assertRaises(FileNotFoundError), atomic.replacing(self.path):
            pass
        self.assertEqual(_read(self.path), "old")

    @parameterized.parameters("file", "folder")
    def test_a_kill_leaves_the_old_and_something_that_can_be_removed(self, kind: str) -> None:
        old = self.path
        if kind == "folder":
            os.mkdir(self.path)
            old = os.path.join(self.path, "old")
        atomic.write_text(old, "old")
        done = subprocess.run(
            [sys.executable, "-c", _KILLED, self.path, kind],
            env={**os.environ, "PYTHONPATH": _ROOT},
            check=False,
        )
        self.assertEqual(done.returncode, -signal.SIGKILL)
        self.assertEqual(_read(old), "old")
        (left,) = set(os.listdir(self.folder)) - {"thing"}
        self.assertTrue(atomic.is_partial(left))
        for name in (".hidden", "other.partial"):
            atomic.write_text(os.path.join(self.folder, name), "not ours")
        atomic.remove_partial(self.folder)
        self.assertCountEqual(os.listdir(self.folder), ["thing", ".hidden", "other.partial"])
        self.assertEqual(_read(old), "old")

    def test_permissions(self) -> None:
        self.addCleanup(os.umask, os.umask(0o022))
        atomic.write_text(self.path, "secret", mode=0o600)
        self.assertEqual(os.stat(self.path).st_mode & 0o777, 0o600)
        atomic.write_text(self.path, "public")
        self.assertEqual(os.stat(self.path).st_mode & 0o777, 0o644)

    def test_json_round_trips(self) -> None:
        value = {"a": 0.1, "b": [1, None, "inf"]}
        atomic.write_json(self.path, value)
        self.assertEqual(json.loads(_read(self.path)), value)

    @parameterized.parameters(float("nan"), float("inf"), -float("inf"))
    def test_json_refuses_what_json_has_not(self, value: float) -> None:
        atomic.write_json(self.path, 1)
        with self.assertRaises(ValueError):
            atomic.write_json(self.path, [value])
        self.assertEqual(_read(self.path), "1\n")


if __name__ == "__main__":
    absltest.main()
