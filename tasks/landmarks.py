"""Google Landmarks v2 by photographer, as published for federated learning.

gld160k has 1,262 users, 2,028 classes and 164,172 training images; gld23k is TensorFlow Federated's
mini set of it, with 233 users and 203 classes.
"""

import os
import re
from typing import Any, ClassVar

from absl import logging

from tasks import archives, federated_vision, preparation
from tff_dpfedemb import progress

_ZIP = "landmarks-user-160k.zip"
_ZIP_MD5 = "53c36bd7d5fc12f927af2820b7e4a57c"
_ZIP_URL = f"http://storage.googleapis.com/gresearch/federated-vision-datasets/{_ZIP}"
_MINI_URL = "https://storage.googleapis.com/tff-datasets-public"
# Training table and test table of each split, each with its md5 where one is published: TFF's
# gldv2.py has those of the mini set.
_TABLES = {
    "gld160k": (("federated_train.csv", None), ("test.csv", None)),
    "gld23k": (
        ("mini_gld_train_split.csv", "9fd62cf79a67046fdd673d3a0ac52841"),
        ("mini_gld_test.csv", "298e9d19d66357236f66fe8e22920933"),
    ),
}
_SHARDS_URL = "https://s3.amazonaws.com/google-landmark"
_SHARD = r"images_\d{3}\.tar"


class Landmarks(federated_vision.FederatedVision):
    """Photographs of landmarks, by photographer."""

    name = "landmarks"
    licence = (
        "Google Landmarks v2: annotations CC BY 4.0; every image under its photographer's own "
        "licence, see train_attribution.csv of the data set"
    )
    split_files: ClassVar = {
        "gld160k": f"{_ZIP}, from {_ZIP_URL}, or federated_train.csv and test.csv out of it",
        "gld23k": f"mini_gld_train_split.csv and mini_gld_test.csv, from {_MINI_URL}",
    }
    image_files = (
        "images/<id>.jpg, or the train set of Google Landmarks v2, images_000.tar to "
        f"images_499.tar, from {_SHARDS_URL}/train, with md5.images_000.txt to md5.images_499.txt "
        f"beside them, from {_SHARDS_URL}/md5sum/train"
    )
    published: ClassVar = {"gld160k": (1262, 164_172), "gld23k": (233, 23_080)}

    def __init__(
        self,
        cache: str,
        *,
        landmarks_split: str = "gld160k",
        image_size: int = 224,
        max_evaluation_images: int = 10_000,
        data_seed: int = 0,
    ):
        """Opens a cache.

        Args:
            cache: The folder of caches.
            landmarks_split: "gld160k" or "gld23k".
            image_size: Height and width of the images in pixels.
            max_evaluation_images: The most images of a held-out split that are used; 0 for all.
            data_seed: Seed of that draw, and of the test set's classes that are for validation.

        Raises:
            ValueError: One line a problem, beginning with an option's name.
        """
        self._landmarks_split = landmarks_split
        super().__init__(
            cache,
            self.cache_name(landmarks_split=landmarks_split, image_size=image_size),
            max_evaluation_images=max_evaluation_images,
            data_seed=data_seed,
        )

    @classmethod
    def published_users(cls, *, landmarks_split: str = "gld160k") -> int | None:
        """The published number of users of a split."""
        cls.check(landmarks_split)
        return cls.published[landmarks_split][0]

    @classmethod
    def cache_name(cls, *, landmarks_split: str = "gld160k", image_size: int = 224) -> str:
        """The name of the cache folder."""
        cls.check(landmarks_split, image_size)
        return f"landmarks-{landmarks_split}-{image_size}"

    @classmethod
    def list_source(
        cls,
        source: str,
        *,
        landmarks_split: str = "gld160k",
        accept_checksum_mismatch: bool = False,
    ) -> preparation.Listing:
        """Lists the images of a split.

        Args:
            source: A folder with, at any depth, the split's files and images in folders or in the
                data set's own tars; or TFF's cache of the split.
            landmarks_split: "gld160k" or "gld23k".
            accept_checksum_mismatch: Whether files other than the published ones are accepted.

        Returns:
            The listing.

        Raises:
            SourceError: One line that says which files are missing or wrong, and what to do.
        """
        cls.check(landmarks_split)
        (train_name, train_md5), (test_name, test_md5) = _TABLES[landmarks_split]
        zips = [_ZIP] if landmarks_split == "gld160k" else []
        found = archives.Source(source)
        train = found.find_table(train_name, zips)
        rows, checked = None, []
        if train is not None:
            test = train.beside(test_name)
            md5s = {train.path: train_md5, test.path: test_md5}
            if train.member:
                md5s = {train.path: _ZIP_MD5}
            checked = archives.verify(md5s, accept_checksum_mismatch)
            rows = (
                train.columns(("user_id", "class", "image_id")),
                test.columns(("class", "image_id")),
            )
        return cls.list_split(
            found,
            landmarks_split,
            rows,
            lambda names: _find_images(found, names, accept_checksum_mismatch),
            [landmarks_split],
            {"split": landmarks_split, "split_files": checked},
        )

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "landmarks_split": self._landmarks_split}


def _find_images(
    source: archives.Source, names: set[str], accept_mismatch: bool
) -> federated_vision.Found:
    """Finds images in folders, and where some are not there in the data set's tars."""
    places = source.find_images(names)
    checked = []
    shards = source.find_files(_SHARD)
    for shard in progress.bar(
        iterable=shards, total=len(shards), desc="tars", unit="tar", shown=len(shards) >= 10
    ):
        if len(places) == len(names):
            break
        if md5 := _published_md5(shard):
            checked.append(preparation.verify_md5(shard, md5, accept_mismatch))
        else:
            logging.warning("%s: has no md5.*.txt beside it; taken as it is", shard)
        places |= archives.index_tar(shard, names - places.keys())
    others = [facts["file"] for facts in checked if not facts["published"]]
    facts = {"tars_checked": len(checked), "tars_other_than_published": others}
    return federated_vision.Found(places, (), facts)


def _published_md5(shard: str) -> str | None:
    """The checksum in the file beside a tar or in a tree of such files; None if there is none."""
    folder, name = os.path.split(shard)
    md5_name = f"md5.{name.removesuffix('.tar')}.txt"
    tree = os.path.join(os.path.dirname(folder), "md5sum", os.path.basename(folder))
    for path in (os.path.join(folder, md5_name), os.path.join(tree, md5_name)):
        if os.path.isfile(path):
            with open(path, encoding="utf-8", errors="replace") as file:
                if found := re.match(r"\s*([0-9a-f]{32})\b", file.read(1000)):
                    return found[1]
            raise preparation.SourceError(f"{path}: holds no md5; download it again")
    return None
