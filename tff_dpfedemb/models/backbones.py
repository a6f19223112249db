"""The backbones by name. Importing this module does not import TensorFlow."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tensorflow as tf

# Name -> (module of the family, smallest height and width it takes).
_FAMILIES = {
    "lenet": ("tff_dpfedemb.models.lenet", 4),
    "small_cnn": ("tff_dpfedemb.models.small_cnn", 8),
}


def names() -> list[str]:
    """The names that `--model_backbone` accepts."""
    return sorted(_FAMILIES)


def check(name: str, image_shape: tuple[int, int, int]) -> None:
    """Checks that a backbone exists and takes images of a shape.

    Args:
        name: The backbone.
        image_shape: (height, width, channels).

    Raises:
        ValueError: If it does not, saying why.
    """
    if name not in _FAMILIES:
        raise ValueError(f"model_backbone={name!r}: accepted are {', '.join(names())}")
    smallest = _FAMILIES[name][1]
    if min(image_shape[:2]) < smallest:
        raise ValueError(
            f"model_backbone={name!r}: takes images of at least {smallest} x {smallest} pixels, "
            f"not {image_shape[0]} x {image_shape[1]}"
        )


def build(
    name: str, image_shape: tuple[int, int, int], embedding_dim: int, seed: int
) -> "tf.keras.Model":
    """Builds a backbone with freshly initialised weights, a pure function of its arguments.

    Args:
        name: One of `names()`.
        image_shape: (height, width, channels).
        embedding_dim: Length of the embedding.
        seed: Seed of the initial weights.

    Returns:
        A Keras model from float32 images of shape (n,) + image_shape, pixels in [-1, 1), to
        float32 embeddings of shape (n, embedding_dim), not normalised.

    Raises:
        ValueError: As `check`.
    """
    check(name, image_shape)
    return importlib.import_module(_FAMILIES[name][0]).build(image_shape, embedding_dim, seed)
