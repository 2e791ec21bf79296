"""When the trail cannot be written: nothing else stops, and everybody is told."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from support.models.trail.read import read_trail
from support.rigs.broker.trail_cell import CELL, Cell
from support.rigs.store.rows import PATIENCE_S

from dmq.store.store import StoreOptions
from dmq.trail import files
from dmq.trail.events import gap_event
from dmq.trail.export import exporter as export
from dmq.trail.export import recovery
from dmq.trail.export.exporter import Exporter, TrailUnavailable


def test_a_full_disk_stops_nothing_but_the_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said once, tried again later and later; the outbox keeps its bound with a gap that counts; then it goes on."""
    cell = Cell(tmp_path)
    cell.options = StoreOptions(gap_event=gap_event, outbox_bytes_max=4_000)
    cell.restart()

    def full(_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with capture_logs() as logs:
        with monkeypatch.context() as patch:
            patch.setattr(recovery, "sync_file", full)
            patch.setattr(files, "sync_file", full)
            tries = []
            for _ in range(200):
                cell.emit(1)
                cell.exporter.turn()
                cell.clock.advance(1000)
                tries.append(cell.exporter.failures_total)
            assert "No space left" in cell.exporter.figures.error
            assert cell.store.failure is None
        assert 5 < tries[-1] < 12, "with a pause that grows"
        cell.clock.advance(60_000)
        cell.exporter.turn()
        cell.store.commit([])  # behind the heartbeat of this turn
        cell.exporter.turn(is_wanted=True)
    assert cell.exporter.figures.error == ""
    names = [entry["event"] for entry in logs]
    assert (names.count("trail_stopped"), names.count("trail_resumed")) == (1, 1)
    told = read_trail(cell.trail, CELL)
    cut = {
        event["detail"] + step for event in told if event["kind"] == "GAP" for step in range(event["due_ms"])
    }  # each is counted once
    seen = {event["sequence"] for event in told}
    assert cut
    assert not cut & seen
    assert max(seen) == cell.store.outbox_state.next_sequence - 1
    assert set(range(min(cut), max(seen) + 1)) == cut | seen
    assert cell.store.outbox_state.lost == len(set(range(1, min(seen))))
    cell.store.close()


def test_a_batch_being_exported_is_not_cut(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the trail would hold events, and a gap that says they are missing."""
    cell.store.close()
    cell.options = StoreOptions(gap_event=gap_event, outbox_bytes_max=3_000)
    cell.restart()
    cell.emit(10, batches=5)
    write = cell.exporter._write

    def slow(*args: object) -> object:
        cell.emit(10)
        cell.emit(10)
        return write(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(cell.exporter, "_write", slow)
    cell.exporter.flush()
    monkeypatch.undo()
    cell.exporter.flush()
    assert "GAP" not in cell.kinds()
    assert cell.numbers() == list(range(1, 71))
    cell.check_outbox()


def test_an_export_that_hangs_does_not_fill_the_disk(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond one and a half of the bound the outbox is cut all the same."""
    cell.store.close()
    cell.options = StoreOptions(gap_event=gap_event, outbox_bytes_max=3_000)
    cell.restart()
    cell.emit(10, batches=3)
    write = cell.exporter._write

    def hanging(*args: object) -> object:
        for _ in range(50):
            cell.emit(10)
            assert cell.store.outbox_state.stored_bytes < 4_500 + 1_500
        return write(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(cell.exporter, "_write", hanging)
    cell.exporter.flush()
    monkeypatch.undo()
    cell.check_outbox()
    assert cell.store.outbox_state.lost > 0


def test_the_thread_survives_an_unexpected_exception(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so, tells who waits, and goes on."""
    monkeypatch.setattr(export, "LOOK_S", 0.01)
    cell.emit(3)
    with monkeypatch.context() as patch:
        patch.setattr(cell.exporter, "_export", lambda *_, **__: 1 // 0)
        with capture_logs() as logs:
            cell.exporter.start()
            with pytest.raises(TrailUnavailable, match="ZeroDivisionError"):
                cell.exporter.flush()
    assert [entry["exc_info"] for entry in logs if entry["event"] == "trail_stopped"][:1] == [True]
    assert cell.exporter.flush() == 3
    assert cell.exporter.figures.error == ""


def test_many_flush_at_once(cell: Cell) -> None:
    """Each returns when what it knew of is exported."""
    cell.exporter.start()
    found: list[bool] = []

    def one() -> None:
        for _ in range(20):
            cell.emit(3)
            before = cell.store.outbox_synced - 1
            found.append(cell.exporter.flush() >= before)

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert found == [True] * 80
    cell.exporter.close(5)
    assert cell.numbers() == list(range(1, 241))
    assert cell.store.outbox_state == (241, 241, 0, 0)


def test_closing_exports_the_rest_and_ends_in_time(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order nothing is left; a disk that hangs does not hold up the end."""
    cell.exporter.start()
    cell.emit(4)
    cell.exporter.close(5)
    assert cell.store.outbox_state == (5, 5, 0, 0)
    cell.emit(1)
    with pytest.raises(TrailUnavailable):
        cell.exporter.flush()
    other = Exporter(cell.store, cell.trail, cell.how)
    other.recover()
    hangs = threading.Event()
    monkeypatch.setattr(files, "sync_file", lambda _: hangs.wait(PATIENCE_S))
    monkeypatch.setattr(export, "_ABORT_S", 0.01)
    other.start()
    with capture_logs() as logs:
        other.close(0.05)
    assert [entry["waiting"] for entry in logs if entry["event"] == "trail_close_timed_out"] == [1]
    hangs.set()
    assert other._thread is not None
    other._thread.join(PATIENCE_S)
