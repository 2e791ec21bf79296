"""One audit run, of a whole trail or of its new files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from spark_audit.engines import Relation, Row, TableEngine, keep
from spark_audit.engines import functions as F  # noqa: N812 - the name that Spark code goes by
from spark_audit.jobs import health, ledgers, pipeline
from spark_audit.jobs.border import ForwardingLedger, look_at_border
from spark_audit.jobs.errors import errors_of
from spark_audit.jobs.health import CellState, FileFindings, Finding
from spark_audit.jobs.options import Options
from spark_audit.jobs.outcome import AuditOutcome, make_outcome
from spark_audit.jobs.pipeline import HeldRows, Judged, Known, Scan
from spark_audit.jobs.state import AuditFacts, AuditState, load_state, save_state
from spark_audit.rules.density import QueueFacts, begins_beyond, last_exits, queue_holes
from spark_audit.rules.findings import first_findings, join_findings, with_history
from spark_audit.rules.rows import kind_in, with_letters
from spark_audit.rules.totals import merge_counts, merge_fingerprints
from spark_audit.rules.undone import is_undone, undone_findings
from spark_audit.schema import CLOCK_CHANGED, READS, TOPIC_CHANGED
from spark_audit.tables import EventFile, TrailListing, list_trail
from spark_audit.undone import Undone, all_of_cell, undone_of

_MODES = {True: "batch", False: "incremental"}
_BROADCAST_MAX = 1_000_000  # keys, of 8 bytes each
_OF_FILES = ("OPENED", "CLOSED", "GAP", "TAIL_LOST")  # about the trail itself: a rollback does not undo them
_OF_CELLS = ("OPENED", "CLOSED", *READS, "GAP", "TAIL_LOST", CLOCK_CHANGED, TOPIC_CHANGED)


class Stopwatch:
    """Stopwatch for the duration of a stage."""

    def __init__(self, engine: TableEngine) -> None:
        self._engine = engine
        self._start = engine.nanos()

    def lap_s(self) -> float:
        """Return the seconds since the last call, or since the start."""
        before, self._start = self._start, self._engine.nanos()
        return round((self._start - before) / 1e9, 3)


class _StartOver(Exception):
    """The saved state cannot be used; the message gives the reason."""


@dataclass(slots=True)
class _Run:
    """Working state of one run."""

    engine: TableEngine
    listing: TrailListing
    options: Options
    state: AuditState | None
    watch: Stopwatch
    figures: dict[str, Any]

    def done(self, stage: str, rows: int | None = None) -> None:
        """Record the duration of a stage and report it as progress."""
        seconds = self.watch.lap_s()
        self.figures["stages"].append({"stage": stage, "seconds": seconds, "rows": rows})
        self.options.say(f"{stage}: {seconds:.1f} s" + ("" if rows is None else f", {rows:,} rows"))


def run_audit(
    engine: TableEngine, trail: str, options: Options, *, state: str | None = None, read_back: str | None = None
) -> AuditOutcome:
    """Audit a trail. With ``state`` (a directory), read only files that no earlier run has read.

    With ``read_back`` (a directory), compare the messages sent to a cluster with the messages read back from it. This
    needs the whole trail, so it excludes ``state``.

    The outcome depends only on the trail and the reported options. It does not depend on the mode, the number of
    incremental steps or ``exact``. Raise ``TrailError`` if there is no readable trail.
    """
    assert state is None or read_back is None
    listing = list_trail(engine, trail)
    with engine.set_for(sum(file.bytes for file in listing.files)):
        kept = load_state(engine, state, options) if state is not None else None
        try:
            return _audit(engine, listing, options, kept, state, read_back)
        except _StartOver as why:
            options.say(f"starting over: {why}")
            return _audit(engine, listing, options, None, state)


def _audit(
    engine: TableEngine,
    listing: TrailListing,
    options: Options,
    kept: AuditState | None,
    where: str | None,
    read_back: str | None = None,
) -> AuditOutcome:
    run = _Run(engine, listing, options, kept, Stopwatch(engine), {"mode": _MODES[where is None], "stages": []})
    _check_kept(run)
    new = _new_files(listing, kept)
    found, raw = health.look_at_files(engine, listing, new, options)
    files = _merge_files(found, kept)
    run.figures |= {"files": len(new), "bytes": sum(file.bytes for file in new)}
    run.done("files", sum(facts.rows for facts in found.facts.values()))

    told = _read_through(raw, options, kept, health.retired_cells(listing))
    scan, counts, rare, of_cells = told.scan, told.counts, told.rare, told.of_cells
    run.listing = listing = health.with_roles(listing, counts)
    _check_roles(run)
    snapshots, of_snapshots = health.sound_snapshots(engine, listing, told.undone, options)
    cells = health.cell_states(listing, files, of_cells, snapshots, options)
    of_snapshots += health.vanished(listing, cells, snapshots) + health.put_back_findings(listing, told.undone)
    held = pipeline.read_held(engine, listing, cells)
    subscriptions = pipeline.subscriptions_of(engine, of_cells, cells, held)
    _check_subscriptions(kept, of_cells)
    removals = pipeline.removals_of(engine, of_cells)
    queues = _queues_of(run, scan.rows, of_cells, removals, cells)
    run.done("counts")

    failed = pipeline.failed_of(scan.rows, options)
    sums = pipeline.sum_up(scan.rows, subscriptions, failed, options)
    if kept is not None:
        sums = keep(merge_fingerprints(kept.sums, sums))
    windows, unequal = pipeline.windows_of(sums)
    run.figures |= {"windows": windows, "windows_skipped": 0 if options.exact else windows - unequal}
    run.done("prefilter")

    spools = [cell.cell for cell in cells if cell.role == "spool"]
    rows, candidates = _rows_to_judge(run, scan.rows, subscriptions, sums if unequal else None, failed, held, spools)
    judged: Judged | None = None
    stops = health.find_stops(engine, listing, files, of_cells) if rows is not None else []
    table = pipeline.cells_table(engine, cells, _first_entries(counts), of_cells, stops, options)
    if rows is not None:
        known = Known(subscriptions, removals, table, held, pipeline.ends_of(rare), health.watermark_of(cells))
        judged = pipeline.judge(rows, known, options)
    border = look_at_border(engine, told.all_rows, cells, read_back, options) if read_back is not None else None
    if border is not None:
        run.done("cluster", sum(row["sent"] for row in border.table))
    apart = [] if border is None else [(border.findings, border.rows)]
    if told.undone:
        apart.append(_look_at_undone(run, told, cells, held))
    of_snapshots += pipeline.queue_findings(engine, of_cells, queues, removals, held, cells, table)
    outcome = _conclude(run, cells, files, of_snapshots, (counts, sums, rare), (judged, rows), border, apart)
    if where is not None:
        facts = AuditFacts(
            files=files,
            roles=_roles_in(listing),
            retired=health.retired_cells(listing),
            counts=counts,
            sums=sums,
            rare=rare,
            new_rows=scan.rows,
            open_rows=rows if rows is not None else pipeline.keyed(pipeline.empty_rows(engine), options),
            candidates=candidates,
            queues=queues,
        )
        save_state(engine, where, options, kept, facts)
        run.done("state")
    return outcome


def _queues_of(
    run: _Run, rows: Relation, of_cells: Sequence[Row], removals: Relation, cells: Sequence[CellState]
) -> QueueFacts:
    """Return the facts of queues and their groups, from the saved state and the new rows."""
    before = run.state.queues if run.state is not None else QueueFacts()
    retired = [cell.cell for cell in cells if cell.retired]
    holes, tops = queue_holes(rows, removals, before.tops, retired)
    beyond = begins_beyond(rows, pipeline.reads_of(run.engine, of_cells))
    exits = last_exits(rows, before.exits)
    return QueueFacts(tops, [*before.holes, *holes], [*before.beyond, *beyond], exits)


def _first_entries(counts: Relation) -> dict[str, int]:
    """Return the lowest number of an accepted entry, by cell."""
    least = counts.group_by("cell").agg(F.min_of("entry_min").alias("first"))
    return {row["cell"]: row["first"] for row in least.collect()}


class _Told(NamedTuple):
    """Result of a pass over the new rows merged with the saved state, once without and once with undone events."""

    scan: Scan
    counts: Relation
    rare: Relation
    of_cells: list[Row]
    undone: list[Undone]
    all_rows: Relation  # with letters
    all_of_cells: list[Row]


def _read_through(raw: Relation, options: Options, kept: AuditState | None, retired: Sequence[str]) -> _Told:
    """Count rows. If a store was rolled back, or is gone with its retired cell, count again without the undone
    events.
    """
    scan = pipeline.scan_rows(raw, options)
    counts, rare = scan.counts, scan.rare
    if kept is not None:
        counts = keep(merge_counts(kept.counts, counts))
        rare = keep(kept.rare.union(rare))
    of_cells = rare.where(kind_in(*_OF_CELLS)).order_by("cell", "sequence").collect()
    put_back = [each for each in undone_of(of_cells) if each.cell not in retired]
    undone = sorted([*put_back, *map(all_of_cell, retired)])
    if not undone:
        return _Told(scan, counts, rare, of_cells, [], scan.rows, of_cells)
    if kept is not None:
        raise _StartOver("a store was restored to an earlier state")
    standing = pipeline.scan_rows(raw.where(~is_undone(undone)), options)
    of_files = rare.where(is_undone(undone) & kind_in(*_OF_FILES))
    left = [
        row
        for row in of_cells
        if row["kind"] in _OF_FILES or not any(each.has(row["cell"], row["sequence"]) for each in undone)
    ]
    return _Told(standing, standing.counts, standing.rare.union(of_files), left, undone, scan.rows, of_cells)


def _look_at_undone(run: _Run, told: _Told, cells: Sequence[CellState], held: HeldRows) -> tuple[Relation, Relation]:
    """Return findings about messages of undone events, and all undone events by message."""
    retired = health.retired_cells(run.listing)
    forgotten = keep(told.all_rows.where(is_undone(told.undone)))
    read = pipeline.subscriptions_of(run.engine, told.all_of_cells, cells, held)
    found = keep(join_findings([undone_findings(forgotten, told.scan.rows, read, retired)]))
    run.done("undone", found.count())
    return found, pipeline.keyed(forgotten, run.options)


def _roles_in(listing: TrailListing) -> dict[str, str]:
    return {name: cell.role for name, cell in listing.cells.items()}


def _check_roles(run: _Run) -> None:
    """Start over if the role of an audited cell has changed."""
    roles = _roles_in(run.listing)
    for name, role in run.state.roles.items() if run.state is not None else ():
        if roles.get(name, role) != role:
            raise _StartOver(f"cell {name} has another role")


def _check_kept(run: _Run) -> None:
    """Start over if cells are or were retired, or if a file or its manifest line has changed since it was read."""
    kept, listing = run.state, run.listing
    if kept is None:
        return
    if kept.retired or health.retired_cells(listing):
        raise _StartOver("a cell is, or was, retired")
    retired = {name: cell.retired for name, cell in listing.cells.items()}
    read = [file for file in listing.files if file.path in kept.files.contents and file.last > retired[file.cell]]
    for path, content in health.contents_of(run.engine, listing, read, run.options).items():
        if content != kept.files.contents[path]:
            raise _StartOver(f"{path} was changed after it was read")


def _new_files(listing: TrailListing, kept: AuditState | None) -> list[EventFile]:
    """Return the files to read: complete by their name, after the retention limit, and not read before."""
    retired = {name: cell.retired for name, cell in listing.cells.items()}
    there = [file for file in listing.files if file.last > retired[file.cell]]
    if kept is None:
        return there
    taken = kept.files.contents.keys()
    gone = taken - {file.path for file in listing.files}
    for path in sorted(gone):
        cell, last = health.cell_of(path), health.span_of(path)[1]
        if last > retired.get(cell, 0):
            raise _StartOver(f"{path} was read before and is missing")
    new = [file for file in there if file.path not in taken]
    upto: dict[str, int] = {}
    for path in taken:
        upto[health.cell_of(path)] = max(upto.get(health.cell_of(path), 0), health.span_of(path)[1])
    for file in new:
        if file.first <= upto.get(file.cell, 0):
            raise _StartOver(f"{file.path} is new and not after the files read before")
    return new


def _merge_files(found: FileFindings, kept: AuditState | None) -> FileFindings:
    if kept is None:
        return found
    before = kept.files
    contents = before.contents | found.contents
    return FileFindings(
        contents, before.facts | found.facts, [*before.gaps, *found.gaps], [*before.findings, *found.findings]
    )


def _check_subscriptions(kept: AuditState | None, rare: Sequence[Row]) -> None:
    """Start over if a new subscription starts at an offset that earlier runs counted: it changes the expected exits.

    A new removal of a topic or reset of a group always starts over.
    """
    if kept is None:
        return
    for row in rare:
        if row["kind"] not in READS or (row["cell"], row["sequence"]) in kept.subscribed:
            continue
        if row["kind"] != "SUBSCRIBED":
            raise _StartOver(f"topic {row['topic']} was removed, or is read from elsewhere")
        top = kept.queues.tops.get((row["cell"], row["topic"], row["queue_id"]))
        if top is not None and row["queue_offset"] is not None and row["queue_offset"] <= top.offset:
            raise _StartOver(f"group {row['group']} begins at messages read before its creation")


def _rows_to_judge(  # noqa: PLR0917 - as ``candidates_of``
    run: _Run,
    new: Relation,
    subscriptions: Relation,
    sums: Relation | None,
    failed: Relation,
    held: HeldRows,
    spools: Sequence[str],
) -> tuple[Relation | None, Relation | None]:
    """Return all events of the messages to judge, kept, and their keys; None if no message is suspicious."""
    options, kept = run.options, run.state
    if options.exact and kept is None:
        rows = keep(pipeline.keyed(new, options))
        run.figures["candidates"] = None
        return rows, rows.select("key").distinct()
    work = new
    if kept is not None:
        work = kept.open_rows.drop("key").union(new)
        failed = pipeline.failed_of(work, options)
    candidates = pipeline.candidates_of(work, subscriptions, sums, failed, held, options, spools)
    if kept is not None:
        again = pipeline.keyed(new, options).where(kind_in("SCHEDULED", "QUEUED") & ~F.col("is_letter"))
        again = (
            kept.closed.where(F.col("is_accepted")).join(again.select("key"), on="key", how="left_semi").select("key")
        )
        candidates = candidates.union(again).distinct()
    candidates = keep(candidates)
    count = candidates.count()
    run.figures["candidates"] = count
    run.done("candidates", count)
    if count == 0:
        return None, candidates
    few = F.broadcast(candidates) if count < _BROADCAST_MAX else candidates
    rows = pipeline.keyed(work, options).join(few, on="key", how="left_semi")
    if kept is not None:
        past = candidates.join(kept.closed.select("key"), on="key", how="left_semi")
        past = keep(past)
        if past.count():
            old = [file for file in run.listing.files if file.path in kept.files.facts]
            again = with_letters(health.rows_of(run.engine, run.listing, old, kept.files))
            rows = rows.union(pipeline.keyed(again, options).join(past, on="key", how="left_semi"))
    return keep(rows), candidates


def _conclude(  # noqa: PLR0917 - the results of a run
    run: _Run,
    cells: list[CellState],
    files: FileFindings,
    of_snapshots: Sequence[Finding],
    tables_of: tuple[Relation, Relation, Relation],
    judgement: tuple[Judged | None, Relation | None],
    border: ForwardingLedger | None,
    apart: Sequence[tuple[Relation, Relation]],
) -> AuditOutcome:
    """Build the ledgers and findings of a run. The tables are counts, sums and rare events.

    ``apart`` are findings about messages that were found separately, with all events of these.
    """
    options = run.options
    counts, sums, rare = tables_of
    judged, rows = judgement
    totals = ledgers.totals_of(counts, sums, rare, cells, options)
    run.done("totals")
    exact: dict[str, ledgers.Ledger] = {}
    if judged is not None and rows is not None:
        exact = ledgers.judged_of(judged, rows, cells, options)
        run.done("verdicts")
    scheduled = ledgers.scheduled_table(totals, exact, cells, options)
    fired = ledgers.fired_table(totals, exact)
    spooled = ledgers.spooled_table(totals, exact, cells)
    own: list[Finding] = [
        *files.findings,
        *health.damage_findings(run.listing),
        *health.retired_findings(run.listing),
        *health.missing_files(run.listing),
        *health.unproven(run.listing),
        *of_snapshots,
        *health.gap_findings(cells),
        *ledgers.unknown_kinds(totals),
        *ledgers.check_ledgers(scheduled, fired, spooled),
    ]
    tables = {"scheduled": scheduled, "fired": fired, "spooled": spooled, **ledgers.other_tables(totals)}
    readable = [file for file in run.listing.files if file.path in files.facts]
    tables["errors"] = errors_of(run.engine, run.listing, readable, options)
    listed, by_kind = _messages_found(judged.findings if judged is not None else None, rows, options)
    if border is not None:
        tables["cluster"] = border.table
    for findings, concerned in apart:
        more, counted = _messages_found(findings, concerned, options)
        listed = [*listed, *more]
        by_kind = Counter(by_kind) + Counter(counted)
    outcome = make_outcome(options, cells, health.watermark_of(cells), tables, own, listed, by_kind, run.figures)
    run.done("findings", outcome.report["findings"]["total"])
    return outcome


def _messages_found(
    findings: Relation | None, rows: Relation | None, options: Options
) -> tuple[list[Row], dict[tuple[str, str], int]]:
    """Return the first findings about messages with their histories, and the number of findings of each kind."""
    if findings is None or rows is None:
        return [], {}
    found = findings
    if options.from_ms is not None:
        found = found.where(
            F.col("window_start_ms").is_null() | (F.col("window_start_ms") + options.window_ms > options.from_ms)
        )
    if options.to_ms is not None:
        found = found.where(F.col("window_start_ms").is_null() | (F.col("window_start_ms") < options.to_ms))
    found = keep(found)
    by_kind = {
        (row["kind"], row["severity"]): row["count"]
        for row in found.group_by("kind", "severity").agg(F.count_rows().alias("count")).collect()
    }
    if not by_kind:
        return [], {}
    first = keep(first_findings(found, options.findings_max))
    return with_history(first, rows, options.key_bits).collect(), by_kind
