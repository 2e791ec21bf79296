"""``explain``: the complete history of one message in the trail, without Spark."""

from __future__ import annotations

import heapq
import json
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa

from spark_audit.report import text
from spark_audit.report.message import (
    EventsFile,
    FileGap,
    Judge,
    MessageOutcome,
    MessageSnapshot,
    Row,
    TrailFiles,
    packed_forms,
    unpacked,
    words,
)
from spark_audit.stops import Stop, last_of_runs, stops_of
from spark_audit.undone import TAIL_LOST, Undone, undone_of

FOUND, NOT_FOUND, USAGE = 0, 3, 2  # 1 is the exit code of an uncaught exception
GRACE_MS = 120_000
_ENDED = ("done", "dead", "undone", "inconsistent")
_CONTEXT = ("GAP", "SUBSCRIBED", "RESET", "OPENED", "CLOSED", TAIL_LOST)
_LETTER, _CHILD = "REDRIVEN", "QUEUED_FOR_GROUP"  # of one redrive; both name group and offset of the dead letter


def main(
    message_id: str,
    trail: Path,
    *,
    out: TextIO,
    as_json: bool = False,
    progress: TextIO | None = None,
    grace_ms: int = GRACE_MS,
) -> int:
    """Write the history of one message to ``out``. Return 0 if it was found, 3 if not, 2 if there is no trail to
    search.

    ``progress`` (stderr) receives a progress line once a second. A message that is only in a snapshot counts as found.
    """
    if not message_id or not (trail / "events").is_dir():
        out.write(f"explain: {trail} is not a trail: it has no events\n" if message_id else "explain: no message id\n")
        return USAGE
    told = explained(message_id, trail, sys.stderr if progress is None else progress, grace_ms)
    if as_json:
        out.write(json.dumps(told, indent=2, sort_keys=True) + "\n")
    else:
        # exactly one line each, even if a name contains a newline
        out.writelines(text.visible(line).replace("\n", "\\u000a") + "\n" for line in _lines(told))
    return FOUND if told["found"] else NOT_FOUND


def explained(message_id: str, trail: Path, progress: TextIO, grace_ms: int = GRACE_MS) -> dict[str, Any]:
    """Return the history of one message as plain data: events, gaps, stops and outcomes."""
    files = TrailFiles(trail, progress)
    cells = sorted({file.cell for file in files.files})
    ids = pa.array(packed_forms(message_id), pa.binary())
    found = files.rows(files.files, "message_id", ids, "looking for the id")
    home = sorted({row["cell"] for row in found})
    topics = sorted({str(row["topic"]) for row in found if row["topic"] is not None})
    looked_at = [file for file in files.files if file.cell in (home or cells)]
    context = files.rows(looked_at, "kind", pa.array(_CONTEXT, pa.string()), "looking for gaps and groups")
    undone = undone_of(context)
    # without events a snapshot may still contain it
    shots = {
        cell: shot
        for cell in home or cells
        if (shot := files.snapshot(cell, ids, topics, undone)) is not None and (home or shot.entries)
    }
    gaps = [*(gap for cell in home for gap in files.gaps(cell)), *_told_gaps(context)]
    as_of_ms = {cell: files.last_at_ms(cell) for cell in home}
    standing = _standing(context, undone)
    stops = _stops(files, looked_at, context)
    judge = Judge(shots=shots, gaps=gaps, context=standing, as_of_ms=as_of_ms, grace_ms=grace_ms, stops=stops)
    left = _standing(found, undone)
    gone = [row for row in found if row["cell"] not in {each["cell"] for each in left}]
    return {
        "message_id": message_id,
        "found": bool(found or shots),
        "searched": {"cells": cells, "files": len(files.files), "unreadable": sorted(set(files.unreadable))},
        "events": [
            {
                **row,
                "message_id": unpacked(row["message_id"]),
                "words": words.event_in_words(row) + words.cause_in_words(row, stops),
                "is_undone": _is_undone(row, undone),
            }
            for row in _by_time(found)
        ],
        "redrives": _redrives(files, looked_at, found),
        "gaps": [asdict(gap) for gap in judge.gaps_that_matter(found)],
        "snapshots": [_held(shot) for shot in shots.values()],
        "outcomes": [
            asdict(_if_retired(outcome, files.retired_cells()))
            for outcome in (*judge.outcomes(left), *judge.undone(gone))
        ],
    }


def _redrives(files: TrailFiles, looked_at: Sequence[EventsFile], found: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the redrives of one group that concern the message, as dead letter or as new message."""
    asked = {_redrive_of(row) for row in found if row["kind"] in {_LETTER, _CHILD}}
    if not asked:
        return []
    rows = files.rows(looked_at, "kind", pa.array((_LETTER, _CHILD), pa.string()), "looking for redrives")
    children: dict[tuple[str, str, int], Row] = {}
    redrives = []
    for row in rows:  # the new message is in the same batch as its dead letter, before it
        of = _redrive_of(row)
        if row["kind"] == _CHILD:
            children[of] = row
        elif of in asked and (child := children.pop(of, None)) is not None:
            ids = {"from": unpacked(row["message_id"]), "to": unpacked(child["message_id"])}
            redrives.append({**ids, "group": row["group"], "at_ms": row["at_ms"]})
    ours = {row["message_id"] for row in found}
    return [each for each in redrives if {each["from"], each["to"]} & {unpacked(one) for one in ours}]


def _redrive_of(row: Row) -> tuple[str, str, int]:
    return row["cell"], row["group"], row["detail"]


def _if_retired(outcome: MessageOutcome, retired: Collection[str]) -> MessageOutcome:
    """Return the outcome with the state of a retired cell if the message was open there; otherwise unchanged."""
    if outcome.cell not in retired or outcome.verdict in _ENDED:
        return outcome
    said = "was open when its cell was retired: the store is gone, and another cell has it if it was accepted again"
    return replace(outcome, verdict="retired", words=said)


def _stops(files: TrailFiles, looked_at: Sequence[EventsFile], context: Sequence[Row]) -> list[Stop]:
    """Return the stops of the cells of ``looked_at``."""
    places = last_of_runs(context)
    holding = [
        each for each in looked_at if any(cell == each.cell and each.first <= n <= each.last for cell, n in places)
    ]
    sequences = pa.array(sorted({n for _, n in places}), pa.int64())
    rows = files.rows(holding, "sequence", sequences, "looking for stops")
    return stops_of(context, {(row["cell"], row["sequence"]): row["at_ms"] for row in rows})


def _is_undone(row: Row, undone: Sequence[Undone]) -> bool:
    return any(each.has(row["cell"], row["sequence"]) for each in undone)


def _standing(rows: Sequence[Row], undone: Sequence[Undone]) -> list[Row]:
    """Return the rows without undone events."""
    return [row for row in rows if not _is_undone(row, undone)]


def _told_gaps(context: Sequence[Row]) -> list[FileGap]:
    """Return the gaps that the trail itself records: events dropped before export."""
    return [
        FileGap(
            cell=row["cell"],
            first=row["detail"],
            last=row["detail"] + (row["due_ms"] or 1) - 1,
            why="dropped before export, to keep a bound",
            before_ms=row["at_ms"],
        )
        for row in context
        if row["kind"] == "GAP" and row["detail"] is not None
    ]


def _by_time(found: Sequence[Row]) -> list[Row]:
    """Sort the events of all cells by time. Within a cell the order of its sequences is kept, even after a clock step
    back.
    """
    cells = []
    for _, rows in groupby(found, key=lambda row: row["cell"]):
        newest_ms = 0
        line: list[tuple[int, str, int, int, Row]] = []
        for row in rows:
            newest_ms = max(newest_ms, row["at_ms"])
            line.append((newest_ms, row["cell"], row["sequence"], len(line), row))
        cells.append(line)
    return [row for *_, row in heapq.merge(*cells, key=lambda each: each[:4])]


def _held(shot: MessageSnapshot) -> dict[str, Any]:
    entries = [{**entry, "message_id": unpacked(entry["message_id"])} for entry in shot.entries]
    return {"cell": shot.cell, "sequence": shot.sequence, "taken_ms": shot.taken_ms, "entries": entries}


def _lines(told: dict[str, Any]) -> Iterator[str]:
    searched = told["searched"]
    where = f"{text.plural(searched['files'], 'file')} of {text.plural(len(searched['cells']), 'cell')}"
    if not told["found"]:
        yield f"message {told['message_id']}: not found in {where}, nor in their newest snapshots"
        yield f"cells searched: {', '.join(searched['cells']) or 'none'}"
    else:
        yield f"message {told['message_id']}, {text.plural(len(told['events']), 'event')} in {where}; all times are UTC"
    yield from (f"NOT READ: {each}" for each in searched["unreadable"])
    if told["found"]:
        yield ""
        yield from _timeline(told)
        for each in told["redrives"]:
            yield f"redrive for group {each['group']}: dead letter {each['from']}, new message {each['to']}"
        yield from _snapshot_lines(told["snapshots"], told["events"])
        yield ""
        yield from _outcome_lines(told)


def _timeline(told: dict[str, Any]) -> Iterator[str]:
    gaps = list(told["gaps"])
    for event in told["events"]:
        for gap in [gap for gap in gaps if gap["cell"] == event["cell"] and gap["first"] <= event["sequence"]]:
            gaps.remove(gap)
            yield _gap_line(gap)
        undone = " - UNDONE: the store was restored to an earlier state" if event["is_undone"] else ""
        yield f"{text.utc(event['at_ms']).removesuffix(' UTC'):<23}  {event['words']}{undone}"
        topic = event["topic"] or "no topic"
        yield (
            f"{'':25}{topic}; {event['kind']}, cell {event['cell']}, run {event['boot']}, "
            f"sequence {event['sequence']}, {event['path']}"
        )
    yield from map(_gap_line, gaps)


def _gap_line(gap: dict[str, Any]) -> str:
    after, before = (text.utc(gap[key]).removesuffix(" UTC") for key in ("after_ms", "before_ms"))
    count = text.plural(gap["last"] - gap["first"] + 1, "event")
    numbers = f"{text.count(gap['first'])} to {text.count(gap['last'])}"
    return f"   GAP in cell {gap['cell']}: {count}, {numbers}, between {after} and {before}: {gap['why']}"


def _snapshot_lines(snapshots: Sequence[dict[str, Any]], events: Sequence[Row]) -> Iterator[str]:
    cells = sorted({event["cell"] for event in events} | {shot["cell"] for shot in snapshots})
    by_cell = {shot["cell"]: shot for shot in snapshots}
    for cell in cells:
        if (shot := by_cell.get(cell)) is None:
            yield f"snapshot of cell {cell}: there is none"
            continue
        head = f"snapshot of cell {cell} at sequence {text.count(shot['sequence'])}, {text.utc(shot['taken_ms'])}:"
        if not shot["entries"]:
            yield f"{head} does not contain it as pending"
        for entry in shot["entries"]:
            of = f" for group {entry['group']}" if entry["group"] else ""
            stranded = ", STRANDED: no scan reaches it" if entry["is_stranded"] else ""
            kind = f"{entry['kind']}{of} of {entry['topic']}"
            failed = text.plural(entry["attempt"], "attempt")
            yield f"{head} holds it as {kind}, due {text.utc(entry['due_ms'])}, {failed} failed{stranded}"


def _outcome_lines(told: dict[str, Any]) -> Iterator[str]:
    many = len({each["cell"] for each in told["outcomes"]}) > 1
    for outcome in told["outcomes"]:
        who = outcome["topic"] + (f", group {outcome['group']}" if outcome["group"] else "")
        if many:
            who += f" (cell {outcome['cell']})"
        yield f"{who}: {outcome['words']} [rule: {outcome['rule']}]"
    if not told["outcomes"]:
        yield "in a snapshot only: the trail has no event of it [rule: ORPHAN]"
