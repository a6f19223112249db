"""MobileNetV2 and ResNet-50 as Keras builds them, with group in place of batch normalisation.

Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks", CVPR 2018; He et al.,
"Deep Residual Learning for Image Recognition", CVPR 2016.
"""

import contextlib
import copy
import functools
from typing import Any

import tensorflow as tf

from tff_dpfedemb.models import layers

_INITIALIZERS = ("kernel_initializer", "depthwise_initializer")


def build_mobilenet_v2(
    image_shape: tuple[int, int, int], embedding_dim: int, seed: int, alpha: float
) -> tf.keras.Model:
    """MobileNetV2 of width `alpha`, average-pooled, and a dense embedding."""
    return _build("MobileNetV2", image_shape, embedding_dim, seed, alpha)


def build_resnet50(
    image_shape: tuple[int, int, int], embedding_dim: int, seed: int
) -> tf.keras.Model:
    """ResNet-50, average-pooled, and a dense embedding."""
    return _build("ResNet50", image_shape, embedding_dim, seed, None)


def _build(
    name: str, image_shape: tuple[int, int, int], embedding_dim: int, seed: int, alpha: float | None
) -> tf.keras.Model:
    """One of Keras' applications without its batch normalisation and without its classifier."""
    initializer = layers.initializers(seed)
    config = copy.deepcopy(_config(name, image_shape, alpha))
    for layer in config["layers"]:
        for key in _INITIALIZERS:
            if key in layer["config"]:
                fresh = tf.keras.initializers.serialize(next(initializer))
                layer["config"][key] = fresh
    base = tf.keras.Model.from_config(config)
    x = tf.keras.layers.GlobalAveragePooling2D(name="pool")(base.output)
    x = tf.keras.layers.Dense(
        embedding_dim, kernel_initializer=next(initializer), name="embedding"
    )(x)
    return tf.keras.Model(base.input, x, name=name.lower())


@functools.cache
def _config(name: str, image_shape: tuple[int, int, int], alpha: float | None) -> dict[str, Any]:
    """The architecture's configuration, edited. No variable of it stays in the current graph."""
    if tf.compat.v1.executing_eagerly_outside_functions():
        elsewhere: contextlib.AbstractContextManager = contextlib.nullcontext()
    else:
        elsewhere = tf.Graph().as_default()
    options = {} if alpha is None else {"alpha": alpha}
    with elsewhere:
        application = getattr(tf.keras.applications, name)(
            input_shape=image_shape, include_top=False, weights=None, **options
        )
        config = application.get_config()
    for layer in config["layers"]:
        if layer["class_name"] == "BatchNormalization":
            old = layer["config"]
            layer["class_name"] = "GroupNormalization"
            layer["registered_name"] = None
            layer["config"] = {
                "name": old["name"],
                "groups": layers.NORM_GROUPS,
                "epsilon": old["epsilon"],
            }
        elif "Conv" in layer["class_name"]:
            # Every convolution is followed by a normalisation, which has an offset of its own.
            layer["config"]["use_bias"] = False
    return config
