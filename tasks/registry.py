"""Finds tasks by the value of `--task`; imports a task's module only when it is built."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from tasks.task import Task

TASKS = {
    "digiface": "tasks.digiface:DigiFace",
    "emnist": "tasks.emnist:Emnist",
    "glyphs": "tasks.glyphs:Glyphs",
    "image_folder": "tasks.image_folder:ImageFolder",
    "inaturalist": "tasks.inaturalist:INaturalist",
    "landmarks": "tasks.landmarks:Landmarks",
    "tfds": "tasks.tfds:TensorFlowDatasets",
}


def names() -> list[str]:
    """The accepted values of `--task`, sorted."""
    return sorted(TASKS)


def find(name: str) -> type[Task]:
    """The class of a task.

    Raises:
        ValueError: If there is no such task.
    """
    if name not in TASKS:
        raise ValueError(f"task must be one of {', '.join(names())}; got {name!r}.")
    module, constructor = TASKS[name].split(":")
    return getattr(importlib.import_module(module), constructor)


def call(function: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Calls a function with those of some options that it takes."""
    taken = inspect.signature(function).parameters
    return function(**{k: v for k, v in options.items() if k in taken})


def build(name: str, **options: Any) -> Task:
    """Builds a task.

    Args:
        name: One of `names()`.
        **options: Arguments of the task's constructor.

    Returns:
        The task.

    Raises:
        ValueError: If there is no such task, or an option is out of its range.
    """
    return find(name)(**options)
