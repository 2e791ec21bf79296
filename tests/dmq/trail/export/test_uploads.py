"""The trail in the object store: a lost host loses no exported event, and its successor continues the same trail."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import TypeVar

import pytest
from support.effort import EFFORT, SEED
from support.models.trail.read import HOUR_MS
from support.rigs.broker.trail_cell import CELL, DAY_MS, Cell

from dmq.replication.objects import ObjectStore, ReplicaUnavailable, open_objects
from dmq.trail.manifest import Layout

pytestmark = pytest.mark.fault
T = TypeVar("T")
_STEP = 1 if EFFORT > 1 else 6  # of the calls that fail


class Failing:
    """An object store that fails a call, before or after the write."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self.url = objects.url
        self.calls = 0
        self.fails_at: int | None = None
        self.is_done_first = False

    def create(self, name: str, data: bytes) -> bool:
        return self._call(lambda: self._objects.create(name, data))

    def replace(self, name: str, data: bytes, etag: str | None) -> str | None:
        return self._call(lambda: self._objects.replace(name, data, etag))

    def read(self, name: str) -> tuple[bytes, str] | None:
        return self._call(lambda: self._objects.read(name))

    def list(self, prefix: str, after: str = "") -> list[str]:
        return self._call(lambda: self._objects.list(prefix, after))

    def delete(self, names: Iterable[str]) -> None:
        self._call(lambda: self._objects.delete(names))

    def _call(self, work: Callable[[], T]) -> T:
        self.calls += 1
        if self.calls == self.fails_at and not self.is_done_first:
            raise ReplicaUnavailable("injected")
        done = work()
        if self.calls == self.fails_at:
            raise ReplicaUnavailable("injected")
        return done


@pytest.fixture
def objects(tmp_path: Path) -> Failing:
    """Return an object store in a directory."""
    folder = tmp_path / "objects"
    folder.mkdir()
    return Failing(open_objects(folder.as_uri()))


@pytest.fixture
def cell(tmp_path: Path, objects: Failing) -> Cell:
    """Return a store with a trail that is uploaded."""
    return Cell(tmp_path, objects)


def _work(cell: Cell) -> None:
    """Commit and export events of three hours; errors are retried by later exports."""
    for _ in range(3):
        cell.emit(5)
        cell.exporter.turn(is_wanted=True)
        cell.clock.advance(HOUR_MS)


def _check_whole(cell: Cell, events: int) -> None:
    kinds = [kind for kind in cell.kinds() if kind != "HEARTBEAT"]
    assert cell.numbers() == list(range(1, cell.store.outbox_state.next_sequence))
    assert len(kinds) == events
    assert "TAIL_LOST" not in kinds
    cell.check_outbox()


def test_a_successor_without_a_trail_continues_it(cell: Cell) -> None:
    """Exported events come from the object store, the others from the outbox; the trail is whole and proven."""
    _work(cell)
    cell.emit(4)
    cell.take_over()
    cell.emit(2)
    cell.exporter.flush()
    _check_whole(cell, 21)
    cell.take_over()
    cell.exporter.flush()
    _check_whole(cell, 21)


@pytest.mark.parametrize("is_done_first", [False, True])
@pytest.mark.parametrize("is_retried", [False, True])
def test_a_host_may_be_lost_at_every_call(tmp_path: Path, *, is_done_first: bool, is_retried: bool) -> None:
    """A call fails, before or after it had its effect; the host is lost then, or after the next export."""
    calls = Random(f"{SEED} {is_done_first} {is_retried}").randint(1, _STEP)
    while True:
        folder = tmp_path / str(calls)
        (folder / "objects").mkdir(parents=True)
        failing = Failing(open_objects((folder / "objects").as_uri()))
        failing.fails_at, failing.is_done_first = calls, is_done_first
        cell = Cell(folder, failing)
        _work(cell)
        if failing.calls < calls:
            break
        if is_retried:
            cell.exporter.flush()
        cell.take_over()
        cell.exporter.flush()
        _check_whole(cell, 15)
        calls += _STEP
    assert calls > 10


def test_events_stay_in_the_outbox_until_they_are_uploaded(cell: Cell, objects: Failing) -> None:
    """The files are written, but the outbox keeps the events while the object store is unavailable."""
    cell.emit(5)
    objects.fails_at = objects.calls + 1
    cell.exporter.turn(is_wanted=True)
    assert cell.exporter.figures.error == "ReplicaUnavailable: injected"
    assert cell.store.outbox_state.first_sequence == 1
    cell.exporter.flush()
    assert cell.exporter.figures.error == ""
    assert cell.store.outbox_state.first_sequence == 6


def test_a_host_killed_before_the_upload_uploads_after_its_restart(cell: Cell, objects: Failing) -> None:
    """Recovery finds events in files and outbox, and drops them from the outbox only after the upload."""
    cell.emit(5)
    objects.fails_at = objects.calls + 1
    cell.exporter.turn(is_wanted=True)
    cell.restart()
    assert cell.store.outbox_state.first_sequence == 6
    cell.take_over()
    _check_whole(cell, 5)


def test_retention_removes_uploaded_files(cell: Cell, objects: Failing) -> None:
    """Old dates disappear from the object store as well, and a successor neither gets them nor misses them."""
    _work(cell)
    cell.clock.advance(30 * DAY_MS)
    cell.emit(5)
    cell.exporter.flush()
    cell.clock.advance(HOUR_MS)
    cell.emit(5)
    cell.exporter.flush()
    first = cell.numbers()[0]
    assert first > 1
    events = objects.list(f"trail/events/cell={CELL}/")
    assert len(events) == len(list(cell.trail.glob("events/*/*/*/*.parquet")))
    cell.take_over()
    assert cell.numbers() == list(range(first, 26))


def test_an_older_trail_of_the_same_cell_is_completed(cell: Cell, tmp_path: Path) -> None:
    """A host that was primary before has the beginning of the trail; it gets the rest, and its manifests grow."""
    _work(cell)
    old = tmp_path / "old"
    cell.trail.rename(old)
    cell.restart()
    _work(cell)
    cell.trail.rename(tmp_path / "newer")
    old.rename(cell.trail)
    cell.restart()
    _check_whole(cell, 30)


def test_snapshots_are_uploaded_whole(cell: Cell, objects: Failing) -> None:
    """A snapshot is fetched only if its manifest was uploaded, which is the last of its files."""
    cell.emit(1)
    folder = cell.trail / "snapshots" / f"cell={CELL}"
    for number in (1, 2):
        snapshot = folder / f"{number:020}"
        snapshot.mkdir(parents=True)
        for name in ("manifest.json", "pending.parquet"):
            (snapshot / name).write_bytes(b"content %d" % number)
        objects.fails_at = objects.calls + 3 if number == 2 else None  # the list, the events of the snapshot
        cell.exporter.turn(is_wanted=True)
        cell.emit(1)
    cell.take_over()
    assert sorted(path.name for path in folder.iterdir()) == [f"{1:020}"]
    assert (folder / f"{1:020}" / "manifest.json").read_bytes() == b"content 1"


def test_a_conflicting_file_is_reported(cell: Cell, objects: Failing) -> None:
    """Another process uploaded other events under the name: the export continues, and keeps the first object."""
    cell.emit(3)
    layout = Layout(cell.trail, CELL)
    path = layout.hour(cell.clock.now_ms()) / f"{1:020}-{3:020}.parquet"
    objects.create(f"trail/{layout.relative(path)}", b"other")
    cell.exporter.flush()
    assert cell.store.outbox_state.first_sequence == 4
