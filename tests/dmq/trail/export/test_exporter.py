"""The exporter on a store in memory, turn by turn: when it exports, and what it drops."""

from __future__ import annotations

import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import pytest
from support.models.trail.read import HOUR_MS, lines, read_trail
from support.rigs.broker.trail_cell import CELL, Cell
from support.rigs.store.rows import PATIENCE_S

from dmq.store.schema.keys import Family, name_key
from dmq.store.store import StoreOptions
from dmq.store.writer.operations import Emit, Put
from dmq.store.writer.writer import Unit
from dmq.trail.events import EventKind, cell_event, encode_event, gap_event
from dmq.trail.export.values import ExportOptions


def test_exported_rows_leave_the_outbox(cell: Cell) -> None:
    """The file first, then the rows; numbers go on."""
    cell.emit(10, batches=7)
    assert cell.exporter.flush() == 70
    assert cell.numbers() == list(range(1, 71))
    assert cell.store.outbox_state == (71, 71, 0, 0)
    cell.check_outbox()
    cell.emit(5)
    assert cell.exporter.flush() == 75
    assert cell.numbers() == list(range(1, 76))
    assert cell.exporter.flush() == 75
    assert len(lines(cell.trail, CELL)) == 2, "nothing waited: no file"


def test_only_synced_rows_are_exported(cell: Cell) -> None:
    """A batch can be read before it is durable; a power cut then must not leave the trail ahead of the store."""
    cell.emit(3)
    cell.gate.hold()
    cell.store.submit(Unit([Emit(cell_event(EventKind.HEARTBEAT))]))
    cell.gate.await_sync()
    assert cell.store.outbox_state.next_sequence == 5
    assert cell.store.outbox_synced == 4
    done = threading.Thread(target=cell.exporter.flush)
    done.start()  # it waits for the writer, too
    cell.gate.let_go()
    done.join(PATIENCE_S)
    assert cell.numbers() == [1, 2, 3]
    assert cell.exporter.flush() == 4


def test_names_stand_for_ids(cell: Cell) -> None:
    """Topics, groups and lanes by the records that the broker leaves; an id without one is still told apart."""

    def named(number: int, kind: int, rest: bytes) -> Put:
        return Put(Family.META, name_key(number), bytes((1, kind)) + bytes(10) + rest)

    cell.store.commit([
        named(1, 1, b"orders"),
        named(2, 2, b"workers"),
        named(3, 3, b"\0\0\0\2\0\0\0\1"),
        *(Emit(encode_event(4, topic, 2, 0, 1, 0, b"\1" * 17), 5) for topic in (1, 3, 9)),
    ])  # fmt: skip
    cell.exporter.flush()
    found = [(event["topic"], event["group"]) for event in read_trail(cell.trail, CELL)]
    assert found == [("orders", "workers"), ("%RETRY%workers", "workers"), ("?9", "workers")]


def test_each_hour_is_a_file_also_when_the_clock_steps_back(cell: Cell) -> None:
    """Rows stay in the order of their sequences; hours and dates of paths go where the clock goes."""
    for step_ms in (0, HOUR_MS, -HOUR_MS, 30 * HOUR_MS, -60 * HOUR_MS):
        cell.clock.step_to(cell.clock.now_ms() + step_ms)
        cell.emit(2)
    cell.exporter.flush()
    assert cell.numbers() == list(range(1, 11))
    assert [line["first_sequence"] for line in lines(cell.trail, CELL)] == [1, 3, 5, 7, 9]
    cell.restart()
    cell.emit(1)
    assert cell.exporter.flush() == 11, "also when the newest date is not the last one written"


@pytest.mark.parametrize(
    ("how", "emitted", "waits_s"),
    [
        (ExportOptions(every_s=60), 5, 60.0),
        (ExportOptions(every_s=60, rows_max=50), 50, 0.0),
        (ExportOptions(every_s=7), 1, 7.0),
    ],
)
def test_it_is_time(tmp_path: Path, how: ExportOptions, emitted: int, waits_s: float) -> None:
    """After ``every_s``; at once where a full go waits."""
    cell = Cell(tmp_path)
    cell.how = how
    cell.restart()
    cell.emit(emitted)
    if waits_s:
        cell.clock.advance(int(waits_s * 1000) - 1)
        cell.exporter.turn()
        assert cell.numbers() == []
        cell.clock.advance(1)
    cell.exporter.turn()
    assert cell.numbers() == list(range(1, emitted + 1))
    cell.store.close()


def test_half_an_outbox_is_exported_at_once(tmp_path: Path) -> None:
    """Before anything would have to be cut."""
    cell = Cell(tmp_path)
    cell.options = StoreOptions(gap_event=gap_event, outbox_bytes_max=20_000)
    cell.restart()
    cell.emit(170)
    cell.exporter.turn()
    assert cell.numbers() == []
    cell.emit(10)
    cell.exporter.turn()
    assert cell.numbers() == list(range(1, 181))
    cell.store.close()


def test_memory_is_bounded(tmp_path: Path) -> None:
    """No file has more rows than are held at once, and all are written in one turn."""
    cell = Cell(tmp_path)
    cell.how = ExportOptions(rows_max=10)
    cell.restart()
    cell.emit(4, batches=11)
    assert cell.exporter.flush() == 44
    assert [line["rows"] for line in lines(cell.trail, CELL)] == [8, 8, 8, 8, 8, 4]
    assert cell.numbers() == list(range(1, 45))
    cell.check_outbox()
    cell.store.close()


def test_a_quiet_cell_has_a_pulse(cell: Cell) -> None:
    """At least one event a minute, and none beside others; of pulses alone there is a file every ten minutes."""
    cell.emit(1)
    cell.exporter.flush()
    files = len(lines(cell.trail, CELL))
    for _ in range(599):
        cell.exporter.turn()
        cell.store.commit([])  # behind the pulse
        cell.clock.advance(1000)
    assert len(lines(cell.trail, CELL)) == files
    for _ in range(80):
        cell.exporter.turn()
        cell.store.commit([])
        cell.clock.advance(1000)
    assert len(lines(cell.trail, CELL)) == files + 1
    beats = [event for event in read_trail(cell.trail, CELL) if event["kind"] == "HEARTBEAT"]
    assert len(beats) >= 10
    assert all(0 < second["at_ms"] - first["at_ms"] <= 60_000 for first, second in pairwise(beats))
    for _ in range(120):
        cell.emit(1)
        cell.exporter.turn()
        cell.clock.advance(1000)
    cell.exporter.flush()
    assert cell.kinds().count("HEARTBEAT") <= len(beats) + 2, "who has something to tell needs no pulse"


def test_the_exporter_costs_no_library_where_it_is_not_used() -> None:
    """Importing it loads neither numpy nor pyarrow: the hook and the command line stay light."""
    loaded = "import dmq.trail.export.exporter, dmq.producer_store.spool, sys; "
    code = f"{loaded}assert not {{'numpy', 'pyarrow'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)
