"""DigiFace-1M: both forms of the download are one data set; identities held out are never seen."""

import dataclasses
import os
import tempfile
import zipfile
from concurrent import futures

import hypothesis
import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized
from hypothesis import strategies as st

from tasks import digiface, held_out, preparation
from tasks.fixtures import digiface as fixture
from tasks.fixtures import pictures
from tasks.image_cache import ExampleTable

_SHARES = {"validation": 0.05, "test": 0.1}
_SIZE = 16


def _table(identities, images):
    """Every identity has so many images; users are in another order than classes."""
    classes = np.repeat(np.arange(identities), images)
    names = [str(7 * i) for i in range(identities)]
    return ExampleTable(
        np.arange(len(classes)),
        identities - 1 - classes,
        classes,
        np.full(len(classes), "train", object),
        names[::-1],
        names,
    )


class DigiFaceSourceTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = self.enterContext(tempfile.TemporaryDirectory())

    def refusal(self, pattern, source=None):
        with self.assertRaisesRegex(preparation.SourceError, pattern) as caught:
            digiface.DigiFace.list_source(source or self.folder)
        self.assertNotIn("\n", str(caught.exception))

    @parameterized.product(prefix=["", "subj_"], unpacked=[False, True])
    def test_zips_and_folders_of_either_naming_are_the_same_data(self, prefix, unpacked):
        written = fixture.write(
            self.folder, identities_per_part=3, size=_SIZE, prefix=prefix, unpacked=unpacked
        )
        listing = digiface.DigiFace.list_source(self.folder)
        self.assertLen(listing.examples, written.images)
        identities = [0, 1, 2, 2000, 2001, 2002, 100000, 100001, 100002]
        self.assertEqual(
            [(e.user, e.class_name, e.split) for e in listing.examples],
            [(str(i), str(i), "train") for i in identities for _ in range(5)],
        )
        self.assertEqual(
            listing.facts["digiface_parts"],
            {
                part: {"identities": 3, "images": 15}
                for part in (
                    "subjects_0-1999_72_imgs",
                    "subjects_2000-3999_72_imgs",
                    "subjects_100000-133332_5_imgs",
                )
            },
        )
        for example, number in zip(listing.examples, [*range(5)] * 9, strict=True):
            image = preparation.to_pixels(listing.read(example.image), (_SIZE, _SIZE, 3))
            drawn = pictures.picture(example.user, example.user, number, _SIZE, _SIZE)
            if number or int(example.user) % 3 == 2:
                np.testing.assert_array_equal(image, drawn, example.image)
            elif int(example.user) % 3 == 0:
                self.assertTrue(np.all(image == image[:, :, :1]))
                np.testing.assert_allclose(image.mean(2), drawn.mean(2), atol=60)
            else:
                # Half transparent, on white.
                np.testing.assert_allclose(image, 127 + drawn / 2, atol=2)

    def test_absent_parts_are_not_missed(self):
        part = "subjects_133333-166665_5_imgs"
        fixture.write(self.folder, parts=[part], identities_per_part=2, size=_SIZE)
        listing = digiface.DigiFace.list_source(self.folder)
        expected = {part: {"identities": 2, "images": 10}}
        self.assertEqual(listing.facts["digiface_parts"], expected)
        # A licence, and what a Mac leaves beside every image.
        self.assertEqual(listing.facts["other_files"], 11)
        by_name = digiface.DigiFace.list_source(os.path.join(self.folder, f"{part}.zip"))
        self.assertEqual(by_name.examples, listing.examples)
        self.assertEqual(
            by_name.read(by_name.examples[3].image), listing.read(listing.examples[3].image)
        )

    def test_numbers_are_in_the_order_of_numbers(self):
        fixture.write(
            self.folder,
            parts=["subjects_0-1999_72_imgs"],
            identities_per_part=11,
            images_per_identity=11,
            size=8,
        )
        images = [e.image for e in digiface.DigiFace.list_source(self.folder).examples]
        self.assertEqual(
            images,
            [f"subjects_0-1999_72_imgs.zip/{i}/{n}.png" for i in range(11) for n in range(11)],
        )

    def test_identities_directly_in_the_folder(self):
        fixture.write(self.folder, identities_per_part=2, size=8, unpacked=True)
        part = os.path.join(self.folder, "subjects_2000-3999_72_imgs")
        listing = digiface.DigiFace.list_source(part)
        self.assertEqual({e.user for e in listing.examples}, {"2000", "2001"})
        self.assertEqual(listing.examples[0].image, "2000/0.png")
        self.assertNotEmpty(listing.read("2000/0.png"))
        os.remove(os.path.join(part, "2000", "0.png"))
        with self.assertRaises(FileNotFoundError):
            listing.read("2000/0.png")

    def test_zips_are_read_the_same_from_any_thread(self):
        fixture.write(self.folder, size=_SIZE)
        listing = digiface.DigiFace.list_source(self.folder)
        # Between parts all the time, of which not all stay open.
        images = [listing.examples[i].image for i in np.random.default_rng(0).permutation(180)]
        with futures.ThreadPoolExecutor(8) as pool:
            found = list(pool.map(listing.read, images))
        for image, data in zip(images, found, strict=True):
            archive, _, member = image.partition(".zip/")
            with zipfile.ZipFile(os.path.join(self.folder, f"{archive}.zip")) as file:
                self.assertEqual(data, file.read(member))

    def test_an_identity_in_two_places_is_refused(self):
        for unpacked in (False, True):
            fixture.write(self.folder, identities_per_part=2, size=8, unpacked=unpacked)
        self.refusal(
            r"identity 0 is in subjects_0-1999_72_imgs(.zip)?/0 and in subjects_0-1999_72_imgs"
            r"(.zip)?/0; accepted is each once"
        )

    @parameterized.parameters(0, 10, -30)
    def test_a_truncated_zip_is_refused(self, size):
        fixture.write(self.folder, identities_per_part=2, size=8)
        path = os.path.join(self.folder, "subjects_2000-3999_72_imgs.zip")
        os.truncate(path, size if size >= 0 else os.path.getsize(path) + size)
        self.refusal("subjects_2000-3999_72_imgs.zip: is cut off or damaged .*download it again")

    def test_says_what_to_download(self):
        with open(os.path.join(self.folder, "1.png"), "w"):
            self.refusal(
                "no image of DigiFace-1M.*download .*subjects_0-1999_72_imgs.zip, .*"
                "subjects_166666-199998_5_imgs.zip.* into it"
            )


class DigiFaceSplitTest(parameterized.TestCase):
    @hypothesis.settings(max_examples=100, deadline=None)
    @hypothesis.given(
        st.integers(6, 200),
        st.integers(1, 3),
        st.floats(0.01, 0.4),
        st.floats(0.01, 0.4),
        st.integers(0, 2**32),
    )
    def test_identities_are_disjoint_for_any_seed(self, identities, images, validation, test, seed):
        shares = {"validation": validation, "test": test}
        hypothesis.assume(held_out.sizes(identities, shares)["train"] >= 2)
        table = _table(identities, images)
        split = digiface.hold_out(table, shares, seed)
        parts = {"validation": split.validation, "test": split.test}
        trained = np.isin(table.classes, split.train_classes)
        np.testing.assert_array_equal(trained, np.isin(table.users, split.train_users))
        parts["train"] = np.flatnonzero(trained)
        for column in (table.users, table.classes, np.arange(len(table.items))):
            of_part = [set(column[rows]) for rows in parts.values()]
            self.assertEqual(sum(map(len, of_part)), len(set().union(*of_part)))
            self.assertEqual(set().union(*of_part), set(column))
        for name, share in shares.items():
            count = len(set(table.users[parts[name]]))
            self.assertEqual(count, max(2, round(share * identities)))

    def test_identities_held_out_are_drawn(self):
        table = _table(60, 2)
        drawn = [tuple(digiface.hold_out(table, _SHARES, s).test) for s in (0, 0, 1, 2, 3)]
        self.assertEqual(drawn[0], drawn[1])
        self.assertLen(set(drawn), 4)

    def test_an_identity_without_images_is_not_drawn(self):
        table = _table(60, 2)
        kept = np.flatnonzero(table.classes % 2 == 0)
        fewer = dataclasses.replace(
            table,
            **{
                name: getattr(table, name)[kept] for name in ("items", "users", "classes", "splits")
            },
        )
        split = digiface.hold_out(fewer, {"validation": 0.2, "test": 0.3}, 0)
        self.assertLen(set(fewer.classes[split.validation]), 6)
        self.assertLen(set(fewer.classes[split.test]), 9)
        self.assertLen(split.train_users, 15)

    def test_too_few_identities_are_refused(self):
        message = (
            "^has 5 classes; accepted are 6 or more: 2 are held out for validation, 2 are held out "
            "for test, and 2 are trained on$"
        )
        with self.assertRaisesRegex(ValueError, message):
            digiface.hold_out(_table(5, 3), _SHARES, 0)
        self.assertLen(digiface.hold_out(_table(6, 3), _SHARES, 0).train_users, 2)


class DigiFaceTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.cache = cls.enterClassContext(tempfile.TemporaryDirectory())
        source = cls.enterClassContext(tempfile.TemporaryDirectory())
        cls.written = fixture.write(source, corrupt=1)
        cls.listing = digiface.DigiFace.list_source(source)
        cls.report = preparation.prepare(
            cls.listing,
            os.path.join(cls.cache, digiface.DigiFace.cache_name(image_size=32)),
            digiface.DigiFace.image_shape_of(image_size=32),
            allow_missing=0.05,
        )

    def test_trains_on_identities_that_are_not_held_out(self):
        self.assertEqual(
            (self.report.users, self.report.classes, self.report.listed, self.report.corrupt),
            (36, 36, 180, 3),
        )
        task = digiface.DigiFace(self.cache, image_size=32)
        self.assertEqual((task.num_users, task.num_train_classes), (30, 30))
        held_out_users = {
            task.user_name(user)
            for split in ("validation", "test")
            for user in task.evaluation_set(split).user_ids
        }
        ids = task.user_ids(np.arange(30))
        names = {task.user_name(i) for i in ids}
        self.assertLen(held_out_users, 6)
        self.assertEqual(names | held_out_users, {e.user for e in self.listing.examples})
        self.assertEmpty(names & held_out_users)
        user = next(i for i in ids if task.user_name(i) not in ("11", "2011", "100011"))
        images, class_ids = (t.numpy() for t in task.load_users(tf.constant([user])))
        self.assertEqual((images.shape, len(set(class_ids))), ((5, 32, 32, 3), 1))

    def test_records_what_was_held_out_and_of_what(self):
        task = digiface.DigiFace(self.cache, image_size=32, digiface_test_share=0.5)
        described = task.describe()
        self.assertEqual(described["digiface_validation_share"], 0.05)
        self.assertEqual(described["digiface_test_share"], 0.5)
        self.assertEqual(described["data_seed"], 0)
        self.assertEqual(described["train"]["users"], 36 - 2 - 18)
        self.assertLen(described["source"]["digiface_parts"], 3)
        self.assertIn("18 identities that training has not", described["test"]["description"])
        self.assertIn("non-commercial research only", described["licence"])

    def test_published_users_are_those_that_the_published_parts_leave(self):
        identities = sum(map(len, digiface.PARTS.values()))
        self.assertEqual(identities, 109_999)
        # 109,999 - 5,500 - 11,000.
        self.assertEqual(digiface.DigiFace.published_users(), 93_499)
        table = _table(identities, 1)
        split = digiface.hold_out(table, {"validation": 0.2, "test": 0.3}, 1)
        published = digiface.DigiFace.published_users(
            digiface_validation_share=0.2, digiface_test_share=0.3
        )
        self.assertLen(split.train_users, published)

    @parameterized.parameters(
        ({"digiface_test_share": 0.0}, "^digiface_test_share=0: accepted are"),
        ({"digiface_validation_share": float("nan")}, "^digiface_validation_share=nan: accepted"),
        (
            {"digiface_validation_share": 0.5, "digiface_test_share": 0.5},
            "^digiface_test_share=0.5: with digiface_validation_share=0.5 it leaves nothing",
        ),
        ({"image_size": 4}, "^image_size=4: accepted"),
    )
    def test_refused_options(self, options, message):
        with self.assertRaisesRegex(ValueError, message) as caught:
            digiface.DigiFace(self.cache, **options)
        self.assertNotIn("\n", str(caught.exception))

    def test_too_many_held_out_is_a_line_about_the_cache(self):
        with self.assertRaisesRegex(ValueError, "^cache=.*: has 36 classes; accepted are"):
            digiface.DigiFace(
                self.cache, image_size=32, digiface_validation_share=0.49, digiface_test_share=0.49
            )


if __name__ == "__main__":
    absltest.main()
