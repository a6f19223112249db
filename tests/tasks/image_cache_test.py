"""The cache: what training reads is what was prepared, of the asked users, and nothing else."""

import os
import stat
import tempfile

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks import image_cache, preparation
from tasks.fixtures import pictures
from tasks.preparation import Example, Listing

_SHAPE = (12, 20, 3)
_CLASSES = 5


def _example(user, i):
    """Users differ in their number of images, and have some that are not for training."""
    split = "test" if i % 7 == 3 else "train"
    return Example(str(user), str((user + i) % _CLASSES), f"{user}/{i}", split)


_EXAMPLES = [_example(user, i) for user in range(8) for i in range(3 * user + 1)]


def _pixels(name):
    user, number = name.split("/")
    return pictures.picture(number, user, 0, *_SHAPE[:2])


def _prepare(folder, encoding):
    path = os.path.join(folder, f"with ?#% and 'quotes' {encoding}")
    listing = Listing(_EXAMPLES, _pixels, {})
    # One image is not there.
    preparation.prepare(
        Listing(listing.examples, lambda n: _gone() if n == "4/2" else _pixels(n), {}),
        path,
        _SHAPE,
        encoding=encoding,
        allow_missing=0.1,
    )
    return image_cache.ImageCache(path)


def _gone():
    raise FileNotFoundError


class ReadingTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        cls.caches = {e: _prepare(folder, e) for e in image_cache.ENCODINGS}
        cls.class_map = np.array([-1, 0, 2, 1, -1])
        cls.loaders = {
            encoding: tf.function(
                lambda users, cache=cache: cache.load_users(users, cls.class_map),
                input_signature=[tf.TensorSpec([None], tf.int64)],
            )
            for encoding, cache in cls.caches.items()
        }

    def _expected(self, users):
        """Images by class id, of these users, by the listing."""
        images = {}
        for e in _EXAMPLES:
            class_id = self.class_map[int(e.class_name)]
            if int(e.user) in users and e.split == "train" and class_id >= 0 and e.image != "4/2":
                images.setdefault(class_id, []).append(_pixels(e.image))
        return images

    @parameterized.parameters(*image_cache.ENCODINGS)
    def test_users_images_are_theirs(self, encoding):
        tolerance = 30 if encoding == "jpeg" else 0
        for users in ([], [0], [4], [7, 1, 4], list(range(8))):
            images, class_ids = (
                part.numpy() for part in self.loaders[encoding](np.array(users, np.int64))
            )
            self.assertEqual(images.shape[1:], _SHAPE)
            expected = self._expected(users)
            self.assertLen(images, sum(map(len, expected.values())))
            for class_id, theirs in expected.items():
                found = images[class_ids == class_id]
                self.assertLen(found, len(theirs))
                # Each is there, whichever its place.
                for image in theirs:
                    nearest = np.abs(found.astype(int) - image).reshape(len(found), -1).max(1).min()
                    self.assertLessEqual(nearest, tolerance)

    @settings(max_examples=20, deadline=None)
    @given(users=st.lists(st.integers(0, 7), unique=True))
    def test_a_virtual_client_is_the_union_of_its_users(self, users):
        load = self.loaders["raw"]
        together = load(np.array(users, np.int64))[0].numpy()
        alone = [load(np.array([user]))[0].numpy() for user in users]
        self.assertCountEqual(
            [image.tobytes() for image in together],
            [image.tobytes() for images in alone for image in images],
        )

    @parameterized.parameters(*image_cache.ENCODINGS)
    def test_training_and_evaluation_decode_alike(self, encoding):
        cache = self.caches[encoding]
        table = cache.table()
        rows = (table.users == 7) & (table.splits == "train")
        images = cache.read(table.items[rows])
        loaded = cache.load_users(tf.constant([7], tf.int64), np.arange(_CLASSES))[0].numpy()
        np.testing.assert_array_equal(images, loaded)

    def test_jpegs_lose_little(self):
        cache = self.caches["jpeg"]
        table = cache.table()
        exact = self.caches["raw"].read(table.items).astype(int)
        self.assertLess(np.abs(cache.read(table.items) - exact).mean(), 4)

    def test_images_are_read_where_they_are_sliced(self):
        cache = self.caches["png"]
        table = cache.table()
        images = image_cache.CachedImages(cache, table.items)
        whole = np.asarray(images)
        self.assertEqual((images.shape, images.dtype), (whole.shape, whole.dtype))
        np.testing.assert_array_equal(images[3:9], whole[3:9])
        mask = table.classes == 2
        np.testing.assert_array_equal(images[mask], whole[mask])
        np.testing.assert_array_equal(images[np.array([5, 1, 5])], whole[[5, 1, 5]])

    def test_a_folder_that_cannot_be_written_serves(self):
        cache = self.caches["raw"]
        database = os.path.join(cache.path, image_cache.DATABASE)
        for path in (database, cache.path):
            mode = stat.S_IMODE(os.stat(path).st_mode)
            os.chmod(path, mode & ~0o222)
            self.addCleanup(os.chmod, path, mode)
        before = sorted(os.listdir(cache.path))
        self.assertLen(
            self.loaders["raw"](np.array([7]))[0], sum(map(len, self._expected([7]).values()))
        )
        cache.table()
        self.assertEqual(sorted(os.listdir(cache.path)), before)


class OpeningTest(absltest.TestCase):
    def test_what_is_not_there_or_not_a_cache(self):
        folder = self.enterContext(tempfile.TemporaryDirectory())
        with self.assertRaisesRegex(ValueError, "is not there$"):
            image_cache.ImageCache(os.path.join(folder, "x"))
        for content in ("", "{}", '{"format": 0}', "[]", '{"format": 1}'):
            with open(os.path.join(folder, "facts.json"), "w") as file:
                file.write(content)
            with self.assertRaisesRegex(ValueError, "not a cache of this version"):
                image_cache.ImageCache(folder)

    def test_small_images_are_kept_as_they_are(self):
        self.assertEqual(image_cache.choose_encoding((28, 28, 1)), "raw")
        self.assertEqual(image_cache.choose_encoding((64, 64, 3)), "raw")
        self.assertEqual(image_cache.choose_encoding((112, 112, 3)), "jpeg")


if __name__ == "__main__":
    absltest.main()
