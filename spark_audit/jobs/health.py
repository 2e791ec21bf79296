"""Health of a trail: usable files, missing data, and the state of each cell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from urllib.parse import unquote

from spark_audit.engines import Relation, Row, TableEngine, plain
from spark_audit.engines import functions as F  # noqa: N812 - the name that Spark code goes by
from spark_audit.jobs.options import Options
from spark_audit.rules.density import OffsetGap
from spark_audit.rules.integrity import (
    FileFacts,
    Gap,
    file_facts,
    join_gaps,
    missing_in,
    once_each,
    repeated_in,
)
from spark_audit.schema import EVENTS, OF_DAEMON, OF_SPOOL, SEVERITY
from spark_audit.stops import Stop, last_of_runs, stops_of
from spark_audit.tables import (
    CONTENTS,
    MISSING,
    EventFile,
    ManifestLine,
    Snapshot,
    TrailCell,
    TrailListing,
    read_contents,
    read_events,
    read_sums,
)
from spark_audit.undone import Undone, undone_of

Finding = dict[str, Any]
GAPS_TIMED_MAX = 200  # each is compared with every file
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def finding(kind: str, rule: str, cell: str, detail: str, **others: Any) -> Finding:  # noqa: ANN401 - its columns
    """Return a finding about a cell or a file; columns that are not given are empty."""
    names = ("topic", "group", "message_id", "entry", "due_ms", "window_start_ms")
    empty: Finding = dict.fromkeys(names)
    base = {"kind": kind, "severity": SEVERITY[kind], "rule": rule, "cell": cell, "detail": detail, "history": []}
    return empty | base | others


class Content(NamedTuple):
    """Digest of a file of events, and its difference from its manifest line, if any."""

    bytes: int
    sha256: str  # empty without ``verify``, or if the file cannot be read
    doubt: str


@dataclass(slots=True)
class FileFindings:
    """Facts about examined files, of this run and earlier ones."""

    contents: dict[str, Content] = field(default_factory=dict)  # by path in the trail; also of unreadable files
    facts: dict[str, FileFacts] = field(default_factory=dict)  # by path in the trail
    gaps: list[Gap] = field(default_factory=list)  # within files
    findings: list[Finding] = field(default_factory=list)


class CellState(NamedTuple):
    """State of a cell at the end of its trail."""

    cell: str
    role: str
    retired: int
    first: int
    last: int
    events: int
    files: int
    first_at_ms: int
    last_at_ms: int
    runs: int
    kills: int
    is_closed: bool
    is_silent: bool
    snapshot: Snapshot | None
    gaps: tuple[Gap, ...]
    doubts: tuple[Gap, ...]  # sequences in altered files: present, but no proof
    undone: tuple[Undone, ...]  # present, but does not count
    is_retired_cell: bool  # its store is gone
    gap_times: tuple[tuple[int | None, int | None], ...]  # of ``gaps``, in the same order


def look_at_files(
    engine: TableEngine, listing: TrailListing, files: Sequence[EventFile], options: Options
) -> tuple[FileFindings, Relation]:
    """Check files. Return the facts and the rows: each record once, from readable files."""
    found = FileFindings(contents_of(engine, listing, files, options))
    altered = {path: content.doubt for path, content in found.contents.items() if content.doubt}
    urls = {listing.url(file.path): file.path for file in files}
    faults = {urls[url]: fault for url, fault in engine.schema_faults(list(urls), EVENTS).items()}
    sound = [file for file in files if file.path not in altered and file.path not in faults]
    if not _take_facts(engine, listing, sound, found):
        for file in sound:  # at least one cannot be read: find it
            if not _take_facts(engine, listing, [file], found):
                altered[file.path] = "cannot be read"
    lines = {line.path: line for line in listing.lines}
    for file in sound:
        facts = found.facts.get(file.path)
        if facts is not None and (facts.first < file.first or facts.last > file.last):
            altered[file.path] = "holds other records than its name says"
        elif facts is not None and (doubt := _doubt_about(file, facts, lines.get(file.path))):
            found.findings.append(finding("UNPROVEN", doubt, file.cell, file.path))
    for file in files:
        reasons = [each[file.path] for each in (altered, faults) if file.path in each]
        if not reasons:
            continue
        # the engines accept different deviations of column types, so neither reads such a file
        is_readable = file.path not in faults and _can_be_read(engine, listing, file)
        if not (is_readable and _take_facts(engine, listing, [file], found)):
            found.gaps.append(Gap(file.cell, file.first, file.last, "file cannot be read"))
            reasons += [] if file.path in faults else ["cannot be read"]
        found.findings.append(finding("FILE_ALTERED", ", and ".join(dict.fromkeys(reasons)), file.cell, file.path))
    return found, rows_of(engine, listing, files, found)


def _doubt_about(file: EventFile, facts: FileFacts, line: ManifestLine | None) -> str:
    """Return how the events in a file contradict its folder or its manifest line; empty if they do not."""
    if any(_hour_folder(at_ms) not in file.path for at_ms in (facts.at_ms_min, facts.at_ms_max)):
        return "holds events of another hour than its folder"
    if line is None:
        return ""
    stated = {"rows": line.rows, "first_at_ms": line.first_at_ms, "last_at_ms": line.last_at_ms}
    held = {"rows": facts.rows, "first_at_ms": facts.first_at_ms, "last_at_ms": facts.last_at_ms}
    wrong = [name for name, value in stated.items() if value is not None and value != held[name]]
    return f"its manifest line has another value of {', '.join(wrong)}" if wrong else ""


def _hour_folder(at_ms: int) -> str:
    try:
        return f"/{_EPOCH + timedelta(milliseconds=at_ms):date=%Y-%m-%d/hour=%H}/"
    except OverflowError:
        return "no date"


def contents_of(
    engine: TableEngine, listing: TrailListing, files: Sequence[EventFile], options: Options
) -> dict[str, Content]:
    """Return the contents of files by path, compared with their manifest lines."""
    lines = {line.path: line for line in listing.lines}
    sums = read_sums(engine, listing, [file.path for file in files]) if options.verify else {}
    found: dict[str, Content] = {}
    for file in files:
        line, sha256, doubt = lines.get(file.path), sums.get(file.path, ""), ""
        if line is not None and file.bytes != line.bytes:
            doubt = "not as long as written"
        elif line is not None and sha256 and sha256 != line.sha256:
            doubt = "sha256 is another one"
        found[file.path] = Content(file.bytes, sha256, doubt)
    return found


def _take_facts(engine: TableEngine, listing: TrailListing, files: Sequence[EventFile], found: FileFindings) -> bool:
    if not files:
        return True
    paths = {plain(listing.url(file.path)): file.path for file in files}
    try:
        facts = file_facts(read_events(engine, listing, files))
    except engine.errors:
        return False
    for each in facts:
        path = paths[plain(each.path)]
        found.facts[path] = each._replace(path=path)
    return len(facts) == len(files)  # Spark reads no rows from an empty file, and DuckDB fails


def _can_be_read(engine: TableEngine, listing: TrailListing, file: EventFile) -> bool:
    """Return True if every column of a file can be read to its end."""
    columns = [name for name, _ in EVENTS]
    try:
        read_events(engine, listing, [file]).agg(F.bit_xor(F.hash64(*columns)).alias("all")).collect()
    except engine.errors:
        return False
    return True


def rows_of(engine: TableEngine, listing: TrailListing, files: Sequence[EventFile], found: FileFindings) -> Relation:
    """Return the rows of files, each once. Record missing and repeated sequences within them."""
    readable = [file for file in files if file.path in found.facts]
    overlapping = _overlapping(readable)
    odd = [
        file
        for file in readable
        if file.path in overlapping or not found.facts[file.path].is_whole(file.first, file.last)
    ]
    sound = _events_of(engine, listing, [file for file in readable if file not in odd])
    if not odd:
        return sound
    rows = _events_of(engine, listing, odd)
    found.gaps += missing_in(rows, [(file.cell, file.first, file.last) for file in odd])
    for row in repeated_in(rows).order_by("cell", "sequence").collect():
        detail = f"sequence {row['sequence']}, {row['count']} times"
        rule = "the same again" if row["is_same"] else "with other content"
        one = finding("RECORD_REPEATED", rule, row["cell"], detail)
        found.findings.append(one | {"severity": "notice"} if row["is_same"] else one)
    return sound.union(once_each(rows))


def _events_of(engine: TableEngine, listing: TrailListing, files: Sequence[EventFile]) -> Relation:
    return read_events(engine, listing, files).drop("path", "file_name")


def _overlapping(files: Iterable[EventFile]) -> set[str]:
    """Return the files whose names share a sequence."""
    found: set[str] = set()
    before: EventFile | None = None
    for file in sorted(files, key=lambda file: (file.cell, file.first, file.last)):
        if before is not None and before.cell == file.cell and file.first <= before.last:
            found |= {before.path, file.path}
        if before is None or before.cell != file.cell or file.last > before.last:
            before = file
    return found


# --- cells ------------------------------------------------------------------------------------------------------------


def missing_files(listing: TrailListing) -> list[Finding]:
    """Return a finding for each file that a manifest names and that does not exist."""
    there = {file.path for file in listing.files}
    return [
        finding("FILE_MISSING", "in the manifest, not there", line.cell, line.path)
        for line in listing.lines
        if line.path not in there and line.last > _retired(listing, line.cell)
    ]


def damage_findings(listing: TrailListing) -> list[Finding]:
    """Return a finding for each file and each manifest line that the audit does not use."""
    return [
        finding("FILE_MISSING", "the file of the cell is not there", each.cell, each.path)
        if each.why == MISSING
        else finding("UNPROVEN", "it cannot be used", each.cell, f"{each.path}: {each.why}")
        for each in listing.damages
    ]


def with_roles(listing: TrailListing, counts: Relation) -> TrailListing:
    """Return the listing with the role of each cell; if its file does not give the role, derive it from its events."""
    unknown = [name for name, cell in listing.cells.items() if not cell.role]
    if not unknown:
        return listing
    kinds: dict[str, set[str]] = {name: set() for name in unknown}
    for row in counts.where(F.col("cell").isin(*unknown)).select("cell", "kind").distinct().collect():
        kinds[row["cell"]].add(row["kind"])
    roles = {name: TrailCell(name, _role_of(own), 0) for name, own in kinds.items()}
    return listing._replace(cells=listing.cells | roles)


def _role_of(kinds: set[str]) -> str:
    is_spool = kinds & {*OF_SPOOL} or ("SCHEDULED" in kinds and not kinds & OF_DAEMON)
    return "spool" if is_spool else "daemon"


def unproven(listing: TrailListing) -> list[Finding]:
    """Return findings about unproven data: files that no manifest lists, and lines that break the digest chain.

    A killed writer leaves one unlisted file, its last.
    """
    rule = "more is said to be retired than retention removes"
    found = [
        finding("UNPROVEN", rule, cell.cell, cell.doubt) for _, cell in sorted(listing.cells.items()) if cell.doubt
    ]
    for cell in sorted({file.cell for file in listing.files}):
        retired = _retired(listing, cell)
        files = [file for file in listing.files if file.cell == cell and file.last > retired]
        lines = [line for line in listing.lines if line.cell == cell and line.last > retired]
        if files and not lines:
            found.append(finding("UNPROVEN", "no manifest names its files", cell, f"{len(files)} files"))
            continue
        listed = {line.path for line in lines}
        newest = max((file.last for file in files), default=0)
        missed = [file.path for file in files if file.path not in listed and file.last < newest]
        found += [finding("UNPROVEN", "in no manifest, though later files are", cell, path) for path in missed]
        found += _chain_findings(cell, lines, is_whole=retired == 0)
    return found


def _chain_findings(cell: str, lines: Sequence[ManifestLine], *, is_whole: bool) -> list[Finding]:
    """Return findings for breaks in the chain of a cell's lines, and for the number of older lines without one."""
    found: list[Finding] = []
    unchained = 0
    before: ManifestLine | None = None
    for number, line in enumerate(lines):
        if line.previous is None and unchained == number:
            unchained += 1
        elif before is None and not is_whole:
            pass  # retention removed the line before it
        elif line.previous != ("" if before is None else before.digest):
            found.append(finding("UNPROVEN", "its manifest does not continue the one before", cell, line.path))
        before = line
    if unchained:
        detail = f"{unchained} of {len(lines)} lines"
        found.append(finding("UNCHAINED", "its manifests are of a build that did not chain them", cell, detail))
    return found


def sound_snapshots(
    engine: TableEngine, listing: TrailListing, undone: Sequence[Undone], options: Options
) -> tuple[list[Snapshot], list[Finding]]:
    """Return the newest intact snapshot of each cell, and a finding for each damaged one.

    Snapshots of undone events are ignored.
    """
    left: dict[str, list[Snapshot]] = {}
    for snapshot in sorted(listing.snapshots, key=_sequence):
        if not any(each.has(snapshot.cell, snapshot.sequence) for each in undone):
            left.setdefault(snapshot.cell, []).append(snapshot)
    sound: list[Snapshot] = []
    found: list[Finding] = []
    while newest := [snapshots.pop() for snapshots in left.values() if snapshots]:
        doubts = {each.cell: each.doubts for each in newest}
        if options.verify:
            doubts |= {each.cell: _altered_in(engine, listing, each) for each in newest if not each.doubts}
        doubts |= _misshapen(engine, listing, [each for each in newest if not doubts[each.cell]])
        doubts |= _miscounted(engine, listing, [each for each in newest if not doubts[each.cell]])
        for snapshot in newest:
            if doubts[snapshot.cell]:
                detail = f"{snapshot.path}: {', '.join(doubts[snapshot.cell])}"
                found.append(finding("UNPROVEN", "the snapshot was altered", snapshot.cell, detail))
            else:
                sound.append(snapshot)
                left[snapshot.cell] = []
    return sound, found


def _misshapen(engine: TableEngine, listing: TrailListing, snapshots: Sequence[Snapshot]) -> dict[str, tuple[str, ...]]:
    """Return by cell the tables of snapshots, at most one of each cell, that differ from docs/reference/trail.md."""
    found: dict[str, tuple[str, ...]] = {each.cell: () for each in snapshots}
    for name, fields in CONTENTS.items():
        urls = {listing.url(f"{each.path}/{name}.parquet"): each.cell for each in snapshots}
        for url, fault in engine.schema_faults(list(urls), fields).items():
            found[urls[url]] += (f"{name}.parquet: {fault}",)
    return found


def _miscounted(
    engine: TableEngine, listing: TrailListing, snapshots: Sequence[Snapshot]
) -> dict[str, tuple[str, ...]]:
    """Return the tables of snapshots, at most one of each cell, whose row count differs from their head, by cell."""
    if not snapshots:
        return {}
    counts = {
        name: read_contents(engine, listing, snapshots, name).group_by("cell").agg(F.count_rows().alias("count"))
        for name in CONTENTS
    }
    there = {(row["cell"], name): row["count"] for name, rows in engine.collect_all(counts).items() for row in rows}
    found: dict[str, tuple[str, ...]] = {}
    for each in snapshots:
        rows = {name: there.get((each.cell, name), 0) for name in CONTENTS}
        others = [f"{name} {count}" for name, count in rows.items() if each.rows[name] != count]
        found[each.cell] = (f"its head counts others: {', '.join(others)}",) if others else ()
    return found


def _altered_in(engine: TableEngine, listing: TrailListing, snapshot: Snapshot) -> tuple[str, ...]:
    """Return the names of the files of a snapshot that are missing or modified."""
    names = tuple(sorted(snapshot.sha256))
    try:
        sums = engine.sums([listing.url(f"{snapshot.path}/{name}") for name in names])
    except engine.errors:
        return names
    return tuple(name for name, one in zip(names, sums, strict=True) if one != snapshot.sha256[name])


def cell_states(
    listing: TrailListing, files: FileFindings, events: Sequence[Row], snapshots: Sequence[Snapshot], options: Options
) -> list[CellState]:
    """Return the state of each cell. ``events`` are the rare ones about cells (``kind``, ``boot``, ``detail``...)."""
    by_cell: dict[str, list[FileFacts]] = {}
    for path, facts in files.facts.items():
        by_cell.setdefault(cell_of(path), []).append(facts)
    last_at_ms = {cell: max(all_facts, key=lambda each: each.last).last_at_ms for cell, all_facts in by_cell.items()}
    newest_ms = max(last_at_ms.values(), default=0)
    states = []
    for cell, all_facts in sorted(by_cell.items()):
        own = [row for row in events if row["cell"] == cell]
        last = max(each.last for each in all_facts)
        opened = {row["boot"] for row in own if row["kind"] == "OPENED"}
        closed = {row["boot"] for row in own if row["kind"] == "CLOSED"}
        is_closed = any(row["kind"] == "CLOSED" and row["sequence"] == last for row in own)
        snapshot = max((each for each in snapshots if each.cell == cell), default=None, key=_sequence)
        gaps = _gaps(listing, files, cell, own, snapshot)
        states.append(
            CellState(
                cell=cell,
                role=listing.cells[cell].role,
                retired=_retired(listing, cell),
                first=min(each.first for each in all_facts),
                last=last,
                events=sum(each.rows for each in all_facts) - _repeated(files, cell),
                files=len(all_facts),
                first_at_ms=min(each.at_ms_min for each in all_facts),
                last_at_ms=last_at_ms[cell],
                runs=len(opened),
                kills=len(opened - closed - {max(opened, default=0)}),
                is_closed=is_closed,
                is_silent=not is_closed and newest_ms - last_at_ms[cell] > options.writer_timeout_ms,
                snapshot=snapshot,
                gaps=tuple(gaps),
                doubts=tuple(_doubts(files, cell)),
                undone=tuple(undone_of(own)),
                is_retired_cell=cell in retired_cells(listing),
                gap_times=tuple(_times_of(gap, all_facts) for gap in gaps[:GAPS_TIMED_MAX]),
            )
        )
    return states


def watermark_of(cells: Sequence[CellState]) -> int:
    """Return the time up to which the trail of every running cell is complete.

    Without a running cell it is the time of the last event.
    """
    alive = [cell.last_at_ms for cell in cells if not (cell.is_closed or cell.is_silent or cell.is_retired_cell)]
    return min(alive) if alive else max((cell.last_at_ms for cell in cells), default=0)


def find_stops(engine: TableEngine, listing: TrailListing, files: FileFindings, events: Sequence[Row]) -> list[Stop]:
    """Return the stops of all cells. ``events`` are the rare ones about cells. Reads the files of the last events."""
    places = last_of_runs(events)
    holding = [
        file
        for file in listing.files
        if file.path in files.facts
        and any(file.cell == cell and file.first <= last <= file.last for cell, last in places)
    ]
    if not holding:
        return []
    rows = read_events(engine, listing, holding).where(F.col("sequence").isin(*sorted({last for _, last in places})))
    ends = rows.group_by("cell", "sequence").agg(F.min_of("at_ms").alias("at_ms")).collect()
    return stops_of(events, {(row["cell"], row["sequence"]): row["at_ms"] for row in ends})


def gap_findings(cells: Sequence[CellState]) -> list[Finding]:
    """Return a finding for each gap that no other finding names."""
    return [
        finding("TRAIL_GAP", gap.why, cell.cell, f"sequences {gap.first} to {gap.last}")
        for cell in cells
        for gap in cell.gaps
        if gap.why not in {"file missing", "file cannot be read"}
    ]


def hole_findings(cells: Sequence[CellState], holes: Iterable[OffsetGap]) -> list[Finding]:
    """Return a finding for each hole in the offsets of a queue that no gap of the trail explains."""
    gaps = {cell.cell: [*cell.gaps, *cell.doubts] for cell in cells}
    return [
        finding(
            "UNPROVEN",
            "no event names an offset of a queue",
            hole.cell,
            f"queue {hole.queue_id}, offsets {hole.first} to {hole.last}",
            topic=hole.topic,
        )
        for hole in sorted(holes)
        if not any(
            gap.last >= hole.after_sequence and gap.first <= hole.before_sequence for gap in gaps.get(hole.cell, ())
        )
    ]


def put_back_findings(listing: TrailListing, undone: Sequence[Undone]) -> list[Finding]:
    """Return a finding for each rollback of a store."""
    gone = retired_cells(listing)
    return [
        finding("PUT_BACK", "the store was put back", each.cell, f"sequences {each.first} to {each.last}")
        for each in undone
        if each.cell not in gone
    ]


def retired_cells(listing: TrailListing) -> list[str]:
    """Return the cells whose stores are gone."""
    return [each.cell for each in listing.retirements if not each.is_void]


def retired_findings(listing: TrailListing) -> list[Finding]:
    """Return a finding for each cell that was declared gone."""
    rules = {False: "its events count for nothing", True: "it has later events, so it is not gone, and is judged"}
    return [
        finding("RETIRED_CELL", rules[each.is_void], each.cell, f"retired after sequence {each.last_sequence}")
        for each in listing.retirements
    ]


def vanished(listing: TrailListing, cells: Sequence[CellState], snapshots: Sequence[Snapshot]) -> list[Finding]:
    """Return a finding for each cell that had events but has no readable file."""
    told = {cell.cell for cell in cells}
    found = []
    for name in sorted(listing.cells.keys() - told):
        ends = [each.sequence for each in snapshots if each.cell == name]
        ends += [line.last for line in listing.lines if line.cell == name]
        upto = max(ends, default=0)
        if upto > _retired(listing, name):
            detail = f"sequences {_retired(listing, name) + 1} to {upto}"
            found.append(finding("TRAIL_GAP", "no file of events is left", name, detail))
    return found


def _times_of(gap: Gap, facts: Sequence[FileFacts]) -> tuple[int | None, int | None]:
    """Return the time of the last file before a gap and of the first file after it, None if there is none.

    Inside of a file it is the time range of the file.
    """
    before = [each.at_ms_max if each.last < gap.first else each.at_ms_min for each in facts if each.first < gap.first]
    after = [each.at_ms_min if each.first > gap.last else each.at_ms_max for each in facts if each.last > gap.last]
    return max(before, default=None), min(after, default=None)


def _gaps(
    listing: TrailListing, files: FileFindings, cell: str, events: Sequence[Row], snapshot: Snapshot | None
) -> list[Gap]:
    told = [
        Gap(cell, row["detail"], row["detail"] + row["due_ms"] - 1, "dropped before export")
        for row in events
        if row["kind"] == "GAP" and row["due_ms"] > 0
    ]
    names = {file.path for file in listing.files}
    missing = [
        Gap(cell, line.first, line.last, "file missing")
        for line in listing.lines
        if line.cell == cell and line.path not in names
    ]
    spans = sorted(span_of(path) for path in files.facts if cell_of(path) == cell)
    upto, between = _retired(listing, cell), []
    for first, last in spans:
        if first > upto + 1:
            between.append(Gap(cell, upto + 1, first - 1, "no file"))
        upto = max(upto, last)
    if snapshot is not None and snapshot.sequence > upto:
        between.append(Gap(cell, upto + 1, snapshot.sequence, "after the end, the snapshot has later events"))
    inside = [gap for gap in files.gaps if gap.cell == cell]
    retired = _retired(listing, cell)
    joined = join_gaps([*told, *(gap for gap in missing if gap.last > retired), *inside, *between])
    return [gap for gap in joined if gap.last > retired]


def _doubts(files: FileFindings, cell: str) -> list[Gap]:
    altered = [each["detail"] for each in files.findings if each["kind"] == "FILE_ALTERED" and each["cell"] == cell]
    return [Gap(cell, *span_of(path), "altered") for path in sorted(altered)]


def _retired(listing: TrailListing, cell: str) -> int:
    return listing.cells[cell].retired if cell in listing.cells else 0


def cell_of(path: str) -> str:
    """Return the cell of a file."""
    return unquote(path.split("/")[1].removeprefix("cell="))


def span_of(path: str) -> tuple[int, int]:
    """Return the first and the last sequence from the name of a file."""
    first, _, last = path.rsplit("/", 1)[1].removesuffix(".parquet").partition("-")
    return int(first), int(last)


def _sequence(snapshot: Snapshot) -> int:
    return snapshot.sequence


def _repeated(files: FileFindings, cell: str) -> int:
    """Return the number of surplus rows in the files of a cell."""
    repeated = [each["detail"] for each in files.findings if each["kind"] == "RECORD_REPEATED" and each["cell"] == cell]
    return sum(int(detail.rsplit(", ", 1)[1].removesuffix(" times")) - 1 for detail in repeated)
