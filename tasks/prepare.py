r"""Prepares a data set: raw downloads become the form that training reads.

  python -m tasks.prepare --task=emnist --source=downloads --cache=cache

goes on where it was stopped or killed. Exit status: 0 done, 2 bad flags or input, 3 stopped but
resumable, 1 anything else.
"""

import os
import signal
import sys

from absl import flags

from tasks import flags as task_flags
from tasks import registry
from tff_dpfedemb import command_line

FLAGS = flags.FLAGS

task_flags.define_task_flags()
flags.DEFINE_string("source", None, "Folder (or file) of the raw downloads. Required.")
flags.DEFINE_float(
    "allow_missing",
    0.0,
    "The largest share of missing images, and the largest share of undecodable ones, to go on "
    "without.",
)
flags.DEFINE_bool(
    "accept_checksum_mismatch", False, "Take files that are not the published ones as they are."
)
flags.DEFINE_enum(
    "cache_encoding",
    "auto",
    ["auto", "raw", "png", "jpeg"],
    "How images are stored. auto: raw up to 64x64 pixels, jpeg of quality 95 above.",
)
flags.DEFINE_integer("workers", None, "Threads that read and decode; default: one a core.")
flags.DEFINE_string("manifest", None, "image_folder: the manifest, where it is not in --source.")
flags.DEFINE_bool("tfds_download", False, "tfds: whether the data set may be downloaded.")
flags.DEFINE_bool("dry_run", False, "List the source and say what would be done; write nothing.")


def main() -> int:
    """Checks the flags, lists the source, prepares."""
    from tasks import cached_task, preparation

    problems = command_line.Problems()
    prepared = issubclass(task_flags.task_class(), cached_task.CachedTask)
    problems.require(
        prepared, f"task={FLAGS.task}: needs no preparation; accepted are the other tasks"
    )
    problems.attempt(task_flags.check_options)
    for name, what in (("source", "raw downloads"), ("cache", "prepared data sets, made if new")):
        problems.require(
            bool(FLAGS[name].value), f"{name}: is missing; accepted are folders of {what}"
        )
    if FLAGS.source:
        problems.require(
            os.path.exists(FLAGS.source),
            f"source={FLAGS.source}: does not exist; accepted are folders",
        )
    problems.require(
        0 <= FLAGS.allow_missing < 1,
        f"allow_missing={FLAGS.allow_missing:g}: accepted are shares from 0 to below 1",
    )
    problems.require(
        FLAGS.workers is None or FLAGS.workers >= 1,
        f"workers={FLAGS.workers}: accepted are whole numbers of at least 1",
    )
    problems.exit_if_any()
    command_line.be_quiet()
    # Ends like a SIGINT.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _prepare(problems)
    except preparation.TooManyProblemsError as error:
        command_line.fail(f"{error.report.in_words()}\nerror: --{error}")
    except preparation.SourceError as error:
        command_line.fail(f"error: --source={FLAGS.source}: {error}")
    except OSError as error:
        command_line.fail(f"error: --cache={FLAGS.cache}: {error}", command_line.RESUMABLE)
    except KeyboardInterrupt:
        command_line.fail(
            "Stopped; what is done is kept. The same command goes on from there.",
            command_line.RESUMABLE,
        )


def _prepare(problems: command_line.Problems) -> int:
    """Lists and prepares."""
    from tasks import preparation

    task = task_flags.task_class()
    options = task_flags.options() | {
        name: FLAGS[name].value
        for name in ("source", "accept_checksum_mismatch", "manifest", "tfds_download")
        if FLAGS[name].value is not None
    }
    name = problems.attempt(lambda: registry.call(task.cache_name, options))
    shape = problems.attempt(lambda: registry.call(task.image_shape_of, options))
    problems.exit_if_any()
    path = os.path.join(FLAGS.cache, name)
    if task.licence:
        print(f"Licence: {task.licence}", file=sys.stderr)
    listing = registry.call(task.list_source, options)
    if FLAGS.dry_run:
        print(f"Would prepare {len(listing.examples):,} images of {shape} in {path}.")
        return command_line.DONE
    report = preparation.prepare(
        listing,
        path,
        shape,
        allow_missing=FLAGS.allow_missing,
        encoding=None if FLAGS.cache_encoding == "auto" else FLAGS.cache_encoding,
        workers=FLAGS.workers,
    )
    print(report.in_words())
    print(f"Cache: {path}  Train on it with --task={task.name} --cache={FLAGS.cache}")
    return command_line.DONE


if __name__ == "__main__":
    command_line.run(main)
