"""A small group-normalised convolutional network: few weights, so that little noise is enough."""

import tensorflow as tf

from tff_dpfedemb.models import layers


def build(image_shape: tuple[int, int, int], embedding_dim: int, seed: int) -> tf.keras.Model:
    """Three 3x3 convolutions of 32 filters, each pooled and normalised, and a dense embedding."""
    initializer = layers.initializers(seed)
    x = inputs = tf.keras.Input(image_shape)
    for _ in range(3):
        x = tf.keras.layers.Conv2D(32, 3, padding="same", kernel_initializer=next(initializer))(x)
        # Pooling first leaves a quarter of the values to normalise.
        x = tf.keras.layers.MaxPool2D(padding="same")(x)
        x = tf.keras.layers.GroupNormalization(groups=2)(x)
        x = tf.keras.layers.ReLU()(x)
    x = tf.keras.layers.Flatten()(x)
    x = tf.keras.layers.Dense(embedding_dim, kernel_initializer=next(initializer))(x)
    return tf.keras.Model(inputs, x, name="small_cnn")
