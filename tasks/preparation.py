"""From a source's listing of images to a cache that training reads."""

import collections
import contextlib
import csv
import dataclasses
import fcntl
import functools
import hashlib
import io
import itertools
import math
import os
import sqlite3
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from tasks import image_cache
from tff_dpfedemb import atomic, progress

PROBLEMS = "problems.csv"

_LOCK = "lock"
_MISSING, _CORRUPT = "missing", "undecodable"
# Images between two commits: what a killed preparation does again, at most.
_BATCH = 512
# SQLite's largest: an image crosses few page borders.
_PAGE_BYTES = 65536
# Reading less is over before a bar would be looked at.
_SLOW_BYTES = 1 << 28
# Images of nobody are drawn by training in groups of about so many.
_GROUP_SIZE = 64


class SourceError(ValueError):
    """The source cannot be prepared; the message says what is wrong and what to do, in one line."""


class Example(NamedTuple):
    """One image that a source names, whether its file is there or not.

    Attributes:
        user: The user's id as the source writes it; None for an image of nobody.
        class_name: The class as the source writes it.
        image: What `Listing.read` takes; its text is shown in reports, so it should read like a
            file's name.
        split: "train", "validation" or "test", as the source says; "train" where it does not.
    """

    user: str | None
    class_name: str
    image: Any
    split: str = "train"


@dataclasses.dataclass(frozen=True)
class Listing:
    """What a source holds.

    Attributes:
        examples: Every image that the source names.
        read: From an example's `image` to the bytes of an image file, or to a uint8 array of shape
            (height, width, channels). Raises FileNotFoundError where there is no such image, and
            OSError or ValueError where it is damaged. Called from several threads at once.
        facts: JSON-serialisable facts about the source, kept in the cache.
        stream: For archives that can be read from front to back only: takes the wanted `image`s,
            and yields (image, what `read` would return) in the archive's order. Used in place of
            `read`.
    """

    examples: Sequence[Example]
    read: Callable[[Any], bytes | np.ndarray] | None
    facts: Mapping[str, Any]
    stream: Callable[[Container[Any]], Iterator[tuple[Any, bytes | np.ndarray]]] | None = None


def verify_md5(path: str, expected: str, accept_mismatch: bool = False) -> dict[str, Any]:
    """Compares a file with a published checksum.

    Args:
        path: The file.
        expected: Hexadecimal md5, or the beginning of it where only that is published.
        accept_mismatch: Whether another file than the published one is accepted.

    Returns:
        Facts to record: the file's name, its md5, and whether it is the published one.

    Raises:
        SourceError: If it is another file.
    """
    digest = hashlib.md5()
    size = os.path.getsize(path)
    with (
        open(path, "rb") as file,
        progress.bar(
            total=size,
            desc=f"md5 of {os.path.basename(path)}",
            unit="B",
            scale=True,
            shown=size >= _SLOW_BYTES,
        ) as bar,
    ):
        while block := file.read(1 << 20):
            digest.update(block)
            bar.update(len(block))
    found = digest.hexdigest()
    published = found.startswith(expected)
    if not (published or accept_mismatch):
        raise SourceError(
            f"{path} has md5 {found}, and the published file {expected}: download it again, or "
            "accept it as it is with --accept_checksum_mismatch"
        )
    return {"file": os.path.basename(path), "md5": found, "published": published}


@dataclasses.dataclass(frozen=True)
class Report:
    """What a preparation found.

    Attributes:
        users: Users that the source names.
        classes: Classes that the source names.
        listed: Images that the source names.
        present: Images that are there and can be decoded.
        missing: Images whose files are not there.
        corrupt: Images whose files cannot be decoded.
        worst_users: (user, listed, missing, corrupt), the most troubled first, at most ten.
    """

    users: int
    classes: int
    listed: int
    present: int
    missing: int
    corrupt: int
    worst_users: Sequence[tuple[str, int, int, int]]

    def in_words(self) -> str:
        """Lines for a terminal."""
        lines = [
            f"{self.users:,} users, {self.classes:,} classes, {self.listed:,} images listed: "
            f"{self.present:,} prepared, {self.missing:,} missing, {self.corrupt:,} undecodable"
        ]
        for user, listed, missing, corrupt in self.worst_users:
            lines.append(
                f"  user {user}: {missing} missing and {corrupt} undecodable of {listed} images"
            )
        return "\n".join(lines)


class TooManyProblemsError(SourceError):
    """More images are missing or undecodable than was accepted.

    Attributes:
        report: What was found.
    """

    def __init__(self, report: Report, message: str):
        super().__init__(message)
        self.report = report


def to_pixels(image: bytes | np.ndarray, image_shape: tuple[int, int, int]) -> np.ndarray:
    """Decodes an image and fits it into a shape.

    The picture is turned as its EXIF says, its colours become grey or RGB (transparency becomes
    white, 16 bits a channel become 8), it is scaled so that it covers the shape, and what is over
    is cut off evenly on both sides.

    Args:
        image: An image file's bytes, or uint8 of shape (height, width, 1 or 3).
        image_shape: (height, width, channels), 1 or 3 channels.

    Returns:
        uint8 array of shape `image_shape`.

    Raises:
        Exception: Whatever Pillow raises for what it cannot decode.
    """
    height, width, channels = image_shape
    if isinstance(image, np.ndarray):
        if image.shape == tuple(image_shape) and image.dtype == np.uint8:
            return image
        picture = Image.fromarray(image[:, :, 0] if image.shape[2:] == (1,) else image)
    else:
        picture = Image.open(io.BytesIO(image))
        # JPEGs are decoded at the smallest scale that still covers the shape.
        picture.draft(None, (width, height))
        picture = ImageOps.exif_transpose(picture)
    if picture.mode.startswith("I"):
        picture = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
    picture = picture.convert("L" if channels == 1 else "RGB")
    if picture.size != (width, height):
        picture = ImageOps.fit(picture, (width, height), Image.Resampling.BILINEAR)
    return np.asarray(picture, np.uint8).reshape(image_shape)


def prepare(
    listing: Listing,
    path: str,
    image_shape: tuple[int, int, int],
    *,
    allow_missing: float = 0.0,
    encoding: str | None = None,
    workers: int | None = None,
) -> Report:
    """Turns a listing into a cache folder; goes on where an earlier call was stopped.

    What is done lies beside `path` under a name that begins with a dot, and takes the place of
    `path` when it is complete.

    Args:
        listing: What the source holds.
        path: The cache folder. If it is there and from the same listing, nothing is done.
        image_shape: (height, width, channels) of the cached images.
        allow_missing: The largest share of missing images, and the largest share of undecodable
            ones, that is accepted, in [0, 1).
        encoding: How images are stored, see `image_cache.ENCODINGS`; None to choose by their size.
        workers: Threads that read and decode; None for one a core.

    Returns:
        What was found.

    Raises:
        TooManyProblemsError: If more is missing or undecodable than accepted; what was done is
            kept, and a list of the problems is written beside it.
        SourceError: If the listing cannot be prepared, or `path` is from another listing.
    """
    catalogue = _Catalogue(
        listing, image_shape, encoding or image_cache.choose_encoding(image_shape)
    )
    if os.path.lexists(path):
        try:
            same = image_cache.ImageCache(path).facts["listing"] == catalogue.digest
        except ValueError:
            same = False
        if not same:
            raise SourceError(
                f"{path} is prepared from something else; remove it, or accepted is another --cache"
            )
        with contextlib.closing(sqlite3.connect(os.path.join(path, image_cache.DATABASE))) as done:
            return catalogue.report(done)
    scratch = scratch_folder(path)
    os.makedirs(scratch, exist_ok=True)
    with _locked(scratch):
        database_path = os.path.join(scratch, image_cache.DATABASE)
        with contextlib.closing(_open(database_path, catalogue)) as database:
            _read_images(database, catalogue, workers or os.cpu_count() or 1)
            report = catalogue.report(database)
            problems_path = os.path.join(scratch, PROBLEMS)
            catalogue.write_problems(database, problems_path)
            _refuse_problems(report, allow_missing, problems_path)
            digest = _finish(database)
        facts = {
            "format": image_cache.FORMAT,
            "listing": catalogue.digest,
            "fingerprint": hashlib.sha256((catalogue.digest + digest).encode()).hexdigest(),
            "image_shape": list(image_shape),
            "encoding": catalogue.encoding,
            "has_users": catalogue.has_users,
            "allow_missing": allow_missing,
            **{k: v for k, v in dataclasses.asdict(report).items() if k != "worst_users"},
            "source": dict(listing.facts),
        }
        atomic.write_json(os.path.join(scratch, image_cache.FACTS), facts)
        os.remove(os.path.join(scratch, _LOCK))
        os.rename(scratch, path)
    return report


def scratch_folder(path: str) -> str:
    """Where the preparation of a cache folder works until it is complete."""
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(folder, f".{name}.preparing")


class _Catalogue:
    """A listing with its users, classes and images numbered, as the cache numbers them."""

    def __init__(self, listing: Listing, image_shape: tuple[int, int, int], encoding: str):
        self.listing, self.image_shape, self.encoding = listing, image_shape, encoding
        examples = listing.examples
        if not examples:
            raise SourceError("the source names no images")
        training = [e.user is not None for e in examples if e.split == "train"]
        if any(training) != all(training):
            raise SourceError("the source names users for some of its training images only")
        self.has_users = any(training)
        self.classes = in_order({e.class_name for e in examples})
        class_numbers = {name: number for number, name in enumerate(self.classes)}
        users: list[str | None] = [e.user for e in examples]
        if not self.has_users:
            users = _pseudo_users(examples)
        self.users = in_order({u for u in users if u is not None})
        user_numbers = {name: number for number, name in enumerate(self.users)}
        rows = [
            (None if u is None else user_numbers[u], class_numbers[e.class_name], e.split, e.image)
            for u, e in zip(users, examples, strict=True)
        ]
        # Training reads a user as one range: each user's training images are consecutive.
        rows.sort(key=lambda row: (row[2] != "train", row[0] is None, row[0] or 0))
        self.rows = rows
        digest = hashlib.sha256(
            repr((image_cache.FORMAT, image_shape, encoding, self.users, self.classes)).encode()
        )
        for row in rows:
            digest.update(repr(row).encode())
        self.digest = digest.hexdigest()

    def ranges(self) -> list[tuple[int, str, int, int]]:
        """(user, name, first item, last item) of what training may read of every user."""
        first, last = {}, {}
        for item, (user, _, split, _) in enumerate(self.rows):
            if split == "train":
                first.setdefault(user, item)
                last[user] = item
        return [
            (user, name, first.get(user, 0), last.get(user, -1))
            for user, name in enumerate(self.users)
        ]

    def report(self, database: sqlite3.Connection) -> Report:
        """What was found so far."""
        counts = dict(database.execute("SELECT kind, count(*) FROM problems GROUP BY kind"))
        (present,) = database.execute("SELECT count(*) FROM images").fetchone()
        listed = collections.Counter(row[0] for row in self.rows)
        of_user: dict[int, collections.Counter] = collections.defaultdict(collections.Counter)
        for item, kind in database.execute("SELECT item, kind FROM problems"):
            of_user[self.rows[item][0]][kind] += 1
        worst = sorted(
            (u for u in of_user if u is not None and self.has_users),
            key=lambda u: (-of_user[u].total(), u),
        )
        return Report(
            users=len(self.users) if self.has_users else 0,
            classes=len(self.classes),
            listed=len(self.rows),
            present=present,
            missing=counts.get(_MISSING, 0),
            corrupt=counts.get(_CORRUPT, 0),
            worst_users=[
                (self.users[u], listed[u], of_user[u][_MISSING], of_user[u][_CORRUPT])
                for u in worst[:10]
            ],
        )

    def write_problems(self, database: sqlite3.Connection, path: str) -> None:
        """Writes a CSV file with a line for each image that is missing or undecodable."""
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(["user", "class", "split", "image", "problem", "detail"])
        for item, kind, detail in database.execute("SELECT * FROM problems ORDER BY item"):
            user, class_number, split, image = self.rows[item]
            name = self.users[user] if user is not None and self.has_users else ""
            writer.writerow([name, self.classes[class_number], split, image, kind, detail])
        atomic.write_text(path, text.getvalue())


def in_order(names: set[str]) -> list[str]:
    """Names sorted, as numbers where all of them are plain numbers."""
    if all(name.isascii() and name.isdigit() for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)


def _pseudo_users(examples: Sequence[Example]) -> list[str | None]:
    """Groups of images of nobody, spread over the listing, by which training can draw them."""
    groups = -(-sum(e.split == "train" for e in examples) // _GROUP_SIZE)
    numbers = itertools.count()
    return [str(next(numbers) % groups) if e.split == "train" else None for e in examples]


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Keeps other preparations out of a folder."""
    with open(os.path.join(folder, _LOCK), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SourceError(f"{folder}: another process is preparing the same cache") from None
        yield


def _open(path: str, catalogue: _Catalogue) -> sqlite3.Connection:
    """The database of a preparation: that of an earlier one of the same listing, or a new one."""
    database = sqlite3.connect(path)
    try:
        (digest,) = database.execute("SELECT digest FROM preparation").fetchone()
        if digest == catalogue.digest:
            return database
    except (sqlite3.DatabaseError, TypeError):
        pass
    database.close()
    for old in (path, path + "-journal"):
        with contextlib.suppress(FileNotFoundError):
            os.remove(old)
    database = sqlite3.connect(path)
    database.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
    database.executescript(image_cache.SCHEMA + "CREATE TABLE preparation(digest TEXT);")
    with database:
        database.executemany("INSERT INTO users VALUES (?, ?, ?, ?)", catalogue.ranges())
        database.executemany("INSERT INTO classes VALUES (?, ?)", enumerate(catalogue.classes))
        database.executemany(
            "INSERT INTO examples VALUES (?, ?, ?, ?)",
            ((item, *row[:3]) for item, row in enumerate(catalogue.rows)),
        )
        database.execute("INSERT INTO preparation VALUES (?)", (catalogue.digest,))
    return database


def _read_images(database: sqlite3.Connection, catalogue: _Catalogue, workers: int) -> None:
    """Reads, decodes and stores every image that is not stored yet."""
    with database:
        # They may have come since.
        database.execute("DELETE FROM problems")
    done = {item for (item,) in database.execute("SELECT item FROM images")}
    pending = [item for item in range(len(catalogue.rows)) if item not in done]
    listing = catalogue.listing

    def convert(item: int, image: Any) -> tuple[int, bytes | None, str, str]:
        """(item, what is stored, kind of problem, detail)."""
        try:
            data = image() if callable(image) else image
            pixels = to_pixels(data, catalogue.image_shape)
            return item, image_cache.encode(pixels, catalogue.encoding), "", ""
        except FileNotFoundError:
            return item, None, _MISSING, ""
        except UnidentifiedImageError:
            return item, None, _CORRUPT, "not an image file that can be read"
        except MemoryError:
            raise
        except Exception as error:  # Pillow raises almost anything for a broken file.
            return item, None, _CORRUPT, f"{type(error).__name__}: {error}"[:200]

    def sources() -> Iterator[tuple[int, Any]]:
        """Items and their images, or how to read them."""
        if listing.stream is None:
            for item in pending:
                yield item, functools.partial(listing.read, catalogue.rows[item][3])
            return
        items: dict[Any, list[int]] = collections.defaultdict(list)
        for item in pending:
            items[catalogue.rows[item][3]].append(item)
        for image, data in listing.stream(items.keys()):
            for item in items.pop(image, ()):
                yield item, data
        for item in itertools.chain(*items.values()):
            yield item, _raise_missing

    with (
        futures.ThreadPoolExecutor(workers) as pool,
        progress.bar(total=len(catalogue.rows), done=len(done), desc="images", unit="image") as bar,
    ):
        for batch in _batches(sources(), _BATCH):
            results = list(pool.map(lambda pair: convert(*pair), batch))
            with database:
                database.executemany(
                    "INSERT INTO images VALUES (?, ?, ?)",
                    (
                        (item, catalogue.rows[item][1], stored)
                        for item, stored, _, _ in results
                        if stored is not None
                    ),
                )
                database.executemany(
                    "INSERT INTO problems VALUES (?, ?, ?)",
                    (
                        (item, kind, detail)
                        for item, stored, kind, detail in results
                        if stored is None
                    ),
                )
            bar.update(len(batch))


def _raise_missing() -> bytes:
    """Reads an image that was not in the stream."""
    raise FileNotFoundError


def _batches(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    """Lists of `size` items, the last perhaps shorter."""
    while batch := list(itertools.islice(items, size)):
        yield batch


def _refuse_problems(report: Report, allow_missing: float, problems_path: str) -> None:
    """Stops where more is missing or undecodable than was accepted."""
    if report.present == 0:
        raise TooManyProblemsError(
            report,
            f"none of the {report.listed:,} images that the source names can be read; "
            f"they are listed in {problems_path}",
        )
    share = max(report.missing, report.corrupt) / report.listed
    if share <= allow_missing:
        return
    enough = math.ceil(share * 1000) / 1000
    raise TooManyProblemsError(
        report,
        f"allow_missing={allow_missing:g}: {report.missing:,} images are missing and "
        f"{report.corrupt:,} are undecodable of {report.listed:,}; they are listed in "
        f"{problems_path}. Supply them and run the same command again, which goes on from here; "
        f"or go on without them: accepted are shares from {enough:g}",
    )


def _finish(database: sqlite3.Connection) -> str:
    """Drops what was not found from the table of examples; returns a digest of that."""
    lost = [item for (item,) in database.execute("SELECT item FROM problems ORDER BY item")]
    with database:
        database.execute("DELETE FROM examples WHERE item IN (SELECT item FROM problems)")
    return repr(lost)
