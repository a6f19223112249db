"""Any image data set of tensorflow-datasets, by name.

The natural source of public data for pretraining; and of private data, where a feature says whose
each image is. Nothing is downloaded unless that is asked for.
"""

import functools
import operator
import os
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from tasks import cached_task, held_out, preparation
from tasks.image_cache import ExampleTable

# No namespace before the name: those are looked up on the network.
_NAME = re.compile(r"\w+(/[\w.-]+)?(:\d+\.\d+\.\d+)?", re.A)
_SHARES = {"validation": 0.1, "test": 0.2}
# Inside of examples, beside the features.
_ID = "tfds_id"


class TensorFlowDatasets(cached_task.CachedTask):
    """A split of a data set; classes drawn at random are held out."""

    name = "tfds"
    licence = (
        "each data set has terms of its own; see its page under "
        "https://www.tensorflow.org/datasets/catalog"
    )

    def __init__(
        self,
        cache: str,
        *,
        tfds_name: str | None = None,
        tfds_split: str = "train",
        tfds_image_key: str = "image",
        tfds_class_key: str = "label",
        tfds_user_key: str | None = None,
        image_size: int | None = None,
        image_channels: int | None = None,
        max_evaluation_images: int = 10_000,
        data_seed: int = 0,
    ):
        """Opens a cache.

        Args:
            cache: The folder of caches.
            tfds_name: The data set, as tensorflow-datasets writes it: name, name/config,
                name/config:version.
            tfds_split: The split that was prepared.
            tfds_image_key: The feature that is the image; a/b for b inside of a.
            tfds_class_key: The feature that is the class.
            tfds_user_key: The feature that is the user; None where there is none, and only
                training without privacy makes sense.
            image_size: Height and width of the images in pixels; None for the data set's own.
            image_channels: 3 for colour, 1 for grey; None for the data set's own.
            max_evaluation_images: The most images of a held-out split that are used; 0 for all.
            data_seed: Seed of that draw, and of the classes that are held out.

        Raises:
            ValueError: One line a problem, beginning with an option's name.
        """
        super().__init__(
            cache,
            self.cache_name(
                tfds_name=tfds_name,
                tfds_split=tfds_split,
                tfds_image_key=tfds_image_key,
                tfds_class_key=tfds_class_key,
                tfds_user_key=tfds_user_key,
                image_size=image_size,
                image_channels=image_channels,
            ),
            max_evaluation_images=max_evaluation_images,
            data_seed=data_seed,
        )

    @classmethod
    def cache_name(
        cls,
        *,
        tfds_name: str | None = None,
        tfds_split: str = "train",
        tfds_image_key: str = "image",
        tfds_class_key: str = "label",
        tfds_user_key: str | None = None,
        image_size: int | None = None,
        image_channels: int | None = None,
    ) -> str:
        """The name of the cache folder, with all that is not as by default."""
        _check(tfds_name, image_size, image_channels)
        parts = ["tfds", tfds_name, tfds_split]
        if image_size:
            parts.append(str(image_size))
        if image_channels:
            parts.append({1: "grey", 3: "colour"}[image_channels])
        for kind, key, default in (
            ("image", tfds_image_key, "image"),
            ("class", tfds_class_key, "label"),
            ("user", tfds_user_key, None),
        ):
            if key != default:
                parts.append(f"{kind}={key}")
        return re.sub(r"[^\w.+=:%\[\]-]", "-", "-".join(parts))

    @classmethod
    def image_shape_of(
        cls,
        *,
        tfds_name: str | None = None,
        source: str | None = None,
        tfds_data_dir: str | None = None,
        tfds_image_key: str = "image",
        image_size: int | None = None,
        image_channels: int | None = None,
    ) -> tuple[int, int, int]:
        """The shape of the cached images.

        Args:
            tfds_name: The data set.
            source: The folder of data sets; None for that of tensorflow-datasets itself.
            tfds_data_dir: The same, where it is not `source`.
            tfds_image_key: The feature that is the image.
            image_size: Height and width in pixels; None for the data set's own.
            image_channels: 3 for colour, 1 for grey; None for grey where the data set's images
                are, else colour.

        Raises:
            ValueError: One line, if there is no such data set or feature, or if its images have
                no size in common and none is given.
        """
        _check(tfds_name, image_size, image_channels)
        builder = _builder(tfds_name, tfds_data_dir or source)
        _, feature = _find(builder, "image", tfds_image_key)
        height, width, channels = feature.shape
        if image_size is None and None in (height, width):
            raise ValueError(
                f"image_size: is missing; the images of {tfds_name} differ in size: accepted are "
                f"{cached_task.SIZES}"
            )
        own = 1 if channels == 1 else 3
        return image_size or height, image_size or width, image_channels or own

    @classmethod
    def list_source(
        cls,
        source: str,
        *,
        tfds_name: str | None = None,
        tfds_data_dir: str | None = None,
        tfds_split: str = "train",
        tfds_image_key: str = "image",
        tfds_class_key: str = "label",
        tfds_user_key: str | None = None,
        tfds_download: bool = False,
    ) -> preparation.Listing:
        """Lists the images of a split.

        Args:
            source: The folder of data sets (tensorflow-datasets calls it data_dir).
            tfds_name: The data set.
            tfds_data_dir: The folder of data sets, where it is not `source`.
            tfds_split: The split, or a sum or a slice of splits as tensorflow-datasets writes them.
            tfds_image_key: The feature that is the image.
            tfds_class_key: The feature that is the class.
            tfds_user_key: The feature that is the user; None for images of nobody.
            tfds_download: Whether the data set may be downloaded if it is not there.

        Returns:
            The listing; images are ids of tensorflow-datasets, and are read from front to back.

        Raises:
            SourceError: One line, if the data set is not there, or not whole, or has no such split
                or feature.
        """
        data_dir = tfds_data_dir or source
        try:
            builder = _builder(tfds_name, data_dir)
            if not builder.info.initialized:
                _download(builder, data_dir, tfds_download)
            keys = {"class": tfds_class_key}
            if tfds_user_key is not None:
                keys["user"] = tfds_user_key
            found = {kind: _find(builder, kind, key) for kind, key in keys.items()}
            image_path, _ = _find(builder, "image", tfds_image_key)
        except ValueError as error:
            raise preparation.SourceError(str(error)) from None
        read = functools.partial(_read, builder, tfds_split)
        examples = []
        for image, values in read([path for path, _ in found.values()]):
            names = {}
            for (kind, (_, feature)), value in zip(found.items(), values, strict=True):
                names[kind] = _as_text(feature, value)
                if names[kind] is None:
                    raise preparation.SourceError(
                        f"tfds_split={tfds_split!r}: {image} has no {keys[kind]} ({value}); "
                        "accepted are splits in which every image has one"
                    )
            examples.append(preparation.Example(names.get("user"), names["class"], image))

        def stream(wanted: Container[str]) -> Iterator[tuple[str, bytes]]:
            for image, (encoded,) in read([image_path], encoded=image_path):
                if image in wanted:
                    yield image, encoded

        facts = {"data_set": builder.info.full_name, "split": tfds_split, "keys": keys}
        return preparation.Listing(examples, None, facts, stream)

    def split(self, table: ExampleTable) -> cached_task.Split:
        """Classes drawn at random are held out."""
        return hold_out(table, self.has_users, self.data_seed)


def hold_out(table: ExampleTable, has_users: bool, data_seed: int) -> cached_task.Split:
    """Holds out classes, whichever users their images are of.

    Args:
        table: The images.
        has_users: Whether its users are users, and not groups of images of nobody.
        data_seed: Of the draw: 10 % of the classes for validation, 20 % for the test.

    Raises:
        ValueError: What is lacking, in one line.
    """
    drawn = held_out.draw(np.unique(table.classes), _SHARES, data_seed)
    rows = {name: np.flatnonzero(np.isin(table.classes, part)) for name, part in drawn.items()}
    train_users = np.unique(table.users[rows["train"]])

    def describe(name: str) -> str:
        line = f"{len(drawn[name]):,} classes that training has not seen, drawn at random"
        if not has_users:
            return line
        users = np.unique(table.users[rows[name]])
        shared = int(np.isin(users, train_users).sum())
        return (
            f"{line}, whichever users they are of: {len(users):,}, {shared:,} of them in training"
        )

    return cached_task.Split(
        train_users,
        drawn["train"],
        rows["validation"],
        rows["test"],
        {name: describe(name) for name in _SHARES},
    )


def _check(
    name: str | None, image_size: int | None = None, image_channels: int | None = None
) -> None:
    """Refuses what names no data set, and sizes that are none."""
    problems = []
    if not name:
        problems.append("tfds_name: is missing; accepted are names of tensorflow-datasets")
    elif not _NAME.fullmatch(name):
        problems.append(
            f"tfds_name={name!r}: accepted are name, name/config and name/config:1.2.3, without a "
            "namespace before the name"
        )
    problems += cached_task.shape_problems(image_size, image_channels)
    if problems:
        raise ValueError("\n".join(problems))


def _builder(name: str | None, data_dir: str | None) -> Any:
    """What tensorflow-datasets knows of a data set; connects to nothing."""
    _check(name)
    if data_dir is not None and not os.path.isdir(data_dir):
        raise ValueError(f"tfds_data_dir={data_dir}: accepted are folders that are there")
    import tensorflow_datasets
    from tensorflow_datasets.core import read_only_builder, registered

    try:
        # Prepared data first: they say what they are, whatever the installed release knows.
        return read_only_builder.builder_from_files(name, data_dir=data_dir)
    except registered.DatasetNotFoundError:
        pass
    try:
        return tensorflow_datasets.builder(name, data_dir=data_dir)
    except registered.DatasetNotFoundError:
        reason = "tensorflow-datasets does not know it"
    except (AssertionError, OSError, ValueError) as error:
        reason = _in_one_line(error)
    raise ValueError(
        f"tfds_name={name!r}: {reason}, and {data_dir or 'its folder'} has no such data set ready; "
        "accepted are names under https://www.tensorflow.org/datasets/catalog, and what is ready"
    )


def _download(builder: Any, data_dir: str, allowed: bool) -> None:
    """Downloads a data set and makes it ready, if that is allowed."""
    name = builder.info.full_name
    if not allowed:
        raise ValueError(
            f"{data_dir} has no {name} ready; accepted is a folder in which tensorflow-datasets "
            f"made it ready (tfds build {name} --data_dir={data_dir}), or --tfds_download to "
            "download it now"
        )
    try:
        builder.download_and_prepare()
    except Exception as error:  # Whatever generates data sets raises whatever it likes.
        raise ValueError(f"{name}: cannot be downloaded: {_in_one_line(error)}") from error


def _find(builder: Any, kind: str, key: str) -> tuple[Sequence[str], Any]:
    """The path of a feature that can be an image, a class or a user, and the feature."""
    fitting = {
        "/".join(path): (path, feature)
        for path, feature in _leaves(builder.info.features)
        if _FITS[kind](feature)
    }
    if key not in fitting:
        raise ValueError(
            f"tfds_{kind}_key={key!r}: is no {kind} in {builder.info.full_name}; accepted are "
            + (", ".join(sorted(fitting)) or "none: another data set is needed")
        )
    return fitting[key]


def _leaves(feature: Any, path: Sequence[str] = ()) -> Iterator[tuple[Sequence[str], Any]]:
    """The features that hold values, and their paths."""
    import tensorflow_datasets

    if isinstance(feature, tensorflow_datasets.features.FeaturesDict):
        for key, inner in feature.items():
            yield from _leaves(inner, (*path, key))
    else:
        yield path, feature


def _is_image(feature: Any) -> bool:
    """Whether a feature is an image that is stored as a file of 8 or 16 bits a channel."""
    import tensorflow_datasets

    return isinstance(feature, tensorflow_datasets.features.Image) and np.dtype(
        feature.np_dtype
    ) in (np.uint8, np.uint16)


def _is_name(feature: Any) -> bool:
    """Whether a feature is a whole number or a text."""
    return feature.shape == () and np.dtype(feature.np_dtype).kind in "iuOSU"


_FITS: Mapping[str, Callable[[Any], bool]] = {
    "image": _is_image,
    "class": _is_name,
    "user": _is_name,
}


def _as_text(feature: Any, value: Any) -> str | None:
    """The name of a class or user; None where a label says that there is none."""
    import tensorflow_datasets

    if isinstance(feature, tensorflow_datasets.features.ClassLabel):
        return feature.int2str(int(value)) if value >= 0 else None
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)


def _read(
    builder: Any, split: str, paths: Sequence[Sequence[str]], encoded: Sequence[str] | None = None
) -> Iterator[tuple[str, list[Any]]]:
    """Ids and the values of some features, in the order of the files; no image is decoded.

    Args:
        builder: Of a data set that is ready.
        split: As tensorflow-datasets writes it.
        paths: Of the features.
        encoded: The path of the feature that stays the bytes of its file.

    Raises:
        SourceError: One line, if there is no such split, or files are damaged.
    """
    import tensorflow as tf
    import tensorflow_datasets

    def refuse(error: Exception) -> NoReturn:
        raise preparation.SourceError(
            f"{builder.info.full_name}, tfds_split={split!r}: {_in_one_line(error)}"
        ) from None

    decoders = _nest({encoded: tensorflow_datasets.decode.SkipDecoding()} if encoded else {})
    try:
        examples = builder.as_dataset(
            split=split,
            shuffle_files=False,
            decoders=tensorflow_datasets.decode.PartialDecoding(
                _nest(dict.fromkeys(paths, True)), decoders=decoders
            ),
            read_config=tensorflow_datasets.ReadConfig(add_tfds_id=True, try_autocache=False),
        )
    except (AssertionError, ValueError) as error:
        refuse(error)
    try:
        for example in tensorflow_datasets.as_numpy(examples):
            values = [functools.reduce(operator.getitem, path, example) for path in paths]
            yield example[_ID].decode(), values
    except tf.errors.OpError as error:
        refuse(error)


def _nest(values: Mapping[Sequence[str], Any]) -> dict[str, Any]:
    """Dictionaries in dictionaries, from values by path."""
    nested: dict[str, Any] = {}
    for (*parents, last), value in values.items():
        functools.reduce(lambda inner, key: inner.setdefault(key, {}), parents, nested)[last] = (
            value
        )
    return nested


def _in_one_line(error: Exception) -> str:
    """What an error says, without line breaks, and not at length."""
    return " ".join(str(error).split())[:300]
