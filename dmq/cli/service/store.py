"""``dmq store``: backup, check and salvage of a store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from broker_adapter.runtime.clock import SystemClock
from broker_adapter.wire.plain import to_plain
from dmq.cli.bulk.progress import Progress
from dmq.cli.nouns import noun
from dmq.cli.output import output as out
from dmq.cli.output.errors import CommandFailed, ExitCode
from dmq.cli.session.offline import stopped
from dmq.cli.session.options import Session, with_output, with_reason
from dmq.config.units import format_size

if TYPE_CHECKING:
    from dmq.recovery import CheckReport

app = noun("store")


@app.command()
@with_reason
def backup(
    session: Session,
    *,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Target folder, new or empty.")],
    data: Annotated[Path | None, typer.Option("--data", metavar="DIR", help="Directory of a stopped daemon.")] = None,
) -> None:
    """Back up the store of the running daemon.

    With --data, the store is that of a stopped daemon. A running daemon writes the copy, so FOLDER is on the
    daemon's machine. On the same file system, the copy shares tables by hard links. The copy contains everything
    that was acknowledged before the command. 'dmq serve --data FOLDER' serves it. The copy does not contain the trail.
    """
    folder = folder.absolute()
    if data is None:
        with session.connect() as client:
            found = to_plain(client.back_up(str(folder)))
    else:
        found = _back_up_stopped(data, folder)
    size, linked, took_ms = (found[name] for name in ("size_bytes", "linked_bytes", "took_ms"))
    assert isinstance(size, int)
    assert isinstance(linked, int)
    assert isinstance(took_ms, float)
    shared = f", {format_size(linked)} of it shared with the store by hard links" if linked else ""
    facts = [("backup", str(found["folder"])), ("size", format_size(size) + shared)]
    facts += [("audit sequence", f"{found['sequence']:,}"), ("took", out.about(took_ms))]
    session.show_facts(found, facts)


def _back_up_stopped(data: Path, folder: Path) -> dict[str, object]:
    with stopped(data):
        from dmq.store import back_up_stopped
        from dmq.trail.snapshots import open_quiet, read_cut

        clock = SystemClock()
        started_s = clock.monotonic_s()
        copied = back_up_stopped(data, folder)
        engine = open_quiet(folder / "rocksdb")  # a copy that cannot be opened is invalid
        try:
            sequence = read_cut(engine).sequence
        finally:
            engine.close()
    return {
        "folder": str(folder),
        "sequence": sequence,
        "size_bytes": copied.size_bytes,
        "linked_bytes": copied.linked_bytes,
        "took_ms": (clock.monotonic_s() - started_s) * 1000,
    }


@app.command()
@with_output
def check(
    session: Session,
    *,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a stopped daemon, or a backup.")],
) -> None:
    """Check each row, block and reference; exit with 4 on damage.

    The command changes no data. Its memory use does not depend on the number of messages.
    """
    with stopped(directory), Progress(f"check of {directory}", quiet=session.as_json) as progress:
        from dmq.recovery import check_store

        found = check_store(directory, progress.show)
    session.show(found.as_json(), lambda: _show_checked(found))
    if count := found.findings.count.total():
        text = f"{directory} is not whole: {count:,} findings; 'dmq store salvage' recovers the readable rows"
        raise CommandFailed(text, ExitCode.DAMAGED)
    if not session.as_json:
        typer.echo(f"{directory} is whole")


@app.command()
@with_output
def salvage(
    session: Session,
    *,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a stopped daemon.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Folder for the new store, new or empty.")],
) -> None:
    """Recover the readable rows of a damaged store into a new store.

    The damaged store is not changed. NEW/LOST.jsonl lists the losses, one JSON object per line. The exit code is 4
    if rows are lost.
    """
    with stopped(directory), Progress(f"salvage of {directory}", quiet=session.as_json) as progress:
        from dmq.recovery import salvage_store

        found = salvage_store(directory, new.absolute(), SystemClock(), progress.show)
    if session.as_json:
        out.show_json(found.as_json())
    else:
        out.show_facts([("new store", str(found.path)), ("damage", found.error), ("opened", found.opened)])
        _show_checked(found.checked)
        for kind, count in found.lost.items():
            typer.echo(f"{kind}: {count:,} in LOST.jsonl")
        if found.lost_offsets:
            typer.echo(f"{found.lost_offsets:,} messages are missing in queues")
    if not found.is_whole or found.checked.findings.count:
        raise CommandFailed(f"not everything could be saved; see {found.path}", ExitCode.DAMAGED)


def _show_checked(found: CheckReport) -> None:
    rows = [(kind, f"{total.rows:,}", format_size(total.size_bytes)) for kind, total in found.totals.items()]
    out.show_table(("ROWS", "COUNT", "SIZE"), rows, numbers=("COUNT", "SIZE"))
    findings = found.findings
    for kind, count in findings.count.items():
        typer.echo(f"{kind}: {count:,} findings")
        for text in findings.first[kind]:
            typer.echo(f"  {out.printable(text)}")
        if count > len(findings.first[kind]):
            typer.echo(f"  and {count - len(findings.first[kind]):,} more")
