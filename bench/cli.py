"""Options, progress, the order of things."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from bench import audit, burst, enqueue, fairness, hook, lateness, nack, pending, send
from bench.figures import STEADY_SPREAD, Figure, table_of, write_json
from bench.load import Load, LoadFailed, generator
from bench.plan import Plan

_FILE_WIDTH = 160
RESULTS = Path(__file__).parent / "results.json"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Name(StrEnum):
    """What can be measured, in the order of the table."""

    ENQUEUE = "enqueue"
    GRPC_SEND = "grpc_send"
    LATENESS = "lateness"
    BURST = "burst"
    PENDING = "pending"
    NACK = "nack"
    FAIRNESS = "fairness"
    HOOK = "hook"
    SPOOL = "spool"
    AUDIT = "audit"


MEASURES: Mapping[Name, Callable[[Plan], list[Figure]]] = {
    Name.ENQUEUE: enqueue.measure,
    Name.GRPC_SEND: send.measure,
    Name.LATENESS: lateness.measure,
    Name.BURST: burst.measure,
    Name.PENDING: pending.measure,
    Name.NACK: nack.measure,
    Name.FAIRNESS: fairness.measure,
    Name.HOOK: hook.measure,
    Name.SPOOL: hook.measure_spool,
    Name.AUDIT: audit.measure,
}


class Kind(StrEnum):
    """Load generators."""

    GO = "go"
    PYTHON = "python"


@app.command()
def main(
    names: Annotated[list[Name] | None, typer.Argument(help="Measure these; everything if none is named.")] = None,
    *,
    only: Annotated[list[Name] | None, typer.Option(help="Measure this; may be given more than once.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds per figure (5, with --quick 1).")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: to see that it works, not how fast.")] = False,
    json: Annotated[Path, typer.Option(help="Where the figures are kept.", metavar="FILE")] = RESULTS,
    load: Annotated[Kind, typer.Option(help="Load generator.")] = Kind.GO,
    pending: Annotated[
        int, typer.Option(min=1000, help="Messages that wait, for the figures of that name.")
    ] = 1_000_000,
    retries: Annotated[
        int | None, typer.Option(min=100, help="Messages that disturb, for fairness (100 000, with --quick 2000).")
    ] = None,
    spooled: Annotated[
        int | None, typer.Option(min=100, help="Entries of a spool that is opened (1 000 000, with --quick 20 000).")
    ] = None,
    events: Annotated[
        int | None, typer.Option(min=10_000, help="Events of the audited trail (10 000 000, with --quick 100 000).")
    ] = None,
) -> None:
    """Measure, show a table, keep the figures as JSON. Leave the machine alone meanwhile."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, _FILE_WIDTH)  # a log has no edge to break lines at
    rounds = rounds or (1 if quick else 5)
    retries = retries or (2_000 if quick else 100_000)
    spooled = spooled or (20_000 if quick else 1_000_000)
    events = events or (100_000 if quick else 10_000_000)
    chosen = [*(names or ()), *(only or ())] or list(Name)
    figures: list[Figure] = []
    failed: dict[str, str] = {}
    columns = (TextColumn("{task.description:12}"), BarColumn(), TextColumn("{task.fields[what]}"), TimeElapsedColumn())
    used = _generator(console, load.value)
    options = {
        "rounds": rounds,
        "quick": quick,
        "native_load": used.is_native,
        "pending": pending,
        "retries": retries,
        "spooled": spooled,
        "events": events,
    }
    with Progress(*columns, console=console) as progress:
        for name in chosen:
            task = progress.add_task(name.value, what="")
            plan = Plan(
                rounds=rounds,
                is_quick=quick,
                pending=pending,
                retries=retries,
                spooled=spooled,
                events=events,
                load=used,
                progress=progress,
                task=task,
            )
            try:
                figures += MEASURES[name](plan)
            except (LoadFailed, RuntimeError) as error:
                failed[name.value] = str(error)
            steps = progress.tasks[task].total
            write_json(json, figures, {**options, "failed": failed})  # what was measured outlives a run that is ended
            progress.update(task, completed=steps or 0, what="failed" if name.value in failed else "")
    _tell(console, figures, json, failed)
    if failed:
        raise typer.Exit(1)


def _tell(console: Console, figures: list[Figure], json: Path, failed: dict[str, str]) -> None:
    console.print(table_of(figures))
    unsteady = sum(not figure.is_steady for figure in figures)
    if unsteady:
        console.print(
            f"[yellow]the rounds of {unsteady} figures disagree by more than a factor of {STEADY_SPREAD}: this machine "
            "was not quiet, and their medians, ratios and goals say little"
        )
    console.print(f"kept in {json}")
    for each, why in failed.items():
        console.print(f"[red]{each} was not measured: {why}")


def _generator(console: Console, kind: str) -> Load:
    if kind == "go":
        try:
            return generator("go")
        except LoadFailed as error:
            console.print(f"[yellow]{error}")
    console.print("[yellow]the load comes from Python: the generator limits what goes through gRPC, not the daemon")
    return generator("python")
