"""iNaturalist 2017 as published for federated learning: photographs of plants and animals.

The split user_120k has 9,275 users, 1,203 classes and 120,300 training images. The geo_* splits
divide the same classes by cells of a map.
"""

import re
from typing import Any, ClassVar

from tasks import archives, federated_vision, preparation

_TFF_URL = "https://storage.googleapis.com/tff-datasets-public"
_AUTHORS_URL = "http://storage.googleapis.com/gresearch/federated-vision-datasets"
# TFF's tables, one for all splits, with their md5s.
_TRAIN, _TRAIN_MD5 = "iNaturalist_train.csv", "63d5a41699434bc2b13f5853f3764c18"
_TEST, _TEST_MD5 = "iNaturalist_test.csv", "bcf08a5a740ee76dac4e5af668081891"
# What TFF's training table says of an image that is not in a split.
_NOT_IN_SPLIT = ("NA", "")
_AUTHORS_TEST = "test.csv"

_TAR = "train_val_images.tar"
_TAR_GZ, _TAR_GZ_MD5 = "train_val_images.tar.gz", "7c784ea5e424efaec655bd392f87301f"
_IMAGES_URL = f"https://ml-inat-competition-datasets.s3.amazonaws.com/2017/{_TAR_GZ}"

_GEO = ("geo_100", "geo_300", "geo_1k", "geo_3k", "geo_10k", "geo_30k")


def _split_files(split: str) -> str:
    """Which files say whose the images of a split are."""
    name = "geo" if split in _GEO else "user-120k"
    return (
        f"{_TRAIN} and {_TEST}, from {_TFF_URL}, or federated_train_{split}.csv and "
        f"{_AUTHORS_TEST}, in inaturalist-{name}.zip or out of it, from {_AUTHORS_URL}"
    )


class INaturalist(federated_vision.FederatedVision):
    """Photographs of plants and animals, by observer."""

    name = "inaturalist"
    licence = (
        "iNaturalist 2017: for non-commercial research and education only; the images must not be "
        "distributed"
    )
    # The authors and TFF publish numbers of cells that differ by one, so none is taken for true.
    published: ClassVar = {"user_120k": (9275, 120_300), **dict.fromkeys(_GEO, (None, None))}
    split_files: ClassVar = {split: _split_files(split) for split in published}
    image_files = (
        f"the folder train_val_images, or {_TAR}, or {_TAR_GZ}, of iNaturalist 2017, from "
        f"{_IMAGES_URL}"
    )

    def __init__(
        self,
        cache: str,
        *,
        inaturalist_split: str = "user_120k",
        image_size: int = 224,
        max_evaluation_images: int = 10_000,
        data_seed: int = 0,
    ):
        """Opens a cache.

        Args:
            cache: The folder of caches.
            inaturalist_split: "user_120k", or "geo_100", "geo_300", "geo_1k", "geo_3k", "geo_10k"
                or "geo_30k", whose users are cells of a map.
            image_size: Height and width of the images in pixels.
            max_evaluation_images: The most images of a held-out split that are used; 0 for all.
            data_seed: Seed of that draw, and of the test set's classes that are for validation.

        Raises:
            ValueError: One line a problem, beginning with an option's name.
        """
        self._inaturalist_split = inaturalist_split
        super().__init__(
            cache,
            self.cache_name(inaturalist_split=inaturalist_split, image_size=image_size),
            max_evaluation_images=max_evaluation_images,
            data_seed=data_seed,
        )

    @classmethod
    def published_users(cls, *, inaturalist_split: str = "user_120k") -> int | None:
        """The published number of users of a split; None for the geo_* splits."""
        cls.check(inaturalist_split)
        return cls.published[inaturalist_split][0]

    @classmethod
    def cache_name(cls, *, inaturalist_split: str = "user_120k", image_size: int = 224) -> str:
        """The name of the cache folder."""
        cls.check(inaturalist_split, image_size)
        return f"inaturalist-{inaturalist_split}-{image_size}"

    @classmethod
    def list_source(
        cls,
        source: str,
        *,
        inaturalist_split: str = "user_120k",
        accept_checksum_mismatch: bool = False,
    ) -> preparation.Listing:
        """Lists the images of a split.

        Args:
            source: A folder with, at any depth, TFF's or the authors' files of the split, and the
                images in folders, in a tar or in the published tar.gz; or TFF's cache of the split.
            inaturalist_split: Which one, see the constructor.
            accept_checksum_mismatch: Whether files other than the published ones are accepted.

        Returns:
            The listing.

        Raises:
            SourceError: One line that says which files are missing or wrong, and what to do.
        """
        cls.check(inaturalist_split)
        found = archives.Source(source)
        rows, checked = _read_tables(found, inaturalist_split, accept_checksum_mismatch)
        return cls.list_split(
            found,
            inaturalist_split,
            rows,
            lambda names: _find_images(found, names, accept_checksum_mismatch),
            # TFF writes it under the one name, and looks for it under the other.
            [inaturalist_split, inaturalist_split.upper()],
            {"split": inaturalist_split, "split_files": checked},
        )

    def describe(self) -> dict[str, Any]:
        split = self._inaturalist_split
        unit = "observers"
        if split in _GEO:
            unit = "cells of a map; a guarantee for a cell is none for a person in several"
        return {**super().describe(), "inaturalist_split": split, "users_are": unit}


def _read_tables(
    source: archives.Source, split: str, accept_mismatch: bool
) -> tuple[Any, list[Any]]:
    """What the split files say, or None; and facts about them."""
    if train := source.find_table(_TRAIN):
        test = train.beside(_TEST)
        md5s = {train.path: _TRAIN_MD5, test.path: _TEST_MD5}
        user = split
    elif train := source.find_table(
        f"federated_train_{split}.csv", ("inaturalist-user-120k.zip", "inaturalist-geo.zip")
    ):
        test = train.beside(_AUTHORS_TEST)
        md5s = dict.fromkeys((train.path, test.path))
        user = "user_id"
    else:
        return None, []
    checked = archives.verify(md5s, accept_mismatch)
    named = train.columns((user, "class", "image_id"))
    rows = [row for row in named if row[0] not in _NOT_IN_SPLIT]
    if not rows:
        raise preparation.SourceError(f"{train}: has no image in the split {split}")
    return (rows, test.columns(("class", "image_id"))), checked


def _find_images(
    source: archives.Source, names: set[str], accept_mismatch: bool
) -> federated_vision.Found:
    """Finds images in folders, and where some are not there in the published archive."""
    places = source.find_images(names)
    for tar in source.find_files(re.escape(_TAR)):
        if len(places) < len(names):
            places |= archives.index_tar(tar, names - places.keys())
    compressed = source.find_files(re.escape(_TAR_GZ))[:1]
    if len(places) == len(names):
        compressed = []
    checked = archives.verify(dict.fromkeys(compressed, _TAR_GZ_MD5), accept_mismatch)
    return federated_vision.Found(places, compressed, {"archives": checked} if checked else {})
