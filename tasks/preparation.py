"""From a source's listing of images to a cache that training reads."""

import dataclasses
import hashlib
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tqdm


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
        stream: For archives that can be read from front to back only: takes the wanted `image`s
            and yields (image, file's bytes) in the archive's order. Used in place of `read`.
    """

    examples: Sequence[Example]
    read: Callable[[Any], bytes | np.ndarray] | None
    facts: Mapping[str, Any]
    stream: Callable[[Container[Any]], Iterator[tuple[Any, bytes]]] | None = None


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
        tqdm.tqdm(
            total=size,
            desc=f"md5 of {os.path.basename(path)}",
            unit="B",
            unit_scale=True,
            disable=size < 1 << 28,
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
