"""Figures of a run as they come: one row in a CSV file, and TensorBoard's events."""

import asyncio
import glob
import os
from collections.abc import Mapping

import tensorflow_federated as tff


class Metrics:
    """Writes figures by TFF's release managers, which survive being stopped and started again."""

    def __init__(self, csv_path: str, tensorboard_folder: str, key: str):
        """Opens both, and removes what a killed process left half-written.

        Args:
            csv_path: One row for each key.
            tensorboard_folder: Where events are written.
            key: What rows are numbered by.
        """
        for name in glob.glob(glob.escape(csv_path) + "_temp*"):
            os.remove(name)
        self._csv = tff.program.CSVFileReleaseManager(
            csv_path, save_mode=tff.program.CSVSaveMode.WRITE, key_fieldname=key
        )
        self._tensorboard = tff.program.TensorBoardReleaseManager(tensorboard_folder)

    def write_row(self, values: Mapping[str, float], number: int) -> None:
        """Writes or replaces the row of a number, and those after it."""
        asyncio.run(self._csv.release(values, key=number))

    def write_events(self, values: Mapping[str, float], number: int) -> None:
        """Adds events."""
        asyncio.run(self._tensorboard.release(values, key=number))
