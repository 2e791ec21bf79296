"""``dmq audit``: the trail, snapshots of pending messages, and the jobs that read them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from broker_adapter.runtime.extras import require
from broker_adapter.wire.plain import to_plain
from dmq.cli.bulk.progress import Progress
from dmq.cli.nouns import noun
from dmq.cli.output import output as out
from dmq.cli.output.errors import CommandFailed, ExitCode, refused, refusing
from dmq.cli.output.times import point_ms
from dmq.cli.session.cluster import ClusterAccess
from dmq.cli.session.offline import stopped
from dmq.cli.session.options import OptionGroup, Session, with_output, with_session, with_watch
from dmq.cli.trail.engines import EngineOption, chosen, run_here
from dmq.cli.trail.spark import (
    MEANINGS,
    Spark,
    find_spark,
    java_memory,
    package_folder,
    path_to,
    run_job,
    submit_command,
)
from dmq.config.units import format_size, parse_duration

if TYPE_CHECKING:
    from broker_adapter.remoting import RemotingOptions
    from dmq.admin import admin_v1 as wire

app = noun("audit")

_CODES = (
    "Exit codes: 0 clean, 10 late or duplicated beyond the threshold, 20 lost, 30 inconclusive, 40 the trail "
    "contradicts itself, 1 internal error, 2 usage."
)
_GAPS_SHOWN = 20
_MASTER = "local[*]"

DataOption = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", help="Directory of a stopped daemon, or one directory of a spool."),
]
TrailOption = Annotated[
    str | None,
    typer.Option("--trail", metavar="DIR", help="Directory of the trail.  [default: the trail of the daemon]"),
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", envvar="DMQ_CONFIG", metavar="FILE", help="TOML file of the daemon.")
]
RetiredCellOption = Annotated[
    list[str] | None,
    typer.Option(
        "--retired-cell",
        metavar="CELL",
        help="Record in the trail that the store of this cell is lost; may be repeated.",
    ),
]
SnapshotOption = Annotated[
    bool | None,
    typer.Option(
        "--snapshot/--no-snapshot",
        help="First export the events of the daemon and take a snapshot.  [default: if possible]",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditScope(OptionGroup):
    """Options of the audited time, of thresholds, and of the state between runs."""

    since: Annotated[
        str | None, typer.Option("--from", metavar="TIME", help="Begin of the reported period: RFC 3339, or epoch ms.")
    ] = None
    until: Annotated[
        str | None, typer.Option("--to", metavar="TIME", help="End of the reported period: RFC 3339, or epoch ms.")
    ] = None
    late_after: Annotated[str | None, typer.Option(metavar="DURATION", help="Tolerated lateness of a message.")] = None
    late_max: Annotated[int | None, typer.Option(min=0, help="Tolerated number of late messages.")] = None
    duplicates_max: Annotated[int | None, typer.Option(min=0, help="Tolerated number of duplicates.")] = None
    grace: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="A message counts as overdue this long after its due time."),
    ] = None
    exact: Annotated[bool, typer.Option("--exact", help="Compare every message, even if all totals agree.")] = False
    incremental: Annotated[bool, typer.Option("--incremental", help="Read only new files; requires --state.")] = False
    state: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the state between runs.")] = None

    def arguments(self) -> list[str]:
        """Return the arguments of the job. Raise a usage error for invalid values."""
        if self.incremental != (self.state is not None):
            raise refused("give both or neither", "--incremental", "--state")
        if self.incremental and (self.since is not None or self.until is not None):
            raise refused("it audits the whole trail: omit --from and --to", "--incremental")
        values: dict[str, object] = {
            "--from": None if self.since is None else point_ms(self.since, "--from"),
            "--to": None if self.until is None else point_ms(self.until, "--to"),
            "--late-after": None if self.late_after is None else _duration("--late-after", self.late_after),
            "--grace": None if self.grace is None else _duration("--grace", self.grace),
            "--late-max": self.late_max,
            "--duplicates-max": self.duplicates_max,
        }
        given = [str(word) for name, value in values.items() if value is not None for word in (name, value)]
        steps = ["--incremental", "--state", str(self.state)] if self.incremental else []
        return [*given, *["--exact"] * self.exact, *steps]


@app.command(epilog=_CODES)
@with_session
def run(
    session: Session,
    *,
    into: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder for the report, findings and Spark's log.")
    ],
    trail: TrailOption = None,
    data: Annotated[Path | None, typer.Option("--data", metavar="DIR", help="Directory of the daemon.")] = None,
    config: ConfigOption = None,
    scope: AuditScope,
    snapshot: SnapshotOption = None,
    retired_cell: RetiredCellOption = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT;...", help="Name servers of a cluster; its messages are compared as well."),
    ] = None,
    cluster_timeout: Annotated[
        str,
        typer.Option(
            metavar="DURATION",
            help="Time limit for reading the cluster; messages that were not read by then count as not read back.",
        ),
    ] = "5m",
    access: ClusterAccess,
    engine: Annotated[
        EngineOption,
        typer.Option(help="Engine of the audit: DuckDB on this machine, or Spark; both have the same result."),
    ] = EngineOption.auto,
    master: Annotated[str | None, typer.Option(metavar="URL", help="Spark's master.  [default: local[*]]")] = None,
    driver_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory for Java.  [default: half of the memory, at most 4g]")
    ] = None,
    conf: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Spark setting; may be repeated.")] = None,
) -> None:
    """Audit the trail for lost, late and duplicated messages."""
    arguments = [
        *("--out", str(into)),
        *scope.arguments(),
        *(word for cell in retired_cell or () for word in ("--retired-cell", cell)),
    ]
    settings, memory = _settings(conf or ()), java_memory(driver_memory)
    _check_out(into)
    where = _trail_of(session, trail, data, config)
    remoting = None
    if cluster is not None:
        _check_place(where, master or _MASTER, incremental=scope.incremental)
        remoting = access.remoting(cluster, "--cluster")
        arguments += ["--read-back", str(into.resolve() / "cluster")]
    timeout_s = _seconds("--cluster-timeout", cluster_timeout)
    engine = _engine_for(where, engine, is_for_spark=bool(master or driver_memory or settings))
    spark, log = (find_spark(), _log_in(into)) if engine is EngineOption.spark else (None, None)
    taken = None if snapshot is False else _snapshot(session, is_wanted=snapshot is True)
    found: dict[str, object] = {}
    if remoting is not None:
        found["read_back"] = _read_back(session, Path(where), remoting, into.resolve() / "cluster", timeout_s)
    code = _judge(spark, log, where, arguments, master=master, memory=memory, conf=settings, quiet=session.as_json)
    if session.as_json:
        of_run = {"out": str(into), "engine": engine.value, "log": None if log is None else str(log), "snapshot": taken}
        out.show_json({"exit_code": code, "meaning": MEANINGS.get(code, "failed")} | of_run | found)
    raise typer.Exit(code)


@app.command()
@with_session
def explain(
    session: Session,
    *,
    message_id: Annotated[str, typer.Argument(metavar="MESSAGE_ID", help="Message id, as returned to its producer.")],
    trail: TrailOption = None,
    data: Annotated[Path | None, typer.Option("--data", metavar="DIR", help="Directory of the daemon.")] = None,
    config: ConfigOption = None,
    snapshot: SnapshotOption = None,
) -> None:
    """Show the events and the result of one message.

    The command needs neither Spark nor Java.
    """
    where = _trail_of(session, trail, data, config)
    taken = None if snapshot is False else _snapshot(session, is_wanted=snapshot is True)
    _check_is_trail(where)
    package = package_folder("spark_audit")
    require("dmq audit explain", "server", "pyarrow")
    command = [sys.executable, "-m", "spark_audit", "explain", "--trail", where]
    command += ["--json"] if session.as_json else []
    ended = subprocess.run(
        [*command, "--", message_id],
        env={**os.environ, **path_to(package)},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    typer.echo(ended.stdout, nl=False)
    if ended.returncode == ExitCode.NOT_FOUND:
        text = f"the trail at {where} has no event of message {message_id}{_not_exported(taken, Path(where))}"
        raise CommandFailed(text, ExitCode.NOT_FOUND)
    raise typer.Exit(ended.returncode if ended.returncode >= 0 else ExitCode.FAILURE)


@app.command()
@with_session
def snapshot(
    session: Session,
    *,
    data: DataOption = None,
    trail: TrailOption = None,
    config: ConfigOption = None,
) -> None:
    """Write a snapshot of the pending messages into the trail.

    The snapshot is of the running daemon or, with --data, of a stopped daemon.
    """
    if data is None:
        if trail is not None:
            raise refused("a running daemon has one trail: give --data as well", "--trail")
        with session.connect() as client:
            found: dict[str, Any] = to_plain(client.take_snapshot())
    else:
        found = _snapshot_of(data, _local_trail(trail, data, config))
    session.show_facts(
        found,
        [
            ("snapshot", found["path"] + ("" if found["is_new"] else ", which was there: nothing happened since")),
            ("sequence", f"{found['sequence']:,}"),
            ("entries", f"{found['entries']:,}"),
            ("taken at", out.when(found["taken_at_ms"])),
            ("took", out.about(found["took_ms"])),
        ],
    )


def _snapshot_of(data: Path, trail: Path) -> dict[str, Any]:
    from broker_adapter.runtime.clock import SystemClock
    from dmq.trail.snapshots import snapshot_of

    with stopped(data):
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


@app.command()
@with_output
def export(
    session: Session,
    *,
    data: Annotated[
        Path, typer.Option("--data", metavar="DIR", help="Directory of a stopped daemon, or one directory of a spool.")
    ],
    trail: TrailOption = None,
    config: ConfigOption = None,
) -> None:
    """Export the remaining events of a stopped process into the trail."""
    where = _local_trail(trail, data, config)
    with stopped(data):
        sequence = _export_all(data, where)
    facts = [("trail", str(where)), ("exported up to", f"{sequence:,}")]
    session.show_facts({"sequence": sequence, "trail": str(where)}, facts)


def _export_all(data: Path, trail: Path) -> int:
    from dmq.trail.export import export_all

    return export_all(data, trail, role="spool" if _is_of_spool(data) else "daemon")


def _is_of_spool(data: Path) -> bool:
    return data.resolve().name.startswith("spool-")


def _local_trail(trail: str | None, data: Path, config: Path | None) -> Path:
    if trail is None and _is_of_spool(data):
        raise refused("the directory of a spool does not contain its trail's location: give --trail", "--data")
    where = trail if trail is not None else _configured(data, config)[0]
    if _is_elsewhere(where):
        raise refused("a trail is written to a local directory", "--trail", given=where)
    return Path(where)


@app.command()
@with_watch
@with_session
def ls(
    session: Session,
    *,
    data: DataOption = None,
    trail: TrailOption = None,
    config: ConfigOption = None,
) -> None:
    """List the cells of the trail: events, gaps and snapshots."""
    where = _trail_of(session, trail, data, config)
    _check_is_trail(where)
    from dmq.trail.cells import cells_of

    found = cells_of(Path(where))
    from broker_adapter.runtime.clock import SystemClock

    now_ms = SystemClock().now_ms()
    headings = ("CELL", "ROLE", "EVENTS", "FIRST", "LAST", "UNTIL", "FILES", "SIZE", "MISSING", "SNAPSHOTS", "NEWEST")
    rows = [
        (
            *(each.cell, each.role),
            *(f"{number:,}" for number in (each.events, each.first_sequence, each.last_sequence)),
            *(out.distance(each.last_at_ms, now_ms), f"{each.files:,}", format_size(each.size_bytes)),
            *(f"{each.missing:,}", f"{len(each.snapshots):,}"),
            f"{each.snapshots[-1].sequence:,}" if each.snapshots else "",
        )
        for each in found
    ]
    numbers = [heading for heading in headings if heading not in {"CELL", "ROLE", "UNTIL"}]
    plain = {"trail": where, "cells": [each.plain() for each in found]}
    session.show_table(plain, headings, rows, numbers=numbers, details=("FIRST", "NEWEST", "FILES", "ROLE"))
    for each in found if not session.as_json else ():
        for first, last in each.gaps[:_GAPS_SHOWN]:
            out.note(f"{each.cell}: events {first:,} to {last:,} are missing")
        for why in each.damaged[:_GAPS_SHOWN]:
            out.note(out.printable(f"{each.cell}: skipped an unreadable entry: {why}"))


def _seconds(name: str, text: str) -> float:
    with refusing(name, text):
        return parse_duration(text) / 1000


def _duration(name: str, text: str) -> str:
    with refusing(name, text):
        return f"{parse_duration(text)}ms"


def _log_in(into: Path) -> Path:
    try:
        into.mkdir(parents=True, exist_ok=True)
        log = into.resolve() / "spark.log"
        log.write_bytes(b"")
    except OSError as error:
        raise CommandFailed(f"nothing can be written to {into}: {error.strerror}") from error
    return log


def _engine_for(trail: str, asked: EngineOption, *, is_for_spark: bool) -> EngineOption:
    is_elsewhere = _is_elsewhere(trail)
    if not is_elsewhere and not Path(trail).is_dir():
        raise CommandFailed(f"there is no trail at {trail}", ExitCode.NOT_FOUND)
    return chosen(asked, trail, is_elsewhere=is_elsewhere, is_for_spark=is_for_spark)


def _judge(
    spark: Spark | None,
    log: Path | None,
    trail: str,
    arguments: list[str],
    *,
    master: str | None,
    memory: str,
    conf: Sequence[str],
    quiet: bool,
) -> int:
    """Run the job, here without Spark, and return its verdict or, if it failed, an exit code of this program."""
    if spark is None or log is None:
        return _verdict(run_here(trail, arguments, quiet=quiet), "")
    master = master or _MASTER
    with tempfile.TemporaryDirectory(prefix="dmq-audit-") as scratch:
        command = submit_command(
            spark, Path(scratch), log, master=master, memory=memory, conf=conf, trail=trail, arguments=arguments
        )
        code = run_job(command, spark.environment, log, quiet=quiet)
    return _verdict(code, f"; Spark's log is {log}")


def _verdict(code: int, where_to_look: str) -> int:
    """Return the exit code of a job if it is a verdict; otherwise report the failure and return the exit code
    for it.
    """
    if code in MEANINGS:
        return code
    out.note(f"the audit failed ({code}){where_to_look}")
    return code if code == ExitCode.USAGE else ExitCode.FAILURE


def _settings(conf: Sequence[str]) -> Sequence[str]:
    for each in conf:
        if "=" not in each:
            raise refused("KEY=VALUE is expected", "--conf", given=each)
    return conf


def _check_place(trail: str, master: str, *, incremental: bool) -> None:
    """Raise for options that conflict with reading a cluster back."""
    if incremental:
        raise refused("it compares the whole trail: omit --incremental", "--cluster")
    if _is_elsewhere(trail) or not master.startswith("local"):
        raise refused("messages are read back to this machine, so trail and master must be local", "--cluster")


def _read_back(
    session: Session, trail: Path, remoting: RemotingOptions, into: Path, timeout_s: float
) -> dict[str, object]:
    """Read back from the cluster the messages that the trail names; end the command if none could be read."""
    from dmq.trail.export import read_back

    with Progress("reading the cluster", quiet=session.as_json) as progress:
        try:
            found = read_back(
                trail, remoting, into, timeout_s=timeout_s, show=lambda count: progress.show(f"{count:,} messages")
            )
        except ValueError as error:
            raise CommandFailed(str(error)) from error
    if found.queues and all(each.queue is None for each in found.queues):
        raise CommandFailed(f"no queue of the cluster was read: {found.queues[0].why}", ExitCode.UNAVAILABLE)
    out.note(f"read back {found.messages:,} messages of {len(found.queues):,} queues")
    for each in found.unread[:_GAPS_SHOWN]:
        place = f"queue {each.queue.queue_id} at {each.queue.broker} of " if each.queue is not None else ""
        out.note(f"{place}topic {each.topic} was not read to its end: {each.why}")
    return {"messages": found.messages, "queues": len(found.queues), "unread": len(found.unread)}


def _snapshot(session: Session, *, is_wanted: bool) -> dict[str, object] | None:
    """Make the daemon export and take a snapshot. If it cannot, print a note, or raise if the snapshot is required."""
    try:
        with session.connect() as client:
            taken = to_plain(client.take_snapshot())
    except CommandFailed as error:
        if is_wanted:
            raise
        out.note(f"no new snapshot, the trail is read as it is: {error.text}")
        return None
    out.note(f"snapshot {taken['sequence']} with {taken['entries']} entries")
    return taken


def _not_exported(taken: dict[str, object] | None, trail: Path) -> str:
    """Return the events that the trail may lack; ``taken`` is the snapshot that followed the daemon's export."""
    cells = {path.stem for path in (trail / "cells").glob("*.json")}
    if taken is not None and (path := Path(str(taken["path"]))).parents[2].resolve() == trail.resolve():
        cells.discard(path.parent.name.removeprefix("cell="))
        if not cells:
            return ""
    return (
        f"; events of the last trail_every (1m by default) of {', '.join(sorted(cells))} may not be exported yet: ask "
        "again after that time, or export the events of a stopped daemon with 'dmq audit export --data DIR'"
    )


def _trail_of(session: Session, trail: str | None, data: Path | None, config: Path | None) -> str:
    """Return the selected trail: the given one, else the one configured here, else that of the daemon."""
    if trail is not None:
        return trail
    if data is not None or config is not None:
        return _configured(data, config)[0]
    near = ""
    if "address" not in session.chosen().sources:  # no daemon is named, so the trail is on this machine
        near, is_default = _configured(None, None)
        if not is_default:
            return near
    try:
        with session.connect() as client:
            found = client.status()
    except CommandFailed as error:
        if error.exit_code is ExitCode.UNAVAILABLE and near and Path(near).is_dir():
            out.note(f"{error.text}; its trail would be at {near}")
            return near
        text = f"{error.text} Without a daemon, name the trail with --trail, --data or --config"
        raise CommandFailed(text, error.exit_code) from error
    return _trail_here(found, session.chosen().target().address)


def _configured(data: Path | None, config: Path | None) -> tuple[str, bool]:
    """Return the configured trail, and whether it is the default. Raise a usage error if the trail is off."""
    from dmq.config.settings import ConfigError, load_with_origins

    try:
        loaded, origins = load_with_origins({"data": str(data) if data is not None else None}, config_file=config)
    except ConfigError as error:
        raise CommandFailed(str(error), ExitCode.USAGE) from error
    if loaded.trail_path is None:
        raise CommandFailed("the trail is off in the configuration; name one with --trail", ExitCode.USAGE)
    return str(loaded.trail_path), origins["trail"] == origins["data"] == "default"


def _trail_here(found: wire.GetStatusResponse, address: str) -> str:
    """Return the trail of a daemon if it is on this machine; otherwise end the command with the remedy."""
    where = found.outbox.trail
    if not where:
        raise CommandFailed(f"the daemon at {address} writes no trail; name one with --trail", ExitCode.NOT_FOUND)
    cells = {path.stem for path in (Path(where) / "cells").glob("*.json")}
    if not Path(where).is_dir() or (cells and found.cell_id not in cells):
        what = f"the daemon at {address} writes its trail to {where} of its own machine, and it is not on this one"
        raise CommandFailed(f"{what}: run the command there, or name a copy with --trail", ExitCode.NOT_FOUND)
    return where


def _check_is_trail(where: str) -> None:
    if _is_elsewhere(where) or not (Path(where) / "events").is_dir():
        yet = ": nothing was exported to it yet, 'dmq audit snapshot' does that" if Path(where).is_dir() else ""
        raise CommandFailed(f"there is no trail at {where}{yet}", ExitCode.NOT_FOUND)


def _check_out(into: Path) -> None:
    """Create only the named folder and none above it, because its disk may not be mounted."""
    if not into.absolute().parent.is_dir():
        raise refused("its parent folder must exist: create it, or mount its disk", "--out", given=str(into))


def _is_elsewhere(trail: str) -> bool:
    """Return True if a trail is in a remote file system, such as ``s3a://``, which only Spark can read."""
    return "://" in trail
