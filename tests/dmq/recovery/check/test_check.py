"""Looking through a store finds each kind of thing that can be wrong with one, and nothing in one that is whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from support.clients.embedded.failing import change
from support.forges.messages.letters import REDRIVE, die, die_many, finish, only
from support.forges.messages.letters import a_message as a_letter
from support.forges.store.spool_damage import entry_of, opened
from support.forges.store.spool_damage import put as put_entries
from support.forges.store.store_rig import READY, CellRig, checked, files_of, fill, killed_cell
from support.rigs.broker.rig import receive
from support.rigs.commands.fake_admin_client import run_dmq as run
from support.rigs.store.rows import all_rows, put_batch

from broker_adapter.runtime.clock import SystemClock
from dmq.errors import StoreCorrupt, StoreLocked
from dmq.store.engines.engine import Batch
from dmq.store.engines.rocks import RocksEngine
from dmq.store.schema import keys
from dmq.store.schema.accounting.ledger import decode_ledger, encode_ledger, unpack_ledger_key
from dmq.store.schema.keys import Family, pack_pair, pack_queue_key, pack_u64
from dmq.store.schema.messages.record import encode_body, encode_queued
from dmq.store.schema.topics.group import pack_group_key
from dmq.store.store import Store, StoreOptions
from dmq.trail.events import EventKind
from dmq.trail.manifest import Layout, Listed, encode_line

pytestmark = pytest.mark.integration
Plant = Callable[[RocksEngine], Batch]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    async def make(rig: CellRig) -> None:
        await fill(rig)
        rig.to_tables()

    return killed_cell(tmp_path_factory.mktemp("whole"), make)


def first(engine: RocksEngine, family: Family, start: bytes = b"", at: int = 0) -> tuple[bytes, bytes]:
    """A row of a family."""
    return all_rows(engine, family, start)[at]


def without(family: Family, *, start: bytes = b"", at: int = 0) -> Plant:
    """Take a row away."""

    def plant(engine: RocksEngine) -> Batch:
        batch = Batch()
        batch.deletes.append((family, first(engine, family, start, at)[0]))
        return batch

    return plant


def changed(family: Family, change: Callable[[bytes], bytes], *, start: bytes = b"", at: int = 0) -> Plant:
    """Change the value of a row."""

    def plant(engine: RocksEngine) -> Batch:
        key, value = first(engine, family, start, at)
        return put_batch((family, key, change(value)))

    return plant


def put(family: Family, key: bytes, value: bytes) -> Plant:
    """Add a row."""
    return lambda _: put_batch((family, key, value))


def miscounted(term: int, *, of_group: bool = False) -> Plant:
    """Let the ledger count one more than there was, of the first topic that has the term."""

    def plant(engine: RocksEngine) -> Batch:
        for key, value in all_rows(engine, Family.META, keys.META_LEDGER):
            counts = decode_ledger(value) if key[:1] == keys.META_LEDGER else {}
            if term in counts and of_group == bool(unpack_ledger_key(key)[1]):
                return put_batch((Family.META, key, encode_ledger(counts | {term: counts[term] + 1})))
        raise AssertionError(term)

    return plant


FINISHED = keys.generation_range(1, 2)[0]  # of the index
TOTAL = keys.META_TOTAL


_A_ROW = encode_queued(0, 1, 0, encode_body(b"\0m", b"", b"", b""))


@pytest.mark.parametrize(
    ("plant", "kinds"),
    [
        pytest.param(without(Family.TIMELINE), {"index", "figure", "row"}, id="a waiting row is gone"),
        pytest.param(changed(Family.TIMELINE, lambda _: b"\1"), {"row", "figure"}, id="a row makes no sense"),
        pytest.param(without(Family.INDEX), {"index"}, id="an index row of what waits is gone"),
        pytest.param(changed(Family.INDEX, lambda value: value[:-1] + b"\xff"), {"index"}, id="it leads elsewhere"),
        pytest.param(
            changed(Family.INDEX, lambda value: value[:-1] + b"\xfe", start=FINISHED), {"index"}, id="to no message"
        ),
        pytest.param(without(Family.QUEUE, at=5), {"queue", "index"}, id="a gap in a queue"),
        pytest.param(without(Family.QUEUE), {"queue", "index"}, id="the head of a queue is gone"),
        pytest.param(without(Family.QUEUE, at=READY // 2 - 1), {"index"}, id="the end of a queue is gone"),
        pytest.param(changed(Family.QUEUE, lambda _: b"\7"), {"row"}, id="a message makes no sense"),
        pytest.param(put(Family.QUEUE, pack_queue_key(2, 9, 0), _A_ROW), {"queue"}, id="no such queue"),
        pytest.param(put(Family.QUEUE, pack_queue_key(99, 0, 0), _A_ROW), {"name"}, id="no such topic"),
        pytest.param(put(Family.GROUP, pack_group_key(99, 2, 0, 1, 0), pack_u64(0)), {"name"}, id="no such group"),
        pytest.param(
            put(Family.GROUP, pack_group_key(1, 2, 0, 1, 0), pack_u64(10**6)), {"group"}, id="a group beyond the end"
        ),
        pytest.param(put(Family.GROUP, b"short", b""), {"row"}, id="a key makes no sense"),
        pytest.param(without(Family.AUDIT, at=3), {"audit", "figure"}, id="audit events are gone"),
        pytest.param(changed(Family.AUDIT, lambda value: value[:-1]), {"row", "figure"}, id="an event is cut"),
        pytest.param(without(Family.META, start=keys.META_NAME), {"row", "name"}, id="a name is gone"),
        pytest.param(
            changed(Family.META, lambda _: b"\1", start=keys.META_NAME, at=1), {"row", "name"}, id="a name is cut"
        ),
        pytest.param(changed(Family.META, lambda _: pack_u64(7), start=TOTAL), {"figure"}, id="a total is wrong"),
        pytest.param(
            changed(Family.META, lambda _: pack_u64(7), start=keys.META_BYTES), {"figure"}, id="bytes are miscounted"
        ),
        pytest.param(without(Family.META, start=keys.META_BYTES), {"figure"}, id="bytes are not counted"),
        pytest.param(changed(Family.META, lambda _: b"\7" * 60, start=b"m"), {"figure"}, id="a count is wrong"),
        pytest.param(changed(Family.META, lambda _: pack_u64(7), start=b"m"), {"row", "figure"}, id="a count is cut"),
        pytest.param(put(Family.META, keys.META_DONE, pack_pair(2**50, 0)), {"mark"}, id="what waits is passed over"),
        pytest.param(put(Family.META, keys.META_SEQUENCE, pack_u64(1)), {"mark"}, id="the sequence stepped back"),
        pytest.param(put(Family.META, keys.META_GENERATION, pack_pair(9, 0)), {"index"}, id="forgotten generations"),
        pytest.param(miscounted(EventKind.SCHEDULED), {"ledger"}, id="a term of a topic is wrong"),
        pytest.param(miscounted(EventKind.ACKED, of_group=True), {"ledger"}, id="a term of a group is wrong"),
        pytest.param(changed(Family.META, lambda _: b"\7", start=keys.META_LEDGER), {"row"}, id="a ledger is cut"),
    ],
)
def test_planted_faults_are_found(whole: Path, tmp_path: Path, plant: Plant, kinds: set[str]) -> None:
    """Each by its kind, and nothing else; nothing is changed by looking."""
    path = Path(shutil.copytree(whole, tmp_path / "store"))
    engine = RocksEngine(path / "rocksdb")
    engine.write(plant(engine))
    engine.close()
    before = files_of(path)
    found = checked(path).findings
    assert set(found.count) == kinds, found.first
    assert files_of(path) == before


def test_a_whole_store_has_nothing(whole: Path, tmp_path: Path) -> None:
    """Nor has one whose queue begins later, by a row that says so."""
    assert not checked(whole).findings.count
    path = Path(shutil.copytree(whole, tmp_path / "store"))
    engine = RocksEngine(path / "rocksdb")
    batch = put_batch((Family.META, keys.begin_key(2, 0), pack_u64(3)))
    batch.deletes += [(Family.QUEUE, pack_queue_key(2, 0, offset)) for offset in range(2)]  # of the third one is left
    engine.write(batch)
    engine.close()
    assert not checked(path).findings.count


def test_redriven_and_removed_counts_match(tmp_path: Path) -> None:
    """Messages in a group's lane, letters of a group that is gone, a dead-letter queue that went with its group."""

    async def make(rig: CellRig) -> None:
        await die_many(rig, 3)
        await finish(rig, replace(REDRIVE, filter=only("m-0", "m-1")))
        for each in await receive(rig, batch_max=1, renew_for="client-1"):
            await change(rig, each)
        await die(rig, a_letter("m-3", topic="third"), group="goes")
        await rig.broker.operator.remove_group("goes", is_forced=True)
        await die(rig, a_letter("m-4", topic="fourth"), group="goes-whole")
        await rig.broker.operator.remove_group("goes-whole", is_forced=True, with_dead_letters=True)

    found = checked(killed_cell(tmp_path, make)).findings
    assert not found.count, found.first


def test_a_store_of_format_1_is_looked_through(whole: Path, tmp_path: Path) -> None:
    """It counts by the minute in other rows, which are not looked at; all else is."""
    path = Path(shutil.copytree(whole, tmp_path / "store"))
    engine = RocksEngine(path / "rocksdb")
    batch = put_batch((Family.META, keys.META_FORMAT, pack_u64(1)), (Family.META, b"c" + bytes(12), pack_u64(1)))
    batch.deletes += [(Family.META, key) for key, _ in all_rows(engine, Family.META) if key[:1] == keys.META_HOUR]
    engine.write(batch)
    assert batch.deletes
    engine.close()
    assert not checked(path).findings.count
    engine = RocksEngine(path / "rocksdb")
    engine.write(changed(Family.META, lambda _: pack_u64(7), start=TOTAL)(engine))
    engine.close()
    assert set(checked(path).findings.count) == {"figure"}


def test_a_lost_end_is_known_from_the_trail(tmp_path: Path) -> None:
    """A log that is gone looks like one that never was; the trail beside the store has more events than it."""
    path = tmp_path / "cell"
    store = Store.open(path, SystemClock(), StoreOptions(ballast_bytes=0))
    store.close()
    assert not checked(path).findings.count
    layout = Layout(path / "trail", store.cell_id)
    layout.manifests.mkdir(parents=True)
    line = Listed(
        path=f"events/cell={store.cell_id}/date=2026-01-01/hour=00/{1:020}-{7:020}.parquet",
        cell=store.cell_id,
        first_sequence=1,
        last_sequence=7,
        rows=7,
        first_at_ms=0,
        last_at_ms=0,
        bytes=1,
        sha256="",
    )
    (layout.manifests / "2026-01-01.jsonl").write_bytes(encode_line(line))
    assert checked(path).findings.first == {
        "audit": ["the trail tells of events up to 7, the store of 0: its end is lost"]
    }


def spool_at(root: Path) -> Path:
    """The directory of a spool that holds an entry."""
    with closing(opened(root)) as spool:
        put_entries(spool, [entry_of(1)])
        return Path(spool.path)


def test_the_command(whole: Path, tmp_path: Path) -> None:
    """0 for a whole store, 4 for findings, 3 where there is none, 6 while it is in use; one line each."""
    told = run("store", "check", str(whole))
    assert (told.exit_code, told.stdout.splitlines()[-1]) == (0, f"{whole} is whole")
    path = Path(shutil.copytree(whole, tmp_path / "store"))
    engine = RocksEngine(path / "rocksdb")
    engine.write(without(Family.QUEUE, at=5)(engine))
    engine.close()
    result = run("store", "check", str(path), "-o", "json")
    assert (result.exit_code, result.stderr.count("\n")) == (4, 1)
    assert json.loads(result.stdout)["is_whole"] is False
    saved = run("store", "salvage", str(path), str(tmp_path / "new"))
    assert (saved.exit_code, saved.stderr.count("\n")) == (4, 1)
    assert "offsets: 1 in LOST.jsonl" in saved.stdout
    assert run("store", "check", str(tmp_path / "new")).exit_code == 0
    assert run("store", "check", str(tmp_path / "nowhere")).exit_code == 3
    shutil.rmtree(path / "rocksdb")
    assert run("store", "check", str(path)).exit_code == 4
    with pytest.raises(StoreCorrupt):
        checked(tmp_path)
    assert run("store", "check", str(spool_at(tmp_path / "spool"))).exit_code == 1
    assert run("store", "salvage", str(spool_at(tmp_path / "spool")), str(tmp_path / "x")).exit_code == 1
    assert not (tmp_path / "x").exists()
    store = Store.open(tmp_path / "used", SystemClock(), StoreOptions(ballast_bytes=0))
    with pytest.raises(StoreLocked):
        checked(tmp_path / "used")
    assert run("store", "check", str(tmp_path / "used")).exit_code == 6
    store.close()
