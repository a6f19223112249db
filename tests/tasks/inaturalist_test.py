"""Tests of iNaturalist: every raw form, every split, what is refused."""

import collections
import os
import tempfile
import zipfile

from absl.testing import absltest, parameterized

from tasks import preparation, registry
from tasks.fixtures import federated_vision as fixture_parts
from tasks.fixtures import inaturalist as fixture
from tasks.inaturalist import INaturalist

_SPLITS = ["user_120k", "geo_100", "geo_300", "geo_1k", "geo_3k", "geo_10k", "geo_30k"]


class OptionsTest(parameterized.TestCase):
    def test_bad_options(self):
        with self.assertRaises(ValueError) as caught:
            INaturalist("nowhere", inaturalist_split="USER_120K", image_size=0)
        first, second = str(caught.exception).splitlines()
        self.assertStartsWith(first, "inaturalist_split='USER_120K': accepted are geo_100, ")
        self.assertStartsWith(second, "image_size=0: accepted are")

    def test_published_numbers_only_where_they_are_known(self):
        self.assertEqual(INaturalist.published_users(), 9275)
        for split in _SPLITS[1:]:
            self.assertIsNone(INaturalist.published_users(inaturalist_split=split))

    def test_caches_that_differ_have_names_that_differ(self):
        names = {INaturalist.cache_name(inaturalist_split=split) for split in _SPLITS}
        self.assertLen(names | {INaturalist.cache_name(image_size=96)}, len(_SPLITS) + 1)
        self.assertIn("inaturalist-user_120k-224", names)


class SourceTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = self.enterContext(tempfile.TemporaryDirectory())
        self.source = os.path.join(self.folder, "source")

    def path(self, *parts):
        return os.path.join(self.source, *parts)

    def listed(self, **options):
        return INaturalist.list_source(self.source, accept_checksum_mismatch=True, **options)

    def refused(self, *words, **options):
        with self.assertRaises(preparation.SourceError) as caught:
            INaturalist.list_source(self.source, **options)
        message = str(caught.exception)
        self.assertLen(message.splitlines(), 1)
        for word in words:
            self.assertIn(word, message)

    def prepared(self, listing, **accepted):
        """How often a cache holds each (user, class, split, pixels)."""
        cache = tempfile.mkdtemp(dir=self.folder)
        options = {"inaturalist_split": listing.facts["split"], "image_size": 32}
        path = os.path.join(cache, INaturalist.cache_name(**options))
        self.report = preparation.prepare(listing, path, (32, 32, 3), **accepted)
        self.task = registry.build("inaturalist", cache=cache, **options)
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
        forms = {}
        for tables in ("authors", "tff"):
            for form in ("folders", "tar", "tar.gz", "tff_cache", "TFF_CACHE"):
                self.source = os.path.join(self.folder, tables, form)
                written = fixture.write(self.source, form=form, tables=tables)
                forms[tables, form] = self.prepared(self.listed())
                self.assertEqual(self.task.num_users, written.users)
        images = forms["authors", "folders"]
        self.assertLen(images, written.listed)
        for name, others in forms.items():
            self.assertEqual(others, images, name)

    @parameterized.parameters("folders", "tar", "tar.gz")
    def test_missing_and_corrupt_images_are_counted(self, form):
        written = fixture.write(self.source, form=form, missing=0.1, corrupt=2)
        with self.assertRaises(preparation.TooManyProblemsError):
            self.prepared(self.listed(), allow_missing=0.05)
        self.prepared(self.listed(), allow_missing=0.1)
        self.assertEqual(self.report.missing, len(written.missing))
        self.assertEqual(self.report.corrupt, 2)

    def test_images_that_are_in_no_cell_of_a_split_are_not_in_it(self):
        written = fixture.write(self.source, tables="tff")
        train = {
            split: [e for e in self.listed(inaturalist_split=split).examples if e.split == "train"]
            for split in _SPLITS
        }
        count = len(train["user_120k"])
        self.assertEqual(count, written.users * 6)
        self.assertLen(train["geo_1k"], count - count // 4 + 1)
        self.assertLen(train["geo_100"], count + 1)
        for split in _SPLITS[1:]:
            self.assertEqual({e.user for e in train[split]}, {f"{split} {i}" for i in range(5)})
        # This image is there in no split, and is of no user in user_120k.
        odd = "f" * 32 + ".jpg"
        self.assertNotIn(odd, {e.image for e in train["user_120k"]})
        self.assertIn(odd, {e.image for e in train["geo_1k"]})

    def test_a_cell_is_no_person(self):
        fixture.write(self.source, tables="tff")
        self.prepared(self.listed(inaturalist_split="geo_100"), allow_missing=0.1)
        facts = self.task.describe()
        self.assertEqual(facts["inaturalist_split"], "geo_100")
        self.assertIn("none for a person", facts["users_are"])
        self.prepared(self.listed())
        self.assertEqual(self.task.describe()["users_are"], "observers")
        self.assertIn("non-commercial", self.task.describe()["licence"])

    @parameterized.parameters("folders", "tar", "tar.gz")
    def test_names_keep_the_letters_of_their_ending(self, form):
        ids = ["0abj", "0abp", "0abg", "0a.jpg"]
        files = [(f"train_val_images/Aves/A b/{i}.jpg", i.encode()) for i in ids]
        files += [(f"train_val_images/Aves/A b/{i}.jpg", b"wrong") for i in ("0ab", "0a")]
        if form == "folders":
            for name, data in files:
                fixture_parts.write_file(self.path(name), data)
        else:
            fixture_parts.write_tar(self.path(f"train_val_images.{form}"), files)
        train = fixture_parts.table(("user_id", "image_id", "class"), [("u", i, "1") for i in ids])
        fixture_parts.write_file(self.path("federated_train_user_120k.csv"), train.encode())
        fixture_parts.write_file(self.path("test.csv"), b"image_id,class\nt,1\n")
        listing = self.listed()
        wanted = [f"{i}.jpg" for i in ids]
        self.assertEqual([e.image for e in listing.examples], [*wanted, "t.jpg"])
        if listing.stream is None:
            found = {image: listing.read(image) for image in wanted}
        else:
            found = dict(listing.stream({*wanted, "t.jpg"}))
        self.assertEqual(found, {f"{i}.jpg": i.encode() for i in ids})

    def test_a_partly_unpacked_archive_is_completed_from_the_archive(self):
        fixture.write(self.source, form="tar.gz")
        other = os.path.join(self.folder, "other")
        fixture.write(other)
        expected = {e.image: e for e in self.listed().examples}
        moved = []
        for folder, _, names in os.walk(os.path.join(other, "train_val_images", "Aves")):
            for name in names:
                with open(os.path.join(folder, name), "rb") as file:
                    fixture_parts.write_file(self.path("unpacked", name), file.read())
                moved.append(name)
        fixture_parts.write_file(self.path("unpacked", moved[0]), b"of the folder")
        listing = self.listed()
        streamed = dict(listing.stream(expected))
        self.assertCountEqual(streamed, expected)
        self.assertEqual(streamed[moved[0]], b"of the folder")
        # The images of the folder come first, and nothing that was not asked for.
        self.assertEqual(set(list(streamed)[: len(moved)]), set(moved))
        some = {moved[1], *list(streamed)[-3:]}
        self.assertCountEqual([image for image, _ in listing.stream(some)], some)

    def test_an_image_of_a_folder_goes_before_that_of_a_tar(self):
        fixture.write(self.source, form="tar")
        one, other = (example.image for example in self.listed().examples[:2])
        fixture_parts.write_file(self.path(one), b"of the folder")
        listing = self.listed()
        self.assertEqual(listing.read(one), b"of the folder")
        self.assertStartsWith(listing.read(other), b"\xff\xd8")

    def test_an_image_that_cannot_be_read_does_not_end_the_stream(self):
        fixture.write(self.source, form="tar.gz")
        images = [example.image for example in self.listed().examples]
        for image in images[:2]:
            fixture_parts.write_file(self.path(image), b"")
        listing = self.listed()
        os.remove(self.path(images[0]))
        os.remove(self.path(images[1]))
        os.mkdir(self.path(images[1]))
        streamed = dict(listing.stream(set(images)))
        self.assertCountEqual(streamed, images[1:])
        self.assertEqual(streamed[images[1]], b"")

    def test_no_archive_is_read_where_folders_hold_all(self):
        fixture.write(self.source)
        fixture_parts.write_file(self.path("train_val_images.tar.gz"), b"cut off")
        fixture_parts.write_file(self.path("train_val_images.tar"), b"cut off")
        with self.assertLogs("absl", "WARNING") as logs:
            listing = INaturalist.list_source(self.source)
        self.assertNotIn("tar", "".join(logs.output))
        self.assertIsNone(listing.stream)
        self.prepared(listing)
        self.assertEqual(self.report.missing, 0)

    def test_a_preparation_goes_on_where_it_was_stopped_in_an_archive(self):
        written = fixture.write(self.source, form="tar.gz", missing=0.1)
        listing = self.listed()
        path = os.path.join(self.folder, "cache")
        with self.assertRaises(preparation.TooManyProblemsError):
            preparation.prepare(listing, path, (32, 32, 3))
        other = os.path.join(self.folder, "other")
        fixture.write(other)
        for folder, _, names in os.walk(other):
            for name in set(names) & set(written.missing):
                os.rename(os.path.join(folder, name), self.path(name))
        listing = self.listed()
        asked = []
        stream = listing.stream
        object.__setattr__(listing, "stream", lambda wanted: asked.extend(wanted) or stream(wanted))
        report = preparation.prepare(listing, path, (32, 32, 3))
        self.assertEqual((report.present, report.missing), (written.listed, 0))
        self.assertCountEqual(asked, written.missing)

    def test_published_checksums_are_checked(self):
        fixture.write(self.source, tables="tff", form="tar.gz")
        self.refused("iNaturalist_train.csv has md5 ", "63d5a41699434bc2b13f5853f3764c18")
        facts = self.listed().facts
        names = ["iNaturalist_train.csv", "iNaturalist_test.csv", "train_val_images.tar.gz"]
        checked = facts["split_files"] + facts["archives"]
        self.assertEqual(
            [(f["file"], f["published"]) for f in checked], [(n, False) for n in names]
        )
        for name in names[:2]:
            os.remove(self.path(name))
        fixture.write(self.source)
        self.assertEqual(INaturalist.list_source(self.source).facts.get("archives"), None)
        for folder, _, files in os.walk(self.path("train_val_images")):
            for file in files[:1]:
                os.remove(os.path.join(folder, file))
        self.refused("train_val_images.tar.gz has md5 ", "7c784ea5")

    def test_nothing_there_names_what_to_download(self):
        os.makedirs(self.source)
        self.refused(
            "holds neither the split files of user_120k nor TFF's cache",
            "iNaturalist_train.csv and iNaturalist_test.csv",
            "federated_train_user_120k.csv and test.csv",
            "train_val_images.tar.gz",
            "ml-inat-competition-datasets",
        )
        self.refused("federated_train_geo_1k.csv", "-geo.zip", inaturalist_split="geo_1k")

    def test_split_files_without_any_image_name_what_to_download(self):
        fixture.write(self.source)
        os.rename(self.path("train_val_images"), os.path.join(self.folder, "elsewhere"))
        self.refused("none of the images that they name", "train_val_images.tar.gz")

    def test_columns_that_are_missing_are_named(self):
        fixture.write(self.source, tables="tff")
        path = self.path("iNaturalist_train.csv")
        fixture_parts.write_file(path, b"image_id,class,user_120k\nx,1,NA\n")
        accept = {"accept_checksum_mismatch": True}
        self.refused(
            path,
            "has no column geo_3k; found are image_id, class, user_120k",
            inaturalist_split="geo_3k",
            **accept,
        )
        self.refused("has no image in the split user_120k", **accept)
        os.remove(self.path("iNaturalist_test.csv"))
        self.refused("iNaturalist_test.csv: is not there", **accept)

    def test_the_authors_files_serve_out_of_their_zip(self):
        written = fixture.write(self.source)
        with zipfile.ZipFile(self.path("inaturalist-user-120k.zip"), "w") as archive:
            for name in ("federated_train_user_120k.csv", "test.csv"):
                path = self.path("inaturalist-user-120k", name)
                archive.write(path, f"inaturalist-user-120k/{name}")
                os.remove(path)
        listing = INaturalist.list_source(self.source)
        self.assertLen(listing.examples, written.listed)
        [facts] = listing.facts["split_files"]
        self.assertEqual(facts["file"], "inaturalist-user-120k.zip")

    def test_of_both_spellings_of_tff_s_cache_the_whole_one_is_taken(self):
        for form, whole, other in (
            ("TFF_CACHE", "USER_120K", "user_120k"),
            ("tff_cache", "user_120k", "USER_120K"),
        ):
            self.source = os.path.join(self.folder, form)
            fixture.write(self.source, form=form)
            os.makedirs(self.path(other, "train"))
            listing = INaturalist.list_source(self.source)
            self.assertStartsWith(listing.examples[0].image, f"{whole}/train/0[0]")
        fixture_parts.write_file(self.path("cache", "geo_1k", "train", "x"), b"")
        self.refused("geo_1k/train: holds no images", inaturalist_split="geo_1k")


if __name__ == "__main__":
    absltest.main()
