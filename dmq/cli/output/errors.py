"""How commands fail: one line on stderr and an exit code that scripts can rely on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from itertools import pairwise

import typer

from dmq.cli.output.output import printable


class ExitCode(IntEnum):
    """What a command ended with; the numbers are a promise."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    NOT_FOUND = 3
    DAMAGED = 4  # a store was read, and something is wrong with it
    NOT_ALLOWED = 5  # the daemon wants an access key, or another one
    UNAVAILABLE = 6  # nobody answered, or the daemon cannot serve now: the same command may work later
    PARTIAL = 7  # some of it could not be done, and what that is was said; the rest was
    INTERRUPTED = 130


class CommandFailed(Exception):
    """A command ends with this text and this code."""

    def __init__(self, text: str, exit_code: ExitCode = ExitCode.FAILURE) -> None:
        super().__init__(text)
        self.text = text
        self.exit_code = exit_code


def refused(allowed: str, *options: str, given: object = None) -> typer.BadParameter:
    """Return the refusal of an option or an argument: which one, what was given, what is allowed.

    Without ``given`` it is of several that do not go together, or of one that lacks another.
    """
    return typer.BadParameter(allowed if given is None else f"{given!r} is refused: {allowed}", param_hint=options)


@contextmanager
def refusing(option: str, given: object) -> Iterator[None]:
    """Make a ``ValueError``, whose text says what is allowed, the refusal of ``given``."""
    try:
        yield
    except ValueError as error:
        raise refused(str(error), option, given=given) from error


def wants_json(arguments: Sequence[str]) -> bool:
    """Say whether the command line asks for JSON, without parsing it: errors of parsing are to be JSON as well."""
    return any(argument in {"--json", "-ojson", "--output=json"} for argument in arguments) or any(
        argument in {"-o", "--output"} and following == "json" for argument, following in pairwise(arguments)
    )


def describe(text: str, exit_code: int, *, as_json: bool) -> str:
    """Return what stderr gets: one line, but for a configuration with several faults."""
    if as_json:
        kind = ExitCode(exit_code).name.lower() if exit_code in set(ExitCode) else "failure"
        return json.dumps({"error": {"kind": kind, "exit_code": exit_code, "message": text}}, ensure_ascii=False)
    return "\n".join(f"dmq: {printable(line)}" for line in text.splitlines() or [""])
