"""Tests of own pictures: manifests, what is refused in which words, who is held out."""

import csv
import io
import os
import subprocess
import sys
import tempfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from absl.testing import absltest, parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks import image_folder, preparation, registry
from tasks.fixtures import image_folder as fixture
from tasks.fixtures import pictures
from tasks.image_cache import ExampleTable

_COLUMNS = ("path", "user_id", "class_id")
_ROOT = os.path.dirname(os.path.dirname(image_folder.__file__))

# Twelve pictures p0.png to p11.png of three users and six classes.
_GOOD = [(f"p{i}.png", f"u{i % 3}", f"c{i // 2}") for i in range(12)]
# The same with a split: six users, each in one part.
_SPLIT = [
    (f"p{i}.png", f"u{i // 2}", f"c{i % 4 // 2}", ("train", "validation", "test")[i // 4])
    for i in range(12)
]
_SPLIT_COLUMNS = (*_COLUMNS, "split")


def _csv(rows, columns=_COLUMNS, end="\n") -> bytes:
    """A manifest's bytes."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator=end)
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue().encode()


def _changed(rows, row, column, value):
    """Rows with another value in one cell."""
    rows = [list(cells) for cells in rows]
    rows[row][column] = value
    return rows


# For each refused CSV manifest its bytes, and what the answer must say.
_REFUSED = {
    "nothing": (b"", ["manifest.csv: is empty", "path,user_id,class_id"]),
    "header_only": (_csv([]), ["names no pictures and no users"]),
    "columns_missing": (
        _csv(_GOOD, ("path", "label", "who")),
        ["columns user_id, class_id missing", "path,label,who", "path,user_id,class_id"],
    ),
    "one_column_missing": (_csv(_GOOD, ("path", "user_id", "x")), ["column class_id missing"]),
    "upper_case_header": (
        _csv(_GOOD, ("Path", "User_ID", "CLASS_ID")),
        ["path, user_id, class_id missing", "Path,User_ID,CLASS_ID", "so written"],
    ),
    "no_header": (_csv(_GOOD[1:], _GOOD[0]), ["missing", "'p0.png,u0,c0'"]),
    "column_twice": (
        _csv(_GOOD, (*_COLUMNS, "user_id")),
        ["column user_id is there 2 times"],
    ),
    "split_in_upper_case": (
        _csv(_SPLIT, (*_COLUMNS, "Split")),
        ["column 'Split' would be ignored", "accepted is the name split"],
    ),
    "splits": (_csv(_SPLIT, (*_COLUMNS, "splits")), ["column 'splits' would be ignored"]),
    "semicolons": (
        _csv(_GOOD).replace(b",", b";"),
        ["line 1", "separated by semicolons", "accepted are commas"],
    ),
    "tabs": (_csv(_GOOD).replace(b",", b"\t"), ["line 1", "separated by tabs"]),
    "latin_1": (
        _csv(_changed(_GOOD, 4, 1, "J\u00f6rg")).decode().encode("latin-1"),
        ["line 6", "J\\xf6rg", "not UTF-8"],
    ),
    "latin_1_behind_a_mark": (
        b"\xef\xbb\xbf" + b"path,user_id,class_id\np0.png,\xf6,c0\n",
        ["line 2", "\\xf6"],
    ),
    "utf_16": (_csv(_GOOD).decode().encode("utf-16"), ["line 1", "not UTF-8"]),
    "short_row": (
        _csv([*_GOOD, ("p12.png", "u0")]),
        ["line 14 has 2 cells", "accepted are 3 in each"],
    ),
    "long_rows": (
        _csv([(*row, "more") for row in _GOOD]),
        ["line 2 has 4, line 3 has 4, line 4 has 4 and 9 more cells"],
    ),
    "open_quote": (
        _csv(_GOOD).replace(b"u1,c0\n", b'"u1,c0\n'),
        ["line 3", "unexpected end of data"],
    ),
    "empty_cell": (_csv(_changed(_GOOD, 2, 1, "")), ["line 4: user_id=''", "empty"]),
    "empty_cells": (
        _csv([(p, u, "") for p, u, _ in _GOOD]),
        ["line 2: class_id=''", "line 4: class_id='' and 9 more: empty"],
    ),
    "empty_split": (
        _csv(_changed(_SPLIT, 2, 3, ""), _SPLIT_COLUMNS),
        ["line 4: split=''", "empty"],
    ),
    "user_with_a_space": (
        _csv(_changed(_GOOD, 2, 1, " u1")),
        ["line 4: user_id=' u1'", "white space"],
    ),
    "user_with_a_line_break": (
        _csv(_changed(_GOOD, 2, 1, "u\n1")),
        [r"line 4: user_id='u\n1'", "control characters"],
    ),
    "line_numbers_count_line_breaks_in_cells": (
        _csv(
            _changed([(*row, "two\nlines") for row in _GOOD], 5, 2, ""),
            (*_COLUMNS, "note"),
        ),
        ["line 12: class_id=''"],
    ),
    "path_with_nul": (
        _csv(_changed(_GOOD, 1, 0, "p\0.png")),
        [r"line 3: path='p\x00.png'", "control characters"],
    ),
    "unknown_split": (
        _csv(_changed(_SPLIT, 11, 3, "val"), _SPLIT_COLUMNS),
        ["line 13: split='val'", "accepted are train, validation, test"],
    ),
    "absolute": (
        _csv(_changed(_GOOD, 1, 0, "/pictures/p1.png")),
        ["line 3: path='/pictures/p1.png'", "absolute", "relative"],
    ),
    "drive": (
        _csv(_changed(_GOOD, 1, 0, "C:\\p1.png")),
        [r"line 3: path='C:\\p1.png'", "absolute"],
    ),
    "address": (_csv(_changed(_GOOD, 1, 0, "gs://bucket/p1.png")), ["line 3", "absolute"]),
    "backslashes": (
        _csv([(f"a\\{p}", u, c) for p, u, c in _GOOD]),
        [r"line 2: path='a\\p0.png'", "and 9 more", "with / between folders"],
    ),
    "above": (
        _csv(_changed(_GOOD, 1, 0, "../p1.png")),
        ["line 3: path='../p1.png'", "leads out of"],
    ),
    "beside": (
        _csv(_changed(_GOOD, 1, 0, "../own too/p1.png")),
        ["line 3: path='../own too/p1.png'", "leads out of"],
    ),
    "above_by_a_detour": (
        _csv(_changed(_GOOD, 1, 0, "folder/../nowhere/../../p1.png")),
        ["line 3", "leads out of"],
    ),
    "link_outside": (
        _csv(_changed(_GOOD, 1, 0, "outside.png")),
        ["line 3: path='outside.png'", "leads out of"],
    ),
    "linked_folder_outside": (
        _csv(_changed(_GOOD, 1, 0, "outside/passwd")),
        ["line 3: path='outside/passwd'", "leads out of"],
    ),
    "folder": (_csv(_changed(_GOOD, 1, 0, "folder")), ["line 3: path='folder'", "not a file"]),
    "folder_with_slash": (
        _csv(_changed(_GOOD, 1, 0, "folder/")),
        ["line 3: path='folder/'", "not a file"],
    ),
    "source_itself": (_csv(_changed(_GOOD, 1, 0, ".")), ["line 3: path='.'", "not a file"]),
    "pipe": (_csv(_changed(_GOOD, 1, 0, "pipe")), ["line 3: path='pipe'", "not a file"]),
    "all_missing": (
        _csv([(f"images/{p}", u, c) for p, u, c in _GOOD]),
        ["none of the 12 files", "/images/p0.png", "accepted as --source"],
    ),
    "one_user": (
        _csv([(p, "me", c) for p, _, c in _GOOD]),
        ["all 12 pictures are of user_id='me'", "2 users or more"],
    ),
    "one_class": (
        _csv([(p, u, "cat") for p, u, _ in _GOOD]),
        ["all 12 pictures are of class_id='cat'", "2 classes or more"],
    ),
    "user_in_two_splits": (
        _csv(_changed(_SPLIT, 11, 1, "u0"), _SPLIT_COLUMNS),
        ["user_id='u0' is in train and test", "drop the column split"],
    ),
    "users_in_three_splits": (
        _csv([(p, f"u{i % 4}", c, s) for i, (p, _, c, s) in enumerate(_SPLIT)], _SPLIT_COLUMNS),
        ["user_id='u0' is in train and validation and test", "and 1 more"],
    ),
    "picture_twice": (
        _csv([*_GOOD, _GOOD[3]]),
        ["line 5 and line 14: path='p3.png' is one file", "one row a picture"],
    ),
    "pictures_twice": (
        _csv([*_GOOD, *_GOOD]),
        ["12 rows repeat a picture, first line 2 and line 14: path='p0.png'"],
    ),
    "picture_of_two_users": (
        _csv([*_GOOD, ("p3.png", "u7", "c1")]),
        ["line 5 and line 14", "'p3.png'", "user_id='u0' and user_id='u7'", "guarantee"],
    ),
    "picture_of_two_users_under_two_paths": (
        _csv([*_GOOD, ("./folder/..//p3.png", "u7", "c1")]),
        ["path='p3.png' and './folder/..//p3.png' is one file", "guarantee"],
    ),
    "picture_of_two_users_by_a_link": (
        _csv([*_GOOD, ("inside.png", "u7", "c1")]),
        ["path='p0.png' and 'inside.png' is one file", "guarantee"],
    ),
    "picture_of_two_users_by_a_linked_folder": (
        _csv([*_GOOD, ("again/p0.png", "u7", "c1")]),
        ["path='p0.png' and 'again/p0.png' is one file", "guarantee"],
    ),
    "missing_picture_of_two_users": (
        _csv([*_GOOD, ("gone.png", "u7", "c1"), ("gone.png", "u8", "c1")]),
        ["path='gone.png' is one file", "guarantee"],
    ),
    "picture_of_two_classes": (
        _csv([*_GOOD, ("p3.png", "u0", "c5")]),
        ["class_id='c1' and class_id='c5'", "one class a picture"],
    ),
    "picture_in_two_splits": (
        _csv([*_SPLIT, ("p0.png", "u0", "c0", "test")], _SPLIT_COLUMNS),
        ["split='train' and split='test'", "one split a picture"],
    ),
    "too_few_classes": (
        _csv([(p, u, f"c{i % 5}") for i, (p, u, _) in enumerate(_GOOD)]),
        ["has 5 classes, 5 of them with 2 pictures", "accepted are 6 and 4"],
    ),
    "too_few_pairs": (
        _csv([(p, u, f"c{max(0, i - 3)}") for i, (p, u, _) in enumerate(_GOOD)]),
        ["has 9 classes, 1 of them with 2 pictures"],
    ),
    "split_without_validation": (
        _csv([(*r[:3], r[3].replace("validation", "train")) for r in _SPLIT], _SPLIT_COLUMNS),
        ["split validation has 0 pictures", "2 such classes"],
    ),
    "split_test_of_one_class": (
        _csv([(p, u, c if s != "test" else "c0", s) for p, u, c, s in _SPLIT], _SPLIT_COLUMNS),
        ["split test has 4 pictures, and 1 classes with 2"],
    ),
    "split_test_of_lone_pictures": (
        _csv([(p, u, p if s == "test" else c, s) for p, u, c, s in _SPLIT], _SPLIT_COLUMNS),
        ["split test has 4 pictures, and 0 classes with 2"],
    ),
    "split_train_of_one_user": (
        _csv([(p, "u0" if s == "train" else u, c, s) for p, u, c, s in _SPLIT], _SPLIT_COLUMNS),
        ["training is left 1 users and 2 classes"],
    ),
    "not_parquet_but_csv_of_binary": (b"PAR1 is not enough", ["manifest.csv", "whole Parquet"]),
}


class ManifestTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        above = os.path.realpath(self.enterContext(tempfile.TemporaryDirectory()))
        self.folder = os.path.join(above, "own")
        os.makedirs(os.path.join(self.folder, "folder"))
        image = pictures.encode(pictures.picture("c", "u", 0, 8, 8), "PNG")
        for i in range(12):
            self.put(f"p{i}.png", image)
        self.put("../p1.png", image)
        for name, target in (
            ("outside.png", "../p1.png"),
            ("outside", "/etc"),
            ("inside.png", "p0.png"),
            ("again", "."),
            ("broken.png", "nowhere.png"),
            ("loop.png", "loop.png"),
        ):
            os.symlink(target, os.path.join(self.folder, name))
        os.mkfifo(os.path.join(self.folder, "pipe"))

    def put(self, name: str, data: bytes) -> str:
        """Writes a file into the folder."""
        path = os.path.join(self.folder, name)
        with open(path, "wb") as file:
            file.write(data)
        return path

    def put_parquet(self, name: str = "manifest.parquet", **columns) -> str:
        """Writes a manifest of typed columns, those of the good one where not given."""
        good = dict(zip(_COLUMNS, map(list, zip(*_GOOD, strict=True)), strict=True))
        path = os.path.join(self.folder, name)
        pyarrow.parquet.write_table(pa.table(good | columns), path)
        return path

    def listed(self, **options) -> preparation.Listing:
        return image_folder.ImageFolder.list_source(self.folder, **options)

    def refused(self, **options) -> str:
        with self.assertRaises(preparation.SourceError) as caught:
            self.listed(**options)
        message = str(caught.exception)
        self.assertLen(message.splitlines(), 1)
        self.assertLess(len(message), 900)
        return message

    @parameterized.named_parameters((name, *case) for name, case in _REFUSED.items())
    def test_refuses(self, manifest, words):
        self.put("manifest.csv", manifest)
        message = self.refused()
        for word in words:
            self.assertIn(word, message)

    @parameterized.named_parameters(
        ("plain", _csv(_GOOD)),
        ("windows_lines", _csv(_GOOD, end="\r\n")),
        ("old_mac_lines", _csv(_GOOD, end="\r")),
        ("byte_order_mark", b"\xef\xbb\xbf" + _csv(_GOOD)),
        ("no_last_line_end", _csv(_GOOD).rstrip()),
        ("blank_lines", b"\n" + _csv(_GOOD).replace(b"\n", b"\n\n")),
        ("quoted", _csv(_GOOD).replace(b"p0.png", b'"p0.png"').replace(b"user_id", b'"user_id"')),
        ("other_order", _csv([row[::-1] for row in _GOOD], _COLUMNS[::-1])),
    )
    def test_accepts(self, manifest):
        self.put("manifest.csv", manifest)
        examples = self.listed().examples
        self.assertEqual([(e.image, e.user, e.class_name) for e in examples], _GOOD)
        self.assertEqual({e.split for e in examples}, {"train"})

    def test_cells_with_commas_and_quotes(self):
        name = 'a, "b".png'
        os.rename(os.path.join(self.folder, "p0.png"), os.path.join(self.folder, name))
        self.put("manifest.csv", _csv(_changed(_GOOD, 0, 0, name)))
        listing = self.listed()
        self.assertEqual(listing.examples[0].image, name)
        self.assertStartsWith(listing.read(name), b"\x89PNG")

    def test_further_columns_are_ignored_and_recorded(self):
        rows = [(str(i), *row, "x") for i, row in enumerate(_GOOD)]
        self.put("manifest.csv", _csv(rows, ("", *_COLUMNS, "note")))
        listing = self.listed()
        self.assertEqual([(e.image, e.user, e.class_name) for e in listing.examples], _GOOD)
        self.assertEqual(listing.facts["ignored_columns"], ["", "note"])

    def test_split_is_taken_as_given(self):
        self.put("manifest.csv", _csv(_SPLIT, _SPLIT_COLUMNS))
        listing = self.listed()
        self.assertEqual([e.split for e in listing.examples], [row[3] for row in _SPLIT])
        self.assertTrue(listing.facts["has_split_column"])

    def test_missing_files_are_left_to_be_counted(self):
        rows = [(p if i != 1 else "gone.png", u, c) for i, (p, u, c) in enumerate(_GOOD)]
        rows += [(p, "u0", "c0") for p in ("nowhere/x.png", "p2.png/x.png", "broken.png")]
        self.put("manifest.csv", _csv(rows))
        listing = self.listed()
        self.assertLen(listing.examples, 15)
        for row in (1, 12, 13, 14):
            with self.assertRaises(FileNotFoundError):
                listing.read(listing.examples[row].image)

    def test_links_inside_are_followed(self):
        rows = _changed(_GOOD, 0, 0, "inside.png")
        self.put("manifest.csv", _csv(_changed(rows, 1, 0, "again/again/p1.png")))
        listing = self.listed()
        for example in listing.examples[:2]:
            self.assertStartsWith(listing.read(example.image), b"\x89PNG")

    def test_source_may_be_a_link(self):
        self.put("manifest.csv", _csv(_GOOD))
        link = os.path.join(os.path.dirname(self.folder), "link")
        os.symlink(self.folder, link)
        listing = image_folder.ImageFolder.list_source(link)
        self.assertStartsWith(listing.read("p0.png"), b"\x89PNG")

    def test_endless_links_are_damaged_pictures(self):
        self.put("manifest.csv", _csv(_changed(_GOOD, 1, 0, "loop.png")))
        with self.assertRaises(OSError):
            self.listed().read("loop.png")

    def test_wrong_source_is_named_where_the_right_one_can_be_seen(self):
        rows = [(f"own/{p}", u, c) for p, u, c in _GOOD]
        self.put("manifest.csv", _csv(rows))
        self.assertIn(f"it is in {os.path.dirname(self.folder)}: give that", self.refused())
        manifest = self.put("manifest.csv", _csv(_GOOD))
        elsewhere = self.enterContext(tempfile.TemporaryDirectory())
        with self.assertRaisesRegex(preparation.SourceError, f"it is in {self.folder}: give that"):
            image_folder.ImageFolder.list_source(elsewhere, manifest=manifest)

    def test_manifest_elsewhere(self):
        manifest = self.put("../list.txt", _csv(_GOOD))
        self.assertLen(self.listed(manifest=manifest).examples, 12)

    def test_manifest_not_to_be_found(self):
        self.assertIn("neither manifest.csv nor manifest.parquet", self.refused())
        self.put("manifest.csv", _csv(_GOOD))
        self.put_parquet()
        self.assertIn("holds manifest.csv and manifest.parquet", self.refused())
        for path, word in (("nowhere.csv", "does not exist"), (self.folder, "is a folder")):
            self.assertIn(f"manifest={path}: {word}", self.refused(manifest=path))
        with self.assertRaisesRegex(preparation.SourceError, "is not a folder"):
            image_folder.ImageFolder.list_source(os.path.join(self.folder, "manifest.csv"))

    def test_unreadable_folder_is_named(self):
        # Root may read everything: a folder that cannot be looked into is feigned.
        rows = _changed(_GOOD, 1, 0, "folder/x.png")
        self.put("manifest.csv", _csv(rows))
        scandir = os.scandir

        def refusing(path):
            if path.endswith("/folder"):
                raise PermissionError(13, "Permission denied")
            return scandir(path)

        with absltest.mock.patch.object(os, "scandir", refusing):
            self.assertIn("own/folder: Permission denied", self.refused())

    @parameterized.named_parameters(
        ("text", pa.string()), ("large_text", pa.large_string()), ("categories", "dictionary")
    )
    def test_parquet_reads_as_csv(self, kind):
        columns = zip(*_SPLIT, strict=True)
        arrays = [
            pa.array(c).dictionary_encode() if kind == "dictionary" else pa.array(c, kind)
            for c in columns
        ]
        path = os.path.join(self.folder, "manifest.parquet")
        pyarrow.parquet.write_table(pa.table(arrays, list(_SPLIT_COLUMNS)), path)
        from_parquet = self.listed()
        os.remove(path)
        self.put("manifest.csv", _csv(_SPLIT, _SPLIT_COLUMNS))
        self.assertEqual(from_parquet.examples, self.listed().examples)

    def test_parquet_with_whole_numbers(self):
        big = 2**63 - 1
        self.put_parquet(
            user_id=pa.array([7, -1, big] * 4, pa.int64()),
            class_id=pa.array([i // 2 for i in range(12)], pa.uint8()).dictionary_encode(),
            __index_level_0__=pa.array([[i] for i in range(12)]),
        )
        listing = self.listed()
        self.assertEqual([e.user for e in listing.examples[:3]], ["7", "-1", str(big)])
        self.assertEqual(listing.examples[11].class_name, "5")
        self.assertEqual(listing.facts["ignored_columns"], ["__index_level_0__"])

    @parameterized.named_parameters(
        ("nulls", {"user_id": ["u0", None, None, None, None] + ["u1"] * 7},
         ["row 2: user_id=None", "row 4: user_id=None and 1 more: empty"]),
        ("only_nulls", {"user_id": pa.nulls(12)}, ["row 1: user_id=None", "and 9 more"]),
        # What pandas makes of whole numbers with a gap: beyond 2**53 it would merge users.
        ("fractions", {"user_id": [1.0] * 12}, ["column user_id is of type double", "accepted"]),
        ("lists", {"class_id": [["c"]] * 12}, ["column class_id is of type list", "accepted"]),
        ("bytes", {"path": [b"p"] * 12}, ["column path is of type binary", "accepted"]),
        ("one_user", {"user_id": [5] * 12}, ["all 12 pictures are of user_id='5'"]),
        ("split_as_number", {"split": [0] * 12}, ["row 1: split='0'", "accepted are train"]),
        ("split_in_upper_case", {"SPLIT": ["test"] * 12}, ["column 'SPLIT' would be ignored"]),
    )  # fmt: skip
    def test_refuses_parquet(self, columns, words):
        self.put_parquet(**columns)
        message = self.refused()
        for word in words:
            self.assertIn(word, message)

    def test_refuses_parquet_without_columns_or_end(self):
        path = self.put_parquet()
        pyarrow.parquet.write_table(pa.table({"path": ["p0.png"], "label": [1]}), path)
        self.assertIn("columns user_id, class_id missing: found are 'path,label'", self.refused())
        with open(path, "rb") as file:
            data = file.read()
        self.put("manifest.parquet", data[:-20])
        self.assertIn("whole Parquet files", self.refused())
        self.put("manifest.parquet", _csv(_GOOD))
        self.assertIn("manifest.parquet: is not Parquet", self.refused())

    def test_refuses_parquet_that_is_not_utf_8(self):
        binary = pa.array([b"u\xff", *[b"u"] * 11], pa.binary())
        text = pa.Array.from_buffers(pa.string(), 12, binary.buffers())
        self.put_parquet(user_id=text)
        self.assertIn("accepted is text in UTF-8", self.refused())

    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(
            st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=8),
            min_size=2,
            max_size=6,
            unique=True,
        ),
        st.sampled_from(["csv", "parquet"]),
    )
    def test_ids_are_kept_exactly(self, ids, form):
        users = [ids[i % len(ids)] for i in range(12)]
        if form == "csv":
            rows = [(p, u, c) for (p, _, c), u in zip(_GOOD, users, strict=True)]
            manifest = self.put("ids.csv", _csv(rows))
        else:
            manifest = self.put_parquet("ids.parquet", user_id=users)
        self.assertEqual([e.user for e in self.listed(manifest=manifest).examples], users)

    def test_numbers_with_zeros_before_them_are_users_of_their_own(self):
        users = ["7", "007", "7.0", "+7"] * 3
        self.put("manifest.csv", _csv([(p, u, c) for (p, _, c), u in zip(_GOOD, users)]))  # noqa: B905
        self.assertEqual([e.user for e in self.listed().examples], users)


def _table(users, classes, splits=None) -> ExampleTable:
    """A table with users and classes that are called by their numbers."""
    return ExampleTable(
        np.arange(len(users)) + 100,
        np.array(users, np.int64),
        np.array(classes, np.int64),
        np.array(splits or ["train"] * len(users), object),
        [str(i) for i in range(max(users) + 1)],
        [str(i) for i in range(max(classes) + 1)],
    )


class SplitTest(parameterized.TestCase):
    @settings(max_examples=200, deadline=None)
    @given(
        st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30)), min_size=1, max_size=120),
        st.integers(0, 5),
    )
    def test_laws_of_held_out_classes(self, pairs, seed):
        users, classes = map(list, zip(*pairs, strict=True))
        table = _table(users, classes)
        try:
            split = image_folder._choose(table, False, seed)
        except ValueError as error:
            counts = np.unique(classes, return_counts=True)[1]
            if not str(error).startswith("training is left 1 users"):
                self.assertTrue(len(counts) < 6 or np.count_nonzero(counts >= 2) < 4)
            return
        of = {n: set(table.classes[getattr(split, n)]) for n in ("validation", "test")}
        train = set(split.train_classes)
        self.assertEmpty((of["validation"] & of["test"]) | (of["validation"] & train))
        self.assertEmpty(of["test"] & train)
        self.assertEqual(of["validation"] | of["test"] | train, set(classes))
        for name, share in (("validation", 0.1), ("test", 0.2)):
            self.assertLen(of[name], max(2, round(share * len(set(classes)))))
            rows = getattr(split, name)
            self.assertCountEqual(rows, np.flatnonzero(np.isin(table.classes, list(of[name]))))
            paired = np.unique(table.classes[rows], return_counts=True)[1] >= 2
            self.assertGreaterEqual(np.count_nonzero(paired), 2)
        # A user trains exactly if one of their images is of a class that is trained on.
        self.assertEqual(set(split.train_users), {u for u, c in pairs if c in train})

    def test_draw_is_seeded_and_uniform(self):
        table = _table([i % 7 for i in range(80)], [i // 2 for i in range(80)])
        drawn = [image_folder._choose(table, False, seed) for seed in range(400)]
        again = image_folder._choose(table, False, 3)
        np.testing.assert_array_equal(drawn[3].test, again.test)
        held_out = np.zeros(40)
        for split in drawn:
            held_out[np.unique(table.classes[split.test])] += 1
        # Binomial(400, 0.2) leaves 40 to 122 with a probability below 1e-6 for all 40 classes.
        self.assertTrue(np.all((held_out > 40) & (held_out < 122)), held_out)

    def test_faces_that_are_held_out_are_nobody_in_training(self):
        faces = [i // 3 for i in range(60)]
        split = image_folder._choose(_table(faces, faces), False, 0)
        np.testing.assert_array_equal(split.train_users, split.train_classes)
        self.assertLen(split.train_users, 14)
        self.assertEqual(
            split.descriptions["test"],
            "4 classes that training has not seen, of 4 users, none of them in training",
        )

    def test_description_counts_users_who_also_train(self):
        table = _table([i % 5 for i in range(60)], [i // 6 for i in range(60)])
        split = image_folder._choose(table, False, 0)
        self.assertEqual(
            split.descriptions["validation"],
            "2 classes that training has not seen, of 5 users, 5 of them in training",
        )

    def test_given_split(self):
        splits = ["train"] * 4 + ["validation"] * 4 + ["test"] * 4
        classes = [0, 0, 1, 2, 3, 3, 4, 4, 0, 0, 5, 5]
        table = _table([0, 1, 1, 1, 2, 2, 3, 3, 4, 4, 4, 4], classes, splits)
        split = image_folder._choose(table, True, 0)
        self.assertEqual(split.train_users.tolist(), [0, 1])
        self.assertEqual(split.train_classes.tolist(), [0, 1, 2])
        self.assertEqual(split.validation.tolist(), [4, 5, 6, 7])
        self.assertEqual(split.test.tolist(), [8, 9, 10, 11])
        self.assertStartsWith(
            split.descriptions["validation"], "2 classes, none of which training has seen, of 2 u"
        )
        self.assertStartsWith(
            split.descriptions["test"], "2 classes, 1 of which training has seen, of 1 users, none"
        )

    def test_training_that_one_user_would_be_left_to_is_refused(self):
        # Whatever is drawn: one user has a single picture, and ten classes are of the other.
        table = _table([0] * 20 + [1, 1], [i // 2 for i in range(20)] + [0, 0])
        outcomes = set()
        for seed in range(40):
            try:
                outcomes.add(len(image_folder._choose(table, False, seed).train_users))
            except ValueError as error:
                outcomes.add(0)
                self.assertIn("training is left 1 users", str(error))
                self.assertIn("--data_seed", str(error))
        self.assertEqual(outcomes, {0, 2})


class OptionsTest(parameterized.TestCase):
    @parameterized.parameters(
        ({"image_size": 4}, "image_size=4: accepted"),
        ({"image_size": 4096}, "image_size=4096: accepted"),
        ({"image_channels": 2}, "image_channels=2: accepted"),
        ({"dataset_name": "../x"}, "dataset_name='../x': accepted"),
        ({"dataset_name": ""}, "dataset_name='': accepted"),
        ({"dataset_name": "none"}, "cache=.*: .*image_folder-none-224 is not there"),
    )
    def test_bad_options(self, options, words):
        folder = self.enterContext(tempfile.TemporaryDirectory())
        with self.assertRaisesRegex(ValueError, f"^{words}"):
            image_folder.ImageFolder(folder, **options)

    def test_caches_that_differ_have_names_that_differ(self):
        name = image_folder.ImageFolder.cache_name
        names = {name(), name(dataset_name="b"), name(image_size=28), name(image_channels=1)}
        self.assertLen(names, 4)
        self.assertEqual(name(), "image_folder-own-224")

    def test_own_data_have_no_published_number_of_users(self):
        self.assertIsNone(image_folder.ImageFolder.published_users())


class PreparationTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = self.enterContext(tempfile.TemporaryDirectory())
        self.source = os.path.join(self.folder, "own")
        self.cache = os.path.join(self.folder, "cache")

    def prepare(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs the program as a user does."""
        command = [sys.executable, "-m", "tasks.prepare", "--task=image_folder", "--image_size=32"]
        return subprocess.run(
            [*command, f"--source={self.source}", f"--cache={self.cache}", *arguments],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=120,
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": _ROOT},
        )

    def build(self, **options):
        return registry.build("image_folder", cache=self.cache, image_size=32, **options)

    def test_missing_and_corrupt_pictures_stop_it_until_they_are_accepted(self):
        written = fixture.write(
            self.source, users=10, classes_per_user=3, missing=0.1, corrupt=1, size=32
        )
        self.assertEqual((written.listed, len(written.missing)), (60, 6))
        stopped = self.prepare()
        self.assertEqual(stopped.returncode, 2)
        self.assertIn(
            "10 users, 10 classes, 60 images listed: 53 prepared, 6 missing, 1 undecodable",
            stopped.stderr,
        )
        self.assertFalse(os.path.exists(os.path.join(self.cache, "image_folder-own-32")))
        [problems] = [
            os.path.join(f, n) for f, _, ns in os.walk(self.cache) for n in ns if "problems" in n
        ]
        self.assertIn(problems, stopped.stderr)
        with open(problems, newline="", encoding="utf-8") as file:
            found = [(row["image"], row["problem"]) for row in csv.DictReader(file)]
        self.assertCountEqual(
            found,
            [(p, "missing") for p in written.missing]
            + [(p, "undecodable") for p in written.corrupt],
        )
        # One picture less is accepted than is missing: still refused.
        self.assertEqual(self.prepare("--allow_missing=0.09").returncode, 2)
        done = self.prepare("--allow_missing=0.1")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("53 prepared, 6 missing, 1 undecodable", done.stdout)
        facts = self.build().describe()
        self.assertEqual((facts["missing"], facts["corrupt"], facts["present"]), (6, 1, 53))
        self.assertEqual(sum(facts[s]["images"] for s in ("train", "validation", "test")), 53)

    @parameterized.parameters("csv", "parquet")
    def test_pixels_ids_and_split_come_through(self, form):
        written = fixture.write(self.source, form=form, split=True, size=32)
        done = self.prepare("--dataset_name=mine")
        self.assertEqual(done.returncode, 0, done.stderr)
        task = self.build(dataset_name="mine")
        self.assertEqual(task.num_users, 4)
        self.assertEqual([task.user_name(u) for u in task.user_ids([0, 3])], ["004", "007"])
        listing = image_folder.ImageFolder.list_source(self.source)
        test = task.evaluation_set("test")
        theirs = [e for e in listing.examples if e.split == "test"]
        expected = [preparation.to_pixels(listing.read(e.image), (32, 32, 3)) for e in theirs]
        self.assertCountEqual(
            [(image.tobytes(), c, u) for image, c, u in zip(
                test.images[:], [task.table.class_names[c] for c in test.class_ids],
                [task.user_name(u) for u in test.user_ids], strict=True)],
            [(image.tobytes(), e.class_name, e.user)
             for image, e in zip(expected, theirs, strict=True)],
        )  # fmt: skip
        images, class_ids = task.load_users(task.user_ids(np.arange(4)))
        trained = [e for e in listing.examples if e.split == "train"]
        self.assertCountEqual(
            [image.tobytes() for image in images.numpy()],
            [preparation.to_pixels(listing.read(e.image), (32, 32, 3)).tobytes() for e in trained],
        )
        self.assertLen(set(class_ids.numpy()), len({e.class_name for e in trained}))
        self.assertEqual(task.describe()["train"]["images"], written.listed // 2)

    def test_refusals_reach_the_terminal_in_one_line(self):
        fixture.write(self.source, users=2, identities=True)
        done = self.prepare()
        self.assertEqual(done.returncode, 2)
        self.assertLen(done.stderr.splitlines(), 1)
        self.assertStartsWith(done.stderr, f"error: --source={self.source}: ")
        self.assertIn("manifest.csv: has 2 classes", done.stderr)

    def test_lost_pictures_never_turn_a_given_split_into_a_drawn_one(self):
        fixture.write(self.source, split=True, users=16)
        with open(os.path.join(self.source, "manifest.csv"), newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if row["split"] != "train":
                    os.remove(os.path.join(self.source, row["path"]))
        self.assertEqual(self.prepare("--allow_missing=0.5").returncode, 0)
        with self.assertRaisesRegex(ValueError, "^cache=.*: split validation has 0 pictures"):
            self.build()

    def test_grey_pictures_and_another_seed(self):
        fixture.write(self.source, identities=True, users=12)
        self.assertEqual(self.prepare("--image_channels=1").returncode, 0)
        tasks = [self.build(image_channels=1, data_seed=seed) for seed in (0, 1)]
        self.assertEqual(tasks[0].image_shape, (32, 32, 1))
        names = [set(task.user_ids(np.arange(task.num_users))) for task in tasks]
        self.assertNotEqual(*names)
        for task, users in zip(tasks, names, strict=True):
            for split in ("validation", "test"):
                self.assertEmpty(users & set(task.evaluation_set(split).user_ids))


class FixtureTest(absltest.TestCase):
    def test_every_form_of_picture_shows_what_was_drawn(self):
        folder = self.enterContext(tempfile.TemporaryDirectory())
        fixture.write(folder, users=7, size=32)
        listing = image_folder.ImageFolder.list_source(folder)
        modes = set()
        for row, example in enumerate(listing.examples):
            data = listing.read(example.image)
            height, width = 32 + row % 3 * 5, 32 + row % 4 * 7
            number = int(os.path.basename(example.image).split(".")[0])
            drawn = pictures.picture(example.class_name, example.user, number, height, width)
            drawn = drawn.astype(float)
            if ".grey." in example.image:
                drawn = drawn.mean(2, keepdims=True)
            elif ".deep." in example.image:
                drawn = drawn[:, :, :1]
            shown = preparation.to_pixels(data, (height, width, 3)).astype(float)
            error = np.abs(shown - drawn)
            # A transparent colour becomes white; a small share of the pixels has it.
            self.assertLess(np.median(error), 12, example.image)
            with preparation.Image.open(io.BytesIO(data)) as picture:
                modes.add((picture.format, picture.mode, picture.getexif().get(0x0112)))
                if ".palette." in example.image:
                    self.assertTrue(picture.has_transparency_data)
        self.assertEqual(
            modes,
            {
                ("JPEG", "RGB", None),
                ("PNG", "RGB", None),
                ("JPEG", "L", None),
                ("JPEG", "CMYK", None),
                ("JPEG", "RGB", 6),
                ("PNG", "I;16", None),
                ("PNG", "P", None),
            },
        )


if __name__ == "__main__":
    absltest.main()
