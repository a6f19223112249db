"""Preparation: what is decoded how, what is reported, and what a kill leaves behind."""

import hashlib
import io
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time

import numpy as np
from absl.testing import absltest, parameterized
from PIL import Image

from tasks import image_cache, preparation
from tasks.fixtures import pictures
from tasks.preparation import Example, Listing

_SHAPE = (16, 16, 3)
_ROOT = os.path.dirname(os.path.dirname(preparation.__file__))


def _file(mode, value, size=(40, 30), file_format="PNG", **options):
    """An image file of one colour."""
    buffer = io.BytesIO()
    Image.new(mode, size, value).save(buffer, file_format, **options)
    return buffer.getvalue()


def _examples(users=5, images=4):
    return [
        Example(f"u{user}", str(i % 3), f"u{user}/{i}")
        for user in range(users)
        for i in range(images)
    ]


def _pixels(name):
    user, number = name.split("/")
    return pictures.picture(number, user, 0, *_SHAPE[:2])


class PixelsTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("rgb", "RGB", (10, 20, 30), (10, 20, 30)),
        ("grey", "L", 77, (77, 77, 77)),
        ("sixteen_bits", "I;16", 77 * 256, (77, 77, 77)),
        ("transparent", "RGBA", (10, 20, 30, 0), (255, 255, 255)),
        ("opaque", "RGBA", (10, 20, 30, 255), (10, 20, 30)),
        ("bilevel", "1", 1, (255, 255, 255)),
    )
    def test_modes_become_rgb(self, mode, value, expected):
        pixels = preparation.to_pixels(_file(mode, value), _SHAPE)
        self.assertEqual(pixels.shape, _SHAPE)
        np.testing.assert_array_equal(pixels, np.broadcast_to(expected, _SHAPE))

    def test_cmyk_jpegs_become_rgb(self):
        pixels = preparation.to_pixels(_file("CMYK", (0, 255, 255, 0), file_format="JPEG"), _SHAPE)
        np.testing.assert_allclose(pixels[0, 0], (255, 0, 0), atol=6)

    def test_transparency_of_a_palette_becomes_white(self):
        palette = Image.new("P", (20, 20), 1)
        palette.putpalette([0, 0, 0, 9, 9, 9])
        buffer = io.BytesIO()
        palette.save(buffer, "PNG", transparency=1)
        pixels = preparation.to_pixels(buffer.getvalue(), _SHAPE)
        self.assertEqual(pixels.min(), 255)

    def test_colours_become_grey(self):
        pixels = preparation.to_pixels(_file("RGB", (200, 200, 200)), (16, 16, 1))
        np.testing.assert_array_equal(pixels, np.full((16, 16, 1), 200))

    def test_a_photograph_is_turned_as_its_exif_says(self):
        upright = Image.new("RGB", (20, 20), "black")
        upright.paste("white", (0, 0, 20, 10))  # Light above.
        exif = Image.Exif()
        exif[0x0112] = 8  # Stored turned by 90 degrees: to be turned back.
        buffer = io.BytesIO()
        upright.transpose(Image.Transpose.ROTATE_270).save(buffer, "PNG", exif=exif)
        pixels = preparation.to_pixels(buffer.getvalue(), (20, 20, 3))
        np.testing.assert_array_equal(pixels, np.asarray(upright))

    @parameterized.parameters(((60, 20),), ((20, 60),))
    def test_the_middle_is_kept_and_nothing_is_stretched(self, size):
        picture = Image.new("RGB", size, "black")
        left, top = (size[0] - 20) // 2, (size[1] - 20) // 2
        picture.paste("white", (left, top, left + 20, top + 20))
        buffer = io.BytesIO()
        picture.save(buffer, "PNG")
        self.assertEqual(preparation.to_pixels(buffer.getvalue(), (20, 20, 3)).min(), 255)

    def test_large_jpegs_keep_their_detail(self):
        picture = pictures.picture("a", "b", 0, 512, 384)
        small = preparation.to_pixels(pictures.encode(picture), (64, 48, 3))
        expected = picture.reshape(64, 8, 48, 8, 3).mean((1, 3))
        self.assertLess(np.abs(small - expected).mean(), 4)

    def test_an_array_of_the_shape_stays_as_it_is(self):
        image = _pixels("u/1")
        self.assertIs(preparation.to_pixels(image, _SHAPE), image)

    @parameterized.parameters((b"",), (b"junk",), (_file("RGB", 1, file_format="JPEG")[:-200],))
    def test_what_is_no_picture_is_refused(self, data):
        with self.assertRaises(OSError):
            preparation.to_pixels(data, _SHAPE)


class PrepareTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        folder = self.enterContext(tempfile.TemporaryDirectory())
        self.path = os.path.join(folder, "cache")
        self.absent, self.broken, self.read_names = set(), set(), []

    def _read(self, name):
        self.read_names.append(name)
        if name in self.absent:
            raise FileNotFoundError(name)
        return b"no picture" if name in self.broken else _pixels(name)

    def _prepare(self, examples=None, **options):
        examples = _examples() if examples is None else examples
        return preparation.prepare(
            Listing(examples, self._read, {"from": "a test"}), self.path, _SHAPE, **options
        )

    def _check_whole(self, examples):
        """The cache holds exactly these examples, with their pixels."""
        cache = image_cache.ImageCache(self.path)
        table = cache.table()
        images = cache.read(table.items)
        found = {}
        for row, image in enumerate(images):
            user = None if table.users[row] < 0 else table.user_names[table.users[row]]
            key = (user, table.class_names[table.classes[row]], table.splits[row])
            found.setdefault(key, []).append(image.tobytes())
        expected = {}
        for e in examples:
            key = (e.user, e.class_name, e.split)
            expected.setdefault(key, []).append(_pixels(e.image).tobytes())
        self.assertEqual(
            {k: sorted(v) for k, v in found.items()}, {k: sorted(v) for k, v in expected.items()}
        )

    def test_holds_what_was_listed(self):
        examples = [
            *_examples(),
            *(Example(None, "9", f"nobody/{i}", "test") for i in range(3)),
            Example("u1", "2", "u1/77", "validation"),
        ]
        np.random.default_rng(0).shuffle(examples)
        examples = [Example(*e[:2], str(e[2]), e[3]) for e in examples]
        report = self._prepare(examples)
        self.assertEqual((report.users, report.classes, report.present), (5, 4, 24))
        self._check_whole(examples)

    def test_reports_exactly_what_is_missing_or_broken_stops_and_goes_on_when_told(self):
        examples = _examples(users=10, images=4)
        self.absent = {"u1/0", "u1/1", "u2/0", "u7/3"}
        self.broken = {"u3/2"}
        with self.assertRaises(preparation.TooManyProblemsError) as caught:
            self._prepare(examples)
        report = caught.exception.report
        self.assertEqual((report.listed, report.present), (40, 35))
        self.assertEqual((report.missing, report.corrupt), (4, 1))
        self.assertEqual(
            list(report.worst_users),
            [("u1", 4, 2, 0), ("u2", 4, 1, 0), ("u3", 4, 0, 1), ("u7", 4, 1, 0)],
        )
        self.assertFalse(os.path.exists(self.path))
        with open(os.path.join(preparation.scratch_folder(self.path), "problems.csv")) as file:
            lines = file.read().splitlines()[1:]
        named = {(line.split(",")[3], line.split(",")[4]) for line in lines}
        self.assertEqual(
            named,
            {(name, "missing") for name in self.absent} | {("u3/2", "undecodable")},
        )
        with self.assertRaises(preparation.TooManyProblemsError):
            self._prepare(examples, allow_missing=0.09)
        self.assertEqual(self._prepare(examples, allow_missing=0.1), report)
        self._check_whole([e for e in examples if e.image not in self.absent | self.broken])

    def test_the_share_that_the_message_names_is_enough(self):
        examples = _examples(users=7, images=1)
        self.absent = {"u1/0"}
        with self.assertRaisesRegex(preparation.TooManyProblemsError, "shares from") as caught:
            self._prepare(examples)
        share = float(str(caught.exception).split("from ")[-1])
        self._prepare(examples, allow_missing=share)

    def test_many_broken_images_are_not_waved_through(self):
        self.broken = {e.image for e in _examples()[:10]}
        with self.assertRaises(preparation.TooManyProblemsError):
            self._prepare(allow_missing=0.4)

    def test_nothing_at_all_is_never_accepted(self):
        self.absent = {e.image for e in _examples()}
        with self.assertRaisesRegex(preparation.TooManyProblemsError, "none of the 20 images"):
            self._prepare(allow_missing=0.999)

    def test_files_that_have_come_since_are_read_and_the_others_not_again(self):
        self.absent = {"u1/0", "u4/3"}
        with self.assertRaises(preparation.TooManyProblemsError):
            self._prepare()
        self.absent, self.read_names = set(), []
        self.assertEqual(self._prepare().missing, 0)
        self.assertCountEqual(self.read_names, ["u1/0", "u4/3"])
        self._check_whole(_examples())

    def test_a_finished_cache_is_not_made_again(self):
        first = self._prepare()
        self.read_names = []
        self.assertEqual(self._prepare(), first)
        self.assertEmpty(self.read_names)

    def test_a_cache_of_something_else_is_kept(self):
        self._prepare()
        with self.assertRaisesRegex(preparation.SourceError, "prepared from something else"):
            self._prepare(_examples(users=6))
        self._check_whole(_examples())

    def test_what_is_no_cache_is_kept(self):
        os.makedirs(self.path)
        with self.assertRaisesRegex(preparation.SourceError, "prepared from something else"):
            self._prepare()
        self.assertEmpty(os.listdir(self.path))

    def test_work_on_another_listing_is_not_gone_on_with(self):
        self.absent = {"u1/0"}
        with self.assertRaises(preparation.TooManyProblemsError):
            self._prepare()
        self.absent = set()
        renamed = [e._replace(class_name=e.class_name + "x") for e in _examples()]
        self._prepare(renamed)
        self._check_whole(renamed)

    def test_a_stream_serves_like_reading(self):
        examples = [*_examples(), Example("u9", "1", "gone/1")]
        wanted_of_stream = []

        def stream(wanted):
            wanted_of_stream.extend(wanted)
            for name in ("other/1", *reversed([e.image for e in _examples()])):
                yield name, _pixels(name)

        report = preparation.prepare(
            Listing(examples, None, {}, stream), self.path, _SHAPE, allow_missing=0.1
        )
        self.assertEqual((report.missing, report.present), (1, 20))
        self.assertCountEqual(wanted_of_stream, [e.image for e in examples])
        self._check_whole(_examples())

    def test_without_users_training_images_are_spread_over_groups(self):
        examples = [Example(None, str(i // 100), f"x/{i}") for i in range(200)]
        examples.append(Example(None, "0", "x/300", "test"))
        report = self._prepare(examples)
        self.assertEqual(report.users, 0)
        cache = image_cache.ImageCache(self.path)
        self.assertFalse(cache.facts["has_users"])
        table = cache.table()
        trained = table.splits == "train"
        for user in np.unique(table.users[trained]):
            self.assertGreater(len(np.unique(table.classes[table.users == user])), 1)
        self.assertEqual(table.users[~trained].tolist(), [-1])

    @parameterized.parameters(
        ([], "no images"),
        ([Example("u", "1", "a"), Example(None, "1", "b")], "some of its training images only"),
    )
    def test_listings_that_cannot_be(self, examples, message):
        with self.assertRaisesRegex(preparation.SourceError, message):
            self._prepare(examples)
        self.assertEmpty(os.listdir(os.path.dirname(self.path)))

    def test_memory_that_runs_out_is_not_taken_for_a_broken_image(self):
        def read(name):
            raise MemoryError

        with self.assertRaises(MemoryError):
            preparation.prepare(Listing(_examples(), read, {}), self.path, _SHAPE)

    def test_names_are_ordered_as_numbers_where_they_are(self):
        self.assertEqual(preparation.in_order({"10", "9", "007"}), ["007", "9", "10"])
        self.assertEqual(preparation.in_order({"10", "9", "x"}), ["10", "9", "x"])

    def test_fingerprints_tell_what_is_there(self):
        fingerprints = []
        for absent in (set(), {"u1/0"}, {"u1/1"}):
            self.absent = absent
            self.path += "x"
            self._prepare(allow_missing=0.1)
            fingerprints.append(image_cache.ImageCache(self.path).facts["fingerprint"])
        self.assertLen(set(fingerprints), 3)


_KILLED = """
import sys, time
import numpy as np
from tasks import preparation
def read(name):
    with open(sys.argv[2], "a") as file:
        file.write(name + "\\n")
    time.sleep(0.001)
    return np.full((16, 16, 3), int(name) % 256, np.uint8)
examples = [preparation.Example(str(i % 50), str(i % 3), str(i)) for i in range(4000)]
preparation.prepare(preparation.Listing(examples, read, {}), sys.argv[1], (16, 16, 3), workers=2)
"""


class KilledTest(absltest.TestCase):
    def _start(self, folder):
        return subprocess.Popen(
            [sys.executable, "-c", _KILLED, f"{folder}/cache", f"{folder}/log"],
            cwd=_ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _read_count(self, folder):
        try:
            with open(f"{folder}/log") as file:
                return len(file.readlines())
        except FileNotFoundError:
            return 0

    def test_is_never_taken_for_a_cache_and_goes_on(self):
        folder = self.enterContext(tempfile.TemporaryDirectory())
        for least in (700, 1700, 2900):
            process = self._start(folder)
            while self._read_count(folder) < least:
                self.assertIsNone(process.poll())
                time.sleep(0.005)
            process.send_signal(signal.SIGKILL)
            process.communicate()
            self.assertFalse(os.path.exists(f"{folder}/cache"))
        process = self._start(folder)
        self.assertEqual(process.wait(120), 0, process.stderr.read())
        # Of what was done when it was killed, at most what was not yet committed is done again.
        self.assertLess(self._read_count(folder), 4000 + 3 * 2 * 512)
        cache = image_cache.ImageCache(f"{folder}/cache")
        table = cache.table()
        self.assertLen(table.items, 4000)
        values = cache.read(table.items)[:, 0, 0, 0]
        expected = np.bincount(np.arange(4000) % 256, minlength=256)
        np.testing.assert_array_equal(np.bincount(values, minlength=256), expected)
        with sqlite3.connect(f"{folder}/cache/examples.sqlite") as database:
            self.assertEqual(database.execute("PRAGMA integrity_check").fetchone(), ("ok",))

    def test_two_at_once_do_not_mix(self):
        folder = self.enterContext(tempfile.TemporaryDirectory())
        first = self._start(folder)
        self.addCleanup(first.kill)
        while not self._read_count(folder):
            time.sleep(0.005)
        second = self._start(folder)
        self.assertIn("another process is preparing", second.communicate()[1])
        self.assertNotEqual(second.returncode, 0)
        self.assertEqual(first.wait(120), 0)


class ChecksumTest(absltest.TestCase):
    def test_the_published_file_and_no_other(self):
        path = os.path.join(self.enterContext(tempfile.TemporaryDirectory()), "x.zip")
        with open(path, "wb") as file:
            file.write(b"content")
        right = hashlib.md5(b"content").hexdigest()
        for expected in (right, right[:8]):
            facts = preparation.verify_md5(path, expected)
            self.assertEqual(facts, {"file": "x.zip", "md5": right, "published": True})
        with self.assertRaisesRegex(preparation.SourceError, f"{path} has md5 {right}"):
            preparation.verify_md5(path, "0" * 32)
        facts = preparation.verify_md5(path, "0" * 32, accept_mismatch=True)
        self.assertFalse(facts["published"])
        json.dumps(facts)


if __name__ == "__main__":
    absltest.main()
