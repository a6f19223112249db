"""Tests of finding images in folders, tars and TFRecords, and of split files."""

import io
import os
import tarfile
import tempfile
import zipfile
from concurrent import futures

import tensorflow as tf
from absl.testing import absltest, parameterized
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tasks import archives, preparation
from tasks.fixtures import federated_vision as fixture

# A name that str.rstrip(".jpg") would shorten, for each letter that it eats.
_NAMES = ["0abj.jpg", "0abp.jpg", "0abg.jpg", "jpg.jpg", "a.b.jpg"]


def _files(names):
    """Different bytes for each name."""
    return [(f"a/b/{name}", f"bytes of {name}".encode() * 50) for name in names]


class FolderTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = self.enterContext(tempfile.TemporaryDirectory())

    def put(self, path, data=b""):
        fixture.write_file(os.path.join(self.folder, path), data)

    def test_finds_wanted_names_at_any_depth_whole(self):
        for name, data in _files([*_NAMES, "0ab.jpg", "unwanted.jpg"]):
            self.put(name, data)
        places = archives.Source(self.folder).find_images({*_NAMES, "0a.jpg", "absent.jpg"})
        self.assertCountEqual(places, _NAMES)
        for name, data in _files(_NAMES):
            self.assertEqual(places[os.path.basename(name)].read(), data)

    def test_other_spellings_of_the_ending_and_no_other_kinds_of_file(self):
        for name in ("a.JPG", "b.jpeg", "c.png", "d", "._e.jpg", "f.jpg.part"):
            self.put(name)
        places = archives.Source(self.folder).find_images({f"{c}.jpg" for c in "abcdef"})
        self.assertCountEqual(places, ["a.jpg", "b.jpg"])

    def test_a_loop_of_links_ends_and_links_elsewhere_are_followed(self):
        elsewhere = self.enterContext(tempfile.TemporaryDirectory())
        self.put(os.path.join(elsewhere, "x/1.jpg"), b"1")
        self.put("y/2.jpg", b"2")
        os.symlink(elsewhere, os.path.join(self.folder, "link"))
        os.symlink("..", os.path.join(self.folder, "y", "loop"))
        os.symlink("nowhere.jpg", os.path.join(self.folder, "3.jpg"))
        source = archives.Source(self.folder)
        self.assertCountEqual(
            [os.path.relpath(folder, self.folder) for folder in source.folders],
            [".", "link", "link/x", "y"],
        )
        places = source.find_images({"1.jpg", "2.jpg", "3.jpg"})
        self.assertEqual([places[n].read() for n in ("1.jpg", "2.jpg")], [b"1", b"2"])
        with self.assertRaises(FileNotFoundError):
            places["3.jpg"].read()

    def test_the_same_of_two_images_is_taken_whatever_the_folder_was_filled_in(self):
        for folders in (["a", "b", "c"], ["c", "b", "a"]):
            with tempfile.TemporaryDirectory() as self.folder:
                for folder in folders:
                    self.put(f"{folder}/1.jpg", folder.encode())
                place = archives.Source(self.folder).find_images({"1.jpg"})["1.jpg"]
                self.assertEqual(place.read(), b"a")

    def test_files_higher_up_come_first(self):
        for path in ("a/a/t.csv", "z/t.csv", "a/b/c/t.csv"):
            self.put(path)
        source = archives.Source(self.folder)
        self.assertEqual(source.find_table("t.csv").path, os.path.join(self.folder, "z/t.csv"))
        self.assertLen(source.find_files(r"t\.csv"), 3)
        self.assertIsNone(source.find_table("t.cs"))

    def test_no_folder_is_refused(self):
        self.put("file")
        for path in ("file", "nothing"):
            with self.assertRaisesRegex(preparation.SourceError, "is no folder"):
                archives.Source(os.path.join(self.folder, path))


class TableTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = self.enterContext(tempfile.TemporaryDirectory())

    def read(self, data, columns=("b", "a")):
        path = os.path.join(self.folder, "t.csv")
        with open(path, "wb") as file:
            file.write(data)
        return archives.Table(path).columns(columns)

    @parameterized.parameters(
        b"a,b,c\n1,2,3\n4,5,6\n",
        b"\xef\xbb\xbfa,b,c\r\n1,2,3\r\n\r\n4,5,6",
        b'c,"b",a\n3,2,"1"\n6,5,4\n',
    )
    def test_reads_columns_by_name(self, data):
        self.assertEqual(self.read(data), [("2", "1"), ("5", "4")])

    @parameterized.parameters(
        (b"a,c\n1,2\n", "has no column b; found are a, c"),
        (b"", "has no column b, a; found are none"),
        (b"a,b\n1,2\n\n3\n", "line 4 has 1 cells, and line 1 has 2"),
        (b"a,b\n", "has no rows"),
        (b"a,b\n\xe9,2\n", "is no CSV file in UTF-8"),
        (b'a,b\n1,"2\n', "is no CSV file in UTF-8"),
    )
    def test_refuses_in_one_line(self, data, words):
        with self.assertRaises(preparation.SourceError) as caught:
            self.read(data)
        self.assertIn(words, str(caught.exception))
        self.assertStartsWith(str(caught.exception), os.path.join(self.folder, "t.csv"))
        self.assertLen(str(caught.exception).splitlines(), 1)

    def test_in_a_zip_which_is_preferred(self):
        for name in ("s.zip", "other.zip"):
            with zipfile.ZipFile(os.path.join(self.folder, name), "w") as archive:
                archive.writestr("__MACOSX/s/._t.csv", "junk")
                archive.writestr("s/t.csv", f"a\n{name}\n")
                archive.writestr("s/u.csv", "a\nbeside\n")
        self.read(b"a\nloose\n", ("a",))
        source = archives.Source(self.folder)
        self.assertEqual(source.find_table("t.csv").columns(["a"]), [("loose",)])
        table = source.find_table("t.csv", ["s.zip"])
        self.assertEqual(table.columns(["a"]), [("s.zip",)])
        self.assertEqual(table.beside("u.csv").columns(["a"]), [("beside",)])
        with self.assertRaisesRegex(preparation.SourceError, r"s\.zip/s/v\.csv: is not there"):
            table.beside("v.csv").columns(["a"])

    def test_a_damaged_zip_is_named(self):
        path = os.path.join(self.folder, "s.zip")
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("t.csv", "a\n" + "1\n" * 1000)
        with open(path, "rb") as file:
            whole = file.read()
        with open(path, "wb") as file:
            file.write(whole[:40] + b"\0" * 10 + whole[50:])
        table = archives.Source(self.folder).find_table("t.csv", ["s.zip"])
        with self.assertRaisesRegex(preparation.SourceError, r"s\.zip: cannot be read"):
            table.columns(["a"])
        with open(path, "wb") as file:
            file.write(whole[:-30])
        with self.assertRaisesRegex(preparation.SourceError, r"s\.zip: cannot be read"):
            archives.Source(self.folder).find_table("t.csv", ["s.zip"])


class TarTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = self.enterContext(tempfile.TemporaryDirectory())

    def path(self, name, files=()):
        path = os.path.join(self.folder, name)
        if files:
            fixture.write_tar(path, files)
        return path

    @parameterized.parameters(tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
    def test_index_gives_every_format_s_bytes_to_many_threads(self, tar_format):
        names = [f"{'n' * (length % 90)}{length}.jpg" for length in range(200)]
        files = {name: os.urandom(length * 7) for length, name in enumerate(names)}
        path = self.path("x.tar")
        with tarfile.open(path, "w", format=tar_format) as tar:
            folder = tarfile.TarInfo("7.jpg")
            folder.type = tarfile.DIRTYPE
            tar.addfile(folder)
            for name, data in files.items():
                # Longer than a tar's header holds.
                member = tarfile.TarInfo(f"{'folder' * 20}/é/{name}")
                if tar_format == tarfile.USTAR_FORMAT:
                    member.name = f"folder/{name}"
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
        places = archives.index_tar(path, files.keys() | {"7.jpg"})
        self.assertCountEqual(places, names)
        with futures.ThreadPoolExecutor(8) as pool:
            for name, data in zip(names, pool.map(lambda n: places[n].read(), names), strict=True):
                self.assertEqual(data, files[name])

    def test_a_tar_that_is_cut_off_yields_what_is_there_and_a_warning(self):
        files = [(f"{i}.jpg", bytes([i]) * 2000) for i in range(6)]
        path = self.path("x.tar", files)
        # In the header of the sixth; then in the fifth's bytes; each takes 512 + 2048 bytes.
        for end in (5 * 2560 + 100, 4 * 2560 + 512 + 700):
            os.truncate(path, end)
            with self.assertLogs("absl", "WARNING") as logs:
                places = archives.index_tar(path, {name for name, _ in files})
            self.assertCountEqual(places, [f"{i}.jpg" for i in range(5)])
            self.assertIn("x.tar: is cut off or damaged", logs.output[0])
        self.assertEqual(places["3.jpg"].read(), files[3][1])
        with self.assertRaisesRegex(ValueError, "x.tar ends before this image"):
            places["4.jpg"].read()

    def test_what_is_no_tar_yields_nothing_and_a_warning(self):
        path = self.path("x.tar")
        with open(path, "wb") as file:
            file.write(b"<html>not found</html>" * 100)
        with self.assertLogs("absl", "WARNING"):
            self.assertEmpty(archives.index_tar(path, {"1.jpg"}))
        with self.assertLogs("absl", "WARNING"):
            self.assertEmpty(list(archives.stream_tar(path, {"1.jpg"})))

    def test_stream_yields_what_is_wanted_in_the_tar_s_order(self):
        files = _files([*_NAMES, "no.jpg"])
        streamed = archives.stream_tar(self.path("x.tar.gz", files), set(_NAMES))
        self.assertEqual(list(streamed), [(os.path.basename(n), d) for n, d in files[:-1]])

    def test_what_is_no_longer_wanted_is_passed_over(self):
        files = [("1.jpg", b"a"), ("2.jpg", b"b"), ("sub/1.jpg", b"c")]
        wanted = {"1.jpg", "2.jpg"}
        found = []
        for name, data in archives.stream_tar(self.path("x.tar.gz", files), wanted):
            wanted.remove(name)
            found.append((name, data))
        self.assertEqual(found, files[:2])

    def test_a_compressed_tar_that_is_cut_off_yields_what_is_there_and_a_warning(self):
        files = [(f"{i}.jpg", os.urandom(50_000)) for i in range(6)]
        path = self.path("x.tar.gz", files)
        with open(path, "rb") as file:
            whole = file.read()
        spoiled = whole[:160_000] + b"\xff" * 100_000 + whole[260_000:]
        for data in (whole[:160_000], spoiled):
            with open(path, "wb") as file:
                file.write(data)
            with self.assertLogs("absl", "WARNING") as logs:
                found = list(archives.stream_tar(path, {name for name, _ in files}))
            self.assertEqual(found[:3], files[:3])
            self.assertLess(len(found), 6)
            self.assertIn("x.tar.gz: is cut off or damaged", logs.output[0])

    def test_not_all_of_a_tar_is_kept_in_memory(self):
        path = self.path("x.tar.gz", [(f"{i}.jpg", b"x") for i in range(50)])
        kept = archives._members(path, "r:gz", {"49.jpg"}, lambda tar, _: len(tar.members))
        self.assertEqual(list(kept), [("49.jpg", 0)])


def _example(image=b"image", label=7, **others):
    """A serialized tf.train.Example."""
    features = {name: tf.train.BytesList(value=[value]) for name, value in others.items()}
    features = {name: tf.train.Feature(bytes_list=value) for name, value in features.items()}
    if image is not None:
        encoded = tf.train.BytesList(value=[image])
        features["image/encoded_jpeg"] = tf.train.Feature(bytes_list=encoded)
    if label is not None:
        features["class"] = tf.train.Feature(int64_list=tf.train.Int64List(value=[label]))
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


class RecordsTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.path = os.path.join(self.enterContext(tempfile.TemporaryDirectory()), "user")

    def write(self, *records):
        with tf.io.TFRecordWriter(self.path) as writer:
            for record in records:
                writer.write(record)

    def index(self):
        records, whole = archives.index_records(self.path)
        return [(label, place.read()) for label, place in records], whole

    def test_reads_what_tensorflow_wrote(self):
        expected = [
            (label, os.urandom(size))
            for label, size in [(0, 1), (1, 127), (127, 128), (128, 300), (2027, 70_000)]
        ]
        self.write(*(_example(image, label) for label, image in expected))
        self.assertEqual(self.index(), (expected, True))

    def test_other_features_in_any_order_do_not_matter(self):
        others = {f"{c}/{'x' * n}": c.encode() * n for n, c in enumerate("abcdefghijklmnopqrstuv")}
        for _ in range(5):
            self.write(_example(b"jpeg", 3, **others), _example(b"more", 4))
            self.assertEqual(self.index(), ([(3, b"jpeg"), (4, b"more")], True))

    @parameterized.named_parameters(
        ("no_image", _example(image=None)),
        ("no_class", _example(label=None)),
        ("class_is_text", _example(label=None, **{"class": b"5"})),
        ("empty", b""),
        ("text", b"some text that is none"),
    )
    def test_records_of_something_else_are_none(self, record):
        self.write(record)
        self.assertEqual(self.index(), ([], False))
        self.write(_example(), record)
        self.assertEqual(self.index(), ([(7, b"image")], False))

    def test_numbers_and_fields_that_are_too_long_are_refused(self):
        record = _example(b"jpeg", 3)
        self.assertEqual(record[:1], b"\x0a")
        self.write(b"\x8a" + b"\x80" * 8 + b"\0" + record[1:])
        self.assertEqual(self.index(), ([(3, b"jpeg")], True))
        self.write(b"\x8a" + b"\x80" * 9 + b"\0" + record[1:])
        self.assertEqual(self.index(), ([], False))
        # The image would end behind the list that it is in.
        self.write(record.replace(b"\x04jpeg", b"\x05jpeg"))
        self.assertEqual(self.index(), ([], False))

    def test_no_file_of_records(self):
        for data in (b"", b"a\n", b"2021-01-01 started\n" * 1000, b"\xff" * 1000, b"\0" * 1000):
            with open(self.path, "wb") as file:
                file.write(data)
            self.assertEqual(self.index(), ([], False))
        self.assertEqual(archives.index_records(os.path.dirname(self.path)), ([], False))

    def test_a_file_cut_off_anywhere_is_never_taken_for_whole(self):
        self.write(_example(b"first", 1), _example(b"second", 2))
        with open(self.path, "rb") as file:
            data = file.read()
        # The first record ends behind its length, its data, and two checksums.
        first_end = int.from_bytes(data[:8], "little") + 16
        for size in range(1, len(data)):
            with open(self.path, "wb") as file:
                file.write(data[:size])
            records, whole = self.index()
            self.assertEqual(records, [(1, b"first")] * (size >= first_end))
            self.assertEqual(whole, size == first_end)

    @settings(max_examples=200, deadline=None)
    @given(st.data())
    @example(None)
    def test_no_bytes_make_it_fail_or_hang(self, data):
        record = _example(b"jpeg" * 5, 300)
        if data is not None:
            record = bytearray(record)
            for _ in range(data.draw(st.integers(1, 4))):
                record[data.draw(st.integers(0, len(record) - 1))] = data.draw(st.integers(0, 255))
        self.write(bytes(record))
        records, whole = self.index()
        self.assertEqual(len(records), int(whole))


if __name__ == "__main__":
    absltest.main()
