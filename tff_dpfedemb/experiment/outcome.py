"""What a finished run leaves: the export, its evaluation, and what is printed of both.

Imports nothing heavy: a run that is over is reported at once.
"""

import json
import sys
from collections.abc import Mapping
from typing import Any

from tasks.task import Task
from tff_dpfedemb import atomic
from tff_dpfedemb.experiment.run_folder import RunFolder


def evaluate(folder: RunFolder, task: Task) -> dict[str, Any]:
    """Evaluates the export on the test classes and writes the figures.

    Raises:
        ValueError: If the export is no model that can be evaluated.
    """
    from tff_dpfedemb.evaluation import evaluator

    evaluation = evaluator.evaluate_export(folder.export, task, "test")
    atomic.write_json(folder.evaluation, evaluation)
    return evaluation


def read_evaluation(folder: RunFolder) -> dict[str, Any]:
    """The figures that `evaluate` wrote."""
    with open(folder.evaluation, encoding="utf-8") as file:
        return json.load(file)


def report(folder: RunFolder, evaluation: Mapping[str, Any]) -> None:
    """Prints what came out."""
    from tff_dpfedemb.evaluation import report as report_lib
    from tff_dpfedemb.privacy import statement

    with open(folder.privacy, encoding="utf-8") as file:
        made = json.load(file)
    print(report_lib.format_table(evaluation))
    print()
    print(statement.in_words(made))
    print()
    print(f"Model: {folder.export}  Statement: {folder.privacy}  Evaluation: {folder.evaluation}")
    sys.stdout.flush()
