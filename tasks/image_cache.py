"""What training reads: one SQLite file with every image at its final size, user after user.

SQLite, because TensorFlow reads it with an operation of its own inside the worker, a user's images
are one range of one table, and any number of users is one file.
"""

import contextlib
import dataclasses
import io
import json
import os
import sqlite3
import urllib.parse
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

FORMAT = 1
ENCODINGS = ("raw", "png", "jpeg")
DATABASE, FACTS = "examples.sqlite", "facts.json"

# Pixels are stored as they are up to this size: below it, decoding costs more than it saves.
_LARGEST_RAW_BYTES = 64 * 64 * 3
_JPEG_QUALITY = 95

# Items of one user that training may read are consecutive. `images` holds what was found,
# `examples` what was listed, and, once the cache is complete, only what was found.
SCHEMA = """
CREATE TABLE users(user INTEGER PRIMARY KEY, name TEXT, first INTEGER, last INTEGER);
CREATE TABLE classes(class INTEGER PRIMARY KEY, name TEXT);
CREATE TABLE examples(item INTEGER PRIMARY KEY, user INTEGER, class INTEGER, split TEXT);
CREATE TABLE images(item INTEGER PRIMARY KEY, class INTEGER, image BLOB);
CREATE TABLE problems(item INTEGER PRIMARY KEY, kind TEXT, detail TEXT);
"""


def choose_encoding(image_shape: tuple[int, int, int]) -> str:
    """How images of a shape are stored where nobody says otherwise."""
    return "raw" if np.prod(image_shape) <= _LARGEST_RAW_BYTES else "jpeg"


def encode(pixels: np.ndarray, encoding: str) -> bytes:
    """The bytes that are stored.

    Args:
        pixels: uint8 of shape (height, width, channels), 1 or 3 channels.
        encoding: One of `ENCODINGS`. "jpeg" has quality 95 and full colour resolution.
    """
    if encoding == "raw":
        return pixels.tobytes()
    buffer = io.BytesIO()
    picture = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    options = {"quality": _JPEG_QUALITY, "subsampling": 0} if encoding == "jpeg" else {}
    picture.save(buffer, encoding, **options)
    return buffer.getvalue()


def decode(stored: bytes, encoding: str, image_shape: tuple[int, int, int]) -> np.ndarray:
    """The inverse of `encode`: uint8 of shape `image_shape`."""
    if encoding == "raw":
        return np.frombuffer(stored, np.uint8).reshape(image_shape)
    return np.asarray(Image.open(io.BytesIO(stored))).reshape(image_shape)


def open_read_only(path: str) -> sqlite3.Connection:
    """Opens a database that nobody writes to, for one thread."""
    # Immutable: no lock file is needed, so that a read-only folder will do.
    quoted = urllib.parse.quote(os.path.abspath(path))
    return sqlite3.connect(f"file:{quoted}?immutable=1", uri=True)


@dataclasses.dataclass(frozen=True)
class ExampleTable:
    """The images of a cache, without their pixels.

    Attributes:
        items: int64 (n,), numbers of the images in the cache.
        users: int64 (n,), each an index into `user_names`; -1 for an image of nobody.
        classes: int64 (n,), each an index into `class_names`.
        splits: Array (n,) of "train", "validation" or "test", as the source said.
        user_names: The users, as the source writes their ids.
        class_names: The classes, as the source writes them.
    """

    items: np.ndarray
    users: np.ndarray
    classes: np.ndarray
    splits: np.ndarray
    user_names: list[str]
    class_names: list[str]


class CachedImages:
    """Some images of a cache: an array that is read where it is sliced.

    Attributes:
        shape: (n, height, width, channels).
        dtype: uint8.
    """

    dtype = np.dtype(np.uint8)
    ndim = 4

    def __init__(self, cache: "ImageCache", items: np.ndarray):
        self._cache, self._items = cache, np.asarray(items, np.int64)
        self.shape = (len(self._items), *cache.image_shape)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> np.ndarray:
        """Reads what a slice, an index array or a mask names."""
        return self._cache.read(self._items[index])

    def __array__(self, dtype: Any = None) -> np.ndarray:
        return np.asarray(self._cache.read(self._items), dtype)


class ImageCache:
    """A complete cache folder, opened for reading.

    Attributes:
        path: The folder.
        facts: What preparation recorded.
        image_shape: (height, width, channels).
        encoding: One of `ENCODINGS`.
    """

    def __init__(self, path: str):
        """Opens a cache.

        Raises:
            ValueError: One line, if there is none or it is of another format.
        """
        self.path = os.path.abspath(path)
        self._database = os.path.join(self.path, DATABASE)
        try:
            with open(os.path.join(path, FACTS), encoding="utf-8") as file:
                self.facts: dict[str, Any] = json.load(file)
            if self.facts["format"] != FORMAT or not os.path.isfile(self._database):
                raise ValueError
        except FileNotFoundError:
            raise ValueError(f"{self.path} is not there") from None
        except (OSError, ValueError, KeyError, TypeError):
            raise ValueError(
                f"{self.path} is not a cache of this version; accepted are folders as "
                "tasks.prepare writes them: prepare it again elsewhere"
            ) from None
        self.image_shape: tuple[int, int, int] = tuple(self.facts["image_shape"])
        self.encoding: str = self.facts["encoding"]

    def table(self) -> ExampleTable:
        """All that is known of the images but their pixels."""
        with contextlib.closing(open_read_only(self._database)) as database:
            query = "SELECT item, coalesce(user, -1), class, split FROM examples ORDER BY item"
            rows = database.execute(query).fetchall()
            user_names = [n for (n,) in database.execute("SELECT name FROM users ORDER BY user")]
            class_names = [
                n for (n,) in database.execute("SELECT name FROM classes ORDER BY class")
            ]
        items, users, classes, splits = zip(*rows, strict=True) if rows else ((), (), (), ())
        return ExampleTable(
            *(np.array(part, np.int64) for part in (items, users, classes)),
            np.array(splits, object),
            user_names,
            class_names,
        )

    def read(self, items: np.ndarray) -> np.ndarray:
        """The pixels of some images.

        Args:
            items: int64 (n,), numbers of images, as `table` has them, any order.

        Returns:
            uint8 of shape (n,) + `image_shape`.
        """
        images = np.empty((np.size(items), *self.image_shape), np.uint8)
        with contextlib.closing(open_read_only(self._database)) as database:
            for place, item in enumerate(np.ravel(items).tolist()):
                query = "SELECT image FROM images WHERE item = ?"
                (stored,) = database.execute(query, (item,)).fetchone()
                images[place] = decode(stored, self.encoding, self.image_shape)
        return images

    def load_users(self, users: Any, class_map: Sequence[int]) -> tuple[Any, Any]:
        """The images that training may read of some users, as TensorFlow operations.

        Args:
            users: int64 tensor (k,), indices into the table's `user_names`, k >= 0.
            class_map: For every class of the cache the id under which training knows it, or -1
                for a class that training must not read.

        Returns:
            images, a uint8 tensor of shape (n,) + `image_shape`, and class_ids, int64 (n,), the
            users' examples one user after another.
        """
        import tensorflow as tf

        numbers = tf.strings.reduce_join(tf.strings.as_string(users), separator=",")
        # A last row that is nobody's makes a batch of what would else be nothing.
        query = tf.strings.join(
            [
                "SELECT i.class, i.image FROM users u CROSS JOIN images i "
                "ON i.item BETWEEN u.first AND u.last WHERE u.user IN (",
                numbers,
                ") UNION ALL SELECT -1, x''",
            ]
        )
        rows = tf.data.experimental.SqlDataset(
            "sqlite", self._database, query, (tf.int64, tf.string)
        )
        classes, stored = rows.batch(1 << 40).get_single_element()
        class_ids = tf.gather(tf.constant(class_map, tf.int64), classes[:-1])
        kept = tf.greater_equal(class_ids, 0)
        class_ids = tf.boolean_mask(class_ids, kept)
        stored = tf.boolean_mask(stored[:-1], kept)
        if self.encoding == "raw":
            images = tf.io.decode_raw(stored, tf.uint8)
        else:
            images = tf.map_fn(
                self._decode_in_graph,
                stored,
                fn_output_signature=tf.TensorSpec(self.image_shape, tf.uint8),
            )
        return tf.reshape(images, [-1, *self.image_shape]), class_ids

    def _decode_in_graph(self, stored: Any) -> Any:
        """`decode`, as TensorFlow operations."""
        import tensorflow as tf

        channels = self.image_shape[2]
        if self.encoding == "png":
            image = tf.io.decode_png(stored, channels)
        else:
            # As Pillow decodes it, bit for bit.
            image = tf.io.decode_jpeg(stored, channels, dct_method="INTEGER_ACCURATE")
        return tf.ensure_shape(image, self.image_shape)
