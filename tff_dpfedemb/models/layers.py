"""What the families of backbones share."""

from collections.abc import Iterator

import numpy as np
import tensorflow as tf


def initializers(seed: int) -> Iterator[tf.keras.initializers.Initializer]:
    """Kernel initialisers, each of its own stream, all functions of one seed."""
    streams = np.random.SeedSequence(seed)
    while True:
        (stream,) = streams.spawn(1)
        yield tf.keras.initializers.GlorotUniform(seed=int(stream.generate_state(1)[0] >> 1))
