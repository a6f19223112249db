"""From images to L2-normalised embeddings."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

_NORM_TOLERANCE = 1e-3
_BATCH = 256
# Larger images are averaged down for the pixel baseline: a vector of all pixels of many images is
# more than memory holds.
_MAX_PIXELS = 32 * 32


def raw_pixels(images: np.ndarray, batch_size: int = 256) -> np.ndarray:
    """The baseline that uses the pixels themselves as the embedding.

    Args:
        images: uint8 array of shape (n, height, width, channels), or what is sliced like one.
            Where height times width is above 1,024, squares of pixels are averaged.
        batch_size: Images that are read at once.

    Returns:
        float32 array of shape (n, pixels * channels), values in [0, 1].
    """
    height, width = images.shape[1:3]
    square = (
        math.ceil(math.sqrt(height * width / _MAX_PIXELS)) if height * width > _MAX_PIXELS else 1
    )
    rows, columns = max(1, height // square), max(1, width // square)
    batches = []
    for start in range(0, images.shape[0], batch_size):
        batch = np.asarray(images[start : start + batch_size], np.float32) / np.float32(255)
        if square > 1:
            batch = batch[:, : rows * square, : columns * square]
            tiles = batch.reshape(len(batch), rows, square, columns, square, -1)
            batch = tiles.mean(axis=(2, 4))
        batches.append(batch.reshape(len(batch), -1))
    return np.concatenate(batches)


def l2_normalize(embeddings: np.ndarray) -> np.ndarray:
    """Embeddings scaled to length one.

    Args:
        embeddings: Real array of shape (n, d).

    Returns:
        float32 array of shape (n, d), rows of L2 norm 1.

    Raises:
        ValueError: If the array is not two-dimensional or has a non-finite or all-zero row.
    """
    embeddings = np.asarray(embeddings)
    if embeddings.ndim != 2:
        raise ValueError(f"embeddings must have shape (n, d), got {embeddings.shape}")
    # Norms in float64: float32 squares overflow from 2e19 on.
    norms = np.linalg.norm(embeddings.astype(np.float64), axis=1, keepdims=True)
    bad = np.flatnonzero(~(np.isfinite(norms) & (norms > 0)))
    if bad.size:
        raise ValueError(
            f"embeddings must be finite and not zero, got {bad.size} bad rows, first row {bad[0]}"
        )
    return (embeddings / norms).astype(np.float32)


def check_labelled(embeddings: np.ndarray, class_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings and classes, checked and in the form that the measures work on.

    Args:
        embeddings: Real array of shape (n, d).
        class_ids: Array of shape (n,), any type that can be sorted.

    Returns:
        The normalised embeddings, float32 of shape (n, d), and class indices, int64 of shape (n,)
        in [0, number of classes).

    Raises:
        ValueError: If shapes disagree, an embedding is non-finite or zero, there are fewer than
            two classes, or no class has two images.
    """
    normalized = l2_normalize(embeddings)
    class_ids = np.asarray(class_ids)
    if class_ids.shape != (len(normalized),):
        raise ValueError(
            f"class_ids must have one entry for each of the {len(normalized)} embeddings, "
            f"got shape {class_ids.shape}"
        )
    ids, classes, counts = np.unique(class_ids, return_inverse=True, return_counts=True)
    if len(ids) < 2:
        raise ValueError(f"class_ids must hold at least 2 classes, got {len(ids)}")
    if counts.max() < 2:
        raise ValueError(
            f"class_ids must hold a class with 2 images or more, got {len(ids)} classes of 1"
        )
    return normalized, classes


def embed(
    model_fn: Callable[[Any], Any], images: np.ndarray, batch_size: int | None = None
) -> np.ndarray:
    """Runs an exported backbone over images in batches, and checks what it returns.

    Args:
        model_fn: A loaded SavedModel's callable: uint8 images of shape (b, height, width,
            channels) to float32 embeddings of shape (b, d) with unit L2 norm.
        images: uint8 array of shape (n, height, width, channels), n >= 1, or what is sliced like
            one.
        batch_size: Images in one call, at least 1; the last call may have fewer. None for 256, and
            fewer of images above 64x64, since a large network holds megabytes for each.

    Returns:
        float32 array of shape (n, d).

    Raises:
        ValueError: If `images` or `batch_size` is unusable, or the model's output is not as above.
    """
    if images.dtype != np.uint8 or images.ndim != 4 or not images.shape[0]:
        raise ValueError(
            "images must be a non-empty uint8 array of shape (n, height, width, channels), "
            f"got {images.dtype} of shape {images.shape}"
        )
    if batch_size is None:
        pixels = images.shape[1] * images.shape[2]
        batch_size = max(1, min(_BATCH, _BATCH * 64 * 64 // pixels))
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    batches = []
    for start in range(0, images.shape[0], batch_size):
        batch = images[start : start + batch_size]
        output = np.asarray(model_fn(batch))
        if output.ndim != 2 or len(output) != len(batch):
            raise ValueError(
                f"model_fn must return shape ({len(batch)}, d) for {len(batch)} images, "
                f"got {output.shape}"
            )
        if output.dtype != np.float32:
            raise ValueError(f"model_fn must return float32, got {output.dtype}")
        if not np.isfinite(output).all():
            raise ValueError(f"model_fn returned non-finite values in the batch from image {start}")
        error = np.abs(np.linalg.norm(output, axis=1) - 1).max()
        if error > _NORM_TOLERANCE:
            raise ValueError(
                f"model_fn must return embeddings of L2 norm 1 +- {_NORM_TOLERANCE}, "
                f"got one that is off by {error:.3g} in the batch from image {start}"
            )
        batches.append(output)
    return np.concatenate(batches)
