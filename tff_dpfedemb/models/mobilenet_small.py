"""A reduced MobileNetV2 for small images: inverted residuals with group normalisation.

The blocks are those of Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks",
CVPR 2018; there are fewer and narrower ones, and the first convolution keeps the resolution.
"""

import tensorflow as tf

from tff_dpfedemb.models import layers

# (expansion, channels, blocks, stride of the first block), as the paper's table 2 writes them.
STAGES = ((1, 16, 1, 1), (4, 24, 2, 2), (4, 32, 2, 2), (4, 64, 2, 2))
STEM, LAST = 16, 256


def build(image_shape: tuple[int, int, int], embedding_dim: int, seed: int) -> tf.keras.Model:
    """A 3x3 stem, seven inverted residuals, a 1x1 convolution, pooling, and a dense embedding."""
    initializer = layers.initializers(seed)

    def convolve(x: tf.Tensor, filters: int, size: int, name: str, active: bool) -> tf.Tensor:
        x = tf.keras.layers.Conv2D(
            filters,
            size,
            padding="same",
            use_bias=False,
            kernel_initializer=next(initializer),
            name=name,
        )(x)
        return normalize(x, f"{name}_norm", active)

    def normalize(x: tf.Tensor, name: str, active: bool = True) -> tf.Tensor:
        x = tf.keras.layers.GroupNormalization(groups=layers.NORM_GROUPS, name=name)(x)
        return tf.keras.layers.ReLU(6.0)(x) if active else x

    def block(x: tf.Tensor, expansion: int, channels: int, stride: int, name: str) -> tf.Tensor:
        entry = x
        if expansion > 1:
            x = convolve(x, expansion * x.shape[-1], 1, f"{name}_expand", True)
        x = tf.keras.layers.DepthwiseConv2D(
            3,
            stride,
            padding="same",
            use_bias=False,
            depthwise_initializer=next(initializer),
            name=f"{name}_depthwise",
        )(x)
        x = normalize(x, f"{name}_depthwise_norm")
        x = convolve(x, channels, 1, f"{name}_project", False)
        return tf.keras.layers.Add()([entry, x]) if entry.shape == x.shape else x

    inputs = tf.keras.Input(image_shape)
    x = convolve(inputs, STEM, 3, "stem", True)
    for stage, (expansion, channels, blocks, stride) in enumerate(STAGES):
        for i in range(blocks):
            x = block(x, expansion, channels, stride if i == 0 else 1, f"block_{stage}_{i}")
    x = convolve(x, LAST, 1, "last", True)
    x = tf.keras.layers.GlobalAveragePooling2D()(x)
    x = tf.keras.layers.Dense(
        embedding_dim, kernel_initializer=next(initializer), name="embedding"
    )(x)
    return tf.keras.Model(inputs, x, name="mobilenet_small")
