"""Checkpoints of the whole training state, by TFF's program state manager."""

import asyncio
import os
import shutil
from typing import Any

import tensorflow_federated as tff


class Checkpoints:
    """The newest states of a run, numbered by the rounds they have behind them."""

    def __init__(self, folder: str, keep: int = 2):
        """Opens a folder and removes what a killed process left half-written.

        Args:
            folder: Created if it does not exist.
            keep: How many of the newest states are kept.
        """
        if os.path.isdir(folder):
            for name in os.listdir(folder):
                if "_temp" in name:
                    shutil.rmtree(os.path.join(folder, name))
        self._manager = tff.program.FileProgramStateManager(
            folder, prefix="round_", keep_total=keep, keep_first=False
        )

    def latest(self, structure: Any) -> tuple[Any, int]:
        """The newest state and its number of rounds.

        Args:
            structure: The initial state, returned with 0 rounds if there is no checkpoint.
        """
        versions = asyncio.run(self._manager.get_versions())
        if not versions:
            return structure, 0
        return asyncio.run(self._manager.load(versions[-1], structure)), versions[-1]

    def save(self, state: Any, rounds: int) -> None:
        """Saves the state after `rounds` rounds, if it is not there yet."""
        if rounds not in (asyncio.run(self._manager.get_versions()) or ()):
            asyncio.run(self._manager.save(state, rounds))
