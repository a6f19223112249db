"""Evaluates embeddings on a task's held-out classes, beside the baselines of any embedding."""

from collections.abc import Callable
from typing import Any

from tasks.task import Task
from tff_dpfedemb.evaluation import embed as embed_lib
from tff_dpfedemb.evaluation import report as report_lib
from tff_dpfedemb.evaluation import verification
from tff_dpfedemb.models import exported

FARS = (0.1, 0.01, 0.001)


class HeldOut:
    """A split of a task, drawn once, for the quick figures in between."""

    def __init__(self, task: Task, split: str):
        """Draws the split at the first use."""
        self._task, self._split = task, split
        self._set = None

    def recalls(self, model_fn: Callable[[Any], Any], far: float = FARS[0]) -> dict[str, float]:
        """Recall at a false accept rate, over all pairs, without intervals.

        Args:
            model_fn: uint8 images to unit-norm embeddings.
            far: The false accept rate.

        Returns:
            The figure by its name; empty if the embeddings are not finite.
        """
        self._set = self._set or self._task.evaluation_set(self._split)
        try:
            embeddings = embed_lib.embed(model_fn, self._set.images)
            result = verification.verify(embeddings, self._set.class_ids, (far,), bootstrap=0)
        except ValueError:
            return {}
        recall = result.points[0].recall
        return {} if recall is None else {f"recall@FAR={far:g}": recall}


def evaluate_export(path: str, task: Task, split: str) -> dict[str, Any]:
    """Evaluates an exported model beside raw pixels and, where they are known, its earlier selves.

    Args:
        path: A SavedModel that maps uint8 images to unit-norm embeddings.
        task: Whose held-out images are embedded.
        split: "validation" or "test".

    Returns:
        The report, ready for JSON; see `report.evaluate`.

    Raises:
        ValueError: If the model does not take the task's images, or returns no embeddings.
    """
    held_out = task.evaluation_set(split)
    model_fn, shape = exported.load(path)
    if any(m not in (None, t) for m, t in zip(shape, task.image_shape, strict=True)):
        raise ValueError(
            f"model={path}: takes images of shape {shape}, and the task {task.name} has "
            f"{tuple(task.image_shape)}"
        )
    try:
        embeddings = {"trained": embed_lib.embed(model_fn, held_out.images)}
    except ValueError as error:
        raise ValueError(f"model={path}: {error}") from None
    for name, model_fn in (
        ("pretrained backbone", exported.load_initial(path)),
        ("untrained backbone", exported.load_untrained(path)),
    ):
        if model_fn is not None:
            embeddings[name] = embed_lib.embed(model_fn, held_out.images)
    embeddings["raw pixels"] = embed_lib.raw_pixels(held_out.images)
    return report_lib.evaluate(embeddings, held_out, FARS)
