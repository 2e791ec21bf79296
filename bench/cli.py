"""Options, progress, the order of things."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from bench import (
    audit,
    burst,
    cluster,
    cluster_away,
    costs,
    enqueue,
    fairness,
    fronts,
    hook,
    hostile,
    indexing,
    lateness,
    nack,
    neighbours,
    overload,
    pending,
    queue_clients,
    receive,
    replica,
    report,
    rocketmq,
    send,
    sizes,
    wakeup,
)
from bench.figures import STEADY_SPREAD, Figure, table_of
from bench.kept import keep, machine
from bench.load import Load, LoadFailed, generator
from bench.place import BUILD
from bench.plan import Plan
from bench.report import RESULTS
from broker_adapter.runtime.clock import SystemClock

_FILE_WIDTH = 160

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Name(StrEnum):
    """What can be measured, in the order of the table."""

    ENQUEUE = "enqueue"
    GRPC_SEND = "grpc_send"
    FRONTS = "fronts"
    RECEIVE = "receive"
    LATENESS = "lateness"
    WAKEUP = "wakeup"
    BURST = "burst"
    OVERLOAD = "overload"
    COSTS = "costs"
    INDEXING = "indexing"
    PENDING = "pending"
    SIZES = "sizes"
    NACK = "nack"
    FAIRNESS = "fairness"
    NEIGHBOURS = "neighbours"
    HOOK = "hook"
    SPOOL = "spool"
    AUDIT = "audit"
    HOSTILE = "hostile"
    CLUSTER = "cluster"
    CLUSTER_AWAY = "cluster_away"
    QUEUE_CLIENTS = "queue_clients"
    REPLICA = "replica"


MEASURES: Mapping[Name, Callable[[Plan], list[Figure]]] = {
    Name.ENQUEUE: enqueue.measure,
    Name.GRPC_SEND: send.measure,
    Name.FRONTS: fronts.measure,
    Name.RECEIVE: receive.measure,
    Name.LATENESS: lateness.measure,
    Name.WAKEUP: wakeup.measure,
    Name.BURST: burst.measure,
    Name.OVERLOAD: overload.measure,
    Name.COSTS: costs.measure,
    Name.INDEXING: indexing.measure,
    Name.PENDING: pending.measure,
    Name.SIZES: sizes.measure,
    Name.NACK: nack.measure,
    Name.FAIRNESS: fairness.measure,
    Name.NEIGHBOURS: neighbours.measure,
    Name.HOOK: hook.measure,
    Name.SPOOL: hook.measure_spool,
    Name.AUDIT: audit.measure,
    Name.HOSTILE: hostile.measure,
    Name.CLUSTER: cluster.measure,
    Name.CLUSTER_AWAY: cluster_away.measure,
    Name.QUEUE_CLIENTS: queue_clients.measure,
    Name.REPLICA: replica.measure,
}
# Measured only by name or with --all: they have goals of their own, and take long.
OTHERS = (
    Name.FRONTS,
    *(Name.NACK, Name.FAIRNESS, Name.NEIGHBOURS, Name.HOOK, Name.SPOOL, Name.AUDIT, Name.HOSTILE, Name.QUEUE_CLIENTS),
    Name.REPLICA,
)


class Kind(StrEnum):
    """Load generators."""

    GO = "go"
    PYTHON = "python"


@app.command()
def main(
    names: Annotated[
        list[Name] | None, typer.Argument(help="Measure these; those of the page if none is named.")
    ] = None,
    *,
    only: Annotated[list[Name] | None, typer.Option(help="Measure this; may be given more than once.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Measure everything, also what is not on the page.")] = False,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds per figure (5, with --quick 1).")] = None,
    minutes: Annotated[float, typer.Option(min=0, help="No further round of a name begins after so many.")] = 8,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: to see that it works, not how fast.")] = False,
    peer: Annotated[
        bool, typer.Option("--peer", help="Measure Apache RocketMQ beside it; needs Java and Maven.")
    ] = False,
    json: Annotated[
        Path | None, typer.Option(help="Where the figures are kept, and by default the page.", metavar="FILE")
    ] = None,
    page: Annotated[Path | None, typer.Option(help="Folder of the page (docs/reference).", metavar="FOLDER")] = None,
    load: Annotated[Kind, typer.Option(help="Load generator.")] = Kind.GO,
    pending: Annotated[
        int, typer.Option(min=1000, help="Messages that wait, for the figures of that name.")
    ] = 1_000_000,
    many: Annotated[
        int, typer.Option(min=0, help="The most messages that wait, for sizes; 0 leaves it out.")
    ] = sizes.MANY,
    retries: Annotated[
        int | None, typer.Option(min=100, help="Messages that disturb, for fairness (100 000, with --quick 2000).")
    ] = None,
    overdue: Annotated[
        int | None, typer.Option(min=0, help="Messages of one topic due at once, for neighbours (500 000, 2000).")
    ] = None,
    spooled: Annotated[
        int | None, typer.Option(min=100, help="Entries of a spool that is opened (1 000 000, with --quick 20 000).")
    ] = None,
    events: Annotated[
        int | None, typer.Option(min=10_000, help="Events of the audited trail (10 000 000, with --quick 100 000).")
    ] = None,
) -> None:
    """Measure, show a table, keep the figures as JSON and write the page. Leave the machine alone meanwhile.

    `python -m bench report` writes the page from what is kept, without measuring.
    """
    console = _console()
    json = json or (BUILD / "quick.json" if quick else RESULTS)
    options = {
        "rounds": rounds or (1 if quick else 5),
        "minutes": minutes,
        "is_quick": quick,
        "pending": pending,
        "many": many,
        "retries": retries or (2_000 if quick else 100_000),
        "overdue": overdue if overdue is not None else (2_000 if quick else 500_000),
        "spooled": spooled or (20_000 if quick else 1_000_000),
        "events": events or (100_000 if quick else 10_000_000),
    }
    chosen = [*(names or ()), *(only or ())] or [name for name in Name if all_ or name not in OTHERS]
    with ExitStack() as last:
        run = _Run(console, json, _generator(console, load.value), options)
        if peer:
            run.start_peer(last)
        run.measure(chosen)
    run.tell()
    report.write(json, page or report.folder_of(json))
    console.print(f"kept in {json}, shown in {(page or report.folder_of(json)) / report.PAGE}")
    if run.failed:
        raise typer.Exit(1)


class _Run:
    """One run: what it was asked for, and what it found so far."""

    def __init__(self, console: Console, json: Path, load: Load, options: Mapping[str, object]) -> None:
        self._console = console
        self._json = json
        self._load = load
        self._options = options
        self._peer: rocketmq.RocketMQ | None = None
        self._peer_said = "not asked for (--peer)"
        self._groups: dict[str, Sequence[Figure]] = {}
        self.failed: dict[str, str] = {}

    def start_peer(self, last: ExitStack) -> None:
        """Start the peer; if that cannot be, say why: its figures are then not measured."""
        self._console.print("starting Apache RocketMQ; it takes about a minute to warm up")
        try:
            warm_up_s = 10 if self._options["is_quick"] else rocketmq.WARM_UP_S
            self._peer = last.enter_context(rocketmq.running(self._load, warm_up_s=warm_up_s))
            self._peer_said = rocketmq.NAME
        except rocketmq.PeerMissing as error:
            self._peer_said = f"not measured: {error}"
            self._console.print(f"[yellow]{self._peer_said}", highlight=False)

    def measure(self, chosen: Iterable[Name]) -> None:
        """Measure one name after the other; what was measured outlives a run that is ended."""
        here, clock = machine(), SystemClock()
        bars = (
            TextColumn("{task.description:12}"),
            BarColumn(),
            TextColumn("{task.fields[what]}"),
            TimeElapsedColumn(),
        )
        with Progress(*bars, console=self._console) as progress:
            for name in chosen:
                task = progress.add_task(name.value, what="")
                plan = Plan(load=self._load, peer=self._peer, progress=progress, task=task, **self._options)  # type: ignore[arg-type]  # by name
                self._groups[name.value] = []
                try:
                    self._groups[name.value] = MEASURES[name](plan)
                except (LoadFailed, RuntimeError) as error:
                    self.failed[name.value] = str(error)
                steps = progress.tasks[task].total
                kept = {**self._options, "native_load": self._load.is_native, "peer": self._peer_said}
                keep(self._json, self._groups, {**kept, "failed": self.failed}, here=here, clock=clock)
                progress.update(task, completed=steps or 0, what="failed" if name.value in self.failed else "")

    def tell(self) -> None:
        """Show what was found."""
        figures = [figure for each in self._groups.values() for figure in each]
        self._console.print(table_of(figures))
        unsteady = sum(not figure.is_steady for figure in figures)
        if unsteady:
            self._console.print(
                f"[yellow]the rounds of {unsteady} figures disagree by more than a factor of {STEADY_SPREAD}: this "
                "machine was not quiet, and their medians, ratios and goals say little"
            )
        for each, why in self.failed.items():
            self._console.print(f"[red]{each} was not measured: {why}")


def _console() -> Console:
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, _FILE_WIDTH)  # a log has no edge to break lines at
    return console


def _generator(console: Console, kind: str) -> Load:
    if kind == "go":
        try:
            return generator("go")
        except LoadFailed as error:
            console.print(f"[yellow]{error}")
    console.print("[yellow]the load comes from Python: the generator limits what goes through gRPC, not the daemon")
    return generator("python")
