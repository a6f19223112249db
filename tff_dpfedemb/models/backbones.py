"""The backbones by name. Importing this module does not import TensorFlow."""

import importlib
import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import tensorflow as tf

DEFAULT_EMBEDDING_DIM = 128
_MAX_ALPHA = 2.0


class _Family(NamedTuple):
    """Where a backbone is built, the smallest height and width it takes, and its options."""

    module: str
    smallest: int
    function: str = "build"
    has_alpha: bool = False


_MODELS = "tff_dpfedemb.models"
_FAMILIES = {
    "lenet": _Family(f"{_MODELS}.lenet", 4),
    "small_cnn": _Family(f"{_MODELS}.small_cnn", 8),
    "mobilenet_small": _Family(f"{_MODELS}.mobilenet_small", 8),
    "mobilenet_v2": _Family(
        f"{_MODELS}.keras_applications", 32, "build_mobilenet_v2", has_alpha=True
    ),
    "resnet50": _Family(f"{_MODELS}.keras_applications", 32, "build_resnet50"),
}


def names() -> list[str]:
    """The built-in backbones, sorted. Everywhere a path of a saved Keras model will do as well."""
    return sorted(_FAMILIES)


def is_path(name: str) -> bool:
    """Whether a backbone is a saved Keras model."""
    return name not in _FAMILIES and (os.sep in name or os.path.exists(name))


def embedding_dim(name: str, wanted: int | None) -> int:
    """The length of the embedding: as wanted, or else 128, or that of the saved Keras model."""
    if wanted is not None:
        return wanted
    if not is_path(name):
        return DEFAULT_EMBEDDING_DIM
    from tff_dpfedemb.models import keras_file

    return keras_file.load(name).embedding_dim


def check(
    name: str,
    image_shape: tuple[int, int, int],
    embedding_dim: int | None = None,
    alpha: float = 1.0,
) -> None:
    """Checks that a backbone exists and takes images of a shape.

    Args:
        name: A built-in backbone, or the path of a saved Keras model.
        image_shape: (height, width, channels).
        embedding_dim: Length of the embedding; None for the backbone's own.
        alpha: Width of the network, for those that have one.

    Raises:
        ValueError: If it does not, saying why; one line a problem.
    """
    shape = " x ".join(map(str, image_shape))
    if is_path(name):
        from tff_dpfedemb.models import keras_file

        file = keras_file.load(name)
        if any(m not in (None, t) for m, t in zip(file.input_shape, image_shape, strict=True)):
            takes = " x ".join("any" if n is None else str(n) for n in file.input_shape)
            raise ValueError(f"model_backbone={name}: takes images of {takes}, not {shape}")
        if embedding_dim not in (None, file.embedding_dim):
            raise ValueError(
                f"embedding_dim={embedding_dim}: the saved model has embeddings of "
                f"{file.embedding_dim}; accepted is that, or none"
            )
    elif name not in _FAMILIES:
        raise ValueError(
            f"model_backbone={name!r}: accepted are {', '.join(names())}, and paths of saved Keras "
            "models"
        )
    else:
        smallest = _FAMILIES[name].smallest
        if min(image_shape[:2]) < smallest:
            raise ValueError(
                f"model_backbone={name!r}: takes images of at least {smallest} x {smallest} "
                f"pixels, not {image_shape[0]} x {image_shape[1]}"
            )
    if alpha != 1.0 and not (name in _FAMILIES and _FAMILIES[name].has_alpha):
        raise ValueError(
            f"backbone_alpha={alpha:g}: accepted is 1, since the width of "
            f"--model_backbone={name} is fixed"
        )
    if not 0 < alpha <= _MAX_ALPHA:
        raise ValueError(
            f"backbone_alpha={alpha:g}: accepted are numbers above 0, at most {_MAX_ALPHA:g}"
        )


def build(
    name: str,
    image_shape: tuple[int, int, int],
    embedding_dim: int,
    seed: int,
    alpha: float = 1.0,
    trainable_conv: bool = True,
) -> "tf.keras.Model":
    """Builds a backbone with freshly initialised weights, a pure function of its arguments.

    Args:
        name: One of `names()`; or the path of a saved Keras model, which, built eagerly, has the
            weights it was saved with.
        image_shape: (height, width, channels).
        embedding_dim: Length of the embedding.
        seed: Seed of the initial weights.
        alpha: Width of the network, for those that have one.
        trainable_conv: Whether convolutions are trained; otherwise they are frozen.

    Returns:
        A Keras model from float32 images of shape (n,) + image_shape, pixels in [-1, 1), to
        float32 embeddings of shape (n, embedding_dim), not normalised.

    Raises:
        ValueError: As `check`, and if nothing is left to train.
    """
    check(name, image_shape, embedding_dim, alpha)
    from tff_dpfedemb.models import keras_file, layers

    if is_path(name):
        backbone = keras_file.load(name).build()
    else:
        family = _FAMILIES[name]
        options = {"alpha": alpha} if family.has_alpha else {}
        function = getattr(importlib.import_module(family.module), family.function)
        backbone = function(image_shape, embedding_dim, seed, **options)
    if not trainable_conv:
        layers.freeze_convolutions(backbone)
        if not backbone.trainable_variables:
            raise ValueError(
                f"trainable_conv=False: leaves nothing of --model_backbone={name} to train; "
                "accepted is True"
            )
    return backbone
