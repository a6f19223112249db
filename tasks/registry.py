"""Finds tasks by the value of `--task`; imports a task's module only when it is built."""

import importlib
from typing import Any

from tasks.task import Task

TASKS = {"glyphs": "tasks.glyphs:Glyphs"}


def names() -> list[str]:
    """The accepted values of `--task`, sorted."""
    return sorted(TASKS)


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
    if name not in TASKS:
        raise ValueError(f"task must be one of {', '.join(names())}; got {name!r}.")
    module, constructor = TASKS[name].split(":")
    return getattr(importlib.import_module(module), constructor)(**options)
