"""One report on several embeddings of one evaluation set."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tasks import task as task_lib
from tff_dpfedemb.evaluation import retrieval, verification


def evaluate(
    embeddings: Mapping[str, np.ndarray],
    evaluation_set: task_lib.EvaluationSet,
    fars: Sequence[float] = (0.1, 0.01, 0.001),
    bootstrap: int = 1000,
    seed: int = 0,
) -> dict[str, Any]:
    """Verification and retrieval figures of each embedding, ready for JSON.

    The gallery/query split is by users where a class has several.

    Args:
        embeddings: Name, e.g. "trained" or "raw pixels", to a real array of shape (n, d).
        evaluation_set: The n labelled images that were embedded.
        fars: False accept rates in (0, 1).
        bootstrap: Bootstrap replicates behind each 95 % interval; 0 for no intervals.
        seed: Seed of the gallery/query split and of the bootstrap.

    Returns:
        {"evaluation_set": {"description", "num_images", "num_classes", "num_users"},
        "settings": {"fars", "bootstrap", "seed"}, "embeddings": {name: {"dimensions",
        "verification", "retrieval"}}}, the last two as `VerificationResult.to_json` and
        `RetrievalResult.to_json` give them. None stands for what is undefined; no value is NaN.

    Raises:
        ValueError: If there is no embedding, or `verify` or `retrieve` refuses one; the message
            names it.
    """
    if not embeddings:
        raise ValueError("embeddings must hold at least one named array, got none")
    class_ids, user_ids = evaluation_set.class_ids, evaluation_set.user_ids
    results = {}
    for name, array in embeddings.items():
        try:
            verified = verification.verify(array, class_ids, fars, bootstrap=bootstrap, seed=seed)
            retrieved = retrieval.retrieve(
                array, class_ids, user_ids=user_ids, bootstrap=bootstrap, seed=seed
            )
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        results[name] = {
            "dimensions": np.shape(array)[1],
            "verification": verified.to_json(),
            "retrieval": retrieved.to_json(),
        }
    return {
        "evaluation_set": {
            "description": evaluation_set.description,
            "num_images": len(class_ids),
            "num_classes": len(np.unique(class_ids)),
            "num_users": None if user_ids is None else len(np.unique(user_ids)),
        },
        "settings": {"fars": [float(far) for far in fars], "bootstrap": bootstrap, "seed": seed},
        "embeddings": results,
    }


def format_table(report: Mapping[str, Any]) -> str:
    """A report as a plain text table, one row an embedding, for a terminal.

    Args:
        report: What `evaluate` returned, or the same read back from JSON.

    Returns:
        Lines without a trailing newline; a dash stands for what is undefined.
    """
    about = report["evaluation_set"]
    users = "" if about["num_users"] is None else f", {about['num_users']} users"
    header = ["", *(f"recall@FAR={far:g}" for far in report["settings"]["fars"])]
    table = [[*header, "recall@1", "mAP"]]
    for name, result in report["embeddings"].items():
        row = [_cell(p["recall"], p["low"], p["high"]) for p in result["verification"]["points"]]
        for measure in ("recall_at_1", "mean_average_precision"):
            row.append(_cell(**result["retrieval"][measure]))
        table.append([name, *row])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(
        [
            f"{about['description']}: {about['num_images']} images, {about['num_classes']} "
            f"classes{users}; 95 % intervals over classes",
            *lines,
        ]
    )


def _cell(value: float | None, low: float | None, high: float | None) -> str:
    """A value with its interval, as far as defined."""
    if value is None:
        return "-"
    return f"{value:.3f}" if low is None else f"{value:.3f} [{low:.3f}, {high:.3f}]"
