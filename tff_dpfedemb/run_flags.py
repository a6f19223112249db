"""The flags that several binaries share, and how they become objects. Imports nothing heavy."""

import os
import re
import sys
from typing import TYPE_CHECKING, Any

from absl import flags

from tasks.task import Task
from tff_dpfedemb import command_line
from tff_dpfedemb.experiment.run_folder import RunFolder
from tff_dpfedemb.models import backbones
from tff_dpfedemb.privacy import plan as plan_lib

if TYPE_CHECKING:
    from tff_dpfedemb.models.embedding_model import EmbeddingModel
    from tff_dpfedemb.models.pretrained import InitialWeights

FLAGS = flags.FLAGS


def define_plan_flags() -> None:
    """Flags from which the privacy follows."""
    flags.DEFINE_integer(
        "virtual_clients_per_round", 48, "V: virtual clients a round, the divisor of the noisy sum."
    )
    flags.DEFINE_integer(
        "virtual_client_size",
        8,
        "Users in a virtual client, on average. 1: every sampled user is a virtual client alone.",
    )
    flags.DEFINE_integer("total_rounds", 32, "Training rounds.")
    command_line.define_optional(
        flags.FloatParser(), "clip_norm", 0.5, "C: L2 norm to which updates are clipped."
    )
    flags.DEFINE_float(
        "noise_multiplier", 0.9, "z: the noise on the sum of updates has standard deviation z * C."
    )
    command_line.define_optional(
        flags.FloatParser(), "delta", None, "Failure probability; none for num_users^-1.1."
    )
    flags.DEFINE_enum("sampling", "poisson", plan_lib.SAMPLINGS, "How a round's users are drawn.")


def build_plan(population: int) -> plan_lib.PrivacyPlan:
    """The privacy plan that the flags name.

    Args:
        population: The stated number of users.

    Raises:
        ValueError: One line for each problem.
    """
    try:
        return plan_lib.PrivacyPlan(
            population=population,
            virtual_clients_per_round=FLAGS.virtual_clients_per_round,
            virtual_client_size=FLAGS.virtual_client_size,
            total_rounds=FLAGS.total_rounds,
            clip_norm=FLAGS.clip_norm,
            noise_multiplier=FLAGS.noise_multiplier,
            delta=FLAGS.delta,
            sampling=FLAGS.sampling,
        )
    except ValueError as error:
        # The plan's population is the flag --num_users.
        raise ValueError(re.sub(r"\bpopulation(?=[=^])", "num_users", str(error))) from None


class _BackboneParser(flags.ArgumentParser):
    """The name of a backbone, or a path."""

    syntactic_help = f"{' or '.join(backbones.names())}, or the path of a saved Keras model"

    def parse(self, argument: str) -> str:
        """Parses the flag's value."""
        if argument not in backbones.names() and not backbones.is_path(argument):
            raise ValueError("is neither")
        return argument


def define_model_flags() -> None:
    """Flags that name the model."""
    flags.DEFINE(_BackboneParser(), "model_backbone", "small_cnn", "The backbone.")
    command_line.define_optional(
        flags.IntegerParser(),
        "embedding_dim",
        None,
        "Length of the embedding; none for 128, or for that of the saved Keras model.",
    )
    flags.DEFINE_float("backbone_alpha", 1.0, "mobilenet_v2: width of the network.")
    flags.DEFINE_bool("trainable_conv", True, "Whether convolutions are trained, or stay frozen.")
    flags.DEFINE_bool("normalize_training", False, "L2-normalise embeddings in training too.")
    flags.DEFINE_string(
        "pretrained",
        None,
        "Weights to start from: an exported model's folder, or a Keras ImageNet weight file (.h5) "
        "for mobilenet_v2 or resnet50. They must come from public data.",
    )


def check_model(task: Task | None) -> None:
    """Checks that the model that the flags name takes a task's images, where there is a task.

    Raises:
        ValueError: One line.
    """
    if FLAGS.embedding_dim is not None and FLAGS.embedding_dim < 1:
        raise ValueError(
            f"embedding_dim={FLAGS.embedding_dim}: accepted are whole numbers of at least 1, or "
            "none"
        )
    if task is not None:
        backbones.check(
            FLAGS.model_backbone,
            task.image_shape,
            embedding_dim=FLAGS.embedding_dim,
            alpha=FLAGS.backbone_alpha,
        )
    if FLAGS.pretrained is not None and not os.path.exists(FLAGS.pretrained):
        raise ValueError(
            f"pretrained={FLAGS.pretrained}: does not exist; accepted are exported models and "
            "Keras weight files"
        )


def starts_from_weights() -> bool:
    """Whether the flags name weights to start from, which takes TensorFlow to check."""
    return FLAGS.pretrained is not None or backbones.is_path(FLAGS.model_backbone)


def build_model(
    problems: command_line.Problems, task: Task, head_size: int
) -> "tuple[EmbeddingModel, InitialWeights | None]":
    """The architecture that the flags name, and the weights to start from, None for fresh ones."""
    from tff_dpfedemb.models import embedding_model, pretrained

    model = embedding_model.EmbeddingModel(
        backbone=FLAGS.model_backbone,
        image_shape=task.image_shape,
        embedding_dim=backbones.embedding_dim(FLAGS.model_backbone, FLAGS.embedding_dim),
        head_size=head_size,
        backbone_alpha=FLAGS.backbone_alpha,
        trainable_conv=FLAGS.trainable_conv,
        normalize_training=FLAGS.normalize_training,
    )
    start = problems.attempt(lambda: pretrained.start(model, FLAGS.pretrained))
    problems.exit_if_any()
    if start is not None and start.note:
        print(f"note: {start.note}", file=sys.stderr)
    return model, start


def define_run_flags() -> None:
    """Flags that name the folder of a run."""
    flags.DEFINE_string("output_dir", "runs", "Folder of runs.")
    flags.DEFINE_string("experiment_name", "default", "The run's folder in --output_dir.")
    flags.DEFINE_bool("dry_run", False, "Check everything, say what would be done, write nothing.")


# Flags that do not change what a run computes or releases, and the seed, which is kept apart: the
# others may be read by anybody.
_NOT_OF_THE_RUN = ("output_dir", "experiment_name", "dry_run", "seed")


def defining_flags(module: Any, task: Task | None) -> dict[str, Any]:
    """The flags that make a run of a binary what it is, and a mark of its data."""
    ours = FLAGS.get_key_flags_for_module(module)
    values = {f.name: f.value for f in ours if f.name not in _NOT_OF_THE_RUN}
    fingerprint = None if task is None else task.describe().get("fingerprint")
    return values if fingerprint is None else {**values, "data_fingerprint": fingerprint}


def check_run_folder(problems: command_line.Problems) -> RunFolder:
    """The folder that the flags name, not yet looked at."""
    name = FLAGS.experiment_name
    problems.require(
        name == os.path.basename(name) and name not in ("", ".", "..") and len(name) <= 200,
        f"experiment_name={name!r}: accepted are names without a path, of at most 200 letters",
    )
    return RunFolder(os.path.join(FLAGS.output_dir, name))
