"""What the commands on a spool have in common: where it is, which entries are meant, how an entry looks."""

from __future__ import annotations

import base64
import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from broker_adapter.clock import SystemClock
from dmq.cli import output as out
from dmq.cli.errors import CommandFailed, ExitCode
from dmq.cli.options import Output, session_of
from dmq.cli.times import After, parse_when
from dmq.units import parse_duration

if TYPE_CHECKING:
    from dmq.errors import StoreError
    from dmq.spool.inspect import Found

UID_DIGITS = 32


class Listing(StrEnum):
    """How a list is answered."""

    TABLE = "table"
    JSON = "json"
    JSONL = "jsonl"  # one object a line
    ID = "id"  # uids alone


RootOption = Annotated[
    Path, typer.Option("--root", envvar="DMQ_SPOOL", metavar="DIR", help="Folder of the spool.", show_envvar=True)
]
ROOT_DEFAULT = Path("var/spool")
ListingOption = Annotated[Listing | None, typer.Option("--output", "-o", help="How to answer.  [default: table]")]
TypeOption = Annotated[list[str] | None, typer.Option("--type", metavar="TYPE", help="Entry type; may be repeated.")]
KeyOption = Annotated[list[str] | None, typer.Option("--key", metavar="KEY", help="With this key; may be repeated.")]
DeadOption = Annotated[bool, typer.Option("--dead", help="List the dead set instead.")]
DueOption = Annotated[
    str | None,
    typer.Option("--due-before", metavar="TIME", help="Due before: RFC 3339, epoch milliseconds, +5m or -1h from now."),
]
YesOption = Annotated[
    bool, typer.Option("--yes", "-y", help="Do not ask for confirmation; required without a terminal.")
]


class Chosen(NamedTuple):
    """Which entries a command means."""

    types: frozenset[str]
    keys: frozenset[str]
    is_dead: bool | None  # None: both
    due_before_ms: int | None

    def of(self, found: Found) -> bool:
        """Say whether an entry is meant."""
        entry = found.entry
        return (
            (not self.types or entry.type_name in self.types)
            and (not self.keys or entry.key in self.keys)
            and (self.due_before_ms is None or entry.due_at_ms < self.due_before_ms)
            and (self.is_dead is None or self.is_dead == (found.dead is not None))
        )


def chosen_of(
    types: list[str] | None, keys: list[str] | None, *, is_dead: bool | None, due_before: str | None
) -> Chosen:
    """Return what the options mean; a usage error for a time that is none."""
    return Chosen(frozenset(types or ()), frozenset(keys or ()), is_dead, instant_ms(due_before))


def instant_ms(text: str | None, option: str = "--due-before") -> int | None:
    """Return the time that ``option`` means; a usage error for one that is none."""
    if text is None:
        return None
    now_ms = SystemClock().now_ms()
    try:
        if text.startswith("-"):
            return max(1, now_ms - parse_duration(text[1:]))
        instant = parse_when(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error
    return now_ms + instant.delay_ms if isinstance(instant, After) else instant.epoch_ms


def uid_of(text: str) -> bytes:
    """Return the uid that ``text`` means: 32 hex digits, with or without dashes."""
    digits = text.replace("-", "")
    try:
        if len(digits) != UID_DIGITS:
            raise ValueError
        return bytes.fromhex(digits)
    except ValueError:
        raise typer.BadParameter(
            f"{out.printable(text)} is no uid, which has 32 hex digits", param_hint="UID"
        ) from None


def listing_of(ctx: typer.Context, given: Listing | None) -> Listing:
    """Return how to answer: as given here, else as given before the command."""
    return given or Listing(session_of(ctx).output)


def as_json(ctx: typer.Context, given: Output | None) -> bool:
    """Say whether the answer is for a program."""
    return session_of(ctx, output=given).as_json


def directories_of(root: Path) -> list[Path]:
    """Return the directories of the spool; the command ends if there is no such folder."""
    from dmq.spool.copies import directories

    if not root.is_dir():
        raise CommandFailed(f"there is no spool at {out.printable(str(root))}", ExitCode.NOT_FOUND)
    return directories(root)


def in_use(error: StoreError) -> CommandFailed:
    """Return the refusal for a directory that another process uses: the same command may work later."""
    return CommandFailed(out.printable(str(error)), ExitCode.UNAVAILABLE)


def plain(found: Found, directory: Path, *, with_body: bool = False) -> dict[str, object]:
    """Return an entry as JSON values: always the same keys, bytes in base64, text as well where they are text."""
    entry, dead = found.entry, found.dead
    made: dict[str, object] = {
        "directory": directory.name,
        "state": found.state.value,
        "type": entry.type_name,
        "uid": entry.uid.hex(),
        "key": entry.key,
        "created_at_ms": entry.created_at_ms,
        "due_at_ms": entry.due_at_ms,
        "attempts": entry.attempts,
        "is_uncertain": entry.is_uncertain,
        "error": entry.error,
        "death": dead.death.name.lower() if dead is not None else None,
        "died_at_ms": dead.died_at_ms if dead is not None else None,
        "body_bytes": len(entry.payload),
    }
    if with_body:
        made["body"] = base64.b64encode(entry.payload).decode()
        try:
            made["body_text"] = entry.payload.decode()
        except UnicodeDecodeError:
            made["body_text"] = None
    return made


class Reader:
    """Reads the entries of every directory, one after the other, and remembers what could not be read."""

    def __init__(self, root: Path) -> None:
        self._paths = directories_of(root)
        self.failures = 0

    def entries(self, chosen: Chosen) -> Generator[tuple[Path, Found], None, None]:
        """Give the entries that are meant, each with its directory; close this if it is not read to its end."""
        from dmq.errors import StoreError
        from dmq.spool.inspect import How, look

        for path in self._paths:
            try:
                with look(path, SystemClock()) as opened:
                    parts = [opened.waiting, opened.parked] if not chosen.is_dead else []
                    parts += [opened.dead] if chosen.is_dead is not False else []
                    for part in parts:
                        for found in part():
                            if chosen.of(found):
                                yield path, found
                    if opened.how is not How.STRICT:
                        self._fail(f"{opened.error}; read {opened.how}")
                    for hole in opened.holes:
                        self._fail(f"{path}: {hole} cannot be read: {hole.error}")
                    for row in opened.unreadable:
                        self._fail(f"{path}: {row.family.name.lower()} {row.key.hex()} is no entry: {row.error}")
            except StoreError as error:
                self._fail(str(error))

    def _fail(self, text: str) -> None:
        self.failures += 1
        typer.echo(f"dmq: {out.printable(text)}", err=True)

    def raise_if_failed(self) -> None:
        """End the command if something could not be read."""
        if self.failures:
            raise CommandFailed("not everything can be read; 'dmq spool repair' saves what can")


def line_of(value: object) -> str:
    """Return one JSON value on one line, escaped as ASCII: exact, whatever a terminal makes of other characters."""
    return json.dumps(value, separators=(",", ":"))


@contextmanager
def silent() -> Iterator[None]:
    """Keep what a store logs out of the answer: the command says itself what matters."""
    import structlog

    was = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))  # nothing of ours is that
    try:
        yield
    finally:
        structlog.configure(**was)
