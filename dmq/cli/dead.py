"""``dmq dead``: dead letters. What is done with them in bulk is in ``dmq.cli.jobs``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from dmq.cli import output as out
from dmq.cli.content import content_facts
from dmq.cli.dead_filter import (
    IdsOption,
    KeyOption,
    ReasonOption,
    SinceOption,
    TopicOption,
    UntilOption,
    filter_of,
    letters_of,
)
from dmq.cli.errors import CommandFailed, ExitCode
from dmq.cli.options import AddressOption, OutputOption, TimeoutOption, session_of
from dmq.cli.progress import Progress

if TYPE_CHECKING:
    from dmq.admin import admin_v1 as wire

GroupArgument = Annotated[str, typer.Argument(metavar="GROUP", help="The consumer group.")]


def groups(
    ctx: typer.Context,
    address: AddressOption = None,
    output: OutputOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """List the groups that have dead letters without an outcome, and how many. Removed groups are listed as well."""
    session = session_of(ctx, address, output, timeout)
    with session.connect() as client:
        found = [group for group in client.groups(with_removed=True) if group.dead]
    if session.as_json:
        out.show_json([{"group": group.name, "dead": group.dead, "removed": group.is_removed} for group in found])
    else:
        rows = [(group.name, f"{group.dead:,}", "removed" if group.is_removed else "") for group in found]
        out.show_table(("GROUP", "DEAD", "STATE"), rows, numbers=("DEAD",))


def ls(
    ctx: typer.Context,
    *,
    group: GroupArgument,
    reason: ReasonOption = None,
    topic: TopicOption = None,
    key: KeyOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    limit: Annotated[int, typer.Option(min=1, help="How many at most.")] = 50,
    all_outcomes: Annotated[
        bool, typer.Option("--all-outcomes", help="Those as well that were redriven or purged.")
    ] = False,
    address: AddressOption = None,
    output: OutputOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """List the dead letters of a group, the oldest death first."""
    session = session_of(ctx, address, output, timeout)
    with session.connect() as client, Progress(f"dead letters of {group}", quiet=session.as_json) as progress:
        chosen = filter_of(client, reason=reason, topic=topic, key=key, since=since, until=until)
        found: list[wire.DeadLetter] = []
        for letter in letters_of(client, group, chosen, limit=limit, with_outcome=all_outcomes):
            found.append(letter)
            progress.show(f"{len(found):,} found")
    if session.as_json:
        out.show_json([out.to_plain(letter) for letter in found])
        return
    headings = ("DEAD AT", "LAST FAILED", "TOPIC", "MESSAGE ID", "REASON", "ATTEMPTS", "TAG", "KEYS")
    out.show_table(
        (*headings, "OUTCOME") if all_outcomes else headings,
        [(*_cells(letter), *((letter.outcome,) if all_outcomes else ())) for letter in found],
        numbers=("ATTEMPTS",),
    )
    if len(found) == limit:
        typer.echo(f"dmq: the first {limit:,}; --limit shows more", err=True)


def show(
    ctx: typer.Context,
    *,
    group: GroupArgument,
    message_id: Annotated[str, typer.Argument(metavar="MESSAGE_ID", help="Its message id.")],
    body: Annotated[bool, typer.Option("--body", help="Show the body as well (base64 in JSON).")] = False,
    address: AddressOption = None,
    output: OutputOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Show a dead letter: where it came from, why and when it died, what became of it, and what it is.

    A message that died more than once is shown once for each death; JSON is always a list.
    """
    session = session_of(ctx, address, output, timeout)
    with session.connect() as client, Progress(f"dead letters of {group}", quiet=session.as_json):
        chosen = filter_of(client, ids=[message_id])
        found = list(letters_of(client, group, chosen, with_outcome=True, with_body=body))
        now_ms = client.status().now_ms
    if not found:
        text = f"message {message_id} is no dead letter of group {group}"
        raise CommandFailed(out.printable(text), ExitCode.NOT_FOUND)
    if session.as_json:
        out.show_json([out.to_plain(letter) for letter in found])
        return
    for number, letter in enumerate(found):
        if number:
            typer.echo()
        out.show_facts(_facts(letter, now_ms))


def export(
    ctx: typer.Context,
    *,
    group: GroupArgument,
    reason: ReasonOption = None,
    topic: TopicOption = None,
    key: KeyOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    message_id: IdsOption = None,
    file: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write here, all or nothing.  [default: stdout]")
    ] = None,
    address: AddressOption = None,
    output: OutputOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Write dead letters as JSON Lines, with their bodies in base64.

    Without a filter: all of the group. Those that were redriven or purged are left out. A file appears under its name
    when it is complete, readable by its owner only.
    """
    session = session_of(ctx, address, output, timeout)
    count = unreadable = 0
    with (
        session.connect() as client,
        Progress(f"export of {group}", quiet=session.as_json or (file is None and sys.stdout.isatty())) as progress,
    ):
        chosen = filter_of(client, reason=reason, topic=topic, key=key, since=since, until=until, ids=message_id)
        with _complete_file(file) if file is not None else _stdout() as lines:
            for letter in letters_of(client, group, chosen, with_body=True):
                # Escaped as ASCII: exact, whatever the terminal or its encoding make of other characters.
                lines.write(json.dumps(out.to_plain(letter), separators=(",", ":")) + "\n")
                count += 1
                unreadable += not letter.HasField("content")
                progress.show(f"{count:,} letters")
    if file is not None:
        _show_exported(group, file, count, unreadable, as_json=session.as_json)
    if unreadable:
        raise CommandFailed(f"{unreadable:,} of {count:,} cannot be read, their content is null")


def _show_exported(group: str, file: Path, count: int, unreadable: int, *, as_json: bool) -> None:
    if as_json:
        out.show_json({"group": group, "file": str(file), "letters": count, "unreadable": unreadable})
    else:
        typer.echo(out.printable(f"{count:,} dead letter{'' if count == 1 else 's'} of {group} in {file}"))


@contextmanager
def _stdout() -> Iterator[TextIO]:
    yield sys.stdout
    sys.stdout.flush()  # here, where a reader that left is an error of the command and not of the interpreter's end


@contextmanager
def _complete_file(path: Path) -> Iterator[TextIO]:
    """Give a file that takes its name when it is written and synced, and is removed if that fails."""
    import tempfile

    target = path.resolve()
    if target.exists() and not target.is_file():  # a device would be replaced by the file
        raise typer.BadParameter(f"{out.printable(str(path))} is there and is no file", param_hint="--out")
    if not target.parent.is_dir():
        raise typer.BadParameter(f"there is no directory {out.printable(str(path.parent))}", param_hint="--out")
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    part = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _cells(letter: wire.DeadLetter) -> tuple[str, ...]:
    return (
        *(out.when(letter.dead_at_ms), out.when(letter.last_failed_at_ms), letter.origin_topic, letter.message_id),
        *(_reason(letter), f"{letter.attempts}", letter.tag, " ".join(letter.keys)),
    )


def _reason(letter: wire.DeadLetter) -> str:
    name = str(out.to_plain(letter)["reason"])
    return "sent here" if name == "REASON_UNSPECIFIED" else name.lower()


def _facts(letter: wire.DeadLetter, now_ms: int) -> list[tuple[str, str]]:
    note = f": {letter.outcome_note}" if letter.outcome_note else ""
    facts = [
        ("message id", letter.message_id),
        ("origin topic", letter.origin_topic),
        ("reason", _reason(letter)),
        ("attempts", str(letter.attempts)),
        ("first failed", out.when(letter.first_failed_at_ms, now_ms)),
        ("last failed", out.when(letter.last_failed_at_ms, now_ms)),
        ("dead at", out.when(letter.dead_at_ms, now_ms)),
        ("offset", str(letter.offset)),
        ("outcome", f"{letter.outcome} {out.when(letter.outcome_at_ms, now_ms)}{note}" if letter.outcome else "none"),
    ]
    is_purged = letter.outcome == "purged"
    if letter.HasField("content"):
        removed = is_purged and not letter.content.body_bytes
        return [*facts, *content_facts(letter.content), ("message", "its body went with its purge" if removed else "")]
    why = "gone with its purge" if is_purged else "CANNOT BE READ, the stored bytes are damaged"
    return [*facts, ("tag", letter.tag), ("keys", " ".join(letter.keys)), ("message", why)]
