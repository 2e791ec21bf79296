"""``dmq spool``: the local stores of producers' hooks on this host, without a daemon. Only unused directories
change.
"""

from __future__ import annotations

import base64
import json
import re
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from broker_adapter.runtime.clock import SystemClock
from dmq.cli.bulk.confirm import confirm
from dmq.cli.bulk.engine import check_missing, is_confirmed
from dmq.cli.bulk.progress import Progress
from dmq.cli.nouns import noun
from dmq.cli.output import output as out
from dmq.cli.output.errors import CommandFailed, ExitCode, refused, refusing
from dmq.cli.output.files import lines_into
from dmq.cli.output.histogram import show_due
from dmq.cli.output.times import instant_ms
from dmq.cli.session.offline import offline
from dmq.cli.session.options import (
    Consent,
    JsonOption,
    KeysOption,
    LimitOption,
    OptionGroup,
    OutFileOption,
    Session,
    session_of,
    with_options,
    with_output,
    with_watch,
)
from dmq.config.units import format_size, parse_size

if TYPE_CHECKING:
    from broker_adapter.runtime.clock import Clock
    from dmq.recovery import FoundEntry, Report, Tell, TypeFigures

app = noun("spool")

_TABLE_ROWS = 1_000
_BODY_BYTES = "4KiB"
_UID = re.compile("[0-9a-fA-F]{32}")
_NAMED_MAX = 20
_ROOT = Path("var/spool")


class Listing(StrEnum):
    """Output format of a list."""

    TABLE = "table"
    JSON = "json"
    JSONL = "jsonl"  # one object a line
    ID = "id"  # uids alone


RootOption = Annotated[
    Path, typer.Option("--root", envvar="DMQ_SPOOL", metavar="DIR", help="Folder of the spool.", show_envvar=True)
]
ListingOption = Annotated[Listing | None, typer.Option("--output", "-o", help="Output format.  [default: table]")]
TypeOption = Annotated[list[str] | None, typer.Option("--type", metavar="TYPE", help="Entry type; may be repeated.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryFilter(OptionGroup):
    """Options that select entries."""

    type_name: TypeOption = None
    key: KeysOption = None
    due_before: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Only entries due before: RFC 3339, epoch milliseconds, +5m or -1h from now."
        ),
    ] = None

    def matcher(self, *, is_dead: bool | None) -> Callable[[FoundEntry], bool]:
        """Return the filter; ``is_dead`` is None for both sets. Raise a usage error for an invalid time."""
        due_before_ms = instant_ms(self.due_before, "--due-before")

        def is_match(found: FoundEntry) -> bool:
            entry = found.entry
            return (
                (not self.type_name or entry.type_name in self.type_name)
                and (not self.key or entry.key in self.key)
                and (due_before_ms is None or entry.due_at_ms < due_before_ms)
                and (is_dead is None or is_dead == (found.dead is not None))
            )

        return is_match


class _Reader:
    """Reader of the entries of all directories, one after the other. It records unreadable ones."""

    def __init__(self, root: Path) -> None:
        self._paths = _directories_of(root)
        self._exit_code = ExitCode.OK

    def entries(self, options: EntryFilter, *, is_dead: bool | None) -> Generator[tuple[Path, FoundEntry], None, None]:
        """Yield the matching entries, each with its directory. Close the generator if it is not exhausted."""
        from dmq.errors import StoreCorrupt, StoreError
        from dmq.recovery import How, SpoolLook

        is_match = options.matcher(is_dead=is_dead)
        for path in self._paths:
            try:
                with SpoolLook.opened(path, SystemClock()) as opened:
                    parts = [opened.waiting, opened.parked] if not is_dead else []
                    parts += [opened.dead] if is_dead is not False else []
                    for part in parts:
                        yield from ((path, found) for found in part() if is_match(found))
                    if opened.how is not How.STRICT:
                        self._fail(f"{opened.error}; read {opened.how}")
                    for hole in opened.holes:
                        self._fail(f"{path}: {hole} cannot be read: {hole.error}")
                    for row in opened.unreadable:
                        self._fail(f"{path}: {row.family.name.lower()} {row.key.hex()} is no entry: {row.error}")
            except StoreCorrupt as error:
                self._fail(str(error))
            except StoreError as error:
                self._fail(str(error), ExitCode.FAILURE)

    def _fail(self, text: str, exit_code: ExitCode = ExitCode.DAMAGED) -> None:
        self._exit_code = max(self._exit_code, exit_code)
        out.note(text)

    def raise_if_failed(self) -> None:
        """End the command if a directory or entry could not be read."""
        if self._exit_code:
            raise CommandFailed(
                "not everything can be read; 'dmq spool salvage' recovers the readable entries", self._exit_code
            )


@app.command()
@with_watch
@with_options
def ls(
    ctx: typer.Context,
    *,
    root: RootOption = _ROOT,
    options: EntryFilter,
    dead: Annotated[bool, typer.Option("--dead", help="List the dead set instead of waiting entries.")] = False,
    limit: LimitOption = 50,
    output: ListingOption = None,
    json: JsonOption = False,
) -> None:
    """List waiting entries by directory, next due first.

    Directories of running processes are included. Unreadable entries are omitted; the exit code is then 4.
    """
    listing = _listing_of(ctx, output, json=json)
    reader = _Reader(root)
    with offline(), closing(reader.entries(options, is_dead=dead)) as entries:
        count = _show_list(islice(entries, limit), listing)
    if count == limit:
        out.note(f"the first {limit:,}; --limit shows more")
    reader.raise_if_failed()


@app.command()
@with_output
def show(
    session: Session,
    *,
    uid: Annotated[str, typer.Argument(metavar="UID", help="Uid of the entry.")],
    root: RootOption = _ROOT,
    body_bytes: Annotated[
        str, typer.Option("--bytes", metavar="SIZE", help="Maximum size of the body shown.")
    ] = _BODY_BYTES,
    as_hex: Annotated[bool, typer.Option("--hex", help="Show the body in hex.")] = False,
) -> None:
    """Show one entry, its body as JSON, text or hex.

    The JSON output is always a list, because after a crash an entry can be in two directories.
    """
    wanted = _uid_of(uid)
    with refusing("--bytes", body_bytes):
        limit = parse_size(body_bytes)
    reader = _Reader(root)
    with offline():
        found = [pair for pair in reader.entries(EntryFilter(), is_dead=None) if pair[1].entry.uid == wanted]
    if not found:
        reader.raise_if_failed()
        raise CommandFailed(f"there is no entry {uid} in {root}", ExitCode.NOT_FOUND)
    if session.as_json:
        out.show_json([_plain(each, path, with_body=True) for path, each in found])
    else:
        now_ms = SystemClock().now_ms()
        for number, (path, each) in enumerate(found):
            if number:
                typer.echo()
            out.show_facts(_facts(each, path, now_ms))
            typer.echo(_body(each.entry.payload, limit, as_hex=as_hex))
    reader.raise_if_failed()


@app.command()
@with_watch
@with_output
def stats(session: Session, *, root: RootOption = _ROOT) -> None:
    """Count the entries of each directory by type and due time.

    The owner of each directory is shown. Each directory stores these counts; no entry is read.
    """
    from dmq.errors import StoreError
    from dmq.producer_store import holder
    from dmq.recovery import SpoolLook, TypeFigures, figures_of

    clock = SystemClock()
    known: list[tuple[Path, str, list[TypeFigures]]] = []
    paths = _directories_of(root)
    with offline(), Progress(str(root), quiet=session.as_json) as progress:
        for path in paths:
            progress.show(path.name, done=len(known), of=len(paths))
            try:
                with SpoolLook.strictly(path, clock) as look:
                    figures = figures_of(look)
                pid = holder(path)
                known.append((path, f"pid {pid}" if pid else "free", figures))
            except StoreError as error:
                known.append((path, f"damaged: {error}", []))
    now_ms = clock.now_ms()
    plain = [
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
    session.show_table(
        plain,
        ("DIRECTORY", "STATE", "TYPE", "WAITING", "PARKED", "BYTES", "DEAD", "OLDEST"),
        [
            (
                *(path.name, state, each.type_name, f"{each.waiting:,}", f"{each.parked:,}", format_size(each.bytes)),
                *(f"{each.dead:,}", out.distance(each.oldest_at_ms, now_ms)),
            )
            for path, state, figures in known
            for each in figures or [TypeFigures("", 0, 0, 0, 0, 0, [])]
        ],
        numbers=("WAITING", "PARKED", "BYTES", "DEAD"),
        details=("BYTES", "PARKED"),
    )
    every = [each for _, _, figures in known for each in figures]
    if not session.as_json:
        due = [pair for each in every for pair in each.due]
        show_due("ENTRIES", due, sum(each.waiting - each.parked for each in every), now_ms)


@app.command("verify", hidden=True)  # its name in earlier builds
@app.command()
@with_output
def check(session: Session, *, root: RootOption = _ROOT) -> None:
    """Check each row, block and reference; exit with 4 on damage.

    All directories are checked. Totals, index, timeline, key queues and trail must agree, and every entry must be
    valid. The check reads copies, so it can run while producers run.
    """
    from dmq.errors import StoreError
    from dmq.recovery import SpoolCheck, SpoolLook

    answers: list[dict[str, object]] = []
    with offline(), Progress(f"check of {root}", quiet=session.as_json) as progress:
        for path in _directories_of(root):
            progress.show(path.name)
            checker: SpoolCheck | None = None
            try:
                with SpoolLook.strictly(path, SystemClock()) as look:
                    checker = SpoolCheck(look, lambda text, name=path.name: progress.show(f"{name}: {text}"))  # type: ignore[misc]
                    findings = checker.run().lines()
            except StoreError as error:
                findings = [str(error)]
            answers.append(
                {
                    "directory": path.name,
                    "rows": checker.rows if checker is not None else 0,
                    "waiting": checker.waiting if checker is not None else 0,
                    "dead": checker.dead if checker is not None else 0,
                    "findings": findings,
                }
            )
    wrong = [each for each in answers if each["findings"]]
    if session.as_json:
        out.show_json(answers)
    else:
        for each in answers:
            figures = f"{each['rows']:,} rows, {each['waiting']:,} waiting, {each['dead']:,} dead"
            typer.echo(f"{each['directory']}: {figures}: {'NOT whole' if each['findings'] else 'whole'}")
            for finding in each["findings"] if isinstance(each["findings"], list) else ():
                typer.echo(f"  {out.printable(str(finding))}")
    if wrong:
        text = f"{len(wrong)} of {len(answers)} directories are damaged; 'dmq spool salvage' recovers readable entries"
        raise CommandFailed(text, ExitCode.DAMAGED)


@app.command()
@with_output
def export(
    session: Session,
    *,
    root: RootOption = _ROOT,
    options: EntryFilter,
    dead: Annotated[bool, typer.Option("--dead", help="Only the dead set.")] = False,
    file: OutFileOption = None,
) -> None:
    """Write entries as JSON Lines, with their bodies in base64.

    A body that is text is also written as text. Without a filter, all waiting entries and the dead set are written.
    Damaged directories are read as far as possible; the exit code is then 4. An output file gets its name when it
    is complete. Only its owner can read it.
    """
    reader = _Reader(root)
    count = 0
    quiet = session.as_json or (file is None and sys.stdout.isatty())
    with offline(), Progress(f"export of {root}", quiet=quiet) as progress, lines_into(file) as lines:
        for path, found in reader.entries(options, is_dead=dead or None):
            lines.write(_line_of(_plain(found, path, with_body=True)) + "\n")
            count += 1
            progress.show(f"{count:,} entries")
    if file is not None:
        session.show({"file": str(file), "entries": count}, f"{_entries(count)} in {file}")
    reader.raise_if_failed()


@app.command("repair", hidden=True)  # its name in earlier builds
@app.command()
@with_output
def salvage(
    session: Session,
    *,
    directory: Annotated[
        list[str] | None,
        typer.Argument(metavar="[DIRECTORY]...", help="Directory names.  [default: all unused directories]"),
    ] = None,
    root: RootOption = _ROOT,
    consent: Consent,
) -> None:
    """Recover the readable entries of damaged directories.

    Each readable entry is copied into a new directory. When the copy is complete, the damaged directory is renamed
    to damaged-<id>, with the report in damaged-<id>.json next to it. The command never removes it. Intact
    directories are not changed and need no confirmation. The exit code is 4 if entries are lost.
    """
    from dmq.recovery import looked_through, salvage_spool

    known = {path.name: path for path in _directories_of(root)}
    for name in directory or ():
        if name not in known:
            raise CommandFailed(f"there is no directory {name} in {root}", ExitCode.NOT_FOUND)
    chosen = [known[name] for name in dict.fromkeys(directory or known)]
    reports: list[Report] = []
    used: list[str] = []
    if not consent.yes:
        reports, used = _each(looked_through, chosen, is_named=bool(directory), quiet=session.as_json)
        damaged = [report for report in reports if report.error]
        if damaged and not consent.dry_run:
            names = ", ".join(f"{Path(each.directory).name} ({each.error})" for each in damaged)
            confirm(
                f"the readable entries of {_counted(len(damaged))} of {root} would be recovered: {names}", yes=False
            )
        chosen = [Path(report.directory) for report in damaged]
    if not consent.dry_run and chosen:
        whole = [report for report in reports if not report.error]
        reports, left = _each(salvage_spool, chosen, is_named=bool(directory), quiet=session.as_json)
        reports, used = [*whole, *reports], [*used, *left]
    if session.as_json:
        out.show_json([report.as_json() for report in reports])
    else:
        for report in reports:
            _show_report(report)
    _note_left_alone(used)
    if not all(report.is_whole for report in reports):
        raise CommandFailed("not everything could be saved; see the reports", ExitCode.DAMAGED)


def _each(
    work: Callable[[Path, Clock, Tell], Report], paths: Sequence[Path], *, is_named: bool, quiet: bool
) -> tuple[list[Report], list[str]]:
    """Process each directory; return the reports, and the directories in use unless they were named."""
    from dmq.errors import StoreLocked

    reports: list[Report] = []
    used: list[str] = []
    with offline(), Progress("salvage", quiet=quiet) as progress:
        for path in paths:
            try:
                reports.append(work(path, SystemClock(), _named_tell(progress, path.name)))
            except StoreLocked as error:
                if is_named:
                    raise
                used.append(str(error))
    return reports, used


def _named_tell(progress: Progress, name: str) -> Tell:
    return lambda text: progress.show(f"{name}: {text}")


@app.command()
@with_output
def requeue(
    session: Session,
    *,
    uids: Annotated[list[str] | None, typer.Argument(metavar="[UID]...", help="Uids of the entries.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="The whole dead set.")] = False,
    type_name: TypeOption = None,
    root: RootOption = _ROOT,
    consent: Consent,
) -> None:
    """Make dead entries due now, with their attempts reset.

    Only directories that no process uses are changed. Name the entries, or select the dead set with --all, limited
    by --type. The next process that uses such a directory sends them. The exit code is 7 if some of the named
    entries are not in a dead set.
    """
    from dmq.errors import StoreCorrupt, StoreLocked
    from dmq.producer_store import requeue as requeue_in

    if bool(uids) == everything or (type_name and not everything):
        raise refused("give uids, or --all with an optional --type", "UID", "--all", "--type")
    wanted = {_uid_of(text) for text in uids or ()}
    paths = _directories_of(root)
    if consent.dry_run or (everything and not consent.yes):
        count, missing = _dead_in(paths, wanted, type_name or ())
        of_type = f" of type {', '.join(type_name)}" if type_name else ""
        text = f"{_entries(count, 'dead ')}{of_type} in the free directories of {root} would be sent again"
        plain = _requeued_plain(count, missing) | ({"is_dry_run": True} if consent.dry_run else {})
        if not is_confirmed(session, text, plain, replace(consent, dry_run=consent.dry_run or not count)):
            check_missing("not dead in a free directory", missing, done=count)
            return
    moved, used, exit_code = set[bytes](), list[str](), ExitCode.NOT_FOUND
    with offline(), Progress(f"requeue in {root}", quiet=session.as_json) as progress:
        for path in paths:
            try:
                moved |= requeue_in(path, SystemClock(), wanted, type_name or (), progress.show)
            except StoreLocked as error:
                used.append(str(error))
                exit_code = max(exit_code, ExitCode.UNAVAILABLE)
            except StoreCorrupt as error:
                used.append(f"{path} is damaged: {error}")
                exit_code = max(exit_code, ExitCode.DAMAGED)
    missing = sorted(uid.hex() for uid in wanted - moved)
    if wanted and not moved:
        text = f"not dead in a free directory of {root}: {', '.join(missing)}{_but(used)}"
        raise CommandFailed(text, exit_code)
    _note_left_alone(used)
    text = "1 entry waits again" if len(moved) == 1 else f"{len(moved):,} entries wait again"
    session.show(_requeued_plain(len(moved), missing, used), text)
    check_missing("not dead in a free directory", missing, done=len(moved))
    if exit_code is ExitCode.DAMAGED:
        raise CommandFailed("a directory is damaged; 'dmq spool salvage' recovers the readable entries", exit_code)


def _dead_in(paths: Sequence[Path], wanted: set[bytes], types: Sequence[str]) -> tuple[int, list[str]]:
    """Count dead entries in directories that no process uses; also return the wanted ones that are not dead there."""
    from dmq.errors import StoreCorrupt
    from dmq.producer_store import holder
    from dmq.recovery import SpoolLook

    count, left = 0, set(wanted)
    with offline():
        for path in paths:
            if holder(path):
                continue
            try:
                with SpoolLook.opened(path, SystemClock()) as opened:
                    for found in opened.dead():
                        uid = found.entry.uid
                        count += (uid in left) if wanted else (not types or found.entry.type_name in types)
                        left.discard(uid)
            except StoreCorrupt as error:
                out.note(str(error))
    return count, sorted(uid.hex() for uid in left)


def _requeued_plain(requeued: int, missing: Sequence[str], left_alone: Sequence[str] = ()) -> dict[str, object]:
    return {
        "requeued": requeued,
        "not_found": len(missing),
        "missing": list(missing),
        "left_alone": list(left_alone),
    }


@app.command()
@with_output
def adopt(
    session: Session,
    *,
    root: RootOption = _ROOT,
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="DIR", help="Folder of another spool.  [default: the same spool]"),
    ] = None,
    consent: Consent,
) -> None:
    """Move the entries of all unused directories into one directory.

    A directory is unused if no process uses it. The next process adopts the new directory. With --from, the entries
    come from another spool, for example from the volume of a replaced container. Directories in use and damaged
    ones are not changed; the output names them. The exit code is 4 if a directory is damaged.
    """
    from dmq.producer_store import directories_of, holder

    origin = source or root
    before = _directories_of(origin)
    used = [f"{path.name} is in use by pid {pid}" for path in before if (pid := holder(path))]
    free = [path for path in before if not any(text.startswith(f"{path.name} ") for text in used)]
    is_alone = origin.resolve() == root.resolve() and len(free) < 2
    if not is_alone and free and (consent.dry_run or not consent.yes):
        count = _entries_in(free)
        text = f"{_entries(count)} of {_counted(len(free))} of {origin} would be moved into one of {root}"
        plain = {"into": "", "entries": count, "adopted": [path.name for path in free], "left_alone": used}
        if not is_confirmed(session, text, plain | {"is_dry_run": True}, consent, asks=bool(count)):
            _note_left_alone(used)
            return
    into, moved, adopted, damaged = free[0].name if is_alone and free else "", 0, list[str](), list[str]()
    if not is_alone and free:
        into, moved, damaged = _adopt(root, origin, _counted(len(free)), quiet=session.as_json)
        adopted = sorted({path.name for path in before} - {path.name for path in directories_of(origin)})
    left = used + damaged
    if adopted:
        text = f"{_entries(moved)} of {_counted(len(adopted))} now in {root / into}"
    else:
        why = "only one directory is free" if free and origin == root else "no directory is free"
        text = f"nothing to take over in {origin}: {why}"
    session.show({"into": into, "entries": moved, "adopted": adopted, "left_alone": left}, text)
    _note_left_alone(left)
    if damaged:
        text = "not everything could be taken over; 'dmq spool salvage' recovers the readable entries"
        raise CommandFailed(text, ExitCode.DAMAGED)


def _entries_in(paths: Sequence[Path]) -> int:
    """Count the entries of directories by their own figures; damaged directories are skipped."""
    from dmq.errors import StoreError
    from dmq.recovery import SpoolLook, figures_of

    count = 0
    with offline():
        for path in paths:
            with suppress(StoreError), SpoolLook.strictly(path, SystemClock()) as look:
                count += sum(each.waiting + each.dead for each in figures_of(look))
    return count


def _note_left_alone(texts: Sequence[str]) -> None:
    for text in texts:
        out.note(f"skipped: {text}")


def _uid_of(text: str) -> bytes:
    """Return the uid of ``text``: 32 hex digits, with or without dashes."""
    digits = text.replace("-", "")
    if not _UID.fullmatch(digits):
        raise refused("a uid of 32 hex digits is expected", "UID", given=text)
    return bytes.fromhex(digits)


def _listing_of(ctx: typer.Context, given: Listing | None, *, json: bool) -> Listing:
    """Return the output format: the option of the command, else the global one."""
    if json and given not in {None, Listing.JSON}:
        raise refused("it is the same as -o json", "--json", "--output")
    return Listing.JSON if json else given or Listing(session_of(ctx).output)


def _directories_of(root: Path) -> list[Path]:
    """Return the directories of the spool; the command ends if the folder does not exist."""
    from dmq.producer_store import LOCK_FILE, directories_of

    if not root.is_dir():
        raise CommandFailed(f"there is no spool at {root}", ExitCode.NOT_FOUND)
    found = directories_of(root)
    if not found and not (root / LOCK_FILE).exists():
        text = f"there is no spool at {root}: no process ever made a directory spool-... in it"
        raise CommandFailed(text, ExitCode.NOT_FOUND)
    return found


def _plain(found: FoundEntry, directory: Path, *, with_body: bool = False) -> dict[str, object]:
    """Return an entry as JSON values: always the same keys, bytes in base64 and, if they are valid text, also
    as text.
    """
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


def _line_of(value: object) -> str:
    """Return one JSON value on one line, escaped as ASCII: exact on every terminal."""
    return json.dumps(value, separators=(",", ":"))


def _show_list(entries: Iterator[tuple[Path, FoundEntry]], listing: Listing) -> int:
    """Print entries as they are read; return their number."""
    count = 0
    if listing is Listing.TABLE:
        now_ms = SystemClock().now_ms()
        while page := list(islice(entries, _TABLE_ROWS)):  # common widths would need all entries
            count += len(page)
            out.show_table(
                ("DUE", "TYPE", "UID", "KEY", "STATE", "MADE", "ATTEMPTS", "LAST ERROR"),
                [_cells(found, now_ms) for _, found in page],
                numbers=("ATTEMPTS",),
                details=("MADE", "ATTEMPTS"),
            )
        return count
    for path, found in entries:
        if listing is Listing.JSON:
            text = out.json_text(_plain(found, path)).replace("\n", "\n  ")
            typer.echo(f"{',' if count else '['}\n  {text}", nl=False)
        else:
            typer.echo(found.entry.uid.hex() if listing is Listing.ID else _line_of(_plain(found, path)))
        count += 1
    if listing is Listing.JSON:
        typer.echo("\n]" if count else "[]")
    return count


def _cells(found: FoundEntry, now_ms: int) -> tuple[str, ...]:
    entry = found.entry
    state = found.dead.death.name.lower() if found.dead is not None else found.state.value
    return (
        *(out.distance(entry.due_at_ms, now_ms), entry.type_name, entry.uid.hex(), entry.key, state),
        *(out.distance(entry.created_at_ms, now_ms), str(entry.attempts), entry.error),
    )


def _facts(found: FoundEntry, path: Path, now_ms: int) -> list[tuple[str, str]]:
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
    """Return a body as text: JSON indented, text unchanged, other bytes in hex, 32 to a line."""
    text: str | None = None
    if not as_hex:
        try:
            text = body.decode()
            indented = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
            indented.encode()  # JSON may contain a lone surrogate, which no terminal accepts
            text = indented
        except (ValueError, RecursionError):
            pass  # not JSON, or not text
    if text is None:
        shown = body[:limit]
        lines = [shown[at : at + 32].hex(" ", -4) for at in range(0, len(shown), 32)]
        left = len(body) - len(shown)
    else:
        raw = text.encode()
        lines = [out.printable(line) for line in raw[:limit].decode(errors="ignore").split("\n")]
        left = max(0, len(raw) - limit)
    return "\n".join(["", *lines, *([f"... {left:,} more bytes; --bytes shows more"] if left else [])])


def _adopt(root: Path, origin: Path, free: str, *, quiet: bool) -> tuple[str, int, list[str]]:
    """Move all entries; return the name of their directory, their number, and the damaged directories."""
    from dmq.producer_store import Adopter, Root, Running, store_options

    clock = SystemClock()
    with offline(), Progress(f"adoption from {origin}", quiet=quiet) as progress:
        progress.show(free)
        running = Running(Root(root, clock, store_options()), is_driven=True)
        try:
            folder = Root(origin, clock, store_options())
            moved = Adopter(folder, running).adopt()
            damaged = [f"{path.name} is damaged: {each.error}" for path, each in folder.damaged.items()]
            return running.path.name, moved, damaged
        finally:
            running.close()


def _show_report(report: Report) -> None:
    if not report.saved_in:
        state = f"damaged: {report.error}" if report.error else "whole, left as it is"
        typer.echo(out.printable(f"{report.directory}: {state}"))
        return
    uids = [*report.missing_uids[:_NAMED_MAX]]
    more = len(report.missing_uids) - len(uids)
    out.show_facts(
        [
            ("directory", report.directory),
            ("damage", report.error),
            ("saved", f"{report.waiting:,} waiting, {report.dead:,} dead, in {report.saved_in}"),
            (
                "missing",
                f"{report.missing} entries" + (f": {' '.join(uids)}" if uids else "") + (" ..." if more else ""),
            ),
            ("lost changes", f"{report.lost_events:,}; what ended in one is sent again" if report.lost_events else ""),
            ("superseded", f"{report.superseded:,} older states" if report.superseded else ""),
            ("type names", f"from a damaged record: {' '.join(report.guessed_types)}" if report.guessed_types else ""),
            ("lost names", f"entries are saved as {' '.join(report.unknown_types)}" if report.unknown_types else ""),
            ("cannot be read", "; ".join([*report.dropped, *report.holes, *report.unreadable])),
            ("kept", f"{report.kept_in}, report in {report.kept_in}.json"),
        ]
    )


def _counted(directories: int) -> str:
    return out.counted(directories, "directory", "directories")


def _entries(count: int, kind: str = "") -> str:
    return out.counted(count, f"{kind}entry", f"{kind}entries")


def _but(used: list[str]) -> str:
    return f"; skipped: {'; '.join(used)}" if used else ""
