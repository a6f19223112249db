"""From user ids to a virtual client's examples, as a computation that runs inside the worker."""

import collections
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

# (user_ids) -> (images, class_ids), as `tasks.task.Task.load_users`.
LoadUsers = Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]


def build_dataset_computation(
    load_users: LoadUsers, user_id_dtype: type[np.generic]
) -> tff.Computation:
    """Builds the computation that reads a virtual client's users, where they are.

    A virtual client is one dense element, not a stream of examples: its users are read once a
    round, and local training cuts its batches out of memory.

    Args:
        load_users: Graph operations from user ids, shape (k,), to images, uint8
            (n, height, width, channels), and class ids, int64 (n,).
        user_id_dtype: np.int64 or np.bytes_. Ids are opaque: any bytes are kept as they are.

    Returns:
        A TFF computation from (user_ids, seed) to a sequence of one element (images, class_ids,
        seed).
    """
    id_dtype = np.str_ if issubclass(user_id_dtype, (np.bytes_, np.str_)) else user_id_dtype
    client_type = collections.OrderedDict(
        user_ids=tff.TensorType(id_dtype, [None]), seed=tff.TensorType(np.int64, [2])
    )

    @tff.tensorflow.computation(client_type)
    def virtual_client(client):
        images, class_ids = load_users(client["user_ids"])
        return tf.data.Dataset.from_tensors(
            collections.OrderedDict(images=images, class_ids=class_ids, seed=client["seed"])
        )

    return virtual_client


def client_arguments(
    user_ids: Sequence[np.ndarray], seeds: Sequence[np.ndarray]
) -> list[collections.OrderedDict]:
    """What a round's `next` takes: one structure a virtual client.

    Args:
        user_ids: One array of ids a virtual client, int64, or bytes in an array of dtype object.
        seeds: One int64 array of shape (2,) a virtual client.

    Raises:
        ValueError: If ids come in an array of fixed-width strings, which drops trailing NULs.
    """
    for ids in user_ids:
        if ids.dtype.kind in "SU":
            raise ValueError(
                f"user_ids of dtype {ids.dtype}: accepted are int64, or object for bytes"
            )
    return [
        collections.OrderedDict(user_ids=ids, seed=seed)
        for ids, seed in zip(user_ids, seeds, strict=True)
    ]
