r"""States the privacy of a set of flags, without training, or of a run's ledger.

  python -m tff_dpfedemb.run_privacy --noise_multiplier=0.9 --total_rounds=100
  python -m tff_dpfedemb.run_privacy --target_epsilon=4 --total_rounds=100
  python -m tff_dpfedemb.run_privacy --ledger=runs/first/ledger.jsonl

The user-level epsilon comes first; the figure per virtual client second. --json prints the
statement as JSON, and nothing else, on standard output.
"""

import dataclasses
import json
import os
import sys
from typing import Any

from absl import flags

from tff_dpfedemb import command_line, run_flags
from tff_dpfedemb.privacy.plan import PrivacyPlan

FLAGS = flags.FLAGS

flags.DEFINE_integer(
    "num_users", 1_000_000, "Population: how many users can take part; public information."
)
run_flags.define_plan_flags()
flags.adopt_module_key_flags(run_flags)
command_line.define_optional(
    flags.FloatParser(),
    "target_epsilon",
    None,
    "State the least --noise_multiplier that keeps the user-level epsilon at or below this.",
)
flags.DEFINE_string(
    "ledger", None, "A run's ledger; its rounds are stated, and all other flags but --delta unused."
)
flags.DEFINE_bool("json", False, "Print JSON instead of words.")


def _of_ledger() -> dict[str, Any]:
    """The statement of a ledger's rounds."""
    from tff_dpfedemb.privacy import ledger as ledger_lib
    from tff_dpfedemb.privacy import statement as statement_lib

    try:
        ledger = ledger_lib.Ledger(FLAGS.ledger)
    except ledger_lib.LedgerError as error:
        raise ValueError(f"ledger: {error}") from None
    if ledger.repaired:
        print("note: the last line is torn; its round is counted.", file=sys.stderr)
    last = ledger.entries[-1]
    plan = PrivacyPlan(
        population=last.population,
        virtual_clients_per_round=last.virtual_clients_per_round,
        virtual_client_size=last.virtual_client_size,
        total_rounds=ledger.num_rounds,
        clip_norm=last.clip_norm,
        noise_multiplier=last.noise_multiplier,
        delta=FLAGS.delta or last.delta,
        sampling=last.sampling,
    )
    return statement_lib.make_statement(plan, ledger)


def _calibrated(plan: PrivacyPlan) -> PrivacyPlan:
    """The plan with the least noise that meets the target."""
    from tff_dpfedemb.privacy import calibration

    noise_multiplier = calibration.noise_multiplier(plan, FLAGS.target_epsilon)
    return dataclasses.replace(plan, noise_multiplier=noise_multiplier)


def _of_flags(plan: PrivacyPlan) -> dict[str, Any]:
    """The statement of a plan."""
    from tff_dpfedemb.privacy import statement as statement_lib

    return statement_lib.make_statement(plan)


def main() -> int:
    """Checks the flags, then accounts."""
    problems = command_line.Problems()
    if FLAGS.ledger is None:
        plan = problems.attempt(lambda: run_flags.build_plan(FLAGS.num_users))
        problems.require(
            FLAGS.target_epsilon is None or not FLAGS["noise_multiplier"].present,
            f"target_epsilon={FLAGS.target_epsilon}: is given with --noise_multiplier="
            f"{FLAGS.noise_multiplier}; accepted is one of the two",
        )
        problems.exit_if_any()
        if FLAGS.target_epsilon is not None:
            plan = problems.attempt(lambda: _calibrated(plan))
            problems.exit_if_any()
        made = _of_flags(plan)
    else:
        problems.require(
            os.path.isfile(FLAGS.ledger) and os.path.getsize(FLAGS.ledger) > 0,
            f"ledger={FLAGS.ledger}: accepted are ledger.jsonl files of runs",
        )
        problems.require(
            FLAGS.delta is None or 0 < FLAGS.delta < 1,
            f"delta={FLAGS.delta}: accepted are numbers between 0 and 1, or none for the run's own",
        )
        problems.exit_if_any()
        made = problems.attempt(_of_ledger)
        problems.exit_if_any()
    if FLAGS.json:
        print(json.dumps(made, indent=2, allow_nan=False))
    else:
        from tff_dpfedemb.privacy import statement as statement_lib

        if FLAGS.ledger is None and FLAGS.target_epsilon is not None:
            print(f"--noise_multiplier={made['noise_multiplier']:g} meets the target:")
        print(statement_lib.summary(made))
        print()
        print(statement_lib.in_words(made))
    return command_line.DONE


if __name__ == "__main__":
    command_line.run(main)
