"""``dmq spool``: what producers' hooks keep on this host, without a daemon. What changes it is in ``spool_change``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer
from typer.core import TyperGroup

from broker_adapter.clock import SystemClock
from dmq.cli import dead as dead_letters
from dmq.cli import output as out
from dmq.cli import spool_change
from dmq.cli.errors import CommandFailed, ExitCode
from dmq.cli.histogram import due_rows
from dmq.cli.options import OutputOption
from dmq.cli.progress import Progress
from dmq.cli.spool_options import (
    ROOT_DEFAULT,
    DeadOption,
    DueOption,
    KeyOption,
    Listing,
    ListingOption,
    Reader,
    RootOption,
    TypeOption,
    as_json,
    chosen_of,
    directories_of,
    line_of,
    listing_of,
    plain,
    silent,
    uid_of,
)
from dmq.units import format_size, parse_size

if TYPE_CHECKING:
    from dmq.spool.inspect import Found

_TABLE_ROWS = 1_000
_BAR_CHARS = 40
_BODY_BYTES = "4KiB"


def mount(group: type[TyperGroup]) -> typer.Typer:
    """Return the commands as a group of their own."""
    made = typer.Typer(
        cls=group, help="Spools of the producer hook on this host; needs no daemon.", rich_markup_mode=None
    )
    for command in (ls, show, stats, verify, export, spool_change.repair, spool_change.requeue, spool_change.adopt):
        made.command(command.__name__)(command)
    return made


def ls(
    ctx: typer.Context,
    *,
    root: RootOption = ROOT_DEFAULT,
    type_name: TypeOption = None,
    key: KeyOption = None,
    dead: DeadOption = False,
    due_before: DueOption = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of rows.")] = 50,
    output: ListingOption = None,
) -> None:
    """List waiting entries by directory, next due first.

    Running processes are included. Unreadable entries are skipped; the exit code is 1 then.
    """
    listing = listing_of(ctx, output)
    chosen = chosen_of(type_name, key, is_dead=dead, due_before=due_before)
    reader = Reader(root)
    with silent(), closing(reader.entries(chosen)) as entries:
        count = _show_list(islice(entries, limit), listing)
    if count == limit:
        typer.echo(f"dmq: the first {limit:,}; --limit shows more", err=True)
    reader.raise_if_failed()


def show(
    ctx: typer.Context,
    *,
    uid: Annotated[str, typer.Argument(metavar="UID", help="Uid of the entry.")],
    root: RootOption = ROOT_DEFAULT,
    body_bytes: Annotated[
        str, typer.Option("--bytes", metavar="SIZE", help="Maximum size of the body shown.")
    ] = _BODY_BYTES,
    as_hex: Annotated[bool, typer.Option("--hex", help="Show the body in hex.")] = False,
    output: OutputOption = None,
) -> None:
    """Show one entry, its body as JSON, text or hex.

    JSON is always a list: an entry can be in two directories after a crash.
    """
    wanted = uid_of(uid)
    try:
        limit = parse_size(body_bytes)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--bytes") from error
    reader = Reader(root)
    with silent():
        every = reader.entries(chosen_of(None, None, is_dead=None, due_before=None))
        found = [pair for pair in every if pair[1].entry.uid == wanted]
    if not found:
        reader.raise_if_failed()
        raise CommandFailed(f"there is no entry {uid} in {out.printable(str(root))}", ExitCode.NOT_FOUND)
    if as_json(ctx, output):
        out.show_json([plain(each, path, with_body=True) for path, each in found])
    else:
        now_ms = SystemClock().now_ms()
        for number, (path, each) in enumerate(found):
            if number:
                typer.echo()
            out.show_facts(_facts(each, path, now_ms))
            typer.echo(_body(each.entry.payload, limit, as_hex=as_hex))
    reader.raise_if_failed()


def stats(ctx: typer.Context, *, root: RootOption = ROOT_DEFAULT, output: OutputOption = None) -> None:
    """Count the entries of each directory by type, with its owner and when they are due.

    The directories keep these figures themselves; no entry is read.
    """
    from dmq.errors import StoreError
    from dmq.spool.copies import holder
    from dmq.spool.figures import TypeFigures, figures_of
    from dmq.spool.inspect import strict_look

    clock = SystemClock()
    known: list[tuple[Path, str, list[TypeFigures]]] = []
    paths = directories_of(root)
    with silent(), Progress(str(root), quiet=as_json(ctx, output)) as progress:
        for path in paths:
            progress.show(path.name, done=len(known), of=len(paths))
            try:
                with strict_look(path, clock) as look:
                    figures = figures_of(look)
                pid = holder(path)
                known.append((path, f"pid {pid}" if pid else "free", figures))
            except StoreError as error:
                known.append((path, f"damaged: {error}", []))
    now_ms = clock.now_ms()
    if as_json(ctx, output):
        out.show_json(
            [
                {
                    "directory": path.name,
                    "state": state,
                    "types": [
                        each._asdict() | {"due": [{"until_ms": until, "count": count} for until, count in each.due]}
                        for each in figures
                    ],
                }
                for path, state, figures in known
            ]
        )
        return
    out.show_table(
        ("DIRECTORY", "STATE", "TYPE", "WAITING", "PARKED", "BYTES", "DEAD", "OLDEST"),
        [
            (
                *(path.name, state, each.type_name, f"{each.waiting:,}", f"{each.parked:,}", format_size(each.bytes)),
                *(f"{each.dead:,}", out.when(each.oldest_at_ms, now_ms)),
            )
            for path, state, figures in known
            for each in figures or [TypeFigures("", 0, 0, 0, 0, 0, [])]
        ],
        numbers=("WAITING", "PARKED", "BYTES", "DEAD"),
    )
    every = [each for _, _, figures in known for each in figures]
    rows = due_rows(
        [pair for each in every for pair in each.due], sum(each.waiting - each.parked for each in every), now_ms
    )
    if rows:
        most = max(row.messages for row in rows)
        typer.echo()
        out.show_table(
            ("DUE", "ENTRIES", ""),
            [(row.label, f"{row.messages:,}", "#" * -(-row.messages * _BAR_CHARS // most)) for row in rows],
            numbers=("ENTRIES",),
        )


def verify(ctx: typer.Context, *, root: RootOption = ROOT_DEFAULT, output: OutputOption = None) -> None:
    """Read every row of every directory and report damage; exit with 1 if there is any.

    Totals, index, timeline, lanes and trail must agree, and every entry must make sense. Works on copies, so also while
    producers run.
    """
    from dmq.errors import StoreError
    from dmq.spool.figures import Verifier
    from dmq.spool.inspect import strict_look

    answers: list[dict[str, object]] = []
    with silent(), Progress(f"verify {root}", quiet=as_json(ctx, output)) as progress:
        for path in directories_of(root):
            progress.show(path.name)
            verifier: Verifier | None = None
            try:
                with strict_look(path, SystemClock()) as look:
                    verifier = Verifier(look, lambda text, name=path.name: progress.show(f"{name}: {text}"))  # type: ignore[misc]
                    findings = verifier.run()
            except StoreError as error:
                findings = [str(error)]
            answers.append(
                {
                    "directory": path.name,
                    "rows": verifier.rows if verifier is not None else 0,
                    "waiting": verifier.waiting if verifier is not None else 0,
                    "dead": verifier.dead if verifier is not None else 0,
                    "findings": findings,
                }
            )
    wrong = [each for each in answers if each["findings"]]
    if as_json(ctx, output):
        out.show_json(answers)
    else:
        for each in answers:
            figures = f"{each['rows']:,} rows, {each['waiting']:,} waiting, {each['dead']:,} dead"
            typer.echo(f"{each['directory']}: {figures}: {'NOT whole' if each['findings'] else 'whole'}")
            for finding in each["findings"] if isinstance(each["findings"], list) else ():
                typer.echo(f"  {out.printable(str(finding))}")
    if wrong:
        text = f"{len(wrong)} of {len(answers)} directories are not whole; 'dmq spool repair' saves what can be read"
        raise CommandFailed(text)


def export(
    ctx: typer.Context,
    *,
    root: RootOption = ROOT_DEFAULT,
    type_name: TypeOption = None,
    key: KeyOption = None,
    due_before: DueOption = None,
    dead: Annotated[bool, typer.Option("--dead", help="The dead set alone.")] = False,
    file: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Output file, written whole or not at all.  [default: stdout]"),
    ] = None,
    output: OutputOption = None,
) -> None:
    """Write entries as JSON Lines, with their bodies in base64, and as text where they are text.

    Without a filter: all that wait, and the dead set. Damaged directories as well, as far as they can be read: then it
    ends with 1. A file appears under its name when it is complete, readable by its owner only.
    """
    chosen = chosen_of(type_name, key, is_dead=True if dead else None, due_before=due_before)
    reader = Reader(root)
    count = 0
    quiet = as_json(ctx, output) or (file is None and sys.stdout.isatty())
    with silent(), Progress(f"export of {root}", quiet=quiet) as progress, _lines(file) as lines:
        for path, found in reader.entries(chosen):
            lines.write(line_of(plain(found, path, with_body=True)) + "\n")
            count += 1
            progress.show(f"{count:,} entries")
    if file is not None:
        if as_json(ctx, output):
            out.show_json({"file": str(file), "entries": count})
        else:
            typer.echo(out.printable(f"{count:,} entr{'y' if count == 1 else 'ies'} in {file}"))
    reader.raise_if_failed()


def _lines(file: Path | None) -> AbstractContextManager[TextIO]:
    return dead_letters._complete_file(file) if file is not None else dead_letters._stdout()


def _show_list(entries: Iterator[tuple[Path, Found]], listing: Listing) -> int:
    """Print entries as they are read; return how many that were."""
    count = 0
    if listing is Listing.TABLE:
        while page := list(islice(entries, _TABLE_ROWS)):  # each a table: widths of all would need all
            count += len(page)
            out.show_table(
                ("DUE AT", "TYPE", "UID", "KEY", "STATE", "MADE", "ATTEMPTS", "LAST ERROR"),
                [_cells(found) for _, found in page],
                numbers=("ATTEMPTS",),
            )
        return count
    for path, found in entries:
        if listing is Listing.JSON:
            text = json.dumps(plain(found, path), indent=2, ensure_ascii=False).replace("\n", "\n  ")
            typer.echo(f"{',' if count else '['}\n  {text}", nl=False)
        else:
            typer.echo(found.entry.uid.hex() if listing is Listing.ID else line_of(plain(found, path)))
        count += 1
    if listing is Listing.JSON:
        typer.echo("\n]" if count else "[]")
    return count


def _cells(found: Found) -> tuple[str, ...]:
    entry = found.entry
    state = found.dead.death.name.lower() if found.dead is not None else found.state.value
    return (
        *(out.when(entry.due_at_ms), entry.type_name, entry.uid.hex(), entry.key, state),
        *(out.when(entry.created_at_ms), str(entry.attempts), entry.error),
    )


def _facts(found: Found, path: Path, now_ms: int) -> list[tuple[str, str]]:
    entry, dead = found.entry, found.dead
    return [
        ("uid", entry.uid.hex()),
        ("type", entry.type_name),
        ("key", entry.key),
        ("state", found.state.value),
        ("directory", path.name),
        ("made", out.when(entry.created_at_ms, now_ms)),
        ("due", out.when(entry.due_at_ms, now_ms) if dead is None else ""),
        ("attempts", f"{entry.attempts}{', the last one in doubt' if entry.is_uncertain else ''}"),
        ("last error", entry.error),
        ("died", f"{out.when(dead.died_at_ms, now_ms)}: {dead.death.name.lower()}" if dead is not None else ""),
        ("body size", f"{len(entry.payload):,} B"),
    ]


def _body(body: bytes, limit: int, *, as_hex: bool) -> str:
    """Return a body for people: JSON indented, text as it is, anything else in hex, 32 bytes to a line."""
    text: str | None = None
    if not as_hex:
        try:
            text = body.decode()
            text = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
        except ValueError:
            pass  # no JSON, or no text at all
    if text is None:
        shown = body[:limit]
        lines = [shown[at : at + 32].hex(" ", -4) for at in range(0, len(shown), 32)]
        left = len(body) - len(shown)
    else:
        raw = text.encode()
        lines = [out.printable(line) for line in raw[:limit].decode(errors="ignore").split("\n")]
        left = max(0, len(raw) - limit)
    return "\n".join(["", *lines, *([f"... {left:,} more bytes; --bytes shows more"] if left else [])])
