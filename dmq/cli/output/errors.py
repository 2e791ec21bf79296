"""Errors of commands: one line on stderr and an exit code that scripts can rely on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from itertools import pairwise

import typer

from dmq.cli.output.output import printable


class ExitCode(IntEnum):
    """Exit codes of commands; the numbers are stable."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    NOT_FOUND = 3
    DAMAGED = 4  # a store was read and is damaged
    NOT_ALLOWED = 5  # the daemon requires an access key, or another one
    UNAVAILABLE = 6  # no answer, or the daemon cannot serve now: the same command may succeed later
    PARTIAL = 7  # a part failed and was reported; the rest was done
    FENCED = 8  # of 'dmq serve': another daemon writes the replica of this store
    INTERRUPTED = 130


class CommandFailed(Exception):
    """Error that ends a command with this text and this exit code."""

    def __init__(self, text: str, exit_code: ExitCode = ExitCode.FAILURE) -> None:
        super().__init__(text)
        self.text = text
        self.exit_code = exit_code


def refused(allowed: str, *options: str, given: object = None) -> typer.BadParameter:
    """Return the error of an invalid option or argument, with its name, its value, and the allowed values.

    Without ``given`` the error is about options that exclude each other, or an option that needs another one.
    """
    return typer.BadParameter(allowed if given is None else f"{given!r} is refused: {allowed}", param_hint=options)


@contextmanager
def refusing(option: str, given: object) -> Iterator[None]:
    """Turn a ``ValueError``, whose text names the allowed values, into the refusal of ``given``."""
    try:
        yield
    except ValueError as error:
        raise refused(str(error), option, given=given) from error


def wants_json(arguments: Sequence[str]) -> bool:
    """Return True if the arguments request JSON. They are not parsed, so that parse errors can also be JSON."""
    return any(argument in {"--json", "-ojson", "--output=json"} for argument in arguments) or any(
        argument in {"-o", "--output"} and following == "json" for argument, following in pairwise(arguments)
    )


def describe(text: str, exit_code: int, *, as_json: bool) -> str:
    """Return the text for stderr: one line, or several for a configuration with several faults."""
    if as_json:
        kind = ExitCode(exit_code).name.lower() if exit_code in set(ExitCode) else "failure"
        return json.dumps({"error": {"kind": kind, "exit_code": exit_code, "message": text}}, ensure_ascii=False)
    return "\n".join(f"dmq: {printable(line)}" for line in text.splitlines() or [""])
