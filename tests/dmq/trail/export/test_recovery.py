"""What a kill leaves of an export, and of retention: the next run finds it, and ends what was begun."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from datetime import timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from structlog.testing import capture_logs
from support.models.trail.read import data_files, lines, read_trail
from support.rigs.broker.trail_cell import CELL, DAY_MS, Cell

from dmq.store.files.steady_clock import STEADY_AFTER_MS
from dmq.trail import manifest
from dmq.trail.cells import cells_of
from dmq.trail.export.exporter import ExportOptions, TrailUnavailable


def _broken(*_: object) -> None:
    raise OSError(errno.EIO, "Input/output error")


def test_a_file_before_its_line_is_taken_in(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kill came between the two: nothing is written twice, nothing is missing."""
    cell.emit(5)
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "append", _broken)
        with pytest.raises(TrailUnavailable):
            cell.exporter.flush()
    assert len(data_files(cell.trail, CELL)) == 1
    assert lines(cell.trail, CELL) == []
    cell.restart()
    assert cell.numbers() == [1, 2, 3, 4, 5]
    cell.check_outbox()
    assert cell.store.outbox_state.first_sequence == 6, "they are dropped, not exported again"


def test_a_line_before_the_rows_left(cell: Cell) -> None:
    """Rows that were exported are only dropped."""
    cell.emit(5)
    before = cell.memory.reopened()
    cell.memory._is_closed = False
    cell.exporter.flush()
    cell.store._writer.close()
    cell.memory = before
    cell.open()
    assert cell.numbers() == [1, 2, 3, 4, 5]
    assert "TAIL_LOST" not in cell.kinds()
    cell.check_outbox()
    cell.emit(1)
    assert cell.exporter.flush() == 6


def test_a_torn_line_is_cut(cell: Cell) -> None:
    """And its file is taken in."""
    cell.emit(2)
    cell.exporter.flush()
    cell.emit(2)
    cell.exporter.flush()
    (path,) = (cell.trail / "manifest").rglob("*.jsonl")
    path.write_bytes(path.read_bytes()[:-7])
    cell.restart()
    assert cell.numbers() == [1, 2, 3, 4]
    assert [line["last_sequence"] for line in lines(cell.trail, CELL)] == [2, 4]


def test_an_unexpected_file_is_set_aside_with_a_report(cell: Cell) -> None:
    """Nothing is removed but what is ours and half done."""
    cell.emit(2)
    cell.exporter.flush()
    (known,) = data_files(cell.trail, CELL)
    hour = (cell.trail / known).parent
    half, strange = hour / "x.parquet.tmp", hour / "notes.txt"
    broken, overlapping = hour / manifest.file_name(3, 4), hour / manifest.file_name(2, 2)
    for path in (half, strange, broken, overlapping):
        path.write_bytes(b"no parquet")
    with capture_logs() as logs:
        cell.restart()
    told = [Path(str(entry["path"])).name for entry in logs if entry["event"] == "trail_file_unexpected"]
    assert sorted(told) == sorted(path.name for path in (strange, broken, overlapping))
    assert not half.exists()
    assert sorted(path.name for path in hour.glob("_unexpected-*")) == sorted(f"_unexpected-{name}" for name in told)
    cell.emit(2)
    assert cell.exporter.flush() == 4
    assert cell.numbers() == [1, 2, 3, 4]


def test_an_unreadable_manifest_is_written_again(cell: Cell) -> None:
    """From the files of its date, of an older date too."""
    for _ in range(3):
        cell.emit(2)
        cell.exporter.flush()
        cell.clock.advance(DAY_MS)
    for path in sorted((cell.trail / "manifest").rglob("*.jsonl"))[:3:2]:
        path.write_text("{}\n", encoding="utf-8")
    with capture_logs() as logs:
        cell.restart()
    assert [entry["event"] for entry in logs].count("trail_file_unexpected") == 2
    assert cell.numbers() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("damage", ["other bytes", "rows missing", "columns missing"])
def test_a_damaged_exported_file_stops_no_export(cell: Cell, damage: str) -> None:
    """A kill left its rows in the outbox, so they are compared with it: what cannot be read accuses nobody."""
    cell.emit(1, batches=5)
    before = cell.memory.reopened()
    cell.memory._is_closed = False
    cell.exporter.flush()
    cell.store._writer.close()
    cell.memory = before
    (path,) = (cell.trail / name for name in data_files(cell.trail, CELL))
    if damage == "other bytes":
        path.write_bytes(b"PAR1")
    else:
        table = pq.ParquetFile(path).read()
        pq.write_table(table.slice(1) if damage == "rows missing" else table.select(["sequence"]), path)
    cell.open()
    cell.emit(2)
    assert cell.exporter.flush() == 7


def put_back(cell: Cell) -> None:
    """End the run, and leave the store as it was after five events, while the trail has ten."""
    cell.emit(3)
    cell.exporter.flush()
    cell.emit(2)
    older = cell.memory.reopened()
    cell.memory._is_closed = False
    cell.emit(5)
    cell.exporter.flush()
    cell.store._writer.close()
    cell.memory = older


def test_a_lost_tail_is_reported_and_no_number_used_twice(cell: Cell) -> None:
    """An older copy of the store was put back: numbers go on behind the trail, before this run's first event."""
    put_back(cell)
    with capture_logs() as logs:
        cell.open()
    assert [entry["log_level"] for entry in logs if entry["event"] == "trail_tail_lost"] == ["critical"]
    cell.emit(1)
    assert cell.exporter.flush() == 12
    told = read_trail(cell.trail, CELL)
    assert [event["sequence"] for event in told] == list(range(1, 13))
    lost = told[10]
    assert (lost["kind"], lost["detail"], lost["due_ms"]) == ("TAIL_LOST", 6, 5)
    cell.check_outbox()
    cell.restart()
    assert cell.store.outbox_state.next_sequence == 13, "the jump is durable"


@pytest.mark.parametrize("restarts", [False, True], ids=["in one run", "in the next run"])
@pytest.mark.parametrize("meanwhile", [2, 5, 20])
def test_numbers_of_a_lost_tail_that_are_used_again_are_a_gap(cell: Cell, meanwhile: int, *, restarts: bool) -> None:
    """An older copy was put back, and its trail could not be looked at when it began: nothing is taken for exported."""
    put_back(cell)
    cell.clock.advance(60_000)
    away = cell.trail.rename(cell.trail.with_name("away"))
    cell.trail.touch()
    cell.open()
    cell.emit(meanwhile)
    if restarts:
        cell.restart()
    cell.trail.unlink()
    away.rename(cell.trail)
    if restarts:
        cell.restart()
    cell.exporter.flush()
    cell.emit(3)
    end = cell.exporter.flush()
    told = read_trail(cell.trail, CELL, has_gaps=True)
    there = {event["sequence"] for event in told}
    (lost,) = [event for event in told if event["kind"] == "TAIL_LOST"]
    (gap,) = [event for event in told if event["kind"] == "GAP"]
    assert (lost["detail"], lost["due_ms"]) == (6, 5)
    assert (gap["detail"], gap["due_ms"]) == (6, meanwhile)
    assert set(range(1, end + 1)) - there == set(range(11, 6 + meanwhile))
    cell.check_outbox()
    cell.emit(1)
    assert cell.exporter.flush() == end + 1


def test_a_new_trail_begins_where_the_outbox_does(cell: Cell) -> None:
    """Of events that went into another trail nothing is made up."""
    cell.emit(3)
    cell.exporter.flush()
    cell.trail = cell.trail.with_name("other")
    cell.restart()
    cell.emit(2)
    with capture_logs() as logs:
        cell.exporter.flush()
    assert cell.numbers() == [4, 5]
    assert "audit_events_trimmed" in [entry["event"] for entry in logs]


def keep_three_days(cell: Cell) -> None:
    """Five days, of which three are kept."""
    cell.how = ExportOptions(keep=timedelta(days=3))
    cell.restart()
    for _ in range(6):
        cell.emit(2)
        cell.exporter.flush()
        cell.clock.advance(DAY_MS)


def test_old_dates_go_whole_and_are_no_gap(cell: Cell) -> None:
    """What was retired is said; the rest is as before, and the next run goes on."""
    keep_three_days(cell)
    told = json.loads((cell.trail / "cells" / f"{CELL}.json").read_text(encoding="utf-8"))
    assert told["retired_sequence"] == 4
    assert cell.numbers() == list(range(5, 13))
    assert len(list((cell.trail / "events" / f"cell={CELL}").iterdir())) == 4
    cell.restart()
    cell.emit(1)
    assert cell.exporter.flush() == 13


def test_no_date_goes_while_the_clock_is_not_steady(cell: Cell) -> None:
    """A clock that is a year ahead makes thirteen of fourteen dates old: they stay, until it was steady for long."""
    for _ in range(14):
        cell.emit(1)
        cell.exporter.flush()
        cell.clock.advance(DAY_MS)
    cell.how = ExportOptions(keep=timedelta(days=14))
    for by_ms in (365 * DAY_MS, -365 * DAY_MS, 365 * DAY_MS):
        cell.clock.step_to(cell.clock.now_ms() + by_ms)
        cell.restart()
        cell.emit(1)
        cell.exporter.flush()
        assert cell.numbers()[0] == 1
    cell.restart()
    cell.clock.advance(STEADY_AFTER_MS)
    cell.emit(1)
    cell.exporter.flush()
    assert cell.numbers()[0] > 1


@pytest.mark.parametrize("step", ["write_cell", "unlink", "rmtree"])
def test_a_kill_while_old_dates_go_is_no_loss(cell: Cell, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """After each step of it the next run finishes, and what is there is said to be there."""
    targets = {
        "write_cell": ("dmq.trail.manifest.write_cell", None),
        "unlink": ("dmq.trail.export.retention.sync_directory", cell.trail / "manifest" / f"cell={CELL}"),
        "rmtree": ("dmq.trail.export.retention.shutil.rmtree", None),
    }
    name, only = targets[step]

    def killed(path: object, *_: object, **__: object) -> None:
        if only is None or path == only:
            raise OSError(errno.EIO, "killed")

    cell.how = ExportOptions(keep=timedelta(days=1))
    cell.emit(2)
    cell.exporter.flush()
    cell.clock.advance(3 * DAY_MS)
    cell.restart()
    cell.emit(2)
    with monkeypatch.context() as patch:
        patch.setattr(name, killed)
        with pytest.raises(TrailUnavailable):
            cell.exporter.flush()
    cell.restart()
    cell.exporter.flush()
    told = json.loads((cell.trail / "cells" / f"{CELL}.json").read_text(encoding="utf-8"))
    assert told["retired_sequence"] == 2
    assert cell.numbers() == [3, 4]


@pytest.mark.parametrize("raised_to", [5, 7, 8, 10, 12, 10**9])
def test_no_more_is_reported_retired_than_retention_removes(cell: Cell, raised_to: int) -> None:
    """A number in the file of the cell, changed by hand or by damage, removes nothing that a manifest lists."""
    keep_three_days(cell)
    cell.how = ExportOptions(keep=timedelta(days=3650))
    file = cell.trail / "cells" / f"{CELL}.json"
    told = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(told | {"retired_sequence": raised_to}), encoding="utf-8")
    with capture_logs() as logs:
        cell.restart()
    assert cell.numbers() == list(range(5, 13))
    is_whole_date = raised_to in {8, 10}  # as retention itself says it before it begins
    assert json.loads(file.read_text(encoding="utf-8")) == (
        told | {"retired_sequence": raised_to if is_whole_date else 4}
    )
    assert [each["event"] for each in logs if each["log_level"] == "error"] == (
        [] if is_whole_date else ["trail_file_unexpected"]
    )
    cell.emit(1)
    assert cell.exporter.flush() == 13
    cell.check_outbox()


@pytest.mark.parametrize("damage", ["{", "[]", '{"cell": "x"}', ""])
def test_a_lost_retired_sequence_is_derived_from_the_trail(cell: Cell, damage: str) -> None:
    """An unreadable or missing cell file does not turn retired events into missing ones."""
    keep_three_days(cell)
    file = cell.trail / "cells" / f"{CELL}.json"
    told = json.loads(file.read_text(encoding="utf-8"))
    if damage:
        file.write_text(damage, encoding="utf-8")
    else:
        file.unlink()
    cell.restart()
    assert json.loads(file.read_text(encoding="utf-8")) == told
    assert [each.gaps for each in cells_of(cell.trail)] == [()]


@pytest.mark.parametrize("damage", [b"{", b"[]", b"\xff\xfe"])
def test_an_unreadable_line_is_skipped_in_the_list_of_cells(cell: Cell, damage: bytes) -> None:
    """Damaged entries of a manifest and a cell file are findings of their cell; the rest is listed."""
    keep_three_days(cell)
    (before,) = cells_of(cell.trail)
    path = max((cell.trail / "manifest").rglob("*.jsonl"))
    with path.open("ab") as file:
        file.write(damage + b"\n")
    (cell.trail / "cells" / f"{CELL}.json").write_bytes(damage)
    (found,) = cells_of(cell.trail)
    assert len(found.damaged) == 2
    assert (found.events, found.last_sequence) == (before.events, before.last_sequence)


def test_without_manifests_nothing_is_removed(cell: Cell) -> None:
    """They say what stays; files that are said to be retired are put aside then, aloud."""
    keep_three_days(cell)
    files = data_files(cell.trail, CELL)
    for path in (cell.trail / "manifest").rglob("*.jsonl"):
        path.unlink()
    file = cell.trail / "cells" / f"{CELL}.json"
    told = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(told | {"retired_sequence": 8}), encoding="utf-8")
    cell.restart()
    left = sorted(path.name.removeprefix("_unexpected-") for path in (cell.trail / "events").rglob("*.parquet"))
    assert left == sorted(path.rsplit("/", 1)[-1] for path in files)


def test_dates_that_a_clock_mixed_go_together(cell: Cell) -> None:
    """Set back over midnight, it puts later events into an earlier date: neither can go without the other."""
    cell.how = ExportOptions(keep=timedelta(days=3))
    cell.restart()
    for by_ms in (DAY_MS, -DAY_MS, DAY_MS, DAY_MS):
        cell.emit(2)
        cell.exporter.flush()
        cell.clock.step_to(cell.clock.now_ms() + by_ms)
    for _ in range(8):
        cell.restart()
        cell.clock.advance(DAY_MS)
        cell.emit(1)
        cell.exporter.flush()
    assert cell.numbers()[0] > 8
    assert json.loads((cell.trail / "cells" / f"{CELL}.json").read_text(encoding="utf-8"))["retired_sequence"] >= 8


def test_the_newest_date_stays_however_old(cell: Cell) -> None:
    """So the next run finds where to go on."""
    cell.emit(2)
    cell.exporter.flush()
    cell.clock.advance(400 * DAY_MS)
    cell.restart()
    cell.exporter.flush()
    assert cell.numbers() == [1, 2]


def chain_of(cell: Cell) -> list[tuple[str, str]]:
    """What each line of the cell's manifests says of the one before, beside its own digest."""
    raw = [
        line
        for path in sorted((cell.trail / "manifest").rglob("????-??-??.jsonl"))
        for line in path.read_bytes().splitlines()
    ]
    return [(json.loads(line)["previous"], hashlib.sha256(line).hexdigest()) for line in raw]


def test_each_line_names_the_one_before_through_any_history(cell: Cell) -> None:
    """Over a restart, a day, a torn line, and a manifest that is made anew: it is what it was, so the chain goes on."""
    for days in (0, 0, 1):
        cell.clock.advance(days * DAY_MS)
        cell.emit(2)
        cell.exporter.flush()
    paths = sorted((cell.trail / "manifest").rglob("????-??-??.jsonl"))
    assert len(paths) == 2
    before = chain_of(cell)
    assert [previous for previous, _ in before] == ["", *(digest for _, digest in before[:-1])]
    paths[0].write_bytes(paths[0].read_bytes().replace(b'"rows"', b"rows", 1))  # is put aside
    paths[1].write_bytes(paths[1].read_bytes()[:-3])
    cell.restart()
    assert chain_of(cell)[: len(before)] == before
    cell.emit(1)
    cell.exporter.flush()
    after = chain_of(cell)
    assert [previous for previous, _ in after] == ["", *(digest for _, digest in after[:-1])]


@pytest.mark.parametrize("has_files", [True, False])
def test_without_manifests_nothing_that_waits_is_taken_for_exported(cell: Cell, has_files: bool) -> None:
    """A number beyond the end drops no event from the outbox, and numbers go on where they ended."""
    keep_three_days(cell)
    cell.how = ExportOptions(keep=timedelta(days=3650))
    cell.emit(2)
    shutil.rmtree(cell.trail / "manifest")
    if not has_files:
        shutil.rmtree(cell.trail / "events")
    file = cell.trail / "cells" / f"{CELL}.json"
    told = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(told | {"retired_sequence": 10**9}), encoding="utf-8")
    with capture_logs() as logs:
        cell.restart()
    assert [each["event"] for each in logs if each["log_level"] in {"error", "critical"}] == ["trail_file_unexpected"]
    cell.emit(1)
    assert cell.exporter.flush() == 15
    assert cell.numbers() == list(range(5 if has_files else 13, 16))
    cell.check_outbox()
