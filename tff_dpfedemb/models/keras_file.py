"""A Keras model that a user saved, as a backbone."""

import dataclasses
import functools
import hashlib
import os
from typing import Any

import numpy as np
import tensorflow as tf

from tff_dpfedemb.models import layers

_ACCEPTED = (
    "accepted are saved functional or sequential Keras models from images to embeddings "
    "(.keras, .h5 or a SavedModel folder)"
)


@dataclasses.dataclass(frozen=True)
class KerasFile:
    """What a file holds.

    Attributes:
        sequential: Whether the model is sequential, or functional.
        config: The architecture.
        weights: The weights, in the order of the model's `weights`.
        input_shape: (height, width, channels), None where any length will do.
        embedding_dim: Length of the embedding.
        sha256: Of the file; of a folder, of its files.
    """

    sequential: bool
    config: dict[str, Any]
    weights: list[np.ndarray]
    input_shape: tuple[int | None, ...]
    embedding_dim: int
    sha256: str

    def build(self) -> tf.keras.Model:
        """The model, eagerly with the file's weights, and in a graph with whatever weights."""
        cls = tf.keras.Sequential if self.sequential else tf.keras.Model
        model = cls.from_config(self.config)
        if tf.executing_eagerly():
            model.set_weights(self.weights)
        return model


@functools.cache
def load(path: str) -> KerasFile:
    """Loads a model; later calls give what the first one read.

    Args:
        path: As Keras takes it.

    Returns:
        What it holds.

    Raises:
        ValueError: One line, if it is no model that can serve as a backbone.
    """

    def refuse(why: str) -> ValueError:
        return ValueError(f"model_backbone={path}: {' '.join(why.split())[:300]}; {_ACCEPTED}")

    if not os.path.exists(path):
        raise refuse("does not exist")
    with tf.init_scope():
        try:
            model = tf.keras.models.load_model(path, compile=False)
        except Exception as error:  # Keras raises almost anything for what it cannot read.
            raise refuse(f"cannot be loaded ({error})") from None
        if not isinstance(model, tf.keras.Model):
            raise refuse("is not a Keras model")
        sequential = isinstance(model, tf.keras.Sequential)
        try:
            config = model.get_config()
            rebuilt = (tf.keras.Sequential if sequential else tf.keras.Model).from_config(config)
            rebuilt.set_weights(model.get_weights())
        except Exception as error:
            raise refuse(f"cannot be built from its configuration ({error})") from None
        all_layers = layers.all_layers(model)
        normalised = [
            layer.name
            for layer in all_layers
            if any("BatchNorm" in c.__name__ for c in type(layer).__mro__)
        ]
        if normalised:
            raise ValueError(
                f"model_backbone={path}: has batch normalisation ({', '.join(normalised[:3])}"
                f"{', ...' if len(normalised) > 3 else ''}), whose statistics mix examples and are "
                "neither aggregated nor private; accepted are models with group normalisation"
            )
        if drifting := layers.drifting_weights(model):
            raise refuse(f"has weights that are not trained by gradients: {', '.join(drifting)}")
        inputs, outputs = model.input_shape, model.output_shape
        if not isinstance(inputs, tuple) or len(inputs) != 4:
            raise refuse(f"takes inputs of shape {inputs}, not one image each")
        if not isinstance(outputs, tuple) or len(outputs) != 2 or outputs[1] is None:
            raise refuse(f"returns outputs of shape {outputs}, not one embedding each")
        dtypes = [model.inputs[0].dtype, model.outputs[0].dtype, *(v.dtype for v in model.weights)]
        if odd := {tf.as_dtype(dtype).name for dtype in dtypes} - {"float32"}:
            # Keras would cast pixels in [-1, 1) to an input's type without a word.
            raise refuse(f"has inputs, outputs or weights of {', '.join(sorted(odd))}, not float32")
        if stateful := [layer.name for layer in all_layers if getattr(layer, "stateful", False)]:
            raise refuse(f"remembers one batch in the next ({', '.join(stateful)})")
        if not model.trainable_variables:
            raise refuse("has no weights to train")
        return KerasFile(
            sequential,
            config,
            model.get_weights(),
            tuple(inputs[1:]),
            outputs[1],
            _sha256(path),
        )


def _sha256(path: str) -> str:
    """Of a file, or of all files of a folder, in the order of their names."""
    digest = hashlib.sha256()
    paths = [path]
    if os.path.isdir(path):
        paths = sorted(
            os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names
        )
    for each in paths:
        with open(each, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
