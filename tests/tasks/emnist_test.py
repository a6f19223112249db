"""EMNIST: what TensorFlow Federated's own loader reads, one user a writer, lower case held out."""

import collections
import contextlib
import errno
import lzma
import os
import sqlite3
import tempfile
from concurrent import futures
from unittest import mock

import hypothesis
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
from absl.testing import absltest, parameterized
from hypothesis import strategies as st

from tasks import emnist, preparation
from tasks.fixtures import emnist as fixture
from tasks.image_cache import ExampleTable

_SPLITS = ("all_train", "all_test")


def _table(writers, labels):
    """Every writer has one image of each label."""
    users, classes = (a.ravel() for a in np.mgrid[0:writers, 0 : len(labels)])
    names = [str(label) for label in labels]
    return ExampleTable(
        np.arange(len(users)),
        users,
        classes,
        np.full(len(users), "train", object),
        [f"f{writer:04d}_00" for writer in range(writers)],
        names,
    )


def _edit(path, statement, *arguments):
    """Changes a database."""
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute(statement, arguments)


def _set_first_row(path, label, pixels):
    """Gives the first row of a database another label and other pixels."""
    example = tf.train.Example()
    example.features.feature["label"].int64_list.value.append(label)
    example.features.feature["pixels"].float_list.value.extend(pixels)
    _edit(
        path,
        "UPDATE examples SET serialized_example_proto = ? WHERE rowid = 1",
        example.SerializeToString(),
    )


def _read_bytes(path):
    with open(path, "rb") as file:
        return file.read()


def _write_bytes(path, data):
    with open(path, "wb") as file:
        file.write(data)


class EmnistSourceTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = self.enterContext(tempfile.TemporaryDirectory())

    def refusal(self, pattern, **options):
        """The source is refused in one line, and nothing is left of the attempt."""
        before = sorted(os.listdir(self.folder))
        with self.assertRaisesRegex(preparation.SourceError, pattern) as caught:
            emnist.Emnist.list_source(self.folder, **options)
        self.assertNotIn("\n", str(caught.exception))
        self.assertEqual(sorted(os.listdir(self.folder)), before)

    def test_reads_what_tff_reads_pixel_by_pixel_for_every_writer(self):
        written = fixture.write(self.folder, writers=5, images_per_writer=70)
        listing = emnist.Emnist.list_source(self.folder)
        ours = collections.defaultdict(list)
        for example in listing.examples:
            self.assertEqual(example.split, "train")
            split = example.image.split("/")[0]
            pixels = listing.read(example.image)
            self.assertEqual((pixels.shape, pixels.dtype), ((28, 28, 1), np.uint8))
            ours[example.user, split].append((int(example.class_name), pixels[:, :, 0]))
        theirs = tff.simulation.datasets.emnist.load_data(only_digits=False, cache_dir=self.folder)
        compared = 0
        for split, clients in zip(_SPLITS, theirs, strict=True):
            self.assertLen(clients.client_ids, written.users)
            for user in clients.client_ids:
                elements = list(clients.create_tf_dataset_for_client(user).as_numpy_iterator())
                labels, pixels = zip(*ours.pop((user, split)), strict=True)
                self.assertEqual(list(labels), [e["label"] for e in elements])
                their_pixels = np.stack([e["pixels"] for e in elements])
                np.testing.assert_array_equal(np.rint(255 * their_pixels), np.stack(pixels))
                np.testing.assert_allclose(255 * their_pixels, np.stack(pixels), atol=1e-4)
                compared += len(elements)
        self.assertEqual(compared, written.images)
        self.assertEmpty(ours)

    def test_train_and_test_of_one_id_are_one_user(self):
        written = fixture.write(self.folder, writers=4, images_per_writer=62)
        listing = emnist.Emnist.list_source(self.folder)
        splits = collections.defaultdict(set)
        counts = collections.Counter(e.user for e in listing.examples)
        for example in listing.examples:
            splits[example.user].add(example.image.split("/")[0])
        self.assertLen(splits, 4)
        self.assertTrue(all(found == set(_SPLITS) for found in splits.values()))
        self.assertEqual(set(counts.values()), {62})
        self.assertEqual(listing.facts["images"], {"all_train": 4 * 56, "all_test": 4 * 6})
        self.assertEqual(sum(counts.values()), written.images)

    def test_images_are_dark_on_white_and_the_same_from_any_thread(self):
        fixture.write(self.folder, writers=2)
        listing = emnist.Emnist.list_source(self.folder)
        images = [e.image for e in listing.examples]
        with futures.ThreadPoolExecutor(8) as pool:
            found = np.stack(list(pool.map(listing.read, images)))
        np.testing.assert_array_equal(found, np.stack([listing.read(i) for i in images]))
        self.assertTrue(np.all(found[:, 0] == 255))
        self.assertLess(found[:, 14, 14].mean(), 200)
        self.assertLen(np.unique(found, axis=0), len(images))

    @parameterized.named_parameters(
        ("between two levels", lambda p: p + 0.5 / 255),
        ("over 1", lambda p: p + 1),
        ("below 0", lambda p: p - 1),
        ("nan", lambda p: p * np.nan),
        ("too few", lambda p: p[:-1]),
        ("of another length of length", lambda p: p[:10]),
        ("none", lambda p: p[:0]),
    )
    def test_other_pixels_are_refused(self, change):
        path = fixture.write(self.folder, writers=2).path
        pixels = np.zeros(784, np.float32)
        pixels[5] = 1
        for values in (pixels, change(pixels)):
            _set_first_row(path, 3, values.tolist())
            listing = emnist.Emnist.list_source(self.folder)
            (image,) = (e.image for e in listing.examples if e.image.endswith("/1"))
            if values is pixels:
                self.assertEqual(listing.read(image).sum(), 255)
        with self.assertRaises(ValueError):
            listing.read(image)

    @parameterized.parameters(99.8, 100.2)
    def test_a_level_slightly_off_is_read_as_the_level(self, level):
        path = fixture.write(self.folder, writers=2).path
        _set_first_row(path, 1, [level / 255] * 784)
        listing = emnist.Emnist.list_source(self.folder)
        (image,) = (e.image for e in listing.examples if e.image.endswith("/1"))
        self.assertTrue(np.all(listing.read(image) == 100))

    @parameterized.parameters(-1, 62)
    def test_a_label_of_no_class_is_refused(self, label):
        path = fixture.write(self.folder, writers=2).path
        _set_first_row(path, label, [0.0] * 784)
        self.refusal(rf"a row has the labels \[{label}\]")

    def test_unpacks_once_and_lists_the_same(self):
        fixture.write(self.folder, writers=2)
        expected = emnist.Emnist.list_source(self.folder)
        os.remove(os.path.join(self.folder, "emnist_all.sqlite"))
        written = fixture.write(self.folder, writers=2, compressed=True)
        self.assertEqual(os.listdir(self.folder), ["emnist_all.sqlite.lzma"])
        for source in (self.folder, written.path, self.folder):
            listing = emnist.Emnist.list_source(source, accept_checksum_mismatch=True)
            self.assertEqual(listing.examples, expected.examples)
            image = expected.examples[7].image
            np.testing.assert_array_equal(listing.read(image), expected.read(image))
            self.assertFalse(listing.facts["published"])
            self.assertEqual(listing.facts["bytes"], os.path.getsize(written.path))
            self.assertCountEqual(
                os.listdir(self.folder), ["emnist_all.sqlite", "emnist_all.sqlite.lzma"]
            )
        os.remove(written.path)
        listing = emnist.Emnist.list_source(os.path.join(self.folder, "emnist_all.sqlite"))
        self.assertEqual(listing.examples, expected.examples)

    def test_another_size_than_the_published_is_refused(self):
        written = fixture.write(self.folder, writers=2, compressed=True)
        self.refusal("bytes, and the published file 170,507,172.*--accept_checksum_mismatch")
        size = os.path.getsize(written.path)
        with mock.patch.object(emnist, "_PUBLISHED_BYTES", size):
            self.assertTrue(emnist.Emnist.list_source(self.folder).facts["published"])

    @parameterized.parameters(0, 5, 0.5, -1)
    def test_a_truncated_download_leaves_nothing(self, where):
        path = fixture.write(self.folder, writers=2, compressed=True).path
        data = _read_bytes(path)
        _write_bytes(path, data[: int(where * len(data)) if isinstance(where, float) else where])
        self.refusal("cut off or damaged.*download it again", accept_checksum_mismatch=True)

    def test_a_corrupt_download_leaves_nothing(self):
        path = fixture.write(self.folder, writers=2, compressed=True).path
        data = bytearray(_read_bytes(path))
        data[len(data) // 2 :] = np.random.default_rng(0).bytes(len(data) - len(data) // 2)
        _write_bytes(path, data)
        self.refusal(
            "emnist_all.sqlite.lzma: (is cut off or damaged|is not a whole)",
            accept_checksum_mismatch=True,
        )

    def test_a_whole_download_of_half_a_database_leaves_nothing(self):
        written = fixture.write(self.folder, writers=2)
        _write_bytes(written.path, _read_bytes(written.path)[:-200_000])
        self.refusal("emnist_all.sqlite: is not a whole .*download it again")
        packed = _read_bytes(written.path)
        os.remove(written.path)
        _write_bytes(written.path + ".lzma", lzma.compress(packed, lzma.FORMAT_ALONE))
        self.refusal("lzma: is not a whole", accept_checksum_mismatch=True)

    @parameterized.parameters(errno.EROFS, errno.ENOSPC)
    def test_a_folder_that_cannot_be_written_to(self, code):
        fixture.write(self.folder, writers=2, compressed=True)
        error = OSError(code, os.strerror(code))
        with mock.patch.object(tempfile, "mkdtemp", side_effect=error):
            self.refusal(f"cannot be unpacked.*{os.strerror(code)}", accept_checksum_mismatch=True)

    @parameterized.parameters(
        ("DELETE FROM client_metadata WHERE split_name = 'digits_only_test'", "digits_only_test"),
        ("DROP TABLE client_metadata", "no such table"),
        ("DROP TABLE examples", "no such table"),
        ("DELETE FROM examples WHERE rowid = 1", "it has 55 of 56 images of f0000_00 in all_train"),
        ("UPDATE examples SET client_id = 'f9' WHERE rowid = 1", "it has 55 of 56"),
        ("UPDATE examples SET serialized_example_proto = x'ff' WHERE rowid = 1", "parsing"),
        ("UPDATE examples SET serialized_example_proto = x'' WHERE rowid = 1", "labels"),
    )
    def test_a_database_that_is_not_whole(self, statement, pattern):
        _edit(fixture.write(self.folder, writers=2).path, statement)
        self.refusal(f"is not a whole .*{pattern}.*download it again")

    def test_not_a_database(self):
        _write_bytes(os.path.join(self.folder, "emnist_all.sqlite"), b"<html>" * 1000)
        self.refusal("is not a database")

    def test_nothing_there(self):
        self.refusal(r"holds neither emnist_all.sqlite nor .*lzma.*https://.*into it")


class EmnistSplitTest(parameterized.TestCase):
    @hypothesis.settings(max_examples=50, deadline=None)
    @hypothesis.given(
        st.integers(2, 30),
        st.integers(0, 2**32),
        st.sampled_from(["paper", "distinct_case"]),
    )
    def test_what_is_held_out_is_never_trained_on(self, writers, seed, emnist_split):
        table = _table(writers, range(62))
        split = emnist.hold_out(table, emnist_split, seed)
        self.assertEqual(
            [table.class_names[c] for c in split.train_classes], [*map(str, range(36))]
        )
        np.testing.assert_array_equal(split.train_users, np.arange(writers))
        labels = set(range(36, 62))
        if emnist_split == "distinct_case":
            labels -= {36 + ord(letter) - ord("a") for letter in "cijklmopsuvwxyz"}
        parts = [split.validation, split.test]
        for rows in parts:
            self.assertEqual(set(table.classes[rows]), labels)
        users = [set(table.users[rows]) for rows in parts]
        self.assertEmpty(users[0] & users[1])
        self.assertLen(users[0], max(1, round(writers / 10)))
        self.assertEqual(users[0] | users[1], set(range(writers)))
        self.assertLen(np.unique(np.concatenate(parts)), writers * len(labels))

    def test_writers_for_validation_are_drawn(self):
        table = _table(50, range(62))
        drawn = [
            tuple(np.unique(table.users[emnist.hold_out(table, "paper", seed).validation]))
            for seed in (0, 0, 1, 2, 3)
        ]
        self.assertEqual(drawn[0], drawn[1])
        self.assertLen(set(drawn), 4)

    def test_labels_count_and_not_their_order(self):
        table = _table(3, [3, 7, 35, 36, 61])
        split = emnist.hold_out(table, "paper", 0)
        np.testing.assert_array_equal(split.train_classes, [0, 1, 2])
        self.assertEqual(set(table.classes[split.test]), {3, 4})

    def test_one_writer_is_refused(self):
        with self.assertRaisesRegex(ValueError, "^has lower-case letters of 1 writers; accepted"):
            emnist.hold_out(_table(1, range(62)), "paper", 0)


class EmnistTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.cache = cls.enterClassContext(tempfile.TemporaryDirectory())
        source = cls.enterClassContext(tempfile.TemporaryDirectory())
        fixture.write(source, off_grid=1)
        listing = emnist.Emnist.list_source(source)
        path = os.path.join(cls.cache, emnist.Emnist.cache_name())
        cls.report = preparation.prepare(
            listing, path, emnist.Emnist.image_shape_of(), allow_missing=0.01
        )
        cls.listing = listing

    def test_trains_on_all_writers_digits_and_upper_case(self):
        self.assertEqual((self.report.users, self.report.corrupt), (12, 1))
        task = emnist.Emnist(self.cache)
        self.assertEqual((task.num_users, task.num_train_classes), (12, 36))
        ids = task.user_ids(np.array([3]))
        name = task.user_name(ids[0])
        images, class_ids = (t.numpy() for t in task.load_users(tf.constant(ids)))
        found = sorted((int(c), i.tobytes()) for c, i in zip(class_ids, images, strict=True))
        expected = sorted(
            (int(e.class_name), self.listing.read(e.image).tobytes())
            for e in self.listing.examples
            if e.user == name and int(e.class_name) < 36
        )
        self.assertEqual(found, expected)
        self.assertLen(found, 36)

    def test_splits_and_what_they_say(self):
        paper = emnist.Emnist(self.cache)
        distinct = emnist.Emnist(self.cache, emnist_split="distinct_case")
        self.assertLen(np.unique(paper.evaluation_set("test").class_ids), 26)
        self.assertLen(np.unique(distinct.evaluation_set("test").class_ids), 11)
        described = paper.describe()
        self.assertEqual(described["emnist_split"], "paper")
        self.assertIn("26 lower-case letters", described["test"]["description"])
        self.assertIn("of 11 of the training writers", described["test"]["description"])
        self.assertIn("the same letters", described["validation"]["description"])
        self.assertEqual(emnist.Emnist.published_users(), 3400)

    def test_another_split_is_refused(self):
        with self.assertRaisesRegex(
            ValueError, "^emnist_split='mine': accepted are paper and distinct_case$"
        ):
            emnist.Emnist(self.cache, emnist_split="mine")


if __name__ == "__main__":
    absltest.main()
