"""LeNet as the paper's EMNIST experiments use it."""

import tensorflow as tf

from tff_dpfedemb.models import layers


def build(image_shape: tuple[int, int, int], embedding_dim: int, seed: int) -> tf.keras.Model:
    """Two 5x5 convolutions (32 and 64 filters), each with a 2x2 max-pool, and a dense embedding."""
    initializer = layers.initializers(seed)
    x = inputs = tf.keras.Input(image_shape)
    for filters in (32, 64):
        x = tf.keras.layers.Conv2D(
            filters, 5, padding="same", activation="relu", kernel_initializer=next(initializer)
        )(x)
        x = tf.keras.layers.MaxPool2D()(x)
    x = tf.keras.layers.Flatten()(x)
    x = tf.keras.layers.Dense(embedding_dim, kernel_initializer=next(initializer))(x)
    return tf.keras.Model(inputs, x, name="lenet")
