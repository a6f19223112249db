"""Weights to start from: an exported backbone's, or those that Keras publishes for ImageNet.

Keras' files are of networks with batch normalisation. Its statistics are folded into the scale and
offset of the group normalisation that takes its place: with a channel's population mean m_c and
variance v_c, of all channels of its group M = mean(m_c) and S^2 = mean(v_c + m_c^2) - M^2,

    gamma'_c = gamma_c * sqrt(S^2 + eps) / sqrt(v_c + eps_bn)
    beta'_c = beta_c + gamma_c * (M - m_c) / sqrt(v_c + eps_bn)

so that on a picture whose groups have the population's mean and variance the two agree.
"""

import collections
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

import h5py
import numpy as np
import tensorflow as tf

from tff_dpfedemb.models import backbones
from tff_dpfedemb.models import embedding_model as embedding_model_lib

_MOST_NAMED = 5
# Of Keras' applications' BatchNormalization layers.
_EPSILONS = {"mobilenet_v2": 1e-3, "resnet50": 1.001e-5}


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
        note = _assign_export(backbone, path)
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


def _assign_export(backbone: tf.keras.Model, path: str) -> str:
    """Takes an exported model's weights, all of them."""
    try:
        loaded = tf.saved_model.load(path)
        found = _named(list(loaded.backbone.variables))
    except (OSError, AttributeError, ValueError, tf.errors.OpError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"pretrained={path}: is not an exported model ({reason}); accepted are folders as "
            "run_centralized and run_federated export them, and Keras weight files"
        ) from None
    wanted = _named(backbone.weights)
    problems = [
        f"{name} has shape {tuple(found[name, i].shape)} and not {tuple(variable.shape)}"
        for (name, i), variable in wanted.items()
        if (name, i) in found and found[name, i].shape != variable.shape
    ]
    problems += [f"{name} is missing" for name, i in wanted if (name, i) not in found]
    problems += [f"{name} is too many" for name, i in found if (name, i) not in wanted]
    if problems:
        raise ValueError(
            f"pretrained={path}: does not fit --model_backbone and its options: {_some(problems)}; "
            "accepted are exports of the same backbone for images of the same shape"
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
    except (OSError, KeyError) as error:
        raise ValueError(
            f"pretrained={path}: cannot be read ({error}); accepted are weight files of Keras' "
            "MobileNetV2 and ResNet50 (.h5), and folders of exported models"
        ) from None


def _assign_keras_weights(name: str, backbone: tf.keras.Model, path: str) -> str:
    """Takes the weights of one of Keras' applications, statistics folded."""
    if name not in _EPSILONS:
        raise ValueError(
            f"pretrained={path}: is a file; accepted are Keras weight files for "
            f"--model_backbone={' or '.join(_EPSILONS)}, and folders of exported models for any"
        )
    layers = _read_keras_weights(path)
    problems = []
    values: list[tuple[tf.Variable, np.ndarray]] = []
    used = set()

    def take(variable: tf.Variable, layer: str, value: np.ndarray | None) -> None:
        if value is None:
            problems.append(f"{layer} is missing")
        elif value.shape != tuple(variable.shape):
            problems.append(f"{layer} has shape {value.shape} and not {tuple(variable.shape)}")
        else:
            values.append((variable, value))

    convolution = None
    for layer in backbone.layers:
        weights = layers.get(layer.name, {})
        if isinstance(layer, tf.keras.layers.GroupNormalization):
            used.add(layer.name)
            needed = {"gamma", "beta", "moving_mean", "moving_variance"}
            channels = tuple(layer.gamma.shape)
            if needed - weights.keys() or any(weights[n].shape != channels for n in needed):
                problems.append(f"{layer.name} lacks statistics of {channels[0]} channels")
                continue
            bias = layers.get(convolution, {}).get("bias", np.float32(0))
            gamma, beta = fold(
                weights["gamma"],
                weights["beta"],
                weights["moving_mean"] - bias,
                weights["moving_variance"],
                layer.groups,
                layer.epsilon,
                _EPSILONS[name],
            )
            values += [(layer.gamma, gamma), (layer.beta, beta)]
        elif layer.weights and layer.name != "embedding":
            used.add(layer.name)
            convolution = layer.name
            (variable,) = layer.weights
            kernel = variable.name.rpartition("/")[2].removesuffix(":0")
            take(variable, layer.name, weights.get(kernel))
    # A classifier on top is of no use here, and that is said below.
    top = [n for n, w in layers.items() if w and n not in used]
    problems += [f"{n} is too many" for n in top if n not in ("predictions", "Logits")]
    if problems:
        raise ValueError(
            f"pretrained={path}: does not fit --model_backbone={name} and its options: "
            f"{_some(problems)}"
        )
    for variable, value in values:
        variable.assign(value)
    return (
        f"starts from {path}: batch normalisation statistics folded into group normalisation; "
        "the embedding layer, which it does not have, starts fresh"
        + (f"; not used: its classifier {', '.join(top)}" if top else "")
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
