"""The flags that name the data, and how they become a task. Imports nothing heavy."""

import inspect
from typing import Any

from absl import flags

from tasks import registry
from tasks.task import Task
from tff_dpfedemb import command_line

FLAGS = flags.FLAGS

# The flags that become arguments of tasks.
_OPTIONS = (
    "num_users",
    "examples_per_user",
    "classes_per_user",
    "data_seed",
    "cache",
    "image_size",
    "max_evaluation_images",
    "emnist_split",
    "landmarks_split",
    "inaturalist_split",
    "digiface_validation_share",
    "digiface_test_share",
    "image_channels",
    "dataset_name",
    "tfds_name",
    "tfds_data_dir",
    "tfds_split",
    "tfds_image_key",
    "tfds_class_key",
    "tfds_user_key",
)


def define_task_flags() -> None:
    """Flags that name the data."""
    flags.DEFINE_enum("task", "glyphs", registry.names(), "The data set.")
    command_line.define_optional(
        flags.IntegerParser(),
        "num_users",
        None,
        "Population: how many users can take part; public information. none: the published number "
        "of the data set, and 1,000,000 for glyphs. Own data have no published one: state it.",
    )
    flags.DEFINE_integer("data_seed", 0, "Seed of what is drawn of the data: hands, splits.")
    flags.DEFINE_integer("examples_per_user", 20, "glyphs: images of every user.")
    flags.DEFINE_integer(
        "classes_per_user", 5, "glyphs: classes of every user, each with an equal share of images."
    )
    flags.DEFINE_string("cache", None, "Folder of prepared data sets, see tasks.prepare.")
    flags.DEFINE_integer(
        "image_size", None, "Height and width of the prepared images; default: the task's."
    )
    flags.DEFINE_integer(
        "max_evaluation_images",
        10_000,
        "The most held-out images that are evaluated, drawn at random; 0 for all.",
    )
    flags.DEFINE_enum(
        "emnist_split",
        "paper",
        ["paper", "distinct_case"],
        "emnist: trained on digits and upper case, evaluated on lower case; distinct_case: only on "
        "the lower-case letters whose shape differs from upper case.",
    )
    flags.DEFINE_string("landmarks_split", "gld160k", "landmarks: gld160k or gld23k.")
    flags.DEFINE_string(
        "inaturalist_split", "user_120k", "inaturalist: user_120k or another published split."
    )
    flags.DEFINE_float("digiface_validation_share", 0.05, "digiface: share of the identities.")
    flags.DEFINE_float("digiface_test_share", 0.1, "digiface: share of the identities.")
    flags.DEFINE_integer(
        "image_channels",
        None,
        "image_folder, tfds: 3 for colour, 1 for grey; default: colour, and for tfds what the data "
        "set has.",
    )
    flags.DEFINE_string("dataset_name", "own", "image_folder: a name, by which caches differ.")
    flags.DEFINE_string("tfds_name", None, "tfds: a data set of tensorflow-datasets.")
    flags.DEFINE_string("tfds_data_dir", None, "tfds: its folder, where it is not --source.")
    flags.DEFINE_string("tfds_split", "train", "tfds: the split to use.")
    flags.DEFINE_string("tfds_image_key", "image", "tfds: the feature that is the image.")
    flags.DEFINE_string("tfds_class_key", "label", "tfds: the feature that is the class.")
    flags.DEFINE_string("tfds_user_key", None, "tfds: the feature that is the user, if one is.")


def task_class() -> type[Task]:
    """The class of the task that --task names."""
    return registry.find(FLAGS.task)


def options() -> dict[str, Any]:
    """The values of all flags that name the data, but for those that are not given at all."""
    values = {name: FLAGS[name].value for name in _OPTIONS}
    return {name: value for name, value in values.items() if value is not None}


def check_options() -> None:
    """Refuses flags that are given and that the task does not take.

    Raises:
        ValueError: One line for each.
    """
    taken = {"num_users"}
    for method in (task_class().__init__, getattr(task_class(), "list_source", None)):
        if method is not None:
            taken |= set(inspect.signature(method).parameters)
    refused = [name for name in _OPTIONS if FLAGS[name].present and name not in taken]
    if refused:
        raise ValueError(
            "\n".join(
                f"{name}={FLAGS[name].value}: --task={FLAGS.task} does not take it"
                for name in refused
            )
        )


def population() -> int:
    """The stated number of users: --num_users, or the published number.

    Raises:
        ValueError: One line, if neither is there.
    """
    if FLAGS.num_users is not None:
        return FLAGS.num_users
    published = registry.call(task_class().published_users, options())
    if published is None:
        raise ValueError(
            f"num_users: is missing; --task={FLAGS.task} has no published number of users, and "
            "privacy depends on one that may be known: state it"
        )
    return published


def build_task() -> Task:
    """The task that the flags name.

    Raises:
        ValueError: One line for each problem, beginning with the flag's name.
    """
    check_options()
    # Whoever needs a cache and is given none says what it is.
    return registry.call(task_class(), {"cache": "", **options()})
