"""What every command shares: flags that may be none, problems said all at once, exit statuses.

Imports nothing heavy.
"""

import logging as standard_logging
import os
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from absl import app, flags, logging

DONE, FAILED, BAD_INPUT, RESUMABLE = 0, 1, 2, 3

FLAGS = flags.FLAGS

# What `define_optional` defines belongs to the module that calls it.
flags.disclaim_key_flags()


class _OptionalParser(flags.ArgumentParser):
    """A number, or "none"."""

    def __init__(self, parser: flags.ArgumentParser):
        self._parser = parser
        self.syntactic_help = f"{parser.syntactic_help}, or none"

    def parse(self, argument: Any) -> Any:
        """Parses a flag's value."""
        if argument is None or str(argument).lower() == "none":
            return None
        return self._parser.parse(argument)

    def flag_type(self) -> str:
        """What the help calls it."""
        return f"{self._parser.flag_type()} or none"


class _OptionalSerializer(flags.ArgumentSerializer):
    """Writes None as "none"."""

    def serialize(self, value: Any) -> str:
        """The text that parses to `value`."""
        return "none" if value is None else str(value)


def define_optional(parser: flags.ArgumentParser, name: str, default: Any, text: str) -> None:
    """Defines a flag whose value may be "none"."""
    flags.DEFINE(_OptionalParser(parser), name, default, text, serializer=_OptionalSerializer())


class Problems:
    """Collects what is wrong with the input, to say it all at once."""

    def __init__(self) -> None:
        self._lines: dict[str, str] = {}  # One for each flag.

    def attempt(self, build: Callable[[], Any]) -> Any:
        """The result of `build`, or None if it refuses its input."""
        try:
            return build()
        except ValueError as error:
            for line in str(error).splitlines():
                self.require(False, line)
            return None

    def require(self, accepted: bool, line: str) -> None:
        """Adds a line, which begins with the flag's name, unless it is accepted."""
        if not accepted:
            self._lines.setdefault(re.match(r"\w*", line)[0], line)

    def exit_if_any(self) -> None:
        """Says what is wrong and ends the program with status 2."""
        if self._lines:
            fail("\n".join(f"error: --{line}" for line in self._lines.values()))


def fail(message: str, status: int = BAD_INPUT) -> NoReturn:
    """Ends the program with a message on standard error."""
    print(message, file=sys.stderr)
    sys.exit(status)


def leave(message: str, status: int) -> NoReturn:
    """Ends the program at once, in the middle of a computation.

    TFF waits for the worker in a thread that aborts the process if it wakes while the interpreter
    shuts down, so the interpreter is not shut down.
    """
    print(message, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def be_quiet() -> None:
    """Keeps what TensorFlow and TFF say at import, which no user can act on, from the terminal."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    warnings.filterwarnings("ignore", message="pkg_resources is deprecated")
    standard_logging.getLogger("tensorflow").setLevel(standard_logging.ERROR)


def run(main: Callable[[], int]) -> NoReturn:
    """Runs a binary: parses its flags and ends with the status that `main` returns.

    Bad flags are a line each and status 2, --help is status 0.
    """
    # Not app.run: Keras builds layers wrongly where TensorFlow is first imported below it.
    app.define_help_flags()
    try:
        problems = _parse(sys.argv[1:])
    except SystemExit:
        sys.exit(DONE)
    if problems:
        fail("\n".join(f"error: {line}" for line in problems))
    logging.set_verbosity(logging.WARNING)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        fail("Interrupted.", FAILED)


def _parse(arguments: list[str]) -> list[str]:
    """Parses flags; returns a line for each problem."""
    try:
        rest = FLAGS([sys.argv[0], *arguments])[1:]
    except flags.Error as error:
        # Parsing ends at the first problem: look at the flags one by one, with their values.
        parts: list[list[str]] = []
        for argument in arguments:
            if not parts or re.match("--?[a-z]", argument) or "=" in parts[-1][0]:
                parts.append([])
            parts[-1].append(argument)
        if len(parts) > 1:
            return [line for part in parts for line in _parse(part)] or [str(error)]
        return [_in_words(error)]
    return [f"unexpected argument {a!r}: accepted are flags, --name=value" for a in rest]


def _in_words(error: flags.Error) -> str:
    """A refused flag: its name, its value and what it accepts."""
    refused = re.match(r"flag --(\w+)=(.*?): ", str(error))
    if refused is None:
        return str(error)
    name, value = refused.groups()
    parser = FLAGS[name].parser
    choices = getattr(parser, "enum_values", ("true", "false"))
    accepted = parser.syntactic_help or " or ".join(choices)
    return f"--{name}={value}: accepted is {accepted}"
