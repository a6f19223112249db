"""Tests of the command that writes fixtures."""

import os
import subprocess
import sys
import tempfile

from absl.testing import absltest, parameterized

from tasks import fixtures
from tasks.fixtures import image_folder

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(fixtures.__file__)))


def _contents(folder: str) -> dict[str, bytes]:
    """The bytes of every file below a folder."""
    found = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            with open(path, "rb") as file:
                found[os.path.relpath(path, folder)] = file.read()
    return found


class FixturesTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = self.enterContext(tempfile.TemporaryDirectory())

    def run_command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs the program as a user does."""
        return subprocess.run(
            [sys.executable, "-m", "tasks.fixtures", *arguments],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=60,
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": _ROOT},
        )

    def test_writes_what_the_module_writes_and_says_how_to_go_on(self):
        done = self.run_command("--task=image_folder", "--output=new/own")
        self.assertEqual(done.returncode, 0, done.stderr)
        image_folder.write(os.path.join(self.folder, "expected"))
        expected = _contents(os.path.join(self.folder, "expected"))
        self.assertEqual(_contents(os.path.join(self.folder, "new/own")), expected)
        self.assertEqual(os.listdir(os.path.join(self.folder, "new")), ["own"])
        megabytes = sum(map(len, expected.values())) / 1e6
        self.assertEqual(
            done.stdout.splitlines(),
            [
                f"Wrote new/own: {len(expected)} files, {megabytes:.1f} MB.",
                "Go on with: python -m tasks.prepare --task=image_folder --source=new/own "
                "--cache=cache",
            ],
        )

    @parameterized.parameters(
        ([], ["--task: is missing", "--output: is missing"]),
        (["--task=glyphs", "--output=new"], ["--task=glyphs: accepted is"]),
        (["--task=emnist", "--output=full"], ["--output=full: is not empty"]),
        (["--task=emnist", "--output=full/file"], ["--output=full/file: is not empty"]),
        (["--task=image_folder", "--output=full/file/x"], ["--output=full/file/x: "]),
        (["emnist"], ["'emnist': accepted are flags"]),
    )
    def test_bad_arguments_end_with_a_line_each_and_status_2(self, arguments, words):
        os.mkdir(os.path.join(self.folder, "full"))
        with open(os.path.join(self.folder, "full", "file"), "w") as file:
            file.write("kept")
        done = self.run_command(*arguments)
        self.assertEqual(done.returncode, 2)
        self.assertLen(done.stderr.splitlines(), len(words), done.stderr)
        for word in words:
            self.assertIn(word, done.stderr)
        self.assertEqual(_contents(self.folder), {"full/file": b"kept"})

    def test_an_empty_folder_may_be_filled(self):
        os.mkdir(os.path.join(self.folder, "empty"))
        done = self.run_command("--task=image_folder", "--output=empty")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("manifest.csv", os.listdir(os.path.join(self.folder, "empty")))


if __name__ == "__main__":
    absltest.main()
