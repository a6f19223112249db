"""Raw downloads: tables in folders and zips; images by name in folders, tars and TFRecords."""

import csv
import io
import mmap
import os
import posixpath
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from absl import logging

from tasks import preparation

# A TFRecord is its length (uint64) and that one's checksum (uint32), the data, and a checksum.
_LENGTH = struct.Struct("<Q4x")
_FOOTER_BYTES = 4
# The features, and the kind of list that each is: bytes, int64.
_IMAGE, _CLASS = b"image/encoded_jpeg", b"class"
_KINDS = {_IMAGE: 1, _CLASS: 3}
# The kinds of protocol buffers' fields that these features consist of.
_VARINT, _DELIMITED = 0, 2

_Taken = TypeVar("_Taken")


class Place(NamedTuple):
    """Where the bytes of an image lie.

    Attributes:
        path: The file that holds them.
        offset: Where they begin in it, in bytes.
        size: How many they are; None for all to the file's end.
    """

    path: str
    offset: int = 0
    size: int | None = None

    def read(self) -> bytes:
        """Reads them; from any thread.

        Raises:
            OSError: If the file is not there or cannot be read.
            ValueError: If it ends before they do.
        """
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            data = file.read(self.size)
        if self.size is not None and len(data) < self.size:
            raise ValueError(f"{self.path} ends before this image does")
        return data


class Table(NamedTuple):
    """A CSV file, in a folder or in a zip.

    Attributes:
        path: The CSV file, or the zip.
        member: Its name in the zip; "" where it is in none.
    """

    path: str
    member: str = ""

    def __str__(self) -> str:
        return posixpath.join(self.path, self.member) if self.member else self.path

    def beside(self, name: str) -> "Table":
        """The table of another name in the same folder; need not be there."""
        if self.member:
            return Table(self.path, posixpath.join(posixpath.dirname(self.member), name))
        return Table(os.path.join(os.path.dirname(self.path), name))

    def columns(self, names: Sequence[str]) -> list[tuple[str, ...]]:
        """Reads some columns.

        Args:
            names: Of the columns.

        Returns:
            A tuple for each row.

        Raises:
            SourceError: One line, if the table is not there, lacks a column, or is damaged.
        """
        try:
            reader = csv.reader(io.StringIO(self._text(), newline=""), strict=True)
            header = next(reader, [])
            if missing := [name for name in names if name not in header]:
                raise preparation.SourceError(
                    f"{self}: has no column {', '.join(missing)}; found are "
                    f"{', '.join(header) or 'none'}"
                )
            numbers = [header.index(name) for name in names]
            rows = []
            for row in filter(None, reader):
                if len(row) != len(header):
                    raise preparation.SourceError(
                        f"{self}: line {reader.line_num} has {len(row)} cells, and line 1 has "
                        f"{len(header)}: it is cut off or damaged, download it again"
                    )
                rows.append(tuple(row[number] for number in numbers))
        except (csv.Error, UnicodeDecodeError) as error:
            raise preparation.SourceError(f"{self}: is no CSV file in UTF-8: {error}") from None
        if not rows:
            raise preparation.SourceError(f"{self}: has no rows; download it again")
        return rows

    def _text(self) -> str:
        """All of the file."""
        try:
            if not self.member:
                data = Place(self.path).read()
            else:
                with zipfile.ZipFile(self.path) as archive:
                    data = archive.read(self.member)
        except (FileNotFoundError, KeyError):
            raise preparation.SourceError(
                f"{self}: is not there; it belongs beside the other file of the split"
            ) from None
        except (OSError, zipfile.BadZipFile, zlib.error) as error:
            raise preparation.SourceError(
                f"{self.path}: cannot be read ({error}): download it again"
            ) from None
        return data.decode("utf-8-sig")


class Source:
    """A folder of raw downloads, looked through at any depth, through links too.

    Attributes:
        path: The folder.
        folders: Paths of it and of the folders below it.
        files: Paths of the files that are not JPEG files, those highest up first.
    """

    def __init__(self, path: str):
        """Looks through a folder.

        Raises:
            SourceError: If there is no such folder.
        """
        if not os.path.isdir(path):
            raise preparation.SourceError("is no folder; accepted are folders of raw downloads")
        self.path = path
        self.folders: list[str] = []
        self.files: list[str] = []
        for folder, names in self._walk():
            self.folders.append(folder)
            self.files += [os.path.join(folder, n) for n in names if _image_name(n) is None]
        self.files.sort(key=lambda file: (file.count(os.sep), file))

    def find_files(self, pattern: str) -> list[str]:
        """Finds files that are not JPEG files.

        Args:
            pattern: Regular expression for the whole of a file's name.

        Returns:
            Paths, those highest up first.
        """
        return [path for path in self.files if re.fullmatch(pattern, os.path.basename(path))]

    def find_table(self, name: str, zips: Sequence[str] = ()) -> Table | None:
        """Finds a CSV file.

        Args:
            name: Of the CSV file.
            zips: Names of zips that may hold it, which are preferred.

        Returns:
            The table highest up; None if there is none.

        Raises:
            SourceError: If a zip cannot be read.
        """
        for path in self.files:
            if os.path.basename(path) in zips:
                try:
                    with zipfile.ZipFile(path) as archive:
                        members = archive.namelist()
                except (OSError, zipfile.BadZipFile) as error:
                    raise preparation.SourceError(
                        f"{path}: cannot be read ({error}): download it again"
                    ) from None
                for member in members:
                    if posixpath.basename(member) == name:
                        return Table(path, member)
        paths = self.find_files(re.escape(name))
        return Table(paths[0]) if paths else None

    def find_images(self, wanted: Container[str]) -> dict[str, Place]:
        """Finds JPEG files.

        Args:
            wanted: Names to find, such as "0123.jpg"; 0123.jpeg and 0123.JPG will do.

        Returns:
            Where they are; of two with one name, the first in the order of folders' names.
        """
        places: dict[str, Place] = {}
        for folder, names in self._walk():
            for file in names:
                name = _image_name(file)
                if name in wanted:
                    places.setdefault(name, Place(os.path.join(folder, file)))
        return places

    def _walk(self) -> Iterator[tuple[str, list[str]]]:
        """The folders, each once, and the names of the files in each, in order."""

        def pass_over(error: OSError) -> None:
            logging.warning("%s: %s; passed over", error.filename, error.strerror)

        seen = set()
        for folder, folders, names in os.walk(self.path, onerror=pass_over, followlinks=True):
            real = os.path.realpath(folder)
            if real in seen:
                folders.clear()
                continue
            seen.add(real)
            folders.sort()
            yield folder, sorted(names)


def verify(
    md5s: Mapping[str, str | None], accept_mismatch: bool
) -> list[dict[str, str | bool | None]]:
    """Compares files with published checksums.

    Args:
        md5s: Checksums by path; None where none is published.
        accept_mismatch: Whether other files than the published ones are accepted.

    Returns:
        As `preparation.verify_md5`, an entry a file; "published" is None where nobody knows.

    Raises:
        SourceError: If a file is another one, or not there.
    """
    facts = []
    for path, md5 in md5s.items():
        if not os.path.isfile(path):
            raise preparation.SourceError(f"{path}: is not there; the split needs it")
        checked = preparation.verify_md5(path, md5 or "", accept_mismatch)
        facts.append(checked if md5 else checked | {"published": None})
    return facts


def index_tar(path: str, wanted: Container[str]) -> dict[str, Place]:
    """Finds JPEG files in an uncompressed tar, reading the headers only.

    Args:
        path: The tar. One that ends early is indexed as far as it goes, with a warning.
        wanted: Names to find, as for `Source.find_images`; folders in the tar do not matter.

    Returns:
        Where they are in the tar.
    """
    places: dict[str, Place] = {}
    for name, place in _members(
        path, "r:", wanted, lambda _, member: Place(path, member.offset_data, member.size)
    ):
        places.setdefault(name, place)
    return places


def stream_tar(path: str, wanted: Container[str]) -> Iterator[tuple[str, bytes]]:
    """Reads JPEG files from a compressed tar, from its front to its end.

    Args:
        path: The tar. From one that ends early comes what can be had, with a warning.
        wanted: As for `index_tar`; may change meanwhile.

    Returns:
        Names out of `wanted`, and the files' bytes.
    """
    return _members(path, "r:gz", wanted, lambda tar, member: tar.extractfile(member).read())


def _members(
    path: str,
    mode: str,
    wanted: Container[str],
    take: Callable[[tarfile.TarFile, tarfile.TarInfo], _Taken],
) -> Iterator[tuple[str, _Taken]]:
    """What `take` makes of each wanted file of a tar, as far as that can be read."""
    try:
        with tarfile.open(path, mode, tarinfo=_Member) as tar:
            while (member := tar.next()) is not None:
                # Otherwise all of them stay in memory, a kilobyte each.
                tar.members.clear()
                name = _image_name(member.name)
                if member.isreg() and name in wanted:
                    yield name, take(tar, member)
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        logging.warning("%s: is cut off or damaged (%s); what is behind is missing", path, error)


class _Member(tarfile.TarInfo):
    """A file of a tar, in whose place nothing but a header is accepted."""

    @classmethod
    def frombuf(cls, buf: bytes, encoding: str, errors: str) -> tarfile.TarInfo:
        """Makes one from a header."""
        try:
            return super().frombuf(buf, encoding, errors)
        except (tarfile.InvalidHeaderError, tarfile.TruncatedHeaderError) as error:
            # These would pass for the end of the tar.
            raise tarfile.ReadError(str(error)) from None


def _image_name(path: str) -> str | None:
    """The name by which an image is wanted; None for what is none."""
    stem, extension = os.path.splitext(posixpath.basename(path))
    return f"{stem}.jpg" if extension.lower() in (".jpg", ".jpeg") else None


def index_records(path: str) -> tuple[list[tuple[int, Place]], bool]:
    """Finds the images in a TFRecord file of TFF's vision data sets, without reading them.

    Each record is a tf.train.Example with the features "image/encoded_jpeg" and "class". TFRecords'
    checksums are not looked at.

    Args:
        path: The file.

    Returns:
        Each record's class and where its image is, as far as there are such records; and whether
        that is all of the file.
    """
    found: list[tuple[int, Place]] = []
    if not os.path.isfile(path) or not os.path.getsize(path):
        return found, False
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        position = 0
        try:
            while position < len(data):
                (size,) = _LENGTH.unpack_from(data, position)
                start = position + _LENGTH.size
                position = start + size + _FOOTER_BYTES
                if position > len(data):
                    return found, False
                class_number, begin, end = _parse_example(data, start, start + size)
                found.append((class_number, Place(path, begin, end - begin)))
        except (struct.error, IndexError, KeyError, ValueError):
            return found, False
    return found, True


def _parse_example(data: mmap.mmap, start: int, end: int) -> tuple[int, int, int]:
    """A tf.train.Example's class, and where its image begins and ends."""
    values = {}
    for _, *features in _fields(data, start, end):
        for _, *entry in _fields(data, *features):
            parts = {number: span for number, *span in _fields(data, *entry)}
            key = data[slice(*parts[1])]
            if key in _KINDS:
                [(kind, *elements)] = _fields(data, *parts[2])
                if kind != _KINDS[key]:
                    raise ValueError(f"feature {key!r} of another kind")
                [(_, *values[key])] = _fields(data, *elements)
    return _varint(data, values[_CLASS][0])[0], *values[_IMAGE]


def _fields(data: mmap.mmap, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """A protocol buffer's fields: number, and where the value begins and ends."""
    while start < end:
        tag, start = _varint(data, start)
        kind = tag & 7
        if kind == _DELIMITED:
            size, start = _varint(data, start)
            stop = start + size
        elif kind == _VARINT:
            stop = _varint(data, start)[1]
        else:
            raise ValueError(f"a field of kind {kind}")
        if stop > end:
            raise ValueError("a field ends behind its message")
        yield tag >> 3, start, stop
        start = stop


def _varint(data: mmap.mmap, start: int) -> tuple[int, int]:
    """A number of variable length, and where it ends."""
    value = 0
    for place in range(10):
        byte = data[start + place]
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, start + place + 1
    raise ValueError("a number is too long")
