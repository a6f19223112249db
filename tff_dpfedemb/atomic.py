"""Files that are whole or absent: written beside their place, then moved into it."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

_SCRATCH_SUFFIX = ".partial"


@contextlib.contextmanager
def replacing(path: str) -> Iterator[str]:
    """Yields a temporary path beside `path` that takes its place when the block ends well.

    Args:
        path: A file or folder. The block creates either at the path that it is given.
    """
    folder, name = os.path.split(os.path.abspath(path))
    scratch = tempfile.mkdtemp(prefix=f".{name}.", suffix=_SCRATCH_SUFFIX, dir=folder)
    try:
        new = os.path.join(scratch, name)
        yield new
        if os.path.isdir(new) and os.path.isdir(path):
            os.rename(path, os.path.join(scratch, "old"))
        os.replace(new, path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def is_partial(name: str) -> bool:
    """Whether a name in a folder is of something half-written."""
    return name.startswith(".") and name.endswith(_SCRATCH_SUFFIX)


def remove_partial(folder: str) -> None:
    """Removes what killed processes left half-written in a folder that nobody else writes to."""
    for name in filter(is_partial, os.listdir(folder)):
        shutil.rmtree(os.path.join(folder, name))


def write_text(path: str, text: str, mode: int = 0o644) -> None:
    """Writes a text file atomically, with the given permissions."""
    with (
        replacing(path) as new,
        open(os.open(new, os.O_WRONLY | os.O_CREAT, mode), "w", encoding="utf-8") as file,
    ):
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: str, value: Any) -> None:
    """Writes a JSON file atomically; NaN and infinity are refused, since JSON has neither."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")
