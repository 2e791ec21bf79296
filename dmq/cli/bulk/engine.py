"""Common steps of commands that change many items: dry run, confirmation, batches of calls, and missing items.

The selection is complete before the first change, so that no item is selected twice. A failure half-way ends the
command after the result so far is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from dmq.cli.bulk.confirm import confirm
from dmq.cli.bulk.progress import Progress
from dmq.cli.output.errors import CommandFailed, ExitCode
from dmq.cli.session.options import Consent, Session
from dmq.errors import DmqError

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

BATCH = 1_000  # items of a call


def is_confirmed(session: Session, would: str, plain: object, consent: Consent, *, asks: bool = True) -> bool:
    """Show the effect of a dry run and return False; otherwise ask for confirmation if ``asks``, and return True."""
    if consent.dry_run:
        session.show(plain, would)
        return False
    if asks:
        confirm(would, yes=consent.yes)
    return True


def in_batches(
    session: Session, name: str, items: Sequence[_Item], call: Callable[[Sequence[_Item]], _Result], *, by_one: bool
) -> tuple[list[_Result], CommandFailed | None]:
    """Return the results of all calls and, if a later one failed, the error that ends the command."""
    results: list[_Result] = []
    done, of, size = 0, len(items), 1 if by_one else BATCH
    try:
        with Progress(name, quiet=session.as_json) as progress:
            for start in range(0, of, size):
                results.append(call(items[start : start + size]))
                done = min(start + size, of)
                progress.show(f"{done:,} of {of:,}", done=done, of=of)
    except (DmqError, KeyboardInterrupt) as error:
        rest = f"{done:,} of {of:,} were processed; repeat the command for the others"
        if isinstance(error, KeyboardInterrupt):
            return results, CommandFailed(f"interrupted: {rest}", ExitCode.INTERRUPTED)
        if not done:
            raise
        code = ExitCode.UNAVAILABLE if error.retriable else ExitCode.FAILURE
        return results, CommandFailed(f"{error}; {rest}", code)
    return results, None


def check_missing(text: str, missing: Sequence[str], *, done: int) -> None:
    """End the command if named items are missing: as partial if others were ``done``, else as not found."""
    if missing:
        code = ExitCode.PARTIAL if done else ExitCode.NOT_FOUND
        raise CommandFailed(f"{text}: {', '.join(missing)}", code)
