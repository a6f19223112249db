"""tensorflow-datasets as a source: the data as generated, nothing fetched, classes held out."""

import os
import socket
import tempfile
import urllib.request
from unittest import mock

import hypothesis
import numpy as np
import tensorflow as tf
import tensorflow_datasets
from absl.testing import absltest, parameterized
from hypothesis import strategies as st

from tasks import preparation, tfds
from tasks.fixtures import pictures
from tasks.image_cache import ExampleTable

_CLASSES, _USERS, _IMAGES = 10, 6, 2
_SIZE = 24
# What tensorflow-datasets calls the class below, config and version.
_TOY = "toy_pictures/owned:1.2.3"


class ToyPictures(tensorflow_datasets.core.GeneratorBasedBuilder):
    """Pictures of shapes; in one config of one size, and of owners."""

    VERSION = tensorflow_datasets.core.Version("1.2.3")
    BUILDER_CONFIGS = [  # noqa: RUF012
        tensorflow_datasets.core.BuilderConfig(name="owned", description="Of owners."),
        tensorflow_datasets.core.BuilderConfig(name="grey", description="Of one grey size."),
        tensorflow_datasets.core.BuilderConfig(name="unlabelled", description="Some of no class."),
    ]

    def _info(self):
        features = tensorflow_datasets.features
        grey = self.builder_config.name == "grey"
        return tensorflow_datasets.core.DatasetInfo(
            builder=self,
            features=features.FeaturesDict(
                {
                    "image": features.Image(shape=(_SIZE, _SIZE, 1) if grey else (None, None, 3)),
                    "label": features.ClassLabel(names=[f"shape {c}" for c in range(_CLASSES)]),
                    "owner": {"name": features.Text(), "number": np.int64},
                    "weight": np.float32,
                }
            ),
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(0), "test": self._generate_examples(7)}

    def _generate_examples(self, first):
        for key, (class_, user, number) in enumerate(np.ndindex(_CLASSES, _USERS, _IMAGES)):
            label = -1 if self.builder_config.name == "unlabelled" and key == 5 else class_
            yield (
                key,
                {
                    "image": _picture(self.builder_config.name, class_, user, first + number),
                    "label": label,
                    "owner": {"name": f"owner {user}", "number": user},
                    "weight": 0.5,
                },
            )


def _picture(config, class_, user, number):
    if config == "grey":
        return pictures.picture(str(class_), str(user), number, _SIZE, _SIZE)[:, :, :1]
    return pictures.picture(str(class_), str(user), number, _SIZE + 3 * class_, _SIZE)


def _table(classes, users):
    """Every user has one image of each class."""
    class_numbers, user_numbers = (a.ravel() for a in np.mgrid[0:classes, 0:users])
    return ExampleTable(
        np.arange(len(user_numbers)),
        user_numbers,
        class_numbers,
        np.full(len(user_numbers), "train", object),
        [str(i) for i in range(users)],
        [str(i) for i in range(classes)],
    )


class _OfflineTestCase(parameterized.TestCase):
    """Fails a test that looks for the network, and lets nothing through."""

    def setUp(self):
        super().setUp()
        self.folder = self.enterContext(tempfile.TemporaryDirectory())
        self.attempts = []
        for name in ("connect", "connect_ex", "sendto"):
            self.enterContext(mock.patch.object(socket.socket, name, self._refuse))
        self.enterContext(mock.patch.object(socket, "getaddrinfo", self._refuse))
        self.addCleanup(lambda: self.assertEmpty(self.attempts))

    def _refuse(self, *arguments, **options):
        self.attempts.append((arguments, options))
        raise OSError("no network in tests")

    def refusal(self, pattern, **options):
        with self.assertRaisesRegex(preparation.SourceError, pattern) as caught:
            tfds.TensorFlowDatasets.list_source(self.folder, **options)
        self.assertNotIn("\n", str(caught.exception))


class PreparedDataTest(_OfflineTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.data_dir = cls.enterClassContext(tempfile.TemporaryDirectory())
        for config in ("owned", "grey", "unlabelled"):
            ToyPictures(config=config, data_dir=cls.data_dir).download_and_prepare()

    def test_lists_and_streams_what_was_generated(self):
        listing = tfds.TensorFlowDatasets.list_source(
            self.data_dir, tfds_name="toy_pictures", tfds_user_key="owner/name"
        )
        self.assertLen(listing.examples, _CLASSES * _USERS * _IMAGES)
        self.assertLen({e.image for e in listing.examples}, len(listing.examples))
        self.assertEqual({e.split for e in listing.examples}, {"train"})
        streamed = dict(listing.stream({e.image for e in listing.examples}))
        found = sorted(
            (e.class_name, e.user, preparation.to_pixels(streamed[e.image], (16, 16, 3)).tobytes())
            for e in listing.examples
        )
        expected = sorted(
            (
                f"shape {class_}",
                f"owner {user}",
                preparation.to_pixels(
                    pictures.encode(_picture("owned", class_, user, number), "PNG"), (16, 16, 3)
                ).tobytes(),
            )
            for class_, user, number in np.ndindex(_CLASSES, _USERS, _IMAGES)
        )
        self.assertEqual(found, expected)
        self.assertEqual(
            listing.facts,
            {
                "data_set": "toy_pictures/owned/1.2.3",
                "split": "train",
                "keys": {"class": "label", "user": "owner/name"},
            },
        )

    def test_streams_the_wanted_only(self):
        listing = tfds.TensorFlowDatasets.list_source(self.data_dir, tfds_name=_TOY)
        wanted = [e.image for e in listing.examples[5:90:7]]
        self.assertEqual([image for image, _ in listing.stream(set(wanted))], wanted)

    def test_splits_as_tensorflow_datasets_writes_them(self):
        def list_split(split):
            listing = tfds.TensorFlowDatasets.list_source(
                self.data_dir, tfds_name=_TOY, tfds_split=split
            )
            return [e.image for e in listing.examples]

        train, test = list_split("train"), list_split("test")
        self.assertEqual(set(list_split("train+test")), {*train, *test})
        self.assertLen({*train, *test}, 2 * len(train))
        self.assertLen(list_split("train[:25%]"), len(train) // 4)
        self.refusal(
            "toy_pictures/owned/1.2.3, tfds_split='dev': Unknown split",
            tfds_name=_TOY,
            tfds_data_dir=self.data_dir,
            tfds_split="dev",
        )

    def test_whole_numbers_are_names_too(self):
        listing = tfds.TensorFlowDatasets.list_source(
            self.data_dir, tfds_name=_TOY, tfds_class_key="owner/number"
        )
        self.assertEqual({e.class_name for e in listing.examples}, set("012345"))
        self.assertEqual({e.user for e in listing.examples}, {None})

    def test_what_is_ready_needs_no_code(self):
        with mock.patch.object(
            tensorflow_datasets, "builder", side_effect=FileNotFoundError("lost\nlabels.txt")
        ):
            listing = tfds.TensorFlowDatasets.list_source(self.data_dir, tfds_name=_TOY)
            self.assertNotEmpty(listing.examples)
            self.refusal("tfds_name='toy_pictures/own': lost labels", tfds_name="toy_pictures/own")

    def test_images_without_a_class_are_refused(self):
        self.refusal(
            r"tfds_split='train': toy_pictures-train\S+ has no label \(-1\); accepted",
            tfds_name="toy_pictures/unlabelled",
            tfds_data_dir=self.data_dir,
        )

    @parameterized.parameters(
        ("image", "label", "accepted are image$"),
        ("class", "image", "accepted are label, owner/name, owner/number$"),
        ("class", "weight", "accepted are label, owner/name, owner/number$"),
        ("class", "owner", "accepted are label, owner/name, owner/number$"),
        ("user", "writer", "accepted are label, owner/name, owner/number$"),
    )
    def test_features_that_do_not_fit_are_refused(self, kind, key, accepted):
        self.refusal(
            f"^tfds_{kind}_key='{key}': is no {kind} in toy_pictures/owned/1.2.3; {accepted}",
            tfds_name=_TOY,
            tfds_data_dir=self.data_dir,
            **{f"tfds_{kind}_key": key},
        )

    @parameterized.parameters(("owned", None), ("owned", 32), ("grey", None), ("grey", 32))
    def test_shape_of_images(self, config, image_size):
        options = {
            "tfds_name": f"toy_pictures/{config}",
            "source": self.data_dir,
            "image_size": image_size,
        }
        if (config, image_size) == ("owned", None):
            with self.assertRaisesRegex(ValueError, "^image_size: is missing; .*accepted"):
                tfds.TensorFlowDatasets.image_shape_of(**options)
            return
        side = image_size or _SIZE
        shape = tfds.TensorFlowDatasets.image_shape_of(**options)
        self.assertEqual(shape, (side, side, 1 if config == "grey" else 3))

    @parameterized.parameters("truncated", "removed")
    def test_damaged_files_are_a_line(self, how):
        ToyPictures(config="grey", data_dir=self.folder).download_and_prepare()
        (path,) = (
            os.path.join(folder, name)
            for folder, _, names in os.walk(self.folder)
            for name in names
            if "train.tfrecord" in name
        )
        if how == "truncated":
            os.truncate(path, os.path.getsize(path) // 2)
        else:
            os.remove(path)
        self.refusal("toy_pictures/grey/1.2.3, tfds_split='train': ", tfds_name="toy_pictures/grey")

    @parameterized.parameters(None, "owner/name")
    def test_prepared_and_opened(self, user_key):
        options = {"tfds_name": "toy_pictures/grey", "tfds_user_key": user_key}
        listing = tfds.TensorFlowDatasets.list_source(self.data_dir, **options)
        path = os.path.join(self.folder, tfds.TensorFlowDatasets.cache_name(**options))
        report = preparation.prepare(listing, path, (_SIZE, _SIZE, 1))
        self.assertEqual(report.present, _CLASSES * _USERS * _IMAGES)
        task = tfds.TensorFlowDatasets(self.folder, **options)
        self.assertEqual(task.has_users, user_key is not None)
        self.assertEqual(task.num_train_classes, 6)
        users = task.user_ids(np.arange(task.num_users))
        images, class_ids = (t.numpy() for t in task.load_users(tf.constant(users)))
        self.assertLen(images, 6 * _USERS * _IMAGES)
        self.assertEqual(set(class_ids), set(range(6)))
        trained = {image.tobytes() for image in images}
        evaluated = set()
        for split, classes in (("validation", 2), ("test", 2)):
            held_out = task.evaluation_set(split)
            self.assertLen(set(held_out.class_ids), classes)
            self.assertEqual(held_out.user_ids is None, user_key is None)
            evaluated |= {image.tobytes() for image in np.asarray(held_out.images)}
            users_said = "whichever users" in held_out.description
            self.assertEqual(users_said, user_key is not None)
        self.assertLen(evaluated, 4 * _USERS * _IMAGES)
        self.assertEmpty(trained & evaluated)
        self.assertEqual(
            trained | evaluated,
            {
                _picture("grey", class_, user, number).tobytes()
                for class_, user, number in np.ndindex(_CLASSES, _USERS, _IMAGES)
            },
        )
        self.assertIsNone(tfds.TensorFlowDatasets.published_users())


class MockedDataTest(_OfflineTestCase):
    """Data sets that tensorflow-datasets knows, filled with random data by its own means."""

    def test_without_users(self):
        with tensorflow_datasets.testing.mock_data(num_examples=30):
            listing = tfds.TensorFlowDatasets.list_source(
                self.folder, tfds_name="omniglot", tfds_class_key="alphabet", tfds_download=True
            )
            shape = tfds.TensorFlowDatasets.image_shape_of(tfds_name="omniglot")
            images = dict(listing.stream({e.image for e in listing.examples}))
        self.assertEqual(shape, (105, 105, 3))
        self.assertLen(images, 30)
        self.assertEqual({e.user for e in listing.examples}, {None})
        self.assertEqual(preparation.to_pixels(images.popitem()[1], shape).shape, shape)

    def test_with_users(self):
        key = "identity/Identity_No"
        options = {"tfds_name": "celeb_a", "tfds_class_key": key, "tfds_user_key": key}
        with tensorflow_datasets.testing.mock_data(num_examples=40, max_value=12):
            listing = tfds.TensorFlowDatasets.list_source(
                self.folder, tfds_download=True, **options
            )
            path = os.path.join(
                self.folder, tfds.TensorFlowDatasets.cache_name(image_size=32, **options)
            )
            preparation.prepare(listing, path, (32, 32, 3))
        self.assertTrue(all(e.user == e.class_name for e in listing.examples))
        task = tfds.TensorFlowDatasets(self.folder, image_size=32, **options)
        self.assertTrue(task.has_users)
        self.assertEqual(task.num_users, task.num_train_classes)
        self.assertIn(", 0 of them in training", task.evaluation_set("test").description)


class MissingDataTest(_OfflineTestCase):
    def test_nothing_is_downloaded_unless_that_is_asked_for(self):
        with mock.patch.object(
            tensorflow_datasets.core.DatasetBuilder, "download_and_prepare"
        ) as download:
            self.refusal(
                f"{self.folder} has no mnist/3.0.1 ready; .*--tfds_download", tfds_name="mnist"
            )
            download.assert_not_called()
            download.side_effect = RuntimeError("the server\nis down")
            self.refusal(
                "^mnist/3.0.1: cannot be downloaded: the server is down$",
                tfds_name="mnist",
                tfds_download=True,
            )
        self.assertEmpty(os.listdir(self.folder))

    def test_a_use_of_the_network_would_be_seen(self):
        with self.assertRaisesRegex(OSError, "no network in tests"):
            urllib.request.urlopen("http://127.0.0.1:9")
        self.assertNotEmpty(self.attempts)
        self.attempts.clear()

    @parameterized.parameters(
        (None, "^tfds_name: is missing"),
        ("huggingface:mnist", "^tfds_name='huggingface:mnist': accepted are"),
        ("../mnist", "^tfds_name='../mnist': accepted are"),
        ("no_such_set", "^tfds_name='no_such_set': tensorflow-datasets does not know it, and"),
        ("mnist/no_such", "^tfds_name='mnist/no_such': .*no_such not found"),
        ("mnist:9.9.9", "^tfds_name='mnist:9.9.9': .*9.9.9"),
    )
    def test_names(self, name, pattern):
        self.refusal(pattern, tfds_name=name)
        with self.assertRaisesRegex(ValueError, pattern):
            tfds.TensorFlowDatasets.image_shape_of(tfds_name=name)

    def test_the_folder_is_the_source_unless_another_is_named(self):
        self.refusal(
            "^tfds_data_dir=gs://tfds-data: accepted are folders",
            tfds_name="mnist",
            tfds_data_dir="gs://tfds-data",
        )
        other = os.path.join(self.folder, "other")
        os.mkdir(other)
        self.refusal(f"{other} has no mnist", tfds_name="mnist", tfds_data_dir=other)

    def test_caches_of_different_data_have_different_names(self):
        options = [
            {"tfds_name": "mnist"},
            {"tfds_name": "mnist:3.0.1"},
            {"tfds_name": "imagenet_resized/8x8"},
            {"tfds_name": "imagenet_resized/16x16"},
            {"tfds_name": "mnist", "tfds_split": "test"},
            {"tfds_name": "mnist", "tfds_split": "train[:10%]"},
            {"tfds_name": "mnist", "tfds_split": "train[10%:]"},
            {"tfds_name": "mnist", "image_size": 32},
            {"tfds_name": "mnist", "tfds_class_key": "a/b"},
            {"tfds_name": "mnist", "tfds_user_key": "a/b"},
            {"tfds_name": "mnist", "tfds_image_key": "a/b"},
        ]
        names = [tfds.TensorFlowDatasets.cache_name(**o) for o in options]
        self.assertLen(set(names), len(options))
        self.assertEqual(names[0], "tfds-mnist-train")
        self.assertEqual([n for n in names if os.path.basename(n) != n], [])

    @parameterized.parameters(7, 4096)
    def test_sizes(self, image_size):
        for method in (
            tfds.TensorFlowDatasets.image_shape_of,
            tfds.TensorFlowDatasets.cache_name,
        ):
            with self.assertRaisesRegex(ValueError, f"^image_size={image_size}: accepted"):
                method(tfds_name="mnist", image_size=image_size)


class SplitTest(parameterized.TestCase):
    @hypothesis.settings(max_examples=50, deadline=None)
    @hypothesis.given(st.integers(6, 80), st.integers(1, 5), st.integers(0, 2**32), st.booleans())
    def test_images_of_held_out_classes_are_never_trained_on(self, classes, users, seed, has_users):
        table = _table(classes, users)
        split = tfds.hold_out(table, has_users, seed)
        parts = [
            set(split.train_classes),
            set(table.classes[split.validation]),
            set(table.classes[split.test]),
        ]
        self.assertEqual(
            [len(p) for p in parts[1:]], [max(2, round(s * classes)) for s in (0.1, 0.2)]
        )
        self.assertEqual(sum(map(len, parts)), classes)
        self.assertEqual(set().union(*parts), set(range(classes)))
        for rows, held_out in zip((split.validation, split.test), parts[1:], strict=True):
            self.assertLen(rows, users * len(held_out))

    def test_users_with_held_out_classes_only_do_not_train(self):
        table = _table(10, 10)
        kept = np.flatnonzero(table.classes == table.users)
        columns = {name: getattr(table, name)[kept] for name in ("items", "users", "classes")}
        own = ExampleTable(**columns, splits=table.splits[kept], user_names=[], class_names=[])
        split = tfds.hold_out(own, True, 0)
        np.testing.assert_array_equal(split.train_users, split.train_classes)
        self.assertIn("of: 2, 0 of them in training", split.descriptions["test"])
        shared = tfds.hold_out(table, True, 0)
        self.assertIn("of: 10, 10 of them in training", shared.descriptions["test"])

    def test_too_few_classes_are_refused(self):
        with self.assertRaisesRegex(ValueError, "^has 5 classes; accepted are 6 or more"):
            tfds.hold_out(_table(5, 3), True, 0)


if __name__ == "__main__":
    absltest.main()
