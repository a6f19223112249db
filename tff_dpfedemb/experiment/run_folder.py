"""The folder of a run: the contract for scripts that read it. Imports nothing heavy."""

import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from typing import Any, TextIO

from tff_dpfedemb import atomic


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

    def check(self, flags: Mapping[str, Any]) -> None:
        """Checks, without writing, that the folder is free or belongs to the same flags.

        Args:
            flags: The flags that define the run, JSON-serialisable.

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
            with open(self.file("flags.json"), encoding="utf-8") as file:
                before = json.load(file)
        except FileNotFoundError:
            if os.path.isdir(self.path) and set(os.listdir(self.path)) - {"lock"}:
                raise RunFolderError(
                    f"experiment_name: {self.path} holds something that is not a run; "
                    "accepted are new or empty folders and folders of the same flags"
                ) from None
            return
        except ValueError:
            raise RunFolderError(
                f"experiment_name: {self.file('flags.json')} is not JSON"
            ) from None
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

    def open(self, flags: Mapping[str, Any]) -> None:
        """Creates or reopens the folder and locks it until this process ends.

        Raises:
            RunFolderError: As `check`, or if another process is running in it.
        """
        self.check(flags)
        os.makedirs(self.path, exist_ok=True)
        self._lock = open(self.file("lock"), "w")  # noqa: SIM115 - held until the process ends.
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunFolderError(
                f"experiment_name: another process is running in {self.path}"
            ) from None
        if not os.path.exists(self.file("flags.json")):
            atomic.write_json(self.file("flags.json"), dict(flags))

    def secret_seed(self, given: int | None) -> int:
        """The run's seed: the given one, or one drawn once and kept in a private file.

        Who knows the seed knows who took part in a round, so it is readable by the owner alone.
        """
        if given is not None:
            return given
        path = self.file("secret_seed")
        if not os.path.exists(path):
            atomic.write_text(path, f"{secrets.randbits(128)}\n", mode=0o600)
        with open(path, encoding="utf-8") as file:
            return int(file.read())
