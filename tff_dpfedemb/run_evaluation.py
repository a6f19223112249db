r"""Evaluates an exported model on a task's held-out classes and held-out users.

  python -m tff_dpfedemb.run_evaluation --model=runs/first/export --task=glyphs

prints recall at false accept rates over all pairs, and retrieval figures, beside raw pixels and the
untrained backbone. --json prints the same as JSON, and nothing else, on standard output.
"""

import json
import os

from absl import flags

from tasks import flags as task_flags
from tff_dpfedemb import command_line

FLAGS = flags.FLAGS

task_flags.define_task_flags()
flags.adopt_module_key_flags(task_flags)
flags.DEFINE_string("model", None, "Folder of an exported model (SavedModel). Required.")
flags.DEFINE_enum("split", "test", ["validation", "test"], "Which held-out classes.")
flags.DEFINE_bool("json", False, "Print JSON instead of a table.")


def main() -> int:
    """Checks the flags, then evaluates."""
    problems = command_line.Problems()
    task = problems.attempt(task_flags.build_task)
    problems.require(FLAGS.model is not None, "model: is missing; accepted are exported models")
    if FLAGS.model is not None:
        problems.require(
            os.path.isfile(os.path.join(FLAGS.model, "saved_model.pb")),
            f"model={FLAGS.model}: is not an exported model; accepted are folders that hold a "
            "saved_model.pb, as run_federated exports them",
        )
    problems.exit_if_any()

    command_line.be_quiet()
    from tff_dpfedemb.evaluation import evaluator, report

    try:
        evaluation = evaluator.evaluate_export(FLAGS.model, task, FLAGS.split)
    except ValueError as error:
        command_line.fail(f"error: --{error}")
    if FLAGS.json:
        print(json.dumps(evaluation, indent=2, allow_nan=False))
    else:
        print(report.format_table(evaluation))
    return command_line.DONE


if __name__ == "__main__":
    command_line.run(main)
