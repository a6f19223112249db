"""What tasks with a cache share: users, classes and held-out images are who the split says."""

import json
import os
import tempfile

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

from tasks import cached_task, preparation
from tasks.fixtures import pictures
from tasks.preparation import Example, Listing

_SHAPE = (8, 8, 1)
# Users u0 to u5, each with two pictures of each of five classes.
_EXAMPLES = [
    Example(f"u{user}", str(class_), f"u{user}/{class_}/{i}")
    for user in range(6)
    for class_ in range(5)
    for i in range(2)
]


def _pixels(name):
    user, class_, number = name.split("/")
    return pictures.picture(class_, user, int(number), *_SHAPE[:2])[:, :, :1]


class _Task(cached_task.CachedTask):
    """Trains u1 to u4 on classes 3, 0 and 1; u0 and u5 are held out, with classes 2 and 4."""

    name = "a_test"

    def __init__(self, cache, **options):
        super().__init__(cache, self.cache_name(), **options)

    @classmethod
    def cache_name(cls):
        return "a_test-8"

    @classmethod
    def image_shape_of(cls):
        return _SHAPE

    @classmethod
    def list_source(cls, source):
        return Listing(_EXAMPLES, _pixels, {"source": source})

    def split(self, table):
        held_out = np.isin(table.users, [0, 5]) & np.isin(table.classes, [2, 4])
        rows = np.flatnonzero(held_out)
        return cached_task.Split(
            train_users=np.array([1, 4, 2, 3]),
            train_classes=np.array([3, 0, 1]),
            validation=rows[table.users[rows] == 0],
            test=rows[table.users[rows] == 5],
            descriptions={"validation": "some", "test": "others"},
        )


def _prepare(cache, examples=_EXAMPLES):
    listing = Listing(examples, _pixels, {"k": 1})
    preparation.prepare(listing, os.path.join(cache, _Task.cache_name()), _SHAPE)


class CachedTaskTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.cache = cls.enterClassContext(tempfile.TemporaryDirectory())
        _prepare(cls.cache)

    def test_training_reads_its_users_and_classes_only_under_their_ids(self):
        task = _Task(self.cache)
        self.assertEqual((task.num_users, task.num_train_classes), (4, 3))
        ids = task.user_ids(np.array([1, 3]))
        self.assertEqual([task.user_name(i) for i in ids], ["u4", "u3"])
        images, class_ids = (p.numpy() for p in task.load_users(tf.constant(ids)))
        found = sorted(
            (int(c), image.tobytes()) for c, image in zip(class_ids, images, strict=True)
        )
        expected = sorted(
            ([3, 0, 1].index(int(e.class_name)), _pixels(e.image).tobytes())
            for e in _EXAMPLES
            if e.user in ("u3", "u4") and e.class_name in "013"
        )
        self.assertEqual(found, expected)

    def test_held_out_images_are_those_of_the_split(self):
        held_out = _Task(self.cache).evaluation_set("test")
        self.assertEqual(held_out.images.shape, (4, *_SHAPE))
        self.assertEqual(sorted(held_out.class_ids), [2, 2, 4, 4])
        self.assertEqual(set(held_out.user_ids), {5})
        self.assertEqual(held_out.description, "others")
        expected = {
            _pixels(e.image).tobytes() for e in _EXAMPLES if e.user == "u5" and e.class_name in "24"
        }
        self.assertEqual({i.tobytes() for i in np.asarray(held_out.images)}, expected)
        with self.assertRaisesRegex(ValueError, "split must be"):
            _Task(self.cache).evaluation_set("train")

    def test_fewer_are_drawn_at_random_and_said(self):
        sets = [
            _Task(self.cache, max_evaluation_images=3, data_seed=seed).evaluation_set("test")
            for seed in (0, 0, *range(1, 9))
        ]
        self.assertIn("3 of 4 images, drawn at random", sets[0].description)
        drawn = [np.asarray(s.images).tobytes() for s in sets]
        self.assertEqual(drawn[0], drawn[1])
        self.assertGreater(len(set(drawn)), 1)
        everything = _Task(self.cache, max_evaluation_images=0).evaluation_set("test")
        self.assertLen(everything.class_ids, 4)

    def test_describes_itself_in_json(self):
        described = json.loads(json.dumps(_Task(self.cache).describe()))
        self.assertEqual(described["train"], {"users": 4, "classes": 3, "images": 4 * 3 * 2})
        self.assertEqual(described["test"]["images"], 4)
        self.assertEqual(described["source"], {"k": 1})

    def test_images_of_nobody_have_no_user(self):
        cache = self.enterContext(tempfile.TemporaryDirectory())
        _prepare(
            cache,
            [e._replace(user=None, split="test") if e.user == "u5" else e for e in _EXAMPLES],
        )

        class Central(_Task):
            def split(self, table):
                rows = np.flatnonzero(table.users == -1)
                none = rows[:0]
                return cached_task.Split(
                    np.arange(5), np.arange(5), none, rows, {"validation": "", "test": ""}
                )

        held_out = Central(cache).evaluation_set("test")
        self.assertIsNone(held_out.user_ids)
        self.assertLen(held_out.images, 10)

    @parameterized.parameters(
        ({"cache": ""}, "^cache: is missing"),
        ({"cache": "/nonexistent"}, "^cache=/nonexistent: .* is not there; prepare it with"),
        ({"max_evaluation_images": -1}, "^max_evaluation_images=-1"),
        ({"data_seed": -1}, "^data_seed=-1: accepted are"),
    )
    def test_says_what_is_wrong(self, options, message):
        with self.assertRaisesRegex(ValueError, message) as caught:
            _Task(**{"cache": self.cache, **options})
        self.assertNotIn("\n", str(caught.exception))

    def test_a_split_without_users_or_classes_is_refused(self):
        class Empty(_Task):
            def split(self, table):
                none = np.array([], np.int64)
                return cached_task.Split(none, none, none, none, {"validation": "", "test": ""})

        with self.assertRaisesRegex(ValueError, "leaves 0 users and 0 classes"):
            Empty(self.cache)


if __name__ == "__main__":
    absltest.main()
