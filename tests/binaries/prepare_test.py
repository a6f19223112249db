"""Preparation as a shell sees it: refused, stopped, gone on with, done."""

import os
import signal
import subprocess
import sys
import tempfile
import time

from absl.testing import absltest, parameterized

from tasks import image_cache, registry
from tasks.fixtures import image_folder

_ROOT = os.path.dirname(os.path.dirname(registry.__file__))
# That of a shell that has not heard of TensorFlow, which sets its log level where it is imported.
_ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}


def _start(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "tasks.prepare", *arguments],
        cwd=_ROOT,
        stdin=subprocess.DEVNULL,
        env=_ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _run(*arguments):
    process = _start(*arguments)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


class RefusalTest(parameterized.TestCase):
    @parameterized.parameters(
        (
            [],
            ["--task=glyphs: needs no preparation", "--source: is missing", "--cache: is missing"],
        ),
        (
            ["--task=emnist", "--cache=CACHE", "--source=/nonexistent", "--allow_missing=1"],
            ["--source=/nonexistent: does not exist", "--allow_missing=1: accepted are shares"],
        ),
        (
            ["--task=emnist", "--cache=CACHE", "--source=SOURCE"],
            ["--source=SOURCE: holds neither emnist_all.sqlite"],
        ),
        (
            ["--task=digiface", "--cache=CACHE", "--source=SOURCE"],
            ["--source=SOURCE: holds no image of DigiFace-1M"],
        ),
        (
            ["--task=landmarks", "--cache=CACHE", "--source=SOURCE", "--image_size=0"],
            ["--image_size=0: accepted are"],
        ),
        (
            ["--task=emnist", "--cache=CACHE", "--source=SOURCE", "--image_size=9"],
            ["--image_size=9: --task=emnist does not take it"],
        ),
        (["--task=tfds", "--cache=CACHE", "--source=SOURCE"], ["--tfds_name: is missing"]),
    )
    def test_says_all_that_is_wrong_and_writes_nothing(self, arguments, expected):
        source = self.enterContext(tempfile.TemporaryDirectory())
        cache = os.path.join(source, "new", "cache")

        def fill_in(text):
            return text.replace("SOURCE", source).replace("CACHE", cache)

        status, out, err = _run(*map(fill_in, arguments))
        self.assertEqual(status, 2, err)
        self.assertEmpty(out)
        lines = [line for line in err.splitlines() if not line.startswith("Licence: ")]
        self.assertLen(lines, len(expected), err)
        for line, words in zip(sorted(lines), sorted(expected), strict=True):
            self.assertStartsWith(line, f"error: {fill_in(words)}")
        self.assertEmpty(os.listdir(source))


class WholeTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        folder = self.enterContext(tempfile.TemporaryDirectory())
        self.source, self.cache = f"{folder}/source", f"{folder}/cache"
        self.flags = (
            "--task=image_folder",
            f"--source={self.source}",
            f"--cache={self.cache}",
            "--image_size=32",
        )

    def test_a_dry_run_writes_nothing(self):
        image_folder.write(self.source)
        status, out, err = _run(*self.flags, "--dry_run")
        self.assertEqual(status, 0, err)
        self.assertRegex(
            out, r"^Would prepare \d+ images of \(32, 32, 3\) in .*image_folder-own-32"
        )
        self.assertFalse(os.path.exists(self.cache))

    def test_an_interrupted_one_goes_on(self):
        image_folder.write(self.source, users=60, classes=20, classes_per_user=20, size=64)
        process = _start(*self.flags, "--workers=1")
        scratch = f"{self.cache}/.image_folder-own-32.preparing/examples.sqlite"
        while not (os.path.exists(scratch) and os.path.getsize(scratch) > 1 << 20):
            self.assertIsNone(process.poll(), "it was done too soon")
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 3, err)
        self.assertIn("The same command goes on from there.", err)
        self.assertNotIn("Traceback", err)
        status, out, err = _run(*self.flags)
        self.assertEqual(status, 0, err)
        self.assertIn("2,400 prepared, 0 missing, 0 undecodable", out)
        self.assertEqual(
            image_cache.ImageCache(f"{self.cache}/image_folder-own-32").facts["present"], 2400
        )


if __name__ == "__main__":
    absltest.main()
