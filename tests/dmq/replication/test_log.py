"""The replication log of a store on RocksDB."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.rigs.replica.objects import Fault, MemoryObjects
from support.rigs.store.rows import copy_at_rest

from broker_adapter.runtime.clock import ManualClock, SystemClock
from dmq.errors import ReplicaDamaged, ReplicaFenced, ReplicaForeign, StoreError, StoreFailed
from dmq.replication.base import list_bases, upload
from dmq.replication.log import LogOptions, LogState, ReplicationLog
from dmq.replication.restore import check, restore
from dmq.replication.segment import segment_name
from dmq.store.backup import TargetTaken
from dmq.store.engines.engine import Batch
from dmq.store.engines.rocks import RocksEngine
from dmq.store.schema.cell.position import decode_position
from dmq.store.schema.keys import META_BOOT, META_POSITION, Family, pack_u64
from dmq.store.store import Store
from dmq.store.writer.batch_log import LogStart
from dmq.store.writer.operations import Delete, Put
from dmq.trail.snapshots.layout import open_quiet

pytestmark = pytest.mark.integration
CLOCK = SystemClock()
_SYNC = LogOptions(is_sync=True, grace_s=60.0)
Rows = dict[tuple[str, bytes], bytes]


def base_maker(objects: MemoryObjects) -> Callable[[LogStart], int]:
    """Return the function that uploads a base in this process."""

    def make(start: LogStart) -> int:
        assert start.directory is not None
        assert start.checkpoint is not None
        path = start.directory / ".checkpoint-test"
        shutil.rmtree(path, ignore_errors=True)
        start.checkpoint(path)
        return upload(objects, path, CLOCK.now_ms()).batch

    return make


def log_of(objects: MemoryObjects, **options: object) -> ReplicationLog:
    """Return a log that waits for a stalled machine when it is closed."""
    return ReplicationLog(
        objects,
        CLOCK,
        LogOptions(**{"is_sync": True, "grace_s": 60.0, **options}),  # type: ignore[arg-type]
        base_maker(objects),
    )


def open_with(path: Path, log: ReplicationLog | None) -> Store:
    """Open a store with a log."""
    return Store.open(path, CLOCK, batch_log=log)


def put(store: Store, key: bytes, value: bytes = b"v") -> None:
    """Put a row and wait for the answer."""
    store.commit([Put(Family.META, b"~" + key, value)])


def rows_of(path: Path, *, with_all: bool = False) -> Rows:
    """Return the rows of a store at rest; without ``with_all`` only those of the test."""
    engine = open_quiet(path / "rocksdb")
    try:
        found = {
            (family.name, key): value
            for family in Family
            for key, value in engine.scan(family, b"", b"\xff" * 40, limit=100_000).rows
        }
    finally:
        engine.close()
    return {each: value for each, value in found.items() if with_all or each[1].startswith(b"~")}


class Killed:
    """State of a store at a moment: ``restart`` is a kill at that moment. The directory keeps its identity."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.copy = path.with_name(f"{path.name}-killed")
        copy_at_rest(path / "rocksdb", self.copy)

    def restart(self) -> None:
        """Replace the database of the closed store by that of the moment."""
        shutil.rmtree(self._path / "rocksdb")
        (self._path / "CLOSED").unlink(missing_ok=True)
        self.copy.rename(self._path / "rocksdb")


def test_the_log_restores_the_store(tmp_path: Path) -> None:
    """In synchronous mode, after every answer the log alone restores every row, and the result is another store."""
    objects = MemoryObjects()
    store = open_with(tmp_path / "data", log_of(objects))
    for number in range(5):
        put(store, b"%d" % number)
        if number == 3:
            store.commit([Delete(Family.META, b"~0")])
        restored = restore(objects, tmp_path / f"restored-{number}")
        assert (Family.META.name, b"~%d" % number) in rows_of(restored.path)
    number_before = store.identity.number
    store.close()
    restore(objects, tmp_path / "last")
    assert rows_of(tmp_path / "last", with_all=True) == rows_of(tmp_path / "data", with_all=True)
    copy = open_with(tmp_path / "last", None)
    assert copy.identity.number != number_before
    copy.close()
    assert check(objects).faults == ()


def test_every_prefix_of_a_log_restores_to_its_model(tmp_path: Path) -> None:
    """After any segment, the restored rows are those that were acknowledged until then."""
    objects = MemoryObjects()
    store = open_with(tmp_path / "data", log_of(objects))
    models: dict[str, dict[bytes, bytes]] = {}
    model: dict[bytes, bytes] = {}
    for number in range(30):
        key = b"~%d" % (number * 7 % 10)
        if number % 4 == 3:
            store.commit([Delete(Family.META, key)])
            model.pop(key, None)
        else:
            store.commit([Put(Family.META, key, b"%d" % number)])
            model[key] = b"%d" % number
        models[max(objects.list("log/"))] = dict(model)
    store.close()
    whole = dict(objects.rows)
    for name, expected in models.items():
        objects.rows = {each: data for each, data in whole.items() if each <= name}
        restored = restore(objects, tmp_path / name.replace("/", "-"))
        assert {key: value for (_, key), value in rows_of(restored.path).items()} == expected


def test_a_restart_applies_the_end_of_the_log(tmp_path: Path) -> None:
    """A batch that only the log has, after a kill between the put and the local write, is there after the restart."""
    objects = MemoryObjects()
    store = open_with(tmp_path / "data", log_of(objects))
    put(store, b"before")
    killed = Killed(tmp_path / "data")
    put(store, b"only in the log")
    segments = dict(objects.rows)
    store.close()
    objects.rows = segments
    killed.restart()
    open_with(tmp_path / "data", log_of(objects)).close()
    assert {key for _, key in rows_of(tmp_path / "data")} == {b"~before", b"~only in the log"}
    restore(objects, tmp_path / "restored")
    assert rows_of(tmp_path / "restored", with_all=True) == rows_of(tmp_path / "data", with_all=True)
    assert check(objects).faults == ()


def test_an_unreachable_object_store_holds_the_batch(tmp_path: Path) -> None:
    """While the object store is unreachable nothing is answered; afterwards the same segment is written once."""
    objects = MemoryObjects()
    log = log_of(objects)
    store = open_with(tmp_path / "data", log)
    before = len(objects.rows)
    faults = iter([Fault.REQUEST_LOST, Fault.ANSWER_LOST, Fault.REQUEST_LOST])
    objects.fault = lambda method, name: next(faults, None)
    put(store, b"held")
    assert len(objects.rows) == before + 1
    assert log.status().error == ""
    store.close()
    assert check(objects).faults == ()


def test_a_close_does_not_wait_for_ever(tmp_path: Path) -> None:
    """A store whose object store stays unreachable closes after the grace time; the held write is in doubt."""
    objects = MemoryObjects()
    store = open_with(tmp_path / "data", log_of(objects, grace_s=0.2))
    put(store, b"answered")
    objects.fault = lambda method, name: Fault.REQUEST_LOST
    failures: list[BaseException] = []

    def write() -> None:
        try:
            put(store, b"held")
        except StoreError as error:
            failures.append(error)

    calls = len(objects.calls)
    writer = threading.Thread(target=write)
    writer.start()
    objects.wait_for(lambda: len(objects.calls) > calls)
    store.close()
    writer.join()
    assert [type(each) for each in failures] == [StoreFailed]
    objects.fault = lambda method, name: None
    store = open_with(tmp_path / "data", log_of(objects))
    assert not store.recovery.was_closed
    store.close()
    assert {key for _, key in rows_of(tmp_path / "data")} == {b"~answered"}


def test_a_fenced_store_answers_no_write(tmp_path: Path) -> None:
    """Once another process has opened the log, the first one's next write fails and reports that it is fenced."""
    objects = MemoryObjects()
    first = open_with(tmp_path / "data", log_of(objects))
    failures: list[StoreError] = []
    first.on_failure = failures.append
    put(first, b"answered")
    engine = RocksEngine(Killed(tmp_path / "data").copy)
    second_log = log_of(objects)
    second_log.begin(engine, LogStart(first.identity.number, first.boot, tmp_path, engine.checkpoint))
    second_log.append(Batch(), opens=first.boot + 1)
    with pytest.raises(StoreFailed, match="in doubt"):
        put(first, b"too late")
    assert any(isinstance(each, ReplicaFenced) for each in failures)
    second_log.close()
    engine.close()
    first.close()


def test_a_store_that_was_stopped_until_its_fence_was_pruned_answers_no_write(tmp_path: Path) -> None:
    """Its next segment is written, since the number is free again; it finds the later ones, and is fenced."""
    objects, clock = MemoryObjects(), ManualClock()
    store = Store.open(tmp_path / "data", clock, batch_log=ReplicationLog(objects, clock, _SYNC, lambda _: 0))
    failures: list[StoreError] = []
    store.on_failure = failures.append
    put(store, b"answered")
    engine = RocksEngine(Killed(tmp_path / "data").copy)
    successor = log_of(objects)
    successor.begin(engine, LogStart(store.identity.number, store.boot, tmp_path, engine.checkpoint))
    written = set(objects.rows)
    successor.append(Batch(), opens=store.boot + 1)
    (fence,) = set(objects.rows) - written
    successor.append(Batch())
    del objects.rows[fence]
    clock.advance(60_000)  # the least replica_keep
    with pytest.raises(StoreFailed, match="in doubt"):
        put(store, b"too late")
    assert any(isinstance(each, ReplicaFenced) for each in failures)
    successor.close()
    engine.close()
    store.close()


def test_a_successor_is_not_continued(tmp_path: Path) -> None:
    """A restart that meets the segments of a successor is fenced, also if a read fails meanwhile: it applies none."""
    objects = MemoryObjects()
    store = open_with(tmp_path / "data", log_of(objects))
    put(store, b"mine")
    killed, segments = Killed(tmp_path / "data"), dict(objects.rows)
    store.close()
    objects.rows = segments
    killed.restart()
    engine = RocksEngine(Killed(tmp_path / "data").copy)
    log, boot = log_of(objects), store.boot + 1
    log.begin(engine, LogStart(store.identity.number, store.boot, tmp_path, engine.checkpoint))
    for number, key in enumerate((META_BOOT, b"~theirs")):
        batch = Batch()
        batch.puts.append((Family.META, key, pack_u64(boot)))
        log.append(batch, opens=0 if number else boot)
    log.close()
    engine.close()
    written = dict(objects.rows)
    for name in sorted(written)[-2:]:
        faults = {name: Fault.REQUEST_LOST}
        objects.fault = lambda method, name, faults=faults: faults.pop(name, None)  # type: ignore[misc]
        with pytest.raises(ReplicaFenced, match="with epoch 2"):
            open_with(tmp_path / "data", log_of(objects))
    assert {key for _, key in rows_of(tmp_path / "data")} == {b"~mine"}
    assert objects.rows == written


def test_an_existing_store_begins_its_log_with_a_base(tmp_path: Path) -> None:
    """A store that had no log is restored from the base that its first start with one makes."""
    objects = MemoryObjects()
    store = open_with(tmp_path / "data", None)
    put(store, b"old")
    store.close()
    store = open_with(tmp_path / "data", log_of(objects))
    put(store, b"new")
    store.close()
    restore(objects, tmp_path / "restored")
    assert {key for _, key in rows_of(tmp_path / "restored")} == {b"~old", b"~new"}
    assert len(list_bases(objects)) == 1
    for each in [name for name in objects.rows if name.startswith("base/")]:
        del objects.rows[each]
    with pytest.raises(ReplicaDamaged):
        restore(objects, tmp_path / "refused")


def test_a_run_without_the_log_is_noticed(tmp_path: Path) -> None:
    """Rows that a run without a log wrote are in the base that the next run with one makes."""
    objects = MemoryObjects()
    for number, log in enumerate((log_of(objects), None, log_of(objects))):
        store = open_with(tmp_path / "data", log)
        put(store, b"%d" % number)
        store.close()
    restore(objects, tmp_path / "restored")
    assert {key for _, key in rows_of(tmp_path / "restored")} == {b"~0", b"~1", b"~2"}
    assert check(objects).faults == ()


def test_an_asynchronous_restart_ahead_of_the_log_makes_a_base(tmp_path: Path) -> None:
    """Batches that a kill left in the store only are in a base before the store serves again."""
    objects = MemoryObjects()
    store = open_with(tmp_path / "data", log_of(objects, is_sync=False, every_s=3600.0))
    put(store, b"answered, not sent")
    sent = dict(objects.rows)
    killed = Killed(tmp_path / "data")
    store.close()
    objects.rows = sent
    killed.restart()
    store = open_with(tmp_path / "data", log_of(objects, is_sync=False))
    put(store, b"later")
    store.close()
    restore(objects, tmp_path / "restored")
    assert {key for _, key in rows_of(tmp_path / "restored")} == {b"~answered, not sent", b"~later"}
    assert check(objects).faults == ()


def test_an_idle_store_writes_no_segment(tmp_path: Path) -> None:
    """Asynchronous batches are sent together, and without batches nothing is sent."""
    objects = MemoryObjects()
    log = log_of(objects, is_sync=False, every_s=0.05)
    store = open_with(tmp_path / "data", log)
    put(store, b"one")
    objects.wait_for(lambda: log.status().lag_batches == 0)
    calls = len(objects.calls)
    threading.Event().wait(0.3)
    assert len(objects.calls) == calls
    store.close()


def test_local_only_continues_alone_and_rejoins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``local_only`` a store answers without the log, and a base brings the missed batches to it later."""
    monkeypatch.setattr("dmq.replication.log.LOCAL_AFTER_S", 0.0)
    objects = MemoryObjects()
    log = log_of(objects, when_unreachable="local_only")
    store = open_with(tmp_path / "data", log)
    objects.fault = lambda method, name: Fault.REQUEST_LOST
    for number in range(5):
        put(store, b"%d" % number)
    assert log.status().state is LogState.LOCAL_ONLY
    assert log.status().lag_batches == 5
    objects.fault = lambda method, name: None
    objects.wait_for(lambda: log.status().state is LogState.FOLLOWING)
    put(store, b"after")
    restore(objects, tmp_path / "restored")
    assert {key for _, key in rows_of(tmp_path / "restored")} == {b"~after", *(b"~%d" % each for each in range(5))}
    store.close()
    assert check(objects).faults == ()


def test_the_log_of_another_store_is_refused(tmp_path: Path) -> None:
    """A store does not write into the log of another one, and a new store does not either."""
    objects = MemoryObjects()
    open_with(tmp_path / "first", log_of(objects)).close()
    for name in ("new", "existing"):
        if name == "existing":
            open_with(tmp_path / name, None).close()
        with pytest.raises(ReplicaForeign, match="is that of store"):
            open_with(tmp_path / name, log_of(objects))


@pytest.mark.parametrize("damage", ["hole", "flip", "exchange"])
def test_a_damaged_log_is_refused(tmp_path: Path, damage: str) -> None:
    """A missing, damaged or exchanged segment is an error of a restore and a fault of a check."""
    objects = MemoryObjects()
    store = open_with(tmp_path / "data", log_of(objects))
    for number in range(5):
        put(store, b"%d" % number)
    store.close()
    name, other = segment_name(3), segment_name(4)
    if damage == "hole":
        del objects.rows[name]
    elif damage == "flip":
        objects.rows[name] = objects.rows[name][:-1] + bytes((objects.rows[name][-1] ^ 1,))
    else:
        objects.rows[name], objects.rows[other] = objects.rows[other], objects.rows[name]
    with pytest.raises(ReplicaDamaged, match=name):
        restore(objects, tmp_path / "restored")
    assert any(name in each for each in check(objects).faults)
    assert not (tmp_path / "restored").exists()


def test_a_directory_with_content_is_refused(tmp_path: Path) -> None:
    """A restore writes into no directory that has files."""
    objects = MemoryObjects()
    open_with(tmp_path / "data", log_of(objects)).close()
    with pytest.raises(TargetTaken):
        restore(objects, tmp_path / "data")


def test_the_position_is_in_every_batch(tmp_path: Path) -> None:
    """The position row of a store at rest names its last segment."""
    objects = MemoryObjects()
    store = open_with(tmp_path / "data", log_of(objects))
    put(store, b"one")
    store.close()
    position = decode_position(rows_of(tmp_path / "data", with_all=True)[Family.META.name, META_POSITION])
    assert segment_name(position.number) == max(objects.list("log/"))


def losses(tmp_path: Path) -> list[bytes]:
    """Return the acknowledged keys that a machine lost just before or after some put would lose."""
    objects = MemoryObjects()
    acknowledged: set[bytes] = set()
    moments: list[tuple[dict[str, bytes], set[bytes]]] = []

    def lose(method: str, name: str) -> None:
        if method == "create":
            threading.Event().wait(0.02)  # a put takes longer than an answer that does not wait for it
            moments.append((dict(objects.rows), set(acknowledged)))

    objects.fault = lose
    store = open_with(tmp_path / "data", log_of(objects, every_s=0.01))
    for number in range(8):
        key = b"~%d" % number
        store.commit([Put(Family.META, key, b"v")])
        acknowledged.add(key)
        moments.append((dict(objects.rows), set(acknowledged)))
    store.close()
    found: list[bytes] = []
    for number, (rows, expected) in enumerate(moments[1:]):
        objects.rows = rows
        if not rows:
            found += expected
            continue
        restored = restore(objects, tmp_path / f"restored-{number}").path
        found += expected - {key for _, key in rows_of(restored)}
        shutil.rmtree(restored)
    return found


def test_a_machine_lost_at_any_step_loses_nothing(tmp_path: Path) -> None:
    """Before and after each put, and after each answer, the log has everything that was answered OK."""
    assert losses(tmp_path) == []


def test_an_answer_before_the_put_is_convicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that does not wait for its put fails the test of a lost machine."""
    monkeypatch.setattr(ReplicationLog, "_await", lambda *_: None)
    assert losses(tmp_path)


def test_a_log_without_a_nonce_is_convicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that takes any segment at its number for its own fails the test of a fenced store."""
    monkeypatch.setattr(ReplicationLog, "_find", lambda _, draft: draft.becomes)
    with pytest.raises(pytest.fail.Exception):
        test_a_fenced_store_answers_no_write(tmp_path)


def test_the_asynchronous_loss_is_the_reported_lag(tmp_path: Path) -> None:
    """A machine lost in asynchronous mode loses exactly the batches that the status reports."""
    objects = MemoryObjects()
    log = log_of(objects, is_sync=False, every_s=3600.0)
    store = open_with(tmp_path / "data", log)
    before = log.status().lag_batches
    for number in range(7):
        put(store, b"%d" % number)
    lag = log.status().lag_batches
    restored = restore(objects, tmp_path / "restored")
    assert lag == before + 7
    assert restored.batch + lag == check(objects).last_batch + lag
    assert rows_of(restored.path) == {}
    store.close()
    assert log.status().lag_batches == 0
    assert len(rows_of(restore(objects, tmp_path / "after").path)) == 7
