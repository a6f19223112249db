"""What the families of backbones share."""

from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

NORM_GROUPS = 2

_CONVOLUTIONS = (
    tf.keras.layers.Conv1D,
    tf.keras.layers.Conv2D,
    tf.keras.layers.Conv3D,
    tf.keras.layers.DepthwiseConv1D,
    tf.keras.layers.DepthwiseConv2D,
    tf.keras.layers.SeparableConv1D,
    tf.keras.layers.SeparableConv2D,
)


def initializers(seed: int) -> Iterator[tf.keras.initializers.Initializer]:
    """Kernel initialisers, each of its own stream, all functions of one seed."""
    streams = np.random.SeedSequence(seed)
    while True:
        (stream,) = streams.spawn(1)
        yield tf.keras.initializers.GlorotUniform(seed=int(stream.generate_state(1)[0] >> 1))


def assign_weights(
    backbone: tf.keras.Model, trainable: Sequence[np.ndarray], frozen: Sequence[np.ndarray]
) -> None:
    """Gives a backbone, eagerly, its trainable and its other weights, all of both."""
    variables = [*backbone.trainable_variables, *backbone.non_trainable_variables]
    for variable, value in zip(variables, [*trainable, *frozen], strict=True):
        variable.assign(value)


def all_layers(backbone: tf.keras.Model) -> list[tf.keras.layers.Layer]:
    """Every layer, also those inside of others."""
    return [m for m in backbone.submodules if isinstance(m, tf.keras.layers.Layer)]


def freeze_convolutions(backbone: tf.keras.Model) -> None:
    """Makes the weights of all convolutions non-trainable."""
    for layer in all_layers(backbone):
        if isinstance(layer, _CONVOLUTIONS):
            layer.trainable = False


def drifting_weights(backbone: tf.keras.Model) -> list[str]:
    """Names of weights that a layer in training changes by other means than gradients."""
    frozen = {id(v) for layer in all_layers(backbone) if not layer.trainable for v in layer.weights}
    return [v.name for v in backbone.non_trainable_variables if id(v) not in frozen]
