"""Command line: ``python -m spark_audit run | explain``. The exit code of ``run`` is the verdict."""

from __future__ import annotations

import re
import sys
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from spark_audit.engines import TableEngine

app = typer.Typer(
    help="Audit a trail for lost, late and duplicated messages.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class EngineName(StrEnum):
    """Engine that runs the rules. All engines produce the same outcome, byte for byte."""

    duckdb = "duckdb"
    spark = "spark"


_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_INTERNAL_ERROR = 1


def main() -> None:
    """Run the command line. Exit code 1 is an internal error or an unreadable trail, 2 an invalid option."""
    try:
        app()
    except ModuleNotFoundError as error:
        name = (error.name or "spark_audit").partition(".")[0]
        if name == "spark_audit":
            raise
        extra = {"pyarrow": "server", "duckdb": "audit-local"}.get(name, "audit")
        sys.exit(f"spark_audit: {name} is missing: pip install 'rock-dmq[{extra}]'")


def duration_ms(text: str) -> int:
    """Return the milliseconds of ``90s``, ``10m``, ``250ms``, ``2h`` or ``1d``. A number needs a unit, except 0."""
    if text.strip() == "0":
        return 0
    match = re.fullmatch(r"([0-9]+)(ms|s|m|h|d)?", text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a duration, such as 90s, 10m or 250ms")
    if not match[2]:
        raise typer.BadParameter(f"a duration needs a unit: {text}ms, {text}s or {text}m; got {text}")
    return int(match[1]) * _UNITS_MS[match[2]]


def instant_ms(text: str) -> int:
    """Return the epoch milliseconds of a number or an ISO 8601 time. A time without a zone is UTC."""
    if re.fullmatch(r"-?\d+", text.strip()):
        return int(text)
    try:
        found = datetime.fromisoformat(text.strip())
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is neither an ISO 8601 time nor epoch milliseconds") from error
    utc = datetime.fromisoformat("1970-01-01T00:00:00+00:00")
    known = found if found.tzinfo is not None else found.replace(tzinfo=utc.tzinfo)
    return round((known - utc).total_seconds() * 1000)


@app.command()
def run(
    *,
    trail: Annotated[str, typer.Option(help="trail: a directory, or any address that Hadoop reads")],
    out: Annotated[Path, typer.Option(help="directory for report.json, report.html and findings")],
    from_time: Annotated[
        str | None, typer.Option("--from", help="start of the first window (by due time), ISO or ms")
    ] = None,
    to_time: Annotated[str | None, typer.Option("--to", help="end of the last window, ISO or ms")] = None,
    late_after: Annotated[str, typer.Option(help="tolerated lateness of a message")] = "60s",
    late_max: Annotated[int, typer.Option(min=0, help="tolerated number of late messages")] = 0,
    duplicates_max: Annotated[int, typer.Option(min=0, help="tolerated number of duplicates")] = 0,
    grace: Annotated[str, typer.Option(help="time after the due time before a message is overdue")] = "120s",
    writer_timeout: Annotated[str, typer.Option(help="silence after which a cell no longer delays the audit")] = "10m",
    window: Annotated[str, typer.Option(help="length of a window")] = "10m",
    exact: Annotated[
        bool, typer.Option("--exact", help="compare every message, even if the sums of a window agree")
    ] = False,
    verify: Annotated[bool, typer.Option(help="verify the sha256 of each file")] = True,
    incremental: Annotated[bool, typer.Option("--incremental", help="read only new files; requires --state")] = False,
    state: Annotated[str | None, typer.Option(help="directory of the state that is kept between runs")] = None,
    read_back: Annotated[
        str | None, typer.Option(help="directory of the messages that were read back from a cluster")
    ] = None,
    retired_cell: Annotated[
        list[str] | None, typer.Option(help="cell whose store is lost, recorded in the trail; may be repeated")
    ] = None,
    findings_max: Annotated[
        int, typer.Option(min=0, help="maximum number of listed findings; all are counted")
    ] = 100_000,
    engine: Annotated[
        EngineName, typer.Option(help="duckdb, in this process, for a trail on this machine; or spark")
    ] = EngineName.spark,
    threads: Annotated[int | None, typer.Option(min=1, help="threads of duckdb; default: all processors")] = None,
) -> None:
    """Audit a trail: 0 clean, 10 late or duplicates, 20 loss, 30 inconclusive, 40 inconsistent."""
    if incremental != (state is not None):
        raise typer.BadParameter("--incremental and --state DIR require each other")
    if incremental and (from_time or to_time):
        raise typer.BadParameter("--incremental audits the whole trail; omit --from and --to")
    if incremental and read_back is not None:
        raise typer.BadParameter("--incremental reads only new files; --read-back compares the whole trail")
    chosen: dict[str, Any] = {
        "from_ms": instant_ms(from_time) if from_time else None,
        "to_ms": instant_ms(to_time) if to_time else None,
        "window_ms": duration_ms(window),
        "late_after_ms": duration_ms(late_after),
        "late_max": late_max,
        "duplicates_max": duplicates_max,
        "grace_ms": duration_ms(grace),
        "writer_timeout_ms": duration_ms(writer_timeout),
        "findings_max": findings_max,
        "verify": verify,
        "exact": exact,
    }
    if chosen["window_ms"] <= 0:
        raise typer.BadParameter("the window must be longer than 0")
    retired = retired_cell or []
    raise typer.Exit(_audit(trail, out, chosen, state, read_back, retired=retired, opened=_ENGINES[engine](threads)))


def _duckdb(threads: int | None) -> TableEngine:
    from spark_audit.engines import duck

    return duck.DuckEngine(threads)


def _spark(threads: int | None) -> TableEngine:
    if threads is not None:
        raise typer.BadParameter("--threads applies to duckdb only; the master of Spark sets its threads")
    _say("starting Spark")
    from spark_audit.engines import spark
    from spark_audit.session import open_session

    return spark.SparkEngine(open_session())


_ENGINES = {EngineName.duckdb: _duckdb, EngineName.spark: _spark}


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _audit(
    trail: str,
    out: Path,
    chosen: dict[str, Any],
    state: str | None,
    read_back: str | None,
    *,
    retired: list[str],
    opened: TableEngine,
) -> int:
    from spark_audit.jobs import Options, run_audit, write_outcome
    from spark_audit.schema import TrailError
    from spark_audit.tables import UnknownCell, retire_cell

    try:
        for cell in retired:
            try:
                retire_cell(opened, trail, cell)
            except UnknownCell as error:
                raise typer.BadParameter(str(error), param_hint="--retired-cell") from error
        outcome = run_audit(opened, trail, Options(say=_say, **chosen), state=state, read_back=read_back)
        write_outcome(outcome, out)
    except TrailError as error:
        _say(f"error: {error}")
        return _INTERNAL_ERROR
    except opened.errors as error:
        _say(f"error: the audit failed: {str(error)[:2000]}")
        return _INTERNAL_ERROR
    finally:
        opened.close()
    _show(outcome.report, out)
    return outcome.exit_code


def _show(report: dict[str, Any], out: Path) -> None:
    """Print the ledgers and the verdict."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 160)
    entry_columns = ("scheduled", "fired", "cancelled", "expired", "pending", "overdue", "lost", "inconclusive")
    _print_ledger(console, "Scheduled", report["scheduled"], ("topic",), (*entry_columns, "late", "duplicated"))
    names = (
        "acked",
        "dead",
        "expired",
        "purged",
        "filtered",
        "unread",
        "in_flight",
        "in_retry",
        "lost",
        "inconclusive",
    )
    _print_ledger(console, "Fired", report["fired"], ("topic", "group"), ("fired", *names))
    if "cluster" in report:
        of_cluster = ("sent", "there", "not_there", "not_read_back", "lost", "in_doubt", "copies", "duplicated")
        _print_ledger(console, "In the cluster", report["cluster"], ("topic",), of_cluster)
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(report["findings"]["by_kind"].items()))
    console.print(f"verdict: {report['verdict']} ({kinds or 'no findings'}); {out / 'report.html'}", soft_wrap=True)


def _print_ledger(
    console: Any,  # noqa: ANN401 - rich is imported when there is something to print
    title: str,
    rows: list[dict[str, Any]],
    keys: tuple[str, ...],
    names: tuple[str, ...],
) -> None:
    from rich.table import Table

    sums: dict[tuple[str, ...], dict[str, int]] = {}
    for row in rows:
        summed = sums.setdefault(tuple(row[key] for key in keys), dict.fromkeys(names, 0))
        for name in names:
            summed[name] += row[name]
    table = Table(title=title, title_justify="left")
    for key in keys:
        table.add_column(key)
    for name in names:
        table.add_column(name, justify="right")
    for key_values, summed in sorted(sums.items()):
        table.add_row(*key_values, *(f"{summed[name]:,}" for name in names))
    console.print(table)


@app.command()
def explain(
    message_id: Annotated[str, typer.Argument(help="message id, as returned to its producer")],
    *,
    trail: Annotated[Path, typer.Option(help="directory of the trail")],
    as_json: Annotated[bool, typer.Option("--json", help="output as JSON")] = False,
) -> None:
    """Show the events of one message. Needs no Spark."""
    from spark_audit import explain as explaining

    code = explaining.main(message_id, trail, out=sys.stdout, as_json=as_json, progress=sys.stderr)
    raise typer.Exit(code)
