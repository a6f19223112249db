"""Checkpoints hold whole states, and the newest ones only."""

import collections
import os
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow_federated as tff
from absl.testing import absltest

from tff_dpfedemb.experiment import checkpoints as checkpoints_lib


def _state(number: int) -> collections.OrderedDict:
    """A state of the kinds of values that a learning process has."""
    return collections.OrderedDict(
        weights=tff.learning.models.ModelWeights(
            trainable=(np.full((2, 3), number / 3, np.float32), np.float32(number)),
            non_trainable=(),
        ),
        aggregator=(np.int32(number), ()),
    )


class CheckpointsTest(absltest.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = os.path.join(self.enterContext(tempfile.TemporaryDirectory()), "checkpoints")

    def _assert_latest(self, number: int, rounds: int) -> None:
        """The newest state, read by somebody new, is that of `number`, bit for bit."""
        state, found = checkpoints_lib.Checkpoints(self.folder).latest(_state(-1))
        self.assertEqual(found, rounds)
        expected = _state(number)
        self.assertIs(type(state), type(expected))
        self.assertIs(type(state["weights"]), type(expected["weights"]))
        for ours, theirs in (
            (state["weights"].trainable, expected["weights"].trainable),
            (state["aggregator"][:1], expected["aggregator"][:1]),
        ):
            for value, wanted in zip(ours, theirs, strict=True):
                self.assertEqual(np.asarray(value).dtype, wanted.dtype)
                np.testing.assert_array_equal(value, wanted)
        self.assertEqual(state["aggregator"][1], ())

    def test_without_any_the_structure_is_the_state(self) -> None:
        self._assert_latest(-1, 0)

    def test_newest_by_number_and_only_two_are_kept(self) -> None:
        checkpoints = checkpoints_lib.Checkpoints(self.folder)
        for rounds in (8, 9, 10):
            checkpoints.save(_state(rounds), rounds)
        self.assertCountEqual(os.listdir(self.folder), ["round_9", "round_10"])
        self._assert_latest(10, 10)

    def test_saving_the_same_round_again_changes_nothing(self) -> None:
        checkpoints = checkpoints_lib.Checkpoints(self.folder)
        checkpoints.save(_state(1), 1)
        checkpoints.save(_state(2), 1)
        self._assert_latest(1, 1)

    def test_what_a_killed_process_left_is_removed_and_not_read(self) -> None:
        checkpoints_lib.Checkpoints(self.folder).save(_state(1), 1)
        os.makedirs(os.path.join(self.folder, "round_2_temp1234", "variables"))
        self._assert_latest(1, 1)
        self.assertEqual(os.listdir(self.folder), ["round_1"])
        checkpoints_lib.Checkpoints(self.folder).save(_state(2), 2)
        self._assert_latest(2, 2)


if __name__ == "__main__":
    absltest.main()
