"""What the tasks with a prepared cache share."""

import abc
import dataclasses
import os
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from tasks import image_cache, preparation
from tasks.image_cache import ExampleTable
from tasks.task import EvaluationSet, Task

__all__ = ["SIZES", "CachedTask", "ExampleTable", "Split", "shape_problems"]


@dataclasses.dataclass(frozen=True)
class Split:
    """Which images of a cache serve what.

    Attributes:
        train_users: int64 (k,), indices into the table's `user_names`.
        train_classes: int64 (c,), indices into the table's `class_names`. Training reads the
            images of `train_users` that are of these classes and whose split is "train".
        validation: int64, rows of the table.
        test: int64, rows of the table.
        descriptions: One line on what "validation" and "test" hold, by their names.
    """

    train_users: np.ndarray
    train_classes: np.ndarray
    validation: np.ndarray
    test: np.ndarray
    descriptions: Mapping[str, str]


# What is accepted as the height and width of cached images.
SIZES = "whole numbers of pixels from 8 to 2048"


def shape_problems(image_size: int | None, image_channels: int | None = None) -> list[str]:
    """One line for each option that no cached image can have; None is not looked at."""
    problems = []
    if image_size is not None and not 8 <= image_size <= 2048:
        problems.append(f"image_size={image_size}: accepted are {SIZES}")
    if image_channels not in (None, 1, 3):
        problems.append(
            f"image_channels={image_channels}: accepted are 3 for colour and 1 for grey"
        )
    return problems


class CachedTask(Task):
    """A data set that was prepared by `tasks.prepare`.

    A subclass says how to list a source (`list_source`), how its caches are called, and, in
    `split`, who trains and what is held out. Its constructor's arguments are its options; each is a
    flag of the same name, and the class methods take those of them that they need.

    Attributes:
        licence: One line on the terms of the data, where there is something to say.
        table: The cache's images, without their pixels.
        has_users: Whether the data name users. Without, training images come in arbitrary groups
            in their place, and only training without privacy makes sense.
    """

    licence: ClassVar[str] = ""

    def __init__(
        self,
        cache: str,
        folder: str,
        *,
        max_evaluation_images: int = 10_000,
        data_seed: int = 0,
    ):
        """Opens a cache.

        Args:
            cache: The folder of caches.
            folder: This one's name in it.
            max_evaluation_images: The most images of a held-out split that are used, drawn at
                random; 0 for all of them.
            data_seed: Seed of that draw, and of splits that are drawn.

        Raises:
            ValueError: One line, if the cache is not there or cannot serve.
        """
        if max_evaluation_images < 0:
            raise ValueError(
                f"max_evaluation_images={max_evaluation_images}: accepted are whole numbers of at "
                "least 1, or 0 for all"
            )
        if data_seed < 0:
            raise ValueError(f"data_seed={data_seed}: accepted are whole numbers of at least 0")
        if not cache:
            raise ValueError(
                f"cache: is missing; --task={self.name} reads a folder that "
                f"`python -m tasks.prepare --task={self.name} --source=... --cache=...` wrote"
            )
        try:
            self._cache = image_cache.ImageCache(os.path.join(cache, folder))
        except ValueError as error:
            raise ValueError(
                f"cache={cache}: {error}; prepare it with `python -m tasks.prepare "
                f"--task={self.name} --source=... --cache={cache}` and the same options"
            ) from None
        self.data_seed = data_seed
        self.image_shape = self._cache.image_shape
        self.has_users = self._cache.facts["has_users"]
        self.table = self._cache.table()
        try:
            self._split = self.split(self.table)
        except ValueError as error:
            raise ValueError(f"cache={os.path.dirname(self._cache.path)}: {error}") from None
        self._max_evaluation_images = max_evaluation_images
        self.num_users = len(self._split.train_users)
        self.num_train_classes = len(self._split.train_classes)
        self._class_map = np.full(len(self.table.class_names), -1, np.int64)
        self._class_map[self._split.train_classes] = np.arange(self.num_train_classes)
        if not self.num_users or not self.num_train_classes:
            raise ValueError(
                f"cache={cache}: {self._cache.path} leaves {self.num_users} users and "
                f"{self.num_train_classes} classes to train on; accepted are caches with some"
            )

    @classmethod
    @abc.abstractmethod
    def cache_name(cls) -> str:
        """The name of the cache folder; subclasses take the options that it depends on."""

    @classmethod
    @abc.abstractmethod
    def image_shape_of(cls) -> tuple[int, int, int]:
        """The shape of the cached images; subclasses take the options that it depends on."""

    @classmethod
    @abc.abstractmethod
    def list_source(cls, source: str) -> preparation.Listing:
        """Lists what raw downloads hold; subclasses take the options that it depends on."""

    @abc.abstractmethod
    def split(self, table: ExampleTable) -> Split:
        """Decides who trains and what is held out.

        Raises:
            ValueError: What is lacking, in one line.
        """

    @property
    def user_id_dtype(self) -> type[np.generic]:
        return np.int64

    def user_ids(self, indices: np.ndarray) -> np.ndarray:
        return np.asarray(self._split.train_users, np.int64)[indices]

    def load_users(self, user_ids: Any) -> tuple[Any, Any]:
        return self._cache.load_users(user_ids, self._class_map)

    def user_name(self, user_id: Any) -> str:
        return self.table.user_names[int(user_id)]

    def evaluation_set(self, split: str) -> EvaluationSet:
        if split not in ("validation", "test"):
            raise ValueError(f"split must be validation or test, got {split!r}")
        rows = np.sort(np.asarray(getattr(self._split, split), np.int64))
        description = self._split.descriptions[split]
        most = self._max_evaluation_images
        if most and len(rows) > most:
            description += f"; {most:,} of {len(rows):,} images, drawn at random"
            rng = np.random.default_rng([self.data_seed, len(rows)])
            rows = np.sort(rng.choice(rows, most, replace=False))
        users = self.table.users[rows]
        return EvaluationSet(
            image_cache.CachedImages(self._cache, self.table.items[rows]),
            self.table.classes[rows],
            users if self.has_users and np.all(users >= 0) else None,
            description,
        )

    def describe(self) -> Mapping[str, Any]:
        trained = np.isin(self.table.classes, self._split.train_classes)
        trained &= np.isin(self.table.users, self._split.train_users)
        trained &= self.table.splits == "train"
        facts = {k: v for k, v in self._cache.facts.items() if k not in ("format", "listing")}
        return {
            "task": self.name,
            "cache": os.path.basename(self._cache.path),
            "licence": self.licence,
            **facts,
            "data_seed": self.data_seed,
            "train": {
                "users": self.num_users if self.has_users else 0,
                "classes": self.num_train_classes,
                "images": int(np.count_nonzero(trained)),
            },
            **{
                name: {
                    "classes": len(np.unique(self.table.classes[rows])),
                    "images": len(rows),
                    "description": self._split.descriptions[name],
                }
                for name, rows in (
                    ("validation", self._split.validation),
                    ("test", self._split.test),
                )
            },
        }
