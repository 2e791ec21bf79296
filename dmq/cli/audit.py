"""``dmq audit``: the trail, snapshots of what waits, and the jobs that read them. Those are in ``audit_run``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dmq.cli import audit_run
from dmq.cli import output as out
from dmq.cli.audit_options import ConfigOption, DataOption, TrailOption, is_elsewhere, trail_of
from dmq.cli.errors import CommandFailed, ExitCode
from dmq.cli.options import OutputOption, Session, session_of, with_session
from dmq.cli.spool_options import in_use, silent
from dmq.units import format_size

_GAPS_SHOWN = 20


def mount(group: type[TyperGroup]) -> typer.Typer:
    """Return the commands as a group of their own."""
    made = typer.Typer(cls=group, help="The audit trail: what became of every message.", rich_markup_mode=None)
    made.command("run", epilog=audit_run.CODES)(audit_run.run)
    for command in (audit_run.explain, snapshot, export, ls):
        made.command(command.__name__)(command)
    return made


@with_session
def snapshot(
    session: Session,
    *,
    data: DataOption = None,
    trail: TrailOption = None,
    config: ConfigOption = None,
) -> None:
    """Write a snapshot of what waits into the trail, of the running daemon or, with --data, a stopped one."""
    if data is None:
        if trail is not None:
            raise typer.BadParameter("a running daemon has one trail; --trail goes with --data", param_hint="--trail")
        with session.connect() as client:
            found: dict[str, Any] = out.to_plain(client.take_snapshot())
    else:
        found = _snapshot_of(data, _local_trail(trail, data, config))
    if session.as_json:
        out.show_json(found)
        return
    out.show_facts(
        [
            ("snapshot", found["path"] + ("" if found["is_new"] else ", which was there: nothing happened since")),
            ("sequence", f"{found['sequence']:,}"),
            ("entries", f"{found['entries']:,}"),
            ("taken at", out.when(found["taken_at_ms"])),
            ("took", out.about(found["took_ms"])),
        ]
    )


def _snapshot_of(data: Path, trail: Path) -> dict[str, Any]:
    from broker_adapter.clock import SystemClock
    from dmq.audit.snapshot_take import snapshot_of

    with silent(), _stopped(data):
        reached = _export_all(data, trail)
        taken = snapshot_of(data, trail, SystemClock(), reached=reached)
    return {
        "sequence": taken.sequence,
        "path": str(taken.path),
        "entries": taken.entries,
        "taken_at_ms": taken.taken_ms,
        "took_ms": taken.took_ms,
        "is_new": taken.is_new,
    }


def export(
    ctx: typer.Context,
    *,
    data: Annotated[Path, typer.Option("--data", metavar="DIR", help="Directory of a stopped daemon, or of a spool.")],
    trail: TrailOption = None,
    config: ConfigOption = None,
    output: OutputOption = None,
) -> None:
    """Export the remaining events of a stopped process into the trail."""
    where = _local_trail(trail, data, config)
    with silent(), _stopped(data):
        sequence = _export_all(data, where)
    if session_of(ctx, output=output).as_json:
        out.show_json({"sequence": sequence, "trail": str(where)})
    else:
        out.show_facts([("trail", str(where)), ("exported up to", f"{sequence:,}")])


def _export_all(data: Path, trail: Path) -> int:
    from dmq.audit.export import export_all

    return export_all(data, trail, role="spool" if _is_of_spool(data) else "daemon")


def _is_of_spool(data: Path) -> bool:
    return data.resolve().name.startswith("spool-")


def _local_trail(trail: str | None, data: Path, config: Path | None) -> Path:
    if trail is None and _is_of_spool(data):
        raise typer.BadParameter("the directory of a spool does not tell its trail: name it", param_hint="--trail")
    where = trail_of(trail, data, config)
    if is_elsewhere(where):
        raise typer.BadParameter("a trail is written to a local directory", param_hint="--trail")
    return Path(where)


@contextmanager
def _stopped(data: Path) -> Iterator[None]:
    """Turn the errors of a directory that is in use, or that is none, into those of a command."""
    from dmq.errors import StoreLocked

    if not (data / "CELL").exists():
        raise CommandFailed(f"there is no store in {out.printable(str(data))}", ExitCode.NOT_FOUND)
    try:
        yield
    except StoreLocked as error:
        raise in_use(error) from error
    except ModuleNotFoundError as error:
        raise CommandFailed(f"{error.name} is missing: pip install 'rock-dmq[server]'") from error


def ls(
    ctx: typer.Context,
    *,
    data: DataOption = None,
    trail: TrailOption = None,
    config: ConfigOption = None,
    output: OutputOption = None,
) -> None:
    """List the cells of the trail with their events, gaps and snapshots."""
    where = trail_of(trail, data, config)
    if is_elsewhere(where) or not Path(where).is_dir():
        raise CommandFailed(f"there is no trail at {out.printable(where)}", ExitCode.NOT_FOUND)
    from dmq.cli.audit_list import cells_of

    try:
        found = cells_of(Path(where))
    except ValueError as error:
        raise CommandFailed(out.printable(str(error))) from error
    if session_of(ctx, output=output).as_json:
        out.show_json({"trail": where, "cells": [each.plain() for each in found]})
        return
    headings = ("CELL", "ROLE", "EVENTS", "FIRST", "LAST", "UNTIL", "FILES", "SIZE", "MISSING", "SNAPSHOTS", "NEWEST")
    rows = [
        (
            each.cell,
            each.role,
            f"{each.events:,}",
            f"{each.first_sequence:,}",
            f"{each.last_sequence:,}",
            out.when(each.last_at_ms),
            f"{each.files:,}",
            format_size(each.size_bytes),
            f"{each.missing:,}",
            f"{len(each.snapshots):,}",
            f"{each.snapshots[-1].sequence:,}" if each.snapshots else "",
        )
        for each in found
    ]
    out.show_table(
        headings, rows, numbers=("EVENTS", "FIRST", "LAST", "FILES", "SIZE", "MISSING", "SNAPSHOTS", "NEWEST")
    )
    for each in found:
        for first, last in each.gaps[:_GAPS_SHOWN]:
            typer.echo(f"dmq: {each.cell}: events {first:,} to {last:,} are missing", err=True)
