"""Tests of the contact sheet and of its command line."""

import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
from absl.testing import absltest
from PIL import Image

from tasks import preview, registry


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the program as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "tasks.preview", *arguments], capture_output=True, text=True
    )


class PreviewTest(absltest.TestCase):
    def test_writes_a_sheet_and_names_it(self):
        path = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory())) / "sheet.png"
        done = _run("--task=glyphs", f"--output={path}", "--preview_users=3", "--num_users=50")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout, f"Wrote {path}\n")
        self.assertEqual(os.listdir(path.parent), ["sheet.png"])
        with Image.open(path) as sheet:
            pixels = np.asarray(sheet.convert("L"))
        # Three rows of 20 tiles of 56 pixels, with names, title and margins around them.
        self.assertBetween(pixels.shape[0], 3 * 56, 3 * 56 + 100)
        self.assertBetween(pixels.shape[1], 20 * 56, 20 * 56 + 200)
        self.assertGreater(pixels.max(), 200)

    def test_bad_arguments_end_with_one_line_and_status_2(self):
        folder = self.enterContext(tempfile.TemporaryDirectory())
        for arguments, named in (
            (["--output=/nonexistent/folder/x.png"], "--output=/nonexistent/folder/x.png"),
            (["--split=holdout"], "split"),
            (["--preview_users=0"], "preview_users"),
            ([f"--output={folder}/x.png", "--num_users=0"], "num_users"),
            (["stray"], "stray"),
        ):
            with self.subTest(named):
                done = _run(*arguments)
                self.assertEqual(done.returncode, 2)
                self.assertLen(done.stderr.splitlines(), 1)
                self.assertIn(named, done.stderr)
        self.assertEmpty(os.listdir(folder))

    def test_import_needs_no_tensorflow(self):
        code = "import sys, tasks.preview; assert 'tensorflow' not in sys.modules"
        subprocess.run([sys.executable, "-c", code], check=True)

    def test_rows_hold_the_users_images_in_order_of_class(self):
        task = registry.build("glyphs", num_users=1000)
        rows = preview.user_rows(task, "train", 3)
        self.assertEqual([name for name, _, _ in rows], ["0", "499", "999"])
        images, class_ids = task.load_users(np.array([499]))
        self.assertTrue((np.diff(rows[1][2]) >= 0).all())
        self.assertCountEqual(rows[1][2], class_ids.numpy())
        first = class_ids.numpy().argmin()
        np.testing.assert_array_equal(rows[1][1][0], images.numpy()[first])

    def test_held_out_rows_are_of_one_writer_each(self):
        task = registry.build("glyphs", evaluation_writers_per_class=1)
        held_out = task.evaluation_set("test")
        for name, images, class_ids in preview.user_rows(task, "test", 2):
            theirs = held_out.user_ids == int(name)
            self.assertCountEqual(class_ids, held_out.class_ids[theirs])
            self.assertLen(images, theirs.sum())


if __name__ == "__main__":
    absltest.main()
