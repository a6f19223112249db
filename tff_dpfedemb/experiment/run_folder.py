"""The folder of a run: the contract for scripts that read it. Imports nothing heavy."""

import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from typing import Any, TextIO

from tff_dpfedemb import atomic

_LOCK, _SEED, _FLAGS = "lock", "secret_seed", "flags.json"
_KEPT = {_SEED: int, _FLAGS: dict}


class RunFolderError(ValueError):
    """The folder cannot serve this run."""


def derive_public_seed(seed: int) -> int:
    """A 31-bit seed that may be published: it does not tell the secret one it is derived from."""
    digest = hashlib.sha256(b"initial weights" + str(seed).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


class RunFolder:
    """Paths and the identity of a run.

    Attributes:
        path: The folder.
    """

    def __init__(self, path: str):
        self.path = os.path.abspath(path)
        self._lock: TextIO | None = None

    def file(self, *name: str) -> str:
        """The path of something in the folder."""
        return os.path.join(self.path, *name)

    @property
    def ledger(self) -> str:
        """One line for each started round."""
        return self.file("ledger.jsonl")

    @property
    def privacy(self) -> str:
        """The privacy statement."""
        return self.file("privacy.json")

    @property
    def metrics(self) -> str:
        """One row a round."""
        return self.file("metrics.csv")

    @property
    def export(self) -> str:
        """The exported model."""
        return self.file("export")

    @property
    def evaluation(self) -> str:
        """The evaluation of the exported model."""
        return self.file("evaluation.json")

    def check(self, flags: Mapping[str, Any], seed: int | None = None) -> None:
        """Checks, without writing, that the folder is free or belongs to the same run.

        Args:
            flags: The flags that define the run, JSON-serialisable.
            seed: The given seed, or None for the one that the folder keeps or will keep.

        Raises:
            RunFolderError: One line, naming the differing flags or what is in the way.
        """
        existing = self.path
        while not os.path.lexists(existing):
            existing = os.path.dirname(existing)
        if not os.path.isdir(existing):
            raise RunFolderError(f"output_dir: {existing} is not a folder")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise RunFolderError(f"output_dir: {existing} is not writable")
        try:
            before, kept_seed = self._kept(_FLAGS), self._kept(_SEED)
            names = set(os.listdir(self.path)) if os.path.isdir(self.path) else set()
        except OSError as error:
            raise RunFolderError(f"experiment_name: {self.path}: {error.strerror}") from None
        if before is None:
            # A process that was killed while it opened the folder leaves these behind.
            if any(name != _LOCK and not atomic.is_partial(name) for name in names):
                raise RunFolderError(
                    f"experiment_name: {self.path} holds something that is not a run; "
                    "accepted are new or empty folders and folders of the same flags"
                )
            return
        differing = [
            f"{name} was {before.get(name)!r} and is {flags.get(name)!r}"
            for name in sorted({*before, *flags})
            if before.get(name) != flags.get(name)
        ]
        if differing:
            raise RunFolderError(
                f"experiment_name: {self.path} belongs to a run with other flags: "
                + "; ".join(differing)
            )
        if seed is not None and seed != kept_seed and kept_seed is not None:
            raise RunFolderError(
                f"seed: {self.path} belongs to a run with another seed; accepted are the same, or "
                "none for the one that is kept there"
            )

    def _kept(self, name: str) -> Any:
        """What a JSON file of the folder holds, of the type it was written with; None without."""
        try:
            with open(self.file(name), encoding="utf-8") as file:
                value = json.load(file)
        except FileNotFoundError:
            return None
        except ValueError:
            value = None
        if not isinstance(value, _KEPT[name]):
            raise RunFolderError(f"experiment_name: {self.file(name)} is not of a run")
        return value

    def open(self, flags: Mapping[str, Any], seed: int | None = None) -> int:
        """Creates or reopens the folder and locks it until this process ends.

        Args:
            flags: As for `check`.
            seed: As for `check`.

        Returns:
            The run's seed: the given one, or one drawn at random, kept in a file of its owner.
            Who knows it knows who took part in a round.

        Raises:
            RunFolderError: As `check`, or if another process is running in it.
        """
        self.check(flags, seed)
        try:
            os.makedirs(self.path, exist_ok=True)
            self._lock = open(self.file(_LOCK), "w")  # noqa: SIM115 - held until the process ends.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunFolderError(
                f"experiment_name: another process is running in {self.path}"
            ) from None
        except OSError as error:
            raise RunFolderError(f"experiment_name: {self.path}: {error.strerror}") from None
        self.check(flags, seed)  # Another process may have come first.
        atomic.remove_partial(self.path)
        if self._kept(_FLAGS) is None:
            atomic.write_json(self.file(_FLAGS), dict(flags))
        kept_seed = self._kept(_SEED)
        if kept_seed is None:
            kept_seed = secrets.randbits(128) if seed is None else seed
            atomic.write_text(self.file(_SEED), f"{kept_seed}\n", mode=0o600)
        return kept_seed
