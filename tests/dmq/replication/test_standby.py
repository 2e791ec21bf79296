"""Directory of a standby: it follows the log, is promoted, and is another store if it is opened alone."""

from __future__ import annotations

import shutil
import threading
from contextlib import closing, nullcontext, suppress
from itertools import count
from pathlib import Path

import pytest
from support.rigs.replica.objects import Fault, MemoryObjects
from support.rigs.store.rows import copy_at_rest

from broker_adapter.runtime.clock import ManualClock, SystemClock
from dmq.errors import FormatUnsupported, ReplicaDamaged, ReplicaForeign, StartRefused, StoreError
from dmq.replication.base import list_bases, mark_verified, prune, upload
from dmq.replication.log import LogOptions, ReplicationLog
from dmq.replication.objects import ReplicaUnavailable
from dmq.replication.restore import restore
from dmq.replication.role import Role, role_of
from dmq.replication.segment import PREFIX, SegmentHead, segment_name
from dmq.replication.standby import DirectoryState, Standby, publish_cell, read_directory
from dmq.store.files.cell import Cell
from dmq.store.schema.cell.identity import Identity, StorePlace
from dmq.store.schema.cell.position import Position
from dmq.store.schema.keys import FORMAT_VERSION, Family
from dmq.store.store import Store
from dmq.store.writer.operations import Put
from dmq.trail.snapshots.layout import open_quiet

pytestmark = pytest.mark.integration
CLOCK = SystemClock()


def open_with(path: Path, objects: MemoryObjects, *, is_sync: bool = True) -> Store:
    """Open a store with a log that sends nothing by itself in asynchronous mode."""
    options = LogOptions(is_sync=is_sync, every_s=3600.0, grace_s=5.0)
    return Store.open(path, CLOCK, batch_log=ReplicationLog(objects, CLOCK, options, lambda _: 0))


def put(store: Store, *keys: bytes) -> None:
    """Put rows, each in a batch of its own."""
    for each in keys:
        store.commit([Put(Family.META, b"~" + each, b"v")])


def keys_of(path: Path) -> set[bytes]:
    """Return the keys that the test put into a store at rest."""
    engine = open_quiet(path)
    try:
        return {key[1:] for key, _ in engine.scan(Family.META, b"~", b"\xff", limit=1_000).rows}
    finally:
        engine.close()


def follow(path: Path, objects: MemoryObjects, *, promotes: bool = False) -> int:
    """Open a standby, catch up, and close it; return the number of applied segments."""
    cell = Cell(path)
    standby = Standby(objects, cell, CLOCK)
    try:
        count = standby.catch_up()
        if promotes:
            standby.promote()
    finally:
        standby.close()
        cell.close()
    return count


@pytest.mark.parametrize("has_base", [False, True])
def test_a_promoted_standby_is_the_same_store(tmp_path: Path, has_base: bool) -> None:
    """It has the rows, the number and the secret of the primary, and a later run."""
    objects = MemoryObjects()
    store = open_with(tmp_path / "first", objects)
    put(store, b"1")
    if has_base:
        store.checkpoint(tmp_path / "base")
        upload(objects, tmp_path / "base", CLOCK.now_ms())
    put(store, b"2")
    follow(tmp_path / "second", objects)
    put(store, b"3")
    store.close()
    assert follow(tmp_path / "second", objects, promotes=True) == 2
    second = open_with(tmp_path / "second", objects)
    assert (second.identity.number, second.identity.secret) == (store.identity.number, store.identity.secret)
    assert second.boot == store.boot + 1
    second.close()
    assert keys_of(tmp_path / "second" / "rocksdb") == {b"1", b"2", b"3"}


def test_a_standby_behind_a_bad_connection_arrives_at_the_end(tmp_path: Path) -> None:
    """Each look at the log ends early, and the next one continues where it ended."""
    objects = MemoryObjects()
    store = open_with(tmp_path / "first", objects)
    follow(tmp_path / "second", objects)
    put(store, *(b"%d" % number for number in range(20)))
    store.close()
    reads = count(1)
    objects.fault = lambda method, _: Fault.REQUEST_LOST if method == "read" and next(reads) % 5 == 0 else None
    with closing(Cell(tmp_path / "second")) as cell, closing(Standby(objects, cell, CLOCK)) as standby:
        for _ in range(20):
            with suppress(ReplicaUnavailable):
                standby.catch_up()
    assert keys_of(tmp_path / "second" / "rocksdb") == {b"%d" % number for number in range(20)}


def test_a_standby_refuses_a_newer_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps the older format until its host is upgraded, and then continues. A restore of a time before it works."""
    objects = MemoryObjects()
    store = open_with(tmp_path / "first", objects)
    put(store, b"1")
    follow(tmp_path / "second", objects)
    store.close()
    before_ms = CLOCK.now_ms()
    with monkeypatch.context() as newer:
        newer.setattr("dmq.store.store.FORMAT_VERSION", FORMAT_VERSION + 1)
        store = open_with(tmp_path / "first", objects)
        put(store, b"2")
        store.close()
    with pytest.raises(FormatUnsupported, match=f"version {FORMAT_VERSION + 1}, this Rock-DMQ knows {FORMAT_VERSION}"):
        follow(tmp_path / "second", objects, promotes=True)
    with pytest.raises(FormatUnsupported):
        restore(objects, tmp_path / "restored")
    restore(objects, tmp_path / "before", before_ms)
    assert keys_of(tmp_path / "before" / "rocksdb") == {b"1"}
    assert keys_of(tmp_path / "second" / "rocksdb") == {b"1"}
    monkeypatch.setattr("dmq.replication.following.FORMAT_VERSION", FORMAT_VERSION + 1)
    follow(tmp_path / "second", objects)
    assert keys_of(tmp_path / "second" / "rocksdb") == {b"1", b"2"}


def test_a_standby_opened_alone_is_another_store(tmp_path: Path) -> None:
    """Neither a standby nor the old primary that became one is the store without the log."""
    objects = MemoryObjects()
    store = open_with(tmp_path / "first", objects)
    put(store, b"1")
    store.close()
    follow(tmp_path / "second", objects)
    follow(tmp_path / "first", objects)
    for name in ("first", "second"):
        alone = Store.open(tmp_path / name, CLOCK)
        assert alone.identity.number != store.identity.number
        alone.close()


def test_the_old_directory_joins_again(tmp_path: Path) -> None:
    """A prefix of the log continues with the segments of its successor."""
    objects = MemoryObjects()
    first = open_with(tmp_path / "first", objects)
    put(first, b"1")
    first.close()
    follow(tmp_path / "second", objects, promotes=True)
    second = open_with(tmp_path / "second", objects)
    put(second, b"2")
    second.close()
    assert follow(tmp_path / "first", objects, promotes=True) > 0
    third = open_with(tmp_path / "first", objects)
    assert third.identity.number == first.identity.number
    third.close()
    assert keys_of(tmp_path / "first" / "rocksdb") == {b"1", b"2"}


def replace_primary(tmp_path: Path, objects: MemoryObjects) -> Store:
    """Kill an asynchronous primary that answered a batch and did not send it; return its successor's store, with 2."""
    first = open_with(tmp_path / "first", objects, is_sync=False)
    put(first, b"answered, not sent")
    copy_at_rest(tmp_path / "first" / "rocksdb", tmp_path / "killed")
    sent = dict(objects.rows)
    first.close()
    objects.rows = sent
    shutil.rmtree(tmp_path / "first" / "rocksdb")
    (tmp_path / "first" / "CLOSED").unlink()
    (tmp_path / "killed").rename(tmp_path / "first" / "rocksdb")
    follow(tmp_path / "second", objects, promotes=True)
    second = open_with(tmp_path / "second", objects)
    put(second, b"2")
    return second


def test_a_diverged_tail_is_kept(tmp_path: Path) -> None:
    """Batches that only the old directory has are kept under another name; it begins again with the log."""
    objects = MemoryObjects()
    second = replace_primary(tmp_path, objects)
    second.close()
    follow(tmp_path / "first", objects)
    assert keys_of(tmp_path / "first" / "rocksdb") == {b"2"}
    (kept,) = (tmp_path / "first").glob("diverged-*")
    assert keys_of(kept) == {b"answered, not sent"}


def test_a_base_of_a_replaced_primary_is_not_used(tmp_path: Path) -> None:
    """A base with batches that the log never got, because another primary took over, restores nothing."""
    objects = MemoryObjects()
    first = open_with(tmp_path / "first", objects, is_sync=False)
    follow(tmp_path / "second", objects, promotes=True)
    put(first, b"answered", b"not sent")
    second = open_with(tmp_path / "second", objects)
    put(second, b"2")
    first.checkpoint(tmp_path / "base")
    upload(objects, tmp_path / "base", CLOCK.now_ms())
    restore(objects, tmp_path / "restored")
    assert keys_of(tmp_path / "restored" / "rocksdb") == {b"2"}
    follow(tmp_path / "third", objects)
    assert keys_of(tmp_path / "third" / "rocksdb") == {b"2"}
    second.close()
    with suppress(StoreError):
        first.close()


def test_an_opening_follows_the_last_segment_of_the_replaced_primary(tmp_path: Path) -> None:
    """A write that the old primary answers while its successor opens is in the successor, which then fences it."""
    objects = MemoryObjects()
    before = threading.enumerate()
    first = open_with(tmp_path / "first", objects)
    (first_thread,) = (each for each in threading.enumerate() if each.name == "dmq-replica" and each not in before)
    follow(tmp_path / "second", objects, promotes=True)
    names = [b"1", b"2"]

    def answer_another_write(method: str, name: str) -> None:
        if method == "create" and threading.current_thread() is not first_thread and names:
            key = names.pop()
            put(first, key)

    objects.fault = answer_another_write
    second = open_with(tmp_path / "second", objects)
    put(second, b"3")
    with pytest.raises(StoreError):
        put(first, b"too late")
    second.close()
    first.close()
    assert keys_of(tmp_path / "second" / "rocksdb") == {b"1", b"2", b"3"}


def test_a_directory_behind_the_pruned_log_begins_again(tmp_path: Path) -> None:
    """A standby that was down while its segments were removed begins with the newest base."""
    objects = MemoryObjects()
    store = open_with(tmp_path / "first", objects)
    put(store, b"1")
    follow(tmp_path / "second", objects)
    put(store, b"2")
    store.checkpoint(tmp_path / "base")
    upload(objects, tmp_path / "base", 1)
    mark_verified(objects, list_bases(objects)[0].suffix)
    segments = len(objects.list(PREFIX))
    assert prune(objects, 2, needs_verified=True)
    assert len(objects.list(PREFIX)) < segments
    put(store, b"3")
    follow(tmp_path / "second", objects)
    assert keys_of(tmp_path / "second" / "rocksdb") == {b"1", b"2", b"3"}
    store.close()


def test_a_directory_behind_a_half_pruned_log_begins_again(tmp_path: Path) -> None:
    """A standby whose next segment was removed, and its last one not yet, begins with the base that has both. Without
    such a base the missing segment is an error.
    """
    objects = MemoryObjects()
    store = open_with(tmp_path / "first", objects)
    put(store, b"1")
    follow(tmp_path / "second", objects)
    put(store, b"2")
    put(store, b"3")
    del objects.rows[sorted(objects.list(PREFIX))[-2]]
    with pytest.raises(ReplicaDamaged, match="is missing"):
        follow(tmp_path / "second", objects)
    store.checkpoint(tmp_path / "base")
    upload(objects, tmp_path / "base", 1)
    put(store, b"4")
    follow(tmp_path / "second", objects)
    assert keys_of(tmp_path / "second" / "rocksdb") == {b"1", b"2", b"3", b"4"}
    store.close()


def test_a_tail_that_the_pruned_log_cannot_judge_is_kept(tmp_path: Path) -> None:
    """A replaced asynchronous primary may have answered batches that it did not send. Its directory is kept, also if
    the segments that would show it are removed.
    """
    objects = MemoryObjects()
    second = replace_primary(tmp_path, objects)
    second.checkpoint(tmp_path / "base")
    upload(objects, tmp_path / "base", 1)
    put(second, b"3")
    assert prune(objects, 2, needs_verified=False)
    follow(tmp_path / "first", objects)
    assert keys_of(tmp_path / "first" / "rocksdb") == {b"2", b"3"}
    (kept,) = (tmp_path / "first").glob("diverged-*")
    assert keys_of(kept) == {b"answered, not sent"}
    second.close()


def test_a_kill_during_the_promotion_leaves_a_standby(tmp_path: Path) -> None:
    """Between the rewritten marker and the row the directory is a standby still."""
    objects = MemoryObjects()
    store = open_with(tmp_path / "first", objects)
    put(store, b"1")
    store.close()
    follow(tmp_path / "second", objects)
    cell = Cell(tmp_path / "second")
    cell.rewrite_marker()
    found = read_directory(cell)
    cell.close()
    assert found is not None
    assert not found.is_original
    follow(tmp_path / "second", objects, promotes=True)
    second = open_with(tmp_path / "second", objects)
    assert second.identity.number == store.identity.number
    second.close()


IDENTITY = Identity(7, bytes(32), StorePlace(1, 2))
END = SegmentHead(store=7, epoch=5, number=9, first_batch=40, time_ms=1, nonce=bytes(16), previous=bytes(16))


def at(epoch: int) -> Position:
    """Return a position of a run."""
    return Position(7, epoch, 9, 40, bytes(16))


@pytest.mark.parametrize(
    ("directory", "end", "expected"),
    [
        (None, None, Role.BEGIN),
        (None, END, Role.STANDBY),
        (DirectoryState(IDENTITY, True, 5, at(5)), END, Role.CONTINUE),
        (DirectoryState(IDENTITY, False, 5, at(5)), END, Role.STANDBY),
        (DirectoryState(IDENTITY, True, 4, at(4)), END, Role.STANDBY),
        (DirectoryState(IDENTITY, True, 6, None), END, Role.BEGIN),
        (DirectoryState(IDENTITY, True, 4, None), END, Role.STANDBY),
        (DirectoryState(IDENTITY, True, 4, None), None, Role.BEGIN),
    ],
)
def test_the_log_and_the_directory_decide_the_role(
    directory: DirectoryState | None, end: SegmentHead | None, expected: Role
) -> None:
    """Only the directory that wrote the newest epoch continues; any other waits for the lease."""
    assert role_of(directory, end, is_copy=False, place="s3://bucket") is expected


def test_a_directory_of_another_store_has_no_role() -> None:
    """A restored copy and another store are refused by name."""
    with pytest.raises(ReplicaForeign):
        role_of(DirectoryState(IDENTITY, True, 5, at(5)), END, is_copy=True, place="s3://bucket")
    with pytest.raises(ReplicaForeign):
        role_of(DirectoryState(IDENTITY._replace(number=8), True, 5, None), END, is_copy=False, place="s3://bucket")


def test_a_takeover_keeps_the_cell(tmp_path: Path) -> None:
    """The successor continues the trail of the same cell."""
    objects = MemoryObjects()
    store = open_with(tmp_path / "first", objects)
    publish_cell(objects, store.cell_id)
    store.close()
    follow(tmp_path / "second", objects, promotes=True)
    successor = open_with(tmp_path / "second", objects)
    assert successor.cell_id == store.cell_id
    successor.close()


def test_an_idle_standby_reads_one_segment(tmp_path: Path) -> None:
    """A look without a new segment is one request, since each costs. A minute later, and before a promotion, the log is
    listed: a hole is an error then.
    """
    objects, clock = MemoryObjects(), ManualClock()
    store = open_with(tmp_path / "first", objects)
    put(store, b"1")
    with closing(Cell(tmp_path / "second")) as cell, closing(Standby(objects, cell, clock)) as standby:
        standby.catch_up()
        objects.calls.clear()
        standby.catch_up()
        assert objects.calls == [("read", segment_name(standby.position.number + 1))]
        put(store, b"2", b"3")
        del objects.rows[segment_name(standby.position.number + 1)]
        assert not standby.catch_up()
        with pytest.raises(ReplicaDamaged, match="is missing"):
            standby.promote()
        clock.advance(60_000)
        with pytest.raises(ReplicaDamaged, match="is missing"):
            standby.catch_up()
    store.close()


@pytest.mark.parametrize(
    ("ahead_ms", "segments", "is_refused"), [(60_000, 3, True), (0, 3, False), (-60_000, 3, False), (60_000, 2, False)]
)
def test_a_clock_ahead_of_the_primary_refuses_the_takeover(
    tmp_path: Path, ahead_ms: int, segments: int, *, is_refused: bool
) -> None:
    """A host that would deliver early is not promoted; one with a clock behind, or that was away for long, is.

    Two late segments show no clock: their puts may have taken that long.
    """
    objects = MemoryObjects()
    store = open_with(tmp_path / "first", objects)
    clock = ManualClock(CLOCK.now_ms() + 24 * 3_600_000)
    with closing(Cell(tmp_path / "second")) as cell, closing(Standby(objects, cell, clock)) as standby:
        standby.catch_up()  # old segments show nothing about the clock
        clock.step_to(CLOCK.now_ms() + ahead_ms)
        for number in range(segments):
            put(store, b"%d" % number)
            standby.catch_up()
        with pytest.raises(StartRefused, match="clock of this host") if is_refused else nullcontext():
            standby.promote()
    store.close()
