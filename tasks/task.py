"""What a data set must offer to be trained on and evaluated.

A task knows its users, its classes and its splits. It never knows about privacy, about models or
about flags: binaries build a task through `tasks.registry` and hand it to the rest.
"""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class EvaluationSet:
    """Labelled images that no private training has seen.

    Attributes:
        images: uint8 array of shape (n, height, width, channels), or what is read like one where
            it is sliced, so that large sets need not be in memory.
        class_ids: int64 array of shape (n,).
        user_ids: array of shape (n,), the user each image is from, integers or bytes; None where
            the images are of nobody.
        description: One line that says what the set holds, for reports.
    """

    images: np.ndarray
    class_ids: np.ndarray
    user_ids: np.ndarray | None
    description: str


class Task(abc.ABC):
    """A user-partitioned image data set with held-out evaluation classes.

    Attributes:
        name: The value of `--task` that selects it.
        image_shape: (height, width, channels) of every image the task yields.
        num_users: How many users can be sampled for training.
        num_train_classes: How many classes the training users' examples come from: the most that
            one virtual client can hold. Their ids are 0 to this number, less one.
        has_users: Whether the data say whose images they are. Without, `num_users` counts arbitrary
            groups of images, and no user-level privacy can be had.
    """

    name: str
    image_shape: tuple[int, int, int]
    num_users: int
    num_train_classes: int
    has_users: bool = True

    @classmethod
    def published_users(cls) -> int | None:
        """The number of users by which privacy is accounted where none is stated, None for none.

        Public, so never a count of the data at hand. Subclasses may take options of theirs.
        """
        return None

    @property
    @abc.abstractmethod
    def user_id_dtype(self) -> type[np.generic]:
        """`np.int64` or `np.bytes_`: the type of the ids that `user_ids` returns."""

    @abc.abstractmethod
    def user_ids(self, indices: np.ndarray) -> np.ndarray:
        """The opaque ids of the users at `indices`, int64 of shape (k,) in [0, num_users).

        Bytes come in an array of dtype object, since NumPy's own bytes drop trailing NULs.
        Costs time in `k` only, not in `num_users`.
        """

    @abc.abstractmethod
    def load_users(self, user_ids: Any) -> tuple[Any, Any]:
        """All training examples of some users, as TensorFlow operations.

        Traced into the computation that runs inside a worker: graph operations only, nothing that
        calls back into Python, and `tf.equal` where tensors are compared, since == compares
        identities in TFF's graphs.

        Args:
            user_ids: Tensor of shape (k,), k >= 0, int64 or string as `user_id_dtype` says.

        Returns:
            images, a uint8 tensor of shape (n,) + `image_shape`, and class_ids, an int64 tensor of
            shape (n,) with values in [0, num_train_classes), the users' examples one user after
            another.
        """

    def user_name(self, user_id: Any) -> str:
        """How a user is called in pictures and reports."""
        return user_id.decode() if isinstance(user_id, bytes) else str(user_id)

    @abc.abstractmethod
    def evaluation_set(self, split: str) -> EvaluationSet:
        """The held-out images of `split`, "validation" or "test".

        Raises:
            ValueError: If the task has no such split.
        """

    @abc.abstractmethod
    def describe(self) -> Mapping[str, Any]:
        """JSON-serialisable facts that identify the data, recorded in the run."""
