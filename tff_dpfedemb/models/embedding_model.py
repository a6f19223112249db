"""The embedding model: a backbone, which is kept, and a head, which is there for training only."""

import dataclasses
from typing import NamedTuple

import tensorflow as tf

from tff_dpfedemb.models import backbones

PHILOX = "philox"  # Named, so that every device draws the same numbers.


class HeadWeights(NamedTuple):
    """A classifier with a row for each class of one virtual client, and rows to spare.

    Attributes:
        kernel: float32 of shape (head_size, embedding_dim).
        bias: float32 of shape (head_size,).
    """

    kernel: tf.Tensor
    bias: tf.Tensor


@dataclasses.dataclass(frozen=True)
class EmbeddingModel:
    """What is trained: the architecture, without any weights.

    Attributes:
        backbone: Name of the backbone, see `backbones.names()`, or path of a saved Keras model.
        image_shape: (height, width, channels).
        embedding_dim: Length of the embedding.
        head_size: The most classes that a head may have.
        backbone_alpha: Width of the backbone, for those that have one.
        trainable_conv: Whether convolutions are trained; otherwise they stay as they were.
        normalize_training: Whether embeddings are L2-normalised in training, as at inference.
    """

    backbone: str
    image_shape: tuple[int, int, int]
    embedding_dim: int
    head_size: int
    backbone_alpha: float = 1.0
    trainable_conv: bool = True
    normalize_training: bool = False

    def build_backbone(self, seed: int = 0) -> tf.keras.Model:
        """A backbone with fresh weights; its trainable ones are what the server aggregates."""
        return backbones.build(
            self.backbone,
            self.image_shape,
            self.embedding_dim,
            seed,
            self.backbone_alpha,
            self.trainable_conv,
        )

    def training_embeddings(self, backbone: tf.keras.Model, images: tf.Tensor) -> tf.Tensor:
        """What a head sees in training.

        Args:
            backbone: One that `build_backbone` built.
            images: uint8 of shape (n, height, width, channels).

        Returns:
            float32 of shape (n, embedding_dim).
        """
        embeddings = backbone(preprocess(images), training=True)
        return tf.math.l2_normalize(embeddings, axis=-1) if self.normalize_training else embeddings

    def initial_head(self, seed: tf.Tensor) -> HeadWeights:
        """A fresh head with a row for each class that a virtual client may hold.

        Args:
            seed: int tensor of shape (2,), a stateless seed.

        Returns:
            Small normal weights and zero bias.
        """
        kernel = tf.random.stateless_normal(
            (self.head_size, self.embedding_dim), seed, stddev=self.embedding_dim**-0.5, alg=PHILOX
        )
        return HeadWeights(kernel, tf.zeros(self.head_size))


def preprocess(images: tf.Tensor) -> tf.Tensor:
    """Maps uint8 pixels in [0, 255] to float32 in [-1, 1)."""
    return tf.cast(images, tf.float32) / 128.0 - 1.0


def logits(head: HeadWeights, embeddings: tf.Tensor, num_classes: tf.Tensor) -> tf.Tensor:
    """Scores of the classes at hand.

    Args:
        head: Of which only the first `num_classes` rows are used, and so trained.
        embeddings: float32 of shape (n, embedding_dim).
        num_classes: int scalar, at most the number of the head's rows.

    Returns:
        float32 of shape (n, num_classes).
    """
    kernel, bias = head.kernel[:num_classes], head.bias[:num_classes]
    return tf.linalg.matmul(embeddings, kernel, transpose_b=True) + bias
