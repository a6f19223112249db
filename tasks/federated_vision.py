"""What landmarks and iNaturalist share: photographs with published splits by who took them.

Hsu, Qi, Brown, "Federated Visual Classification with Real-World Data Distribution" (ECCV 2020).
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from absl import logging

from tasks import archives, cached_task, preparation
from tasks.image_cache import ExampleTable

_VALIDATION_SHARE = 0.1
_TRAIN_FOLDER, _TEST_FILE = "train", "test.tfRecord"


class Found(NamedTuple):
    """Where images were found.

    Attributes:
        places: Of those that can be read in any order, by their names.
        compressed: Compressed tars with further images.
        facts: About the files that they are in.
    """

    places: dict[str, archives.Place]
    compressed: Sequence[str]
    facts: Mapping[str, Any]


class FederatedVision(cached_task.CachedTask):
    """Photographs of users, and a published test set of the same classes.

    A subclass names its option for the split and sets the attributes below.

    Attributes:
        published: For every published split the numbers of its users and of its training images,
            None where they are not known.
        split_files: For every split which files say whose its images are, and where they are from.
        image_files: In which files the images are, and where those are from.
    """

    published: ClassVar[Mapping[str, tuple[int | None, int | None]]]
    split_files: ClassVar[Mapping[str, str]]
    image_files: ClassVar[str]

    @classmethod
    def check(cls, split: str, image_size: int = 224) -> None:
        """Refuses options out of their range.

        Raises:
            ValueError: One line a problem, beginning with an option's name.
        """
        problems = []
        if split not in cls.published:
            problems.append(
                f"{cls.name}_split={split!r}: accepted are {', '.join(sorted(cls.published))}"
            )
        problems += cached_task.shape_problems(image_size)
        if problems:
            raise ValueError("\n".join(problems))

    @classmethod
    def image_shape_of(cls, *, image_size: int = 224) -> tuple[int, int, int]:
        """The shape of the cached images."""
        cls.check(next(iter(cls.published)), image_size)
        return image_size, image_size, 3

    def split(self, table: ExampleTable) -> cached_task.Split:
        """All users train; a tenth of the test set's classes is for validation."""
        return choose(table, self.data_seed)

    @classmethod
    def list_split(
        cls,
        source: archives.Source,
        split: str,
        rows: tuple[Sequence[tuple[str, str, str]], Sequence[tuple[str, str]]] | None,
        find: Callable[[set[str]], Found],
        cache_names: Sequence[str],
        facts: Mapping[str, Any],
    ) -> preparation.Listing:
        """Lists a split: images that split files name, or else the cache that TFF's loader wrote.

        Args:
            source: Where to look.
            split: Which one.
            rows: What the split files say: (user, class, image id) of the training images, and
                (class, image id) of the test images; None where there are none.
            find: Finds images by names such as "0123.jpg".
            cache_names: Names of the folder of TFF's cache.
            facts: About the source.

        Returns:
            The listing.

        Raises:
            SourceError: One line that says what is not there, or cannot be.
        """
        listing = list_tables(*rows, find, facts) if rows else None
        folder = find_tff_cache(source, cache_names)
        if listing is None and folder is not None:
            listing = list_tff_cache(folder, facts)
        if listing is None:
            lacking = f"neither the split files of {split} nor TFF's cache of it, a folder {split}"
            needed = f"{cls.split_files[split]}; and the images: {cls.image_files}"
            if rows:
                lacking = f"the split files of {split} and none of the images that they name"
                needed = cls.image_files
            raise preparation.SourceError(f"holds {lacking}; accepted are, at any depth: {needed}")
        expected = cls.published[split][1]
        named = sum(example.split == "train" for example in listing.examples)
        if expected is not None and named < expected:
            logging.warning(
                "%s training images are named, and %s were published as %s",
                f"{named:,}",
                f"{expected:,}",
                split,
            )
        return listing


def choose(table: ExampleTable, data_seed: int) -> cached_task.Split:
    """Divides the published test images, by class.

    Args:
        table: The images.
        data_seed: Of the draw of the classes for validation.

    Raises:
        ValueError: What is lacking, in one line.
    """
    rows = np.flatnonzero(table.splits == "test")
    train = np.flatnonzero(table.splits == "train")
    counts = np.bincount(table.classes[rows], minlength=len(table.class_names))
    present, paired = np.count_nonzero(counts), np.count_nonzero(counts >= 2)
    if paired < 4:
        raise ValueError(
            f"has {paired} classes with 2 test images or more; accepted are 4 or more: 2 for "
            "validation and 2 for the test"
        )
    # All names are drawn, so that one lost image does not change all of the draw.
    drawn = np.random.default_rng(data_seed).permutation(len(table.class_names))
    first = drawn[counts[drawn] >= 2][:4]
    others = drawn[(counts[drawn] > 0) & ~np.isin(drawn, first)]
    chosen = np.concatenate([first[:2], others[: max(0, round(_VALIDATION_SHARE * present) - 2)]])
    for_validation = np.isin(table.classes[rows], chosen)
    parts = {"validation": rows[for_validation], "test": rows[~for_validation]}
    trained = np.unique(table.classes[train])

    def describe(name: str, other: str) -> str:
        classes = np.unique(table.classes[parts[name]])
        seen = np.count_nonzero(np.isin(classes, trained))
        return (
            f"{len(classes):,} classes of the published test set, {seen:,} of which training has "
            f"seen, as published, and none of which is in {other}; who took the images is not known"
        )

    return cached_task.Split(
        np.unique(table.users[train]),
        trained,
        parts["validation"],
        parts["test"],
        {
            "validation": describe("validation", "the test"),
            "test": describe("test", "validation"),
        },
    )


def list_tables(
    train: Sequence[tuple[str, str, str]],
    test: Sequence[tuple[str, str]],
    find: Callable[[set[str]], Found],
    facts: Mapping[str, Any],
) -> preparation.Listing | None:
    """Lists images that split files name.

    Args:
        train: (user, class, image id) of the training images.
        test: (class, image id) of the test images.
        find: Finds images by names such as "0123.jpg".
        facts: About the source.

    Returns:
        The listing; None if no image at all is there.

    Raises:
        SourceError: One line, if an image is of two users.
    """
    users: dict[str, str] = {}
    for user, _, image in train:
        if users.setdefault(image, user) != user:
            raise preparation.SourceError(
                f"image_id={image!r} is of two users, {users[image]!r} and {user!r}, and the "
                "guarantee of neither would hold; accepted are split files with one user an image"
            )
    held_out = [(name, image) for name, image in test if image not in users]
    examples = [preparation.Example(user, name, f"{i}.jpg") for user, name, i in train]
    examples += [preparation.Example(None, name, f"{i}.jpg", "test") for name, i in held_out]
    names = {example.image for example in examples}
    places, compressed, found_facts = find(names)
    if not places and not compressed:
        return None

    def read(image: str) -> bytes:
        if image not in places:
            raise FileNotFoundError
        return places[image].read()

    def stream(wanted: Any) -> Iterator[tuple[str, bytes]]:
        for image in filter(wanted.__contains__, places):
            try:
                data = places[image].read()
            except FileNotFoundError:
                continue
            except (OSError, ValueError):
                # It cannot be decoded, as it should be: a damaged image does not end the stream.
                data = b""
            yield image, data
        pending = {name for name in names if name not in places and name in wanted}
        for path in compressed:
            for image, data in archives.stream_tar(path, pending):
                pending.remove(image)
                yield image, data
                if not pending:
                    return

    return preparation.Listing(
        examples,
        read,
        {
            **facts,
            **found_facts,
            "form": "split files and images",
            "test_images_left_out_because_trained_on": len(test) - len(held_out),
        },
        stream if compressed else None,
    )


def find_tff_cache(source: archives.Source, names: Sequence[str]) -> str | None:
    """Finds the folder that TFF's loader wrote.

    Args:
        source: Where to look.
        names: What it may be called.

    Returns:
        Its path, of several preferably one with a test set; None if there is none.
    """
    parents = {os.path.dirname(f) for f in source.folders if os.path.basename(f) == _TRAIN_FOLDER}
    found = sorted(f for f in parents if os.path.basename(os.path.abspath(f)) in names)
    found.sort(key=lambda folder: not os.path.isfile(os.path.join(folder, _TEST_FILE)))
    return found[0] if found else None


def list_tff_cache(folder: str, facts: Mapping[str, Any]) -> preparation.Listing:
    """Lists the images that TFF's loader wrote: a TFRecord file a user, and one for the test.

    Args:
        folder: With train/<user> and test.tfRecord.
        facts: About the source.

    Raises:
        SourceError: One line, if there are no users, no test set, or a file is cut off.
    """
    places: dict[str, archives.Place] = {}
    examples, ignored = [], []
    called = os.path.basename(os.path.abspath(folder))
    train = os.path.join(folder, _TRAIN_FOLDER)
    files = [(user, f"{_TRAIN_FOLDER}/{user}", "train") for user in sorted(os.listdir(train))]
    for user, file, split in [*files, (None, _TEST_FILE, "test")]:
        path = os.path.join(folder, file)
        records, whole = archives.index_records(path)
        if not records:
            ignored.append(path)
        elif not whole:
            raise preparation.SourceError(
                f"{path}: is damaged or cut off behind image {len(records)}; accepted are whole "
                "files: have TFF write it again, or remove it"
            )
        for number, (class_number, place) in enumerate(records):
            image = f"{called}/{file}[{number}]"
            places[image] = place
            examples.append(preparation.Example(user, str(class_number), image, split))
    for split, what in (("train", train), ("test", os.path.join(folder, _TEST_FILE))):
        if all(example.split != split for example in examples):
            raise preparation.SourceError(
                f"{what}: holds no images as TFF writes them; accepted are TFRecords of them"
            )
    for path in ignored:
        logging.warning("%s: is no TFRecord file of images; passed over: it is no user", path)
    return preparation.Listing(
        examples,
        lambda image: places[image].read(),
        {**facts, "form": "cache of TFF", "files_passed_over": len(ignored)},
    )
