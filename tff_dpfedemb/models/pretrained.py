"""Weights to start from: an exported backbone's, or those that Keras publishes for ImageNet.

Keras' files are of networks with batch normalisation. Its statistics are folded into the scale and
offset of the group normalisation that takes its place: with a channel's population mean m_c and
variance v_c, of all channels of its group M = mean(m_c) and S^2 = mean(v_c + m_c^2) - M^2,

    gamma'_c = gamma_c * sqrt(S^2 + eps) / sqrt(v_c + eps_bn)
    beta'_c = beta_c + gamma_c * (M - m_c) / sqrt(v_c + eps_bn)

so that on a picture whose groups have the population's mean and variance the two agree. A bias of
the convolution before, which ours has not, moves m_c; so does what the network took for pixels,
which Keras' `preprocess_input` makes other than ours.
"""

import collections
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

import h5py
import numpy as np
import tensorflow as tf

from tff_dpfedemb.models import backbones, exported
from tff_dpfedemb.models import embedding_model as embedding_model_lib

_MOST_NAMED = 5


class _Application(NamedTuple):
    """What Keras' application computes with; its colours are scale * (ours, in [-1, 1)) + offset.

    Attributes:
        epsilon: Of its batch normalisation.
        scale: Of its colours.
        offset: Of its colours, in their order.
        bgr: Whether that is blue, green, red.
    """

    epsilon: float
    scale: float
    offset: tuple[float, float, float]
    bgr: bool


# What `preprocess_input` of tf.keras.applications does to pixels: x / 127.5 - 1, and x - mean.
_APPLICATIONS = {
    "mobilenet_v2": _Application(1e-3, 128 / 127.5, (128 / 127.5 - 1,) * 3, False),
    "resnet50": _Application(1.001e-5, 128.0, (128 - 103.939, 128 - 116.779, 128 - 123.68), True),
}


class InitialWeights(NamedTuple):
    """A backbone's weights.

    Attributes:
        trainable: In the order of the backbone's `trainable_variables`.
        non_trainable: In the order of the backbone's `non_trainable_variables`.
        note: What the user should know of them, or "".
    """

    trainable: tuple[np.ndarray, ...]
    non_trainable: tuple[np.ndarray, ...]
    note: str = ""


def start(
    model: embedding_model_lib.EmbeddingModel, path: str | None, seed: int = 0
) -> InitialWeights | None:
    """The weights that a run starts from.

    Args:
        model: Whose backbone is trained.
        path: An exported model's folder, or a weight file of Keras' applications (.h5); None for
            the weights that the backbone was saved with, if it is a saved Keras model.
        seed: Seed of those weights that a Keras file lacks.

    Returns:
        The weights; None for fresh ones.

    Raises:
        ValueError: One line that names the weights that do not fit.
    """
    if path is None:
        if not backbones.is_path(model.backbone):
            return None
        return _collect(model.build_backbone(), f"starts from the weights in {model.backbone}")
    backbone = model.build_backbone(seed)
    if os.path.isdir(path):
        note = _assign_export(model, backbone, path)
    else:
        note = _assign_keras_weights(model.backbone, backbone, path)
    return _collect(backbone, note)


def _collect(backbone: tf.keras.Model, note: str) -> InitialWeights:
    """A backbone's weights."""
    return InitialWeights(
        tuple(v.numpy() for v in backbone.trainable_variables),
        tuple(v.numpy() for v in backbone.non_trainable_variables),
        note,
    )


def _named(variables: Sequence[tf.Variable]) -> dict[tuple[str, int], tf.Variable]:
    """Variables by name and place among those of that name; Keras numbers layers as they come."""
    counts: collections.Counter[str] = collections.Counter()
    named = {}
    for variable in variables:
        name = re.sub(r"_\d+/", "/", variable.name.removesuffix(":0"))
        named[name, counts[name]] = variable
        counts[name] += 1
    return named


def _some(names: Sequence[str]) -> str:
    """A few names, and how many there are."""
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def _assign_export(
    model: embedding_model_lib.EmbeddingModel, backbone: tf.keras.Model, path: str
) -> str:
    """Takes an exported model's weights, all of them."""
    try:
        facts = exported.read_facts(path) or {}
        loaded = tf.saved_model.load(path)
        found = _named(list(loaded.backbone.variables))
    except (OSError, AttributeError, LookupError, ValueError, tf.errors.OpError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"pretrained={path}: is not an exported model ({reason}); accepted are folders as "
            "run_centralized and run_federated export them, and Keras weight files"
        ) from None
    wanted = _named(backbone.weights)
    architecture = {"backbone_alpha": model.backbone_alpha, "embedding_dim": model.embedding_dim}
    if not backbones.is_path(model.backbone):
        architecture["backbone"] = model.backbone
    problems = [
        f"{name} is {facts[name]} and not {value}"
        for name, value in architecture.items()
        if facts.get(name, value) != value
    ]
    problems += [
        f"{name} has shape {tuple(found[name, i].shape)} and not {tuple(variable.shape)}"
        for (name, i), variable in wanted.items()
        if (name, i) in found and found[name, i].shape != variable.shape
    ]
    problems += [f"{name} is missing" for name, i in wanted if (name, i) not in found]
    problems += [f"{name} is too many" for name, i in found if (name, i) not in wanted]
    if problems:
        raise ValueError(
            f"pretrained={path}: does not fit --model_backbone and its options: {_some(problems)}; "
            "accepted are exports of the same backbone"
        )
    for key, variable in wanted.items():
        variable.assign(found[key])
    return f"starts from the weights of the exported model in {path}"


def _read_keras_weights(path: str) -> dict[str, dict[str, np.ndarray]]:
    """Layer -> weight -> value, as Keras' legacy format keeps them."""
    try:
        with h5py.File(path, "r") as file:
            root = file.get("model_weights", file)
            layers = {}
            for layer in root.attrs["layer_names"]:
                layer = layer.decode() if isinstance(layer, bytes) else layer
                group = root[layer]
                names = [
                    n.decode() if isinstance(n, bytes) else n for n in group.attrs["weight_names"]
                ]
                layers[layer] = {
                    n.rpartition("/")[2].removesuffix(":0"): np.asarray(group[n]) for n in names
                }
            return layers
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"pretrained={path}: cannot be read ({error}); accepted are weight files of Keras' "
            "MobileNetV2 and ResNet50 (.h5), and folders of exported models"
        ) from None


def _by_our_names(
    layers: dict[str, dict[str, np.ndarray]], names: Sequence[str]
) -> tuple[dict[str, dict[str, np.ndarray]], str]:
    """A file's layers without its classifier, by our names where they fit; and what to say."""
    top = [n for n, weights in layers.items() if np.ndim(weights.get("kernel")) == 2]
    note = f"; not used: its classifier {', '.join(top)}" if top else ""
    found = {n: weights for n, weights in layers.items() if weights and n not in top}
    if found.keys() >= set(names) or len(found) != len(names):
        return found, note
    # Published files have names of older releases; Keras itself goes by the order.
    note += "; its layers have other names and are taken in their order"
    return dict(zip(names, found.values(), strict=True)), note


def _assign_keras_weights(name: str, backbone: tf.keras.Model, path: str) -> str:
    """Takes the weights of one of Keras' applications, statistics folded."""
    if name not in _APPLICATIONS:
        raise ValueError(
            f"pretrained={path}: is a file; accepted are Keras weight files for "
            f"--model_backbone={' or '.join(_APPLICATIONS)}, and folders of exported models for any"
        )
    application = _APPLICATIONS[name]
    ours = [layer for layer in backbone.layers if layer.weights and layer.name != "embedding"]
    names = [layer.name for layer in ours]
    found, note = _by_our_names(_read_keras_weights(path), names)
    problems: list[str] = []
    values: list[tuple[tf.Variable, np.ndarray]] = []
    # By convolution: its outputs in the file's network are scale * ours + shift.
    scales, shifts = {}, {}
    for layer in ours:
        weights = found.get(layer.name, {})
        if isinstance(layer, tf.keras.layers.GroupNormalization):
            needed = ("gamma", "beta", "moving_mean", "moving_variance")
            channels = tuple(layer.gamma.shape)
            if any(n not in weights or weights[n].shape != channels for n in needed):
                problems.append(f"{layer.name} lacks statistics of {channels[0]} channels")
                continue
            before = layer.inbound_nodes[0].inbound_layers.name
            scale = scales.get(before, 1.0)
            gamma, beta = fold(
                weights["gamma"],
                weights["beta"],
                (weights["moving_mean"] - shifts.get(before, 0.0)) / scale,
                weights["moving_variance"] / scale**2,
                layer.groups,
                layer.epsilon,
                application.epsilon / scale**2,
            )
            values += [(layer.gamma, gamma), (layer.beta, beta)]
            continue
        (variable,) = layer.weights
        kernel = weights.get(variable.name.rpartition("/")[2].removesuffix(":0"))
        if kernel is None:
            problems.append(f"{layer.name} is missing")
        elif kernel.shape != tuple(variable.shape):
            problems.append(f"{layer.name} has shape {kernel.shape} and not {variable.shape}")
        else:
            shift = weights.get("bias", 0.0)
            # Of other images than coloured ones Keras says nothing.
            if layer is ours[0] and kernel.shape[2] == len(application.offset):
                # The statistics are scaled, since a larger kernel would learn more slowly.
                scales[layer.name] = application.scale
                shift = shift + np.einsum("hwco,c->o", kernel, application.offset)
                kernel = kernel[:, :, ::-1] if application.bgr else kernel
            shifts[layer.name] = shift
            values.append((variable, kernel))
    problems += [f"{n} is too many" for n in found if n not in names]
    if problems:
        raise ValueError(
            f"pretrained={path}: does not fit --model_backbone={name} and its options: "
            f"{_some(problems)}"
        )
    for variable, value in values:
        variable.assign(value)
    return (
        f"starts from {path}: batch normalisation statistics folded into group normalisation; "
        f"the embedding layer, which it does not have, starts fresh{note}"
    )


def fold(
    gamma: np.ndarray,
    beta: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    groups: int,
    epsilon: float,
    batch_epsilon: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Scale and offset of a group normalisation that takes a batch normalisation's place.

    Args:
        gamma: Scale, (channels,).
        beta: Offset, (channels,).
        mean: Population mean of what is normalised, (channels,).
        variance: Population variance, (channels,).
        groups: Groups, of channels next to each other.
        epsilon: Of the group normalisation.
        batch_epsilon: Of the batch normalisation.

    Returns:
        The new scale and offset; the formula is at the top of this module.
    """
    by_group = mean.reshape(groups, -1)
    group_mean = by_group.mean(axis=1)
    second = (variance.reshape(groups, -1) + by_group**2).mean(axis=1)
    group_variance = np.maximum(second - group_mean**2, 0.0)
    per_channel = len(mean) // groups
    spread = np.sqrt(np.repeat(group_variance, per_channel) + epsilon)
    scale = gamma / np.sqrt(variance + batch_epsilon)
    return scale * spread, beta + scale * (np.repeat(group_mean, per_channel) - mean)
