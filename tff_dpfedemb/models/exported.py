"""Backbones as SavedModels: from images as they are to unit-norm embeddings."""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tff_dpfedemb import atomic
from tff_dpfedemb.models import backbones, keras_file, layers
from tff_dpfedemb.models import embedding_model as embedding_model_lib

FACTS = "model.json"
# The model that training started from, where that is not one of fresh weights.
INITIAL = "initial"

Embed = Callable[[Any], tf.Tensor]


class EmbeddingModule(tf.Module):
    """From images as they are to unit-norm embeddings, preprocessing inside."""

    def __init__(self, backbone: tf.keras.Model):
        """Wraps a backbone, which takes preprocessed images."""
        super().__init__()
        self.backbone = backbone
        images = tf.TensorSpec((None, *backbone.input_shape[1:]), tf.uint8, name="images")
        self._embed = tf.function(self._forward, input_signature=[images])

    def _forward(self, images: tf.Tensor) -> tf.Tensor:
        embeddings = self.backbone(embedding_model_lib.preprocess(images), training=False)
        return tf.math.l2_normalize(embeddings, axis=-1)

    def __call__(self, images: Any) -> tf.Tensor:
        """Embeds images.

        Args:
            images: uint8 of shape (n, height, width, channels).

        Returns:
            float32 of shape (n, embedding_dim), each row of norm 1.
        """
        return self._embed(images)

    def save(self, path: str) -> None:
        """Writes a SavedModel that is callable and has the signature "serving_default"."""
        servable = tf.Module()
        servable.backbone = self.backbone
        servable.__call__ = self._embed
        signature = tf.function(
            lambda images: {"embeddings": self._embed(images)},
            input_signature=self._embed.input_signature,
        )
        tf.saved_model.save(servable, path, signatures=signature.get_concrete_function())


def with_weights(
    model: embedding_model_lib.EmbeddingModel,
    trainable: Sequence[np.ndarray],
    frozen: Sequence[np.ndarray] = (),
) -> EmbeddingModule:
    """The embedding module of a model with given backbone weights, trainable and others."""
    backbone = model.build_backbone()
    layers.assign_weights(backbone, trainable, frozen)
    return EmbeddingModule(backbone)


def write_facts(
    path: str, model: embedding_model_lib.EmbeddingModel, init_seed: int, more: Mapping[str, Any]
) -> dict[str, Any]:
    """Writes beside a SavedModel what it takes to build its untrained self; returns the facts."""
    backbone = model.build_backbone()
    facts = {
        **dataclasses.asdict(model),
        "num_weights": backbone.count_params(),
        "num_trainable_weights": sum(v.shape.num_elements() for v in backbone.trainable_variables),
        "init_seed": init_seed,
        **more,
    }
    if backbones.is_path(model.backbone):
        # Where it lay is nobody's business.
        facts["backbone"] = os.path.basename(os.path.normpath(model.backbone))
        facts["backbone_sha256"] = keras_file.load(model.backbone).sha256
    atomic.write_json(os.path.join(path, FACTS), facts)
    return facts


def load(path: str) -> tuple[Embed, tuple[int | None, ...]]:
    """Loads an exported model.

    Args:
        path: A SavedModel whose signature "serving_default" takes one uint8 tensor of images and
            returns one tensor of embeddings.

    Returns:
        The function from images to embeddings, and the shape of an image, with None where any
        length will do.

    Raises:
        ValueError: If there is no such model.
    """
    accepted = "accepted are SavedModel folders as run_federated exports them"
    try:
        loaded = tf.saved_model.load(path)
        signature = loaded.signatures["serving_default"]
    except (OSError, LookupError, ValueError, tf.errors.OpError) as error:
        raise ValueError(f"model={path}: {str(error).splitlines()[0]}; {accepted}") from None
    inputs, outputs = signature.structured_input_signature[1], signature.structured_outputs
    specs = [*inputs.values()]
    if len(outputs) != 1 or [(s.dtype, s.shape.rank) for s in specs] != [(tf.uint8, 4)]:
        raise ValueError(f"model={path}: does not map uint8 images to embeddings; {accepted}")
    (name,), (output,) = inputs, outputs

    def embed(images: Any, keep_alive: Any = loaded) -> tf.Tensor:
        del keep_alive  # The signature alone does not keep its variables.
        return signature(**{name: tf.convert_to_tensor(images)})[output]

    return embed, tuple(specs[0].shape[1:])


def read_facts(path: str) -> dict[str, Any] | None:
    """What is written beside an exported model; None where nothing is.

    Raises:
        ValueError: If what is written is no facts.
    """
    file_path = os.path.join(path, FACTS)
    try:
        with open(file_path, encoding="utf-8") as file:
            return dict(json.load(file))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise ValueError(f"model={path}: {file_path} is not of a model ({error!r})") from None


def load_untrained(path: str) -> Embed | None:
    """The model at `path` with fresh weights, or None where the folder does not tell.

    Raises:
        ValueError: If what the folder tells is no model's.
    """
    facts = read_facts(path)
    if facts is None or "backbone_sha256" in facts:
        return None
    try:
        fields = [f.name for f in dataclasses.fields(embedding_model_lib.EmbeddingModel)]
        options = {name: facts[name] for name in fields}
        options["image_shape"] = tuple(facts["image_shape"])
        model = embedding_model_lib.EmbeddingModel(**options)
        return EmbeddingModule(model.build_backbone(facts["init_seed"]))
    except (ValueError, KeyError, TypeError) as error:
        file_path = os.path.join(path, FACTS)
        raise ValueError(f"model={path}: {file_path} is not of a model ({error!r})") from None


def load_initial(path: str) -> Embed | None:
    """The model that the one at `path` was trained from, where it is kept beside it."""
    initial = os.path.join(path, INITIAL)
    return load(initial)[0] if os.path.isdir(initial) else None
