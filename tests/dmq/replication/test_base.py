"""Bases of a replicated store: upload, verification and removal."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.rigs.replica.objects import MemoryObjects

from broker_adapter.runtime.clock import SystemClock
from dmq.errors import ReplicaDamaged
from dmq.recovery import check_store
from dmq.recovery.replica import BaseKeeper, BaseStatus, KeeperOptions, Worker
from dmq.replication.base import FILES, list_bases, mark_verified, prune, upload
from dmq.replication.log import LogOptions, ReplicationLog
from dmq.replication.objects import ObjectStore, open_objects
from dmq.replication.restore import check, restore
from dmq.replication.segment import PREFIX
from dmq.store.schema.keys import Family
from dmq.store.store import Store
from dmq.store.writer.batch_log import LogStart
from dmq.store.writer.operations import Put
from dmq.trail.snapshots.layout import open_quiet

pytestmark = pytest.mark.integration
CLOCK = SystemClock()


def open_with(path: Path, objects: ObjectStore) -> tuple[Store, ReplicationLog]:
    """Open a new store with a synchronous log."""
    log = ReplicationLog(objects, CLOCK, LogOptions(is_sync=True), lambda _: 0)
    return Store.open(path, CLOCK, batch_log=log), log


def make_base(store: Store, objects: ObjectStore, path: Path, time_ms: int) -> None:
    """Upload a base in this process."""
    store.checkpoint(path)
    upload(objects, path, time_ms)


def keys_of(path: Path) -> set[bytes]:
    """Return the keys that the test put into a store at rest."""
    engine = open_quiet(path / "rocksdb")
    try:
        return {key for key, _ in engine.scan(Family.META, b"~", b"\xff", limit=1_000).rows}
    finally:
        engine.close()


def test_a_base_uploads_each_table_once(tmp_path: Path) -> None:
    """A base has only the tables that no earlier base has, and restores alone."""
    objects = MemoryObjects()
    store, _ = open_with(tmp_path / "data", objects)
    store.commit([Put(Family.META, b"~%d" % each, bytes(1_000)) for each in range(500)])
    make_base(store, objects, tmp_path / "first", CLOCK.now_ms())
    tables = {path.name for path in (tmp_path / "first").glob("*.sst")}
    files = set(objects.list(FILES))
    store.commit([Put(Family.META, b"~last", b"v")])
    make_base(store, objects, tmp_path / "second", CLOCK.now_ms())
    assert tables < {path.name for path in (tmp_path / "second").glob("*.sst")}
    assert len(set(objects.list(FILES)) - files) < len(files)
    for each in objects.list(PREFIX):
        del objects.rows[each]
    restore(objects, tmp_path / "restored")
    assert len(keys_of(tmp_path / "restored")) == 501
    assert not check_store(tmp_path / "restored", lambda _: None).findings.count
    store.close()


def test_pruning_keeps_every_restore_of_the_window(tmp_path: Path) -> None:
    """After a prune each time of the window can be restored, and objects of the newest verified base stay."""
    objects = MemoryObjects()
    store, _ = open_with(tmp_path / "data", objects)
    begin_ms = CLOCK.now_ms()
    for number in range(4):
        store.commit([Put(Family.META, b"~%d" % number, b"v")])
        make_base(store, objects, tmp_path / f"base-{number}", begin_ms + number)
    names = list_bases(objects)
    whole = len(objects.rows)
    assert prune(objects, begin_ms + 10, needs_verified=True) == 0
    mark_verified(objects, names[1].suffix)
    assert prune(objects, begin_ms + 10, needs_verified=True)
    assert list_bases(objects) == names[1:]
    assert len(objects.rows) < whole
    assert check(objects).faults == ()
    restore(objects, tmp_path / "newest")
    assert keys_of(tmp_path / "newest") == {b"~%d" % each for each in range(4)}
    restore(objects, tmp_path / "at-base-1", begin_ms + 1)
    assert b"~1" in keys_of(tmp_path / "at-base-1")
    with pytest.raises(ReplicaDamaged, match="no base"):
        restore(objects, tmp_path / "too-early", begin_ms)
    store.close()


@pytest.mark.parametrize("damage", ["short", "missing"])
def test_a_damaged_base_is_refused(tmp_path: Path, damage: str) -> None:
    """A base with a short or missing file restores nothing."""
    objects = MemoryObjects()
    store, _ = open_with(tmp_path / "data", objects)
    make_base(store, objects, tmp_path / "base", CLOCK.now_ms())
    store.close()
    name = max(objects.list(FILES), key=lambda each: len(objects.rows[each]))
    if damage == "short":
        objects.rows[name] = objects.rows[name][:-1]
    else:
        del objects.rows[name]
    with pytest.raises(ReplicaDamaged, match=name):
        restore(objects, tmp_path / "restored")
    assert not (tmp_path / "restored").exists()


def test_the_keeper_makes_and_verifies_bases(tmp_path: Path) -> None:
    """A running store gets a base, a verification by a restore, and a prune, from processes of their own."""
    (tmp_path / "objects").mkdir()
    url = f"file://{tmp_path}/objects"
    store, log = open_with(tmp_path / "data", open_objects(url))
    store.commit([Put(Family.META, b"~one", b"v")])
    start = LogStart(store.identity.number, store.boot, tmp_path / "data", store.checkpoint)
    options = KeeperOptions(base_every_ms=1, keep_ms=0, verify_every_ms=1)
    keeper = BaseKeeper(store, open_objects(url), url, options, worker=Worker(), log_status=log.status, start=start)
    keeper.start()
    wait_for(keeper, lambda status: bool(status.base_at_ms and status.verified_at_ms))
    keeper.close()
    assert not [each for each in (tmp_path / "data").iterdir() if "replica" in each.name]
    store.close()
    assert check(open_objects(url)).faults == ()


def test_a_long_log_gets_a_base_early(tmp_path: Path) -> None:
    """After so many segments a base is made before its interval ends, so that a new standby reads few of them."""
    (tmp_path / "objects").mkdir()
    url = f"file://{tmp_path}/objects"
    store, log = open_with(tmp_path / "data", open_objects(url))
    start = LogStart(store.identity.number, store.boot, tmp_path / "data", store.checkpoint)
    options = KeeperOptions(base_every_ms=2**40, keep_ms=0, verify_every_ms=0, base_segments_max=5)
    keeper = BaseKeeper(store, open_objects(url), url, options, worker=Worker(), log_status=log.status, start=start)
    keeper.start()
    for number in range(4):
        assert not keeper.status.base_at_ms
        store.commit([Put(Family.META, b"~%d" % number, b"v")])
    wait_for(keeper, lambda status: bool(status.base_at_ms))
    keeper.close()
    store.close()


def wait_for(keeper: BaseKeeper, is_reached: Callable[[BaseStatus], bool]) -> None:
    """Wait for a status of the keeper."""
    for _ in range(600):
        assert not keeper.status.error
        if is_reached(keeper.status):
            return
        threading.Event().wait(0.1)
    raise AssertionError(keeper.status)
