"""EMNIST by writer, as TensorFlow Federated publishes it: digits and letters of 3,400 writers.

A writer's rows in the training and in the test split are one user's: the published splits divide
every writer's images, and what is held out here are classes.
"""

import collections
import contextlib
import lzma
import math
import os
import sqlite3
import string
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tasks import cached_task, image_cache, preparation
from tasks.image_cache import ExampleTable
from tff_dpfedemb import atomic, progress

_DATABASE = "emnist_all.sqlite"
_URL = "https://storage.googleapis.com/tff-datasets-public/emnist_all.sqlite.lzma"
_PUBLISHED_BYTES = 170_507_172
_PUBLISHED_USERS = 3400
_SPLITS = ("all_train", "all_test")
_ALL_SPLITS = {*_SPLITS, "digits_only_train", "digits_only_test"}

_SHAPE = (28, 28, 1)
# Bytes before 784 packed floats: a tag, and their length in two bytes.
_PACKED_HEADER = 3
# How far a grey level may be from a multiple of 1/255.
_TOLERANCE = 1e-3
# Images or bytes below which a bar would be gone at once.
_LEAST_PROGRESS = 50_000

# The character of every label.
_CHARACTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase
_FIRST_LOWER = _CHARACTERS.index("a")
# EMNIST itself merges the other letters' two cases in its split "bymerge": they look the same.
_HELD_OUT = {"paper": string.ascii_lowercase, "distinct_case": "abdefghnqrt"}
_VALIDATION_SHARE = 0.1


class Emnist(cached_task.CachedTask):
    """Writers' digits and upper-case letters, evaluated on lower-case letters."""

    name = "emnist"

    def __init__(
        self,
        cache: str,
        *,
        emnist_split: str = "paper",
        max_evaluation_images: int = 10_000,
        data_seed: int = 0,
    ):
        """Opens a cache.

        Args:
            cache: The folder of caches.
            emnist_split: "paper": trained on digits and upper case (labels below 36), evaluated on
                lower case; "distinct_case": evaluated only on the lower-case letters whose shape
                differs from that of upper case.
            max_evaluation_images: The most images of a held-out split that are used; 0 for all.
            data_seed: Seed of that draw, and of which writers' letters are for validation.

        Raises:
            ValueError: One line a problem, beginning with an option's name.
        """
        if emnist_split not in _HELD_OUT:
            raise ValueError(
                f"emnist_split={emnist_split!r}: accepted are {' and '.join(_HELD_OUT)}"
            )
        self._emnist_split = emnist_split
        super().__init__(
            cache,
            self.cache_name(),
            max_evaluation_images=max_evaluation_images,
            data_seed=data_seed,
        )

    @classmethod
    def published_users(cls) -> int | None:
        """3,400 writers."""
        return _PUBLISHED_USERS

    @classmethod
    def cache_name(cls) -> str:
        """The name of the cache folder."""
        return "emnist"

    @classmethod
    def image_shape_of(cls) -> tuple[int, int, int]:
        """The shape of the cached images."""
        return _SHAPE

    @classmethod
    def list_source(
        cls, source: str, *, accept_checksum_mismatch: bool = False
    ) -> preparation.Listing:
        """Lists the images of a database; unpacks it beside the download where that is not done.

        Args:
            source: emnist_all.sqlite or emnist_all.sqlite.lzma, or a folder that holds one.
            accept_checksum_mismatch: Whether a download of another size than the published one is
                accepted.

        Returns:
            The listing. Images are uint8 with a white background.

        Raises:
            SourceError: One line, if the database is not there, or not whole.
        """
        unpacked = os.path.join(source, _DATABASE)
        if not os.path.isdir(source):
            unpacked = source.removesuffix(".lzma")
        packed = unpacked + ".lzma"
        there = [path for path in (packed, unpacked) if os.path.isfile(path)]
        if not there:
            raise preparation.SourceError(
                f"holds neither {_DATABASE} nor {_DATABASE}.lzma, which are EMNIST as TensorFlow "
                f"Federated publishes it: download {_URL} (171 MB, 4.7 GB unpacked) into it"
            )
        facts = {"file": os.path.basename(there[0]), "bytes": os.path.getsize(there[0])}
        if there[0] == packed:
            facts["published"] = facts["bytes"] == _PUBLISHED_BYTES
            if not (facts["published"] or accept_checksum_mismatch):
                raise preparation.SourceError(
                    f"{packed} has {facts['bytes']:,} bytes, and the published file "
                    f"{_PUBLISHED_BYTES:,}: download it again, or accept it as it is with "
                    "--accept_checksum_mismatch"
                )
        examples = _list(unpacked) if unpacked in there else _unpack(packed, unpacked)
        counts = collections.Counter(example.image.split("/")[0] for example in examples)
        local = threading.local()

        def read(image: str) -> np.ndarray:
            if not hasattr(local, "database"):
                local.database = image_cache.open_read_only(unpacked)
            query = "SELECT serialized_example_proto FROM examples WHERE rowid = ?"
            row = (int(image.rpartition("/")[2]),)
            return _pixels(*local.database.execute(query, row).fetchone())

        return preparation.Listing(examples, read, facts | {"images": dict(counts)})

    def split(self, table: ExampleTable) -> cached_task.Split:
        """Digits and upper case are trained on, lower case is held out."""
        return hold_out(table, self._emnist_split, self.data_seed)

    def describe(self) -> dict[str, object]:
        return {**super().describe(), "emnist_split": self._emnist_split}


def hold_out(table: ExampleTable, emnist_split: str, data_seed: int) -> cached_task.Split:
    """Divides images by class for training, and by writer for validation and test.

    Args:
        table: The images; names of classes are labels.
        emnist_split: As for `Emnist`.
        data_seed: Of the draw of the writers for validation.

    Raises:
        ValueError: What is lacking, in one line.
    """
    labels = np.array([int(name) for name in table.class_names], np.int64)
    held_out = [_CHARACTERS.rindex(letter) for letter in _HELD_OUT[emnist_split]]
    rows = np.flatnonzero(np.isin(labels[table.classes], held_out))
    writers = np.unique(table.users[rows])
    if len(writers) < 2:
        raise ValueError(
            f"has lower-case letters of {len(writers)} writers; accepted are 2 or more: one for "
            "validation, one for the test"
        )
    for_validation = np.random.default_rng(data_seed).permutation(writers)
    for_validation = for_validation[: max(1, round(_VALIDATION_SHARE * len(writers)))]
    chosen = np.isin(table.users[rows], for_validation)

    def describe(rows: np.ndarray, other: str) -> str:
        return (
            f"{len(np.unique(table.classes[rows]))} lower-case letters that training has not seen, "
            f"of {len(np.unique(table.users[rows])):,} of the training writers; other writers than "
            f"in {other}, and the same letters"
        )

    validation, test = rows[chosen], rows[~chosen]
    return cached_task.Split(
        np.arange(len(table.user_names)),
        np.flatnonzero(labels < _FIRST_LOWER),
        validation,
        test,
        {
            "validation": describe(validation, "the test"),
            "test": describe(test, "validation"),
        },
    )


def _unpack(packed: str, unpacked: str) -> list[preparation.Example]:
    """Unpacks a database and lists it; what is not whole never takes its place."""
    try:
        with atomic.replacing(unpacked) as new:
            with (
                open(packed, "rb") as raw,
                lzma.open(raw) as file,
                open(new, "wb") as out,
                _progress(None, os.path.getsize(packed), "unpacking", "B") as bar,
            ):
                while block := file.read(1 << 20):
                    out.write(block)
                    bar.update(raw.tell() - bar.n)
                out.flush()
                os.fsync(out.fileno())
            return _list(new, packed)
    except (EOFError, lzma.LZMAError) as error:
        raise preparation.SourceError(
            f"{packed}: is cut off or damaged ({error}): download it again from {_URL}"
        ) from None
    except OSError as error:
        raise preparation.SourceError(
            f"{packed}: cannot be unpacked beside it ({error.strerror}); accepted is a folder that "
            "can be written to and has 5 GB to spare, or one with the unpacked file"
        ) from None


def _list(path: str, origin: str | None = None) -> list[preparation.Example]:
    """Lists a database's images, checking that it is whole; `origin` is what messages name."""
    from google.protobuf import message

    examples = []
    found: collections.Counter = collections.Counter()
    try:
        with contextlib.closing(image_cache.open_read_only(path)) as database:
            expected = collections.Counter(
                {
                    (split, user): count
                    for user, split, count in database.execute(
                        "SELECT client_id, split_name, num_examples FROM client_metadata"
                    )
                }
            )
            if missing := _ALL_SPLITS - {split for split, _ in expected}:
                raise ValueError(f"the split {min(missing)} is missing")
            expected = collections.Counter({k: n for k, n in expected.items() if k[0] in _SPLITS})
            # In the file's order, whatever indices it has.
            rows = database.execute(
                "SELECT rowid, split_name, client_id, serialized_example_proto FROM examples "
                "WHERE split_name IN (?, ?) ORDER BY rowid",
                _SPLITS,
            )
            for row, split, user, serialized in _progress(
                rows, expected.total(), "listing", "image"
            ):
                label = _label(serialized)
                examples.append(preparation.Example(user, str(label), f"{split}/{user}/{row}"))
                found[split, user] += 1
        for split, user in sorted(found.keys() | expected.keys()):
            if found[split, user] != expected[split, user]:
                raise ValueError(
                    f"it has {found[split, user]:,} of {expected[split, user]:,} images of {user} "
                    f"in {split}"
                )
    except (sqlite3.DatabaseError, message.DecodeError, ValueError) as error:
        raise preparation.SourceError(
            f"{origin or path}: is not a whole {_DATABASE} ({error}): remove it, and download it "
            f"again from {_URL}"
        ) from None
    return examples


def _progress(iterable: Iterable[Any] | None, total: int, what: str, unit: str) -> Any:
    """A progress bar, unless it would be gone at once."""
    return progress.bar(
        total=total,
        desc=what,
        unit=unit,
        iterable=iterable,
        scale=True,
        shown=total >= _LEAST_PROGRESS,
    )


def _parse(serialized: bytes) -> Mapping[str, Any]:
    """The features of a tf.Example."""
    from tensorflow.core.example import example_pb2

    return example_pb2.Example.FromString(serialized).features.feature


def _label(serialized: bytes) -> int:
    """The class of a row."""
    labels = _parse(serialized)["label"].int64_list.value
    if len(labels) != 1 or not 0 <= labels[0] < len(_CHARACTERS):
        raise ValueError(f"a row has the labels {list(labels)}")
    return labels[0]


def _pixels(serialized: bytes) -> np.ndarray:
    """The image of a row, uint8 of shape (28, 28, 1)."""
    # One tag, one length and the floats as they are: read so, at a third of what a list costs.
    packed = _parse(serialized)["pixels"].float_list.SerializeToString()
    values = np.frombuffer(packed[_PACKED_HEADER:], "<f4")
    levels = np.rint(values * 255)
    on_grid = np.abs(values - levels / 255) <= _TOLERANCE
    if values.size != math.prod(_SHAPE) or not np.all(on_grid & (levels >= 0) & (levels <= 255)):
        raise ValueError("not 28 x 28 pixels that are multiples of 1/255 from 0 to 1")
    return levels.astype(np.uint8).reshape(_SHAPE)
