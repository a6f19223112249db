"""Tests of Google Landmarks: every raw form, what is refused, who is held out."""

import collections
import os
import tempfile
import zipfile

import numpy as np
from absl.testing import absltest, parameterized

from tasks import federated_vision, preparation, registry
from tasks.fixtures import federated_vision as fixture_parts
from tasks.fixtures import landmarks as fixture
from tasks.image_cache import ExampleTable
from tasks.landmarks import Landmarks


def _table(classes, splits, users=None, class_names=None):
    """A table of images."""
    classes = np.array(classes, np.int64)
    users = np.where(np.array(splits) == "train", np.arange(len(classes)) % 3, -1)
    names = class_names or [str(number) for number in range(classes.max() + 1)]
    rows = np.arange(len(classes))
    return ExampleTable(rows, users, classes, np.array(splits, object), ["a", "b", "c"], names)


def _published(test_classes=40, per_class=3):
    """A table with training images and test images of the same classes."""
    train = [c for c in range(test_classes) for _ in range(2)]
    test = [c for c in range(test_classes) for _ in range(per_class)]
    return _table(train + test, ["train"] * len(train) + ["test"] * len(test))


class SplitTest(parameterized.TestCase):
    def test_a_tenth_of_the_test_classes_is_for_validation_and_in_no_other_part(self):
        table = _published()
        split = federated_vision.choose(table, 0)
        self.assertEqual(split.train_users.tolist(), [0, 1, 2])
        self.assertEqual(split.train_classes.tolist(), list(range(40)))
        rows = np.concatenate([split.validation, split.test])
        np.testing.assert_array_equal(np.sort(rows), np.flatnonzero(table.splits == "test"))
        classes = [set(table.classes[part]) for part in (split.validation, split.test)]
        self.assertEqual([len(part) for part in classes], [4, 36])
        self.assertEmpty(classes[0] & classes[1])

    def test_it_is_drawn_by_the_seed(self):
        table = _published()
        drawn = {tuple(federated_vision.choose(table, seed).validation) for seed in (0, 0, 1, 2)}
        self.assertLen(drawn, 3)

    def test_a_class_that_is_lost_changes_nothing_of_the_others(self):
        table = _published()
        whole = federated_vision.choose(table, 0)
        lost = np.setdiff1d(table.classes, table.classes[whole.validation])[0]
        kept = np.flatnonzero((table.classes != lost) | (table.splits != "test"))
        partial = federated_vision.choose(
            ExampleTable(
                *(part[kept] for part in (table.items, table.users, table.classes, table.splits)),
                table.user_names,
                table.class_names,
            ),
            0,
        )
        np.testing.assert_array_equal(kept[partial.validation], whole.validation)

    def test_both_parts_have_pairs_wherever_there_are_four(self):
        classes = [*range(30), 3, 9, 14, 20]
        for seed in range(20):
            table = _table([0, *classes], ["train"] + ["test"] * len(classes))
            split = federated_vision.choose(table, seed)
            for part in (split.validation, split.test):
                self.assertEqual(np.sum(np.bincount(table.classes[part]) == 2), 2)

    def test_descriptions_count_what_training_has_seen(self):
        classes = [c for c in range(20) for _ in range(2)]
        table = _table([0, 1, 2, *classes], ["train"] * 3 + ["test"] * 40)
        split = federated_vision.choose(table, 0)
        seen = len({0, 1, 2} & set(table.classes[split.test]))
        self.assertStartsWith(
            split.descriptions["test"],
            f"18 classes of the published test set, {seen} of which training has seen",
        )
        self.assertIn("who took the images is not known", split.descriptions["validation"])
        self.assertIn("none of which is in the test", split.descriptions["validation"])

    def test_too_few_pairs_are_refused(self):
        table = _table([0, 0, 0, 1, 1, 2, 2, 3], ["train"] + ["test"] * 7)
        with self.assertRaisesRegex(ValueError, "^has 3 classes with 2 test images.* are 4 or mor"):
            federated_vision.choose(table, 0)


class OptionsTest(parameterized.TestCase):
    @parameterized.parameters(
        ({"landmarks_split": "gld"}, ["landmarks_split='gld': accepted are gld160k, gld23k"]),
        ({"image_size": 4}, ["image_size=4: accepted are"]),
        (
            {"landmarks_split": "gld", "image_size": 5000},
            ["landmarks_split='gld'", "image_size=5000: accepted are"],
        ),
    )
    def test_bad_options(self, options, starts):
        with self.assertRaises(ValueError) as caught:
            Landmarks("nowhere", **options)
        for line, start in zip(str(caught.exception).splitlines(), starts, strict=True):
            self.assertStartsWith(line, start)

    def test_published_numbers(self):
        self.assertEqual(Landmarks.published_users(), 1262)
        self.assertEqual(Landmarks.published_users(landmarks_split="gld23k"), 233)

    def test_caches_that_differ_have_names_that_differ(self):
        name = Landmarks.cache_name
        self.assertEqual(name(), "landmarks-gld160k-224")
        self.assertLen({name(), name(image_size=96), name(landmarks_split="gld23k")}, 3)


class SourceTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = self.enterContext(tempfile.TemporaryDirectory())
        self.source = os.path.join(self.folder, "source")

    def path(self, *parts):
        return os.path.join(self.source, *parts)

    def refused(self, *words, **options):
        with self.assertRaises(preparation.SourceError) as caught:
            Landmarks.list_source(self.source, **options)
        message = str(caught.exception)
        self.assertLen(message.splitlines(), 1)
        for word in words:
            self.assertIn(word, message)

    def prepared(self, listing, **accepted):
        """How often a cache holds each (user, class, split, pixels)."""
        cache = tempfile.mkdtemp(dir=self.folder)
        split = listing.facts["split"]
        name = Landmarks.cache_name(landmarks_split=split, image_size=32)
        path = os.path.join(cache, name)
        self.report = preparation.prepare(listing, path, (32, 32, 3), **accepted)
        self.task = registry.build("landmarks", cache=cache, landmarks_split=split, image_size=32)
        table = self.task.table
        return collections.Counter(
            (
                None if user < 0 else table.user_names[user],
                table.class_names[class_number],
                split,
                pixels.tobytes(),
            )
            for user, class_number, split, pixels in zip(
                table.users,
                table.classes,
                table.splits,
                self.task._cache.read(table.items),
                strict=True,
            )
        )

    def test_every_form_holds_the_same_images(self):
        accept = {"accept_checksum_mismatch": True}
        forms = {}
        for name, options in {
            "shards": {},
            "folders": {"form": "folders"},
            "zipped": {"zipped": True},
            "mini": {"split": "gld23k"},
            "tff": {"form": "tff_cache"},
            "mini_tff": {"form": "tff_cache", "split": "gld23k"},
        }.items():
            self.source = os.path.join(self.folder, name)
            written = fixture.write(self.source, **options)
            split = options.get("split", "gld160k")
            listing = Landmarks.list_source(self.source, landmarks_split=split, **accept)
            self.assertLen(listing.examples, written.listed)
            forms[name] = self.prepared(listing)
            self.assertEqual(self.task.num_users, written.users)
            self.assertEqual(self.task.num_train_classes, written.classes)
        images = forms["shards"]
        self.assertEqual(images.total(), written.listed)
        grey = sum(
            (np.ptp(np.frombuffer(i[3], np.uint8).reshape(-1, 3), 1) == 0).all() for i in images
        )
        self.assertEqual(grey, -(-written.listed // 5))
        for name, others in forms.items():
            self.assertEqual(others, images, name)

    @parameterized.parameters("shards", "folders")
    def test_missing_and_corrupt_images_are_reported_by_name(self, form):
        written = fixture.write(self.source, form=form, missing=0.1, corrupt=1)
        listing = Landmarks.list_source(self.source)
        self.assertLen(listing.examples, written.listed)
        for image in written.missing:
            with self.assertRaises(FileNotFoundError):
                listing.read(image)
        with self.assertRaises(preparation.TooManyProblemsError):
            self.prepared(listing, allow_missing=0.05)
        self.prepared(listing, allow_missing=0.1)
        self.assertEqual(self.report.missing, len(written.missing))
        self.assertEqual(self.report.corrupt, 1)
        self.assertEqual(self.report.listed, written.listed)

    def test_what_tff_left_out_is_warned_of(self):
        fixture.write(self.source, form="tff_cache", missing=0.1, corrupt=1)
        with self.assertLogs("absl", "WARNING") as logs:
            listing = Landmarks.list_source(self.source)
        named = sum(e.split == "train" for e in listing.examples)
        self.assertIn(f"{named} training images are named, and 164,172 were", "".join(logs.output))
        self.prepared(listing, allow_missing=0.1)
        self.assertEqual((self.report.missing, self.report.corrupt), (0, 1))

    def test_images_that_are_not_in_folders_are_taken_from_shards(self):
        fixture.write(self.source)
        expected = Landmarks.list_source(self.source)
        one, other = expected.examples[0].image, expected.examples[1].image
        fixture_parts.write_file(self.path("images", "a", one), b"from the folder")
        listing = Landmarks.list_source(self.source)
        self.assertEqual(listing.read(one), b"from the folder")
        self.assertEqual(listing.read(other), expected.read(other))

    def test_shards_are_not_looked_at_where_folders_hold_all(self):
        fixture.write(self.source, form="folders")
        fixture_parts.write_file(self.path("images_000.tar"), b"cut off")
        fixture_parts.write_file(self.path("md5.images_000.txt"), b"0" * 32)
        self.assertEqual(Landmarks.list_source(self.source).facts["tars_checked"], 0)

    def test_a_shard_that_is_another_one_is_named_and_taken_only_if_accepted(self):
        fixture.write(self.source, wrong_md5=True)
        self.refused("images_000.tar has md5 ", "0" * 32, "--accept_checksum_mismatch")
        listing = Landmarks.list_source(self.source, accept_checksum_mismatch=True)
        self.assertEqual(listing.facts["tars_other_than_published"], ["images_000.tar"])
        self.assertEqual(listing.facts["tars_checked"], 2)
        self.prepared(listing)
        self.assertEqual(self.report.missing, 0)

    def test_checksums_may_lie_in_a_tree_of_their_own_as_they_are_published(self):
        fixture.write(self.source, wrong_md5=True)
        os.makedirs(self.path("md5sum", "train"))
        for number in range(2):
            name = f"md5.images_{number:03d}.txt"
            os.rename(self.path("train", name), self.path("md5sum", "train", name))
        self.refused("images_000.tar has md5 ")

    def test_a_shard_without_checksum_is_warned_of(self):
        fixture.write(self.source)
        os.remove(self.path("train", "md5.images_001.txt"))
        with self.assertLogs("absl", "WARNING") as logs:
            listing = Landmarks.list_source(self.source)
        self.assertIn("images_001.tar: has no md5", "".join(logs.output))
        self.assertEqual(listing.facts["tars_checked"], 1)

    def test_a_checksum_file_without_checksum_is_refused(self):
        fixture.write(self.source)
        fixture_parts.write_file(self.path("train", "md5.images_001.txt"), b"<html>404</html>")
        self.refused("md5.images_001.txt: holds no md5")

    def test_split_files_are_checked_where_checksums_are_published(self):
        fixture.write(self.source, zipped=True)
        self.refused("landmarks-user-160k.zip has md5 ", "53c36bd7d5fc12f927af2820b7e4a57c")
        listing = Landmarks.list_source(self.source, accept_checksum_mismatch=True)
        [facts] = listing.facts["split_files"]
        self.assertEqual((facts["file"], facts["published"]), ("landmarks-user-160k.zip", False))
        self.source += "23k"
        fixture.write(self.source, split="gld23k")
        self.refused("mini_gld_train_split.csv has md5 ", landmarks_split="gld23k")

    def test_unpacked_split_files_have_no_published_checksum(self):
        fixture.write(self.source)
        facts = Landmarks.list_source(self.source).facts["split_files"]
        self.assertEqual([f["file"] for f in facts], ["federated_train.csv", "test.csv"])
        self.assertEqual([f["published"] for f in facts], [None, None])
        self.assertTrue(all(len(f["md5"]) == 32 for f in facts))

    def test_nothing_there_names_what_to_download_and_where_to_put_it(self):
        os.makedirs(self.source)
        self.refused(
            "holds neither the split files of gld160k nor TFF's cache",
            "http://storage.googleapis.com/gresearch/federated-vision-datasets/landmarks-user-160k",
            "federated_train.csv",
            "images_000.tar to images_499.tar",
            "https://s3.amazonaws.com/google-landmark/md5sum/train",
            "at any depth",
        )
        self.refused("gld23k", "mini_gld_train_split.csv", landmarks_split="gld23k")

    def test_split_files_without_any_image_name_what_to_download(self):
        fixture.write(self.source, form="folders")
        os.rename(self.path("images"), os.path.join(self.folder, "elsewhere"))
        self.refused("none of the images that they name", "images_000.tar to images_499.tar")

    def test_split_files_and_tff_cache_need_no_other_images(self):
        fixture.write(self.source, form="folders")
        os.rename(self.path("images"), os.path.join(self.folder, "elsewhere"))
        fixture_parts_source = os.path.join(self.folder, "cache")
        fixture.write(fixture_parts_source, form="tff_cache")
        os.rename(os.path.join(fixture_parts_source, "gld160k"), self.path("gld160k"))
        self.assertEqual(Landmarks.list_source(self.source).facts["form"], "cache of TFF")

    def test_split_files_of_another_split_do_not_serve(self):
        fixture.write(self.source)
        self.refused("neither the split files of gld23k", landmarks_split="gld23k")

    def test_a_split_file_that_lacks_columns_or_its_fellow_is_named(self):
        fixture.write(self.source)
        path = self.path("landmarks-user-160k", "federated_train.csv")
        fixture_parts.write_file(path, b"user,image_id,class\n1,2,3\n")
        self.refused(path, "has no column user_id; found are user, image_id, class")
        os.remove(self.path("landmarks-user-160k", "test.csv"))
        self.refused("landmarks-user-160k/test.csv: is not there")
        with zipfile.ZipFile(self.path("landmarks-user-160k.zip"), "w") as archive:
            archive.writestr("federated_train.csv", "user_id,image_id,class\n1,2,3\n")
        self.refused("zip/test.csv: is not there", accept_checksum_mismatch=True)

    def rewrite(self, name, change):
        path = self.path("landmarks-user-160k", name)
        with open(path) as file:
            lines = file.read().splitlines()
        with open(path, "w") as file:
            file.write("\n".join(change(lines)) + "\n")

    def test_an_image_of_two_users_is_refused(self):
        fixture.write(self.source)
        self.rewrite("federated_train.csv", lambda lines: [*lines, "99" + lines[1][1:]])
        self.refused("is of two users, '0' and '99'", "guarantee")

    def test_a_test_image_that_is_trained_on_is_left_out(self):
        written = fixture.write(self.source)
        train = self.path("landmarks-user-160k", "federated_train.csv")
        with open(train) as file:
            trained = file.read().splitlines()[1].split(",", 1)[1]
        self.rewrite("test.csv", lambda lines: [*lines, trained])
        listing = Landmarks.list_source(self.source)
        self.assertLen(listing.examples, written.listed)
        self.assertEqual(listing.facts["test_images_left_out_because_trained_on"], 1)

    def test_files_that_are_no_users_are_passed_over_with_a_warning(self):
        written = fixture.write(self.source, form="tff_cache")
        fixture_parts.write_file(self.path("gld160k", "train", "empty"), b"")
        os.makedirs(self.path("gld160k", "train", "folder"))
        with self.assertLogs("absl", "WARNING") as logs:
            listing = Landmarks.list_source(self.source)
        for name in ("load_data.log", "empty", "folder"):
            self.assertIn(f"train/{name}: is no TFRecord", "".join(logs.output))
        self.assertEqual(listing.facts["files_passed_over"], 3)
        users = {e.user for e in listing.examples if e.split == "train"}
        self.assertLen(users, written.users)
        self.assertEqual({e.user for e in listing.examples if e.split == "test"}, {None})

    def test_a_user_s_file_that_is_cut_off_is_named(self):
        fixture.write(self.source, form="tff_cache")
        path = self.path("gld160k", "train", "7")
        os.truncate(path, os.path.getsize(path) - 10)
        self.refused("train/7: is damaged or cut off behind image 5")

    def test_tff_s_cache_without_test_set_or_without_users_is_refused(self):
        fixture.write(self.source, form="tff_cache")
        os.rename(self.path("gld160k", "test.tfRecord"), self.path("moved"))
        self.refused("test.tfRecord: holds no images")
        os.rename(self.path("moved"), self.path("gld160k", "test.tfRecord"))
        for name in os.listdir(self.path("gld160k", "train")):
            os.remove(self.path("gld160k", "train", name))
        self.refused("gld160k/train: holds no images")

    def test_the_cache_of_tff_may_be_the_source_itself(self):
        written = fixture.write(self.source, form="tff_cache")
        listing = Landmarks.list_source(self.path("gld160k"))
        self.assertLen(listing.examples, written.listed)

    def test_what_is_recorded_of_a_run(self):
        fixture.write(self.source)
        self.prepared(Landmarks.list_source(self.source))
        facts = self.task.describe()
        self.assertEqual(facts["landmarks_split"], "gld160k")
        self.assertEqual(facts["source"]["form"], "split files and images")
        self.assertIn("CC BY", facts["licence"])
        self.assertIsNone(self.task.evaluation_set("test").user_ids)


if __name__ == "__main__":
    absltest.main()
