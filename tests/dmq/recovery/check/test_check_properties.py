"""Indexed properties in the store of a stopped daemon: differences are found, and a salvage writes the rows again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from support.clients.embedded.failing import change
from support.forges.messages.half import a_half, prepare
from support.forges.messages.letters import a_message
from support.forges.store.store_rig import CellRig, checked, killed_cell, run_cell
from support.models.store.properties import assert_properties
from support.rigs.broker.rig import GROUP, TOPIC, receive
from support.rigs.store.rows import all_rows

from broker_adapter.runtime.clock import ManualClock
from dmq.broker.topics import IndexChange
from dmq.recovery import salvage_store
from dmq.store.engines.engine import Batch
from dmq.store.engines.rocks import RocksEngine
from dmq.store.schema import keys
from dmq.store.schema.keys import META_SETTINGS, Family
from dmq.store.schema.messages.properties import PROPERTY, START

pytestmark = pytest.mark.integration
NOW = 1_700_000_000_000
Damage = Callable[[RocksEngine, Batch], None]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A killed store with an indexed message at each kind of place, and some from before the index."""

    async def make(rig: CellRig) -> None:
        await rig.broker.send([a_message("before"), a_message("before-late", deliver_at_ms=NOW + 60_000)])
        await rig.broker.operator.set_topic(TOPIC, index=IndexChange(("color",)))
        await rig.broker.send([a_message("late", deliver_at_ms=NOW + 60_000), a_message("ready")])
        await prepare(rig, a_half("half", a_message("half").payload))
        for delivery in await receive(rig, renew_for="client-1"):
            if delivery.message_id == "before":
                await rig.broker.dead_letter(GROUP, TOPIC, delivery.receipt_handle, attempts=1)
            else:
                await change(rig, delivery)  # a failure: a pending retry
        assert_properties(rig.store)

    return killed_cell(tmp_path_factory.mktemp("properties"), make, ManualClock(NOW))


def rows_of(engine: RocksEngine, family: Family, start: bytes) -> list[bytes]:
    """Keys of a family with that first byte."""
    return [key for key, _ in all_rows(engine, family, start) if key[:1] == start]


def without_rows(engine: RocksEngine, batch: Batch) -> None:
    """All rows of the property are lost, but not its starts."""
    batch.deletes += [(Family.PROPERTY, key) for key in rows_of(engine, Family.PROPERTY, PROPERTY)]


def without_message(engine: RocksEngine, batch: Batch) -> None:
    """The last message of the dead-letter queue is lost."""
    batch.deletes.append((Family.QUEUE, all_rows(engine, Family.QUEUE)[-1][0]))


def of_other_value(engine: RocksEngine, batch: Batch) -> None:
    """The digest of a value is another one."""
    key = rows_of(engine, Family.PROPERTY, PROPERTY)[-1]
    batch.puts.append((Family.PROPERTY, key[:13] + bytes(16) + key[29:], b""))


def without_settings(engine: RocksEngine, batch: Batch) -> None:
    """The topic has no indexed property any more."""
    batch.deletes += [(Family.META, key) for key, _ in all_rows(engine, Family.META, META_SETTINGS)][:1]


def cut(engine: RocksEngine, batch: Batch) -> None:
    """A key is too short."""
    batch.puts += [(Family.PROPERTY, PROPERTY + b"short", b""), (Family.PROPERTY, START + b"\0", b"")]


def damaged(whole: Path, target: Path, damage: Damage | None) -> Path:
    """A copy with the damage."""
    path = Path(shutil.copytree(whole, target))
    with closing(RocksEngine(path / "rocksdb")) as engine:
        batch = Batch()
        if damage is not None:
            damage(engine, batch)
        engine.write(batch)
        engine.sync()
    return path


@pytest.mark.parametrize(
    ("damage", "kind", "text"),
    [
        (None, "", ""),
        (without_rows, "property", "pending message late is not found by its indexed property"),
        (without_message, "property", "where it has no message"),
        (of_other_value, "property", "which has another value of it"),
        (without_settings, "property", "that is not indexed"),
        (cut, "row", "the start of a property under a key of 2 bytes"),
    ],
)
def test_a_check_compares_messages_and_rows(
    whole: Path, tmp_path: Path, damage: Damage | None, kind: str, text: str
) -> None:
    """Both a message without its row and a row without its message are found; an undamaged store has no finding."""
    found = checked(damaged(whole, tmp_path / "store", damage)).findings
    assert bool(found.count) is (damage is not None), found.first
    if damage is not None:
        assert any(text in each for each in found.first[kind]), found.first


def test_a_salvage_writes_the_rows_of_all_messages(whole: Path, tmp_path: Path) -> None:
    """The new store is clean, and it indexes also messages that are older than the index."""
    target = tmp_path / "new"
    old = damaged(whole, tmp_path / "store", without_rows)
    salvaged = salvage_store(old, target, ManualClock(NOW), lambda _: None)
    assert not salvaged.checked.findings.count
    with closing(RocksEngine(target / "rocksdb")) as engine:
        timeline = [key for key, _ in all_rows(engine, Family.TIMELINE) if not keys.is_half_body_key(key)]
        messages = len(timeline) + len(all_rows(engine, Family.QUEUE))
        assert len(rows_of(engine, Family.PROPERTY, PROPERTY)) == messages == 7


def test_a_store_without_the_family_is_checked_and_opened(whole: Path, tmp_path: Path) -> None:
    """A store of format 6 has no family for properties: a check reads it as empty, and opening adds it."""
    path = Path(shutil.copytree(whole, tmp_path / "store"))
    make_format_6(path / "rocksdb")
    assert not checked(path).findings.count

    async def use(rig: CellRig) -> None:
        await rig.broker.operator.set_topic(TOPIC, index=IndexChange(("color",)))
        await rig.broker.send([a_message("new")])
        assert len(all_rows(rig.store, Family.PROPERTY)) == 2
        assert_properties(rig.store)

    run_cell(path, use, ManualClock(NOW))
    assert not checked(path).findings.count


def make_format_6(database: Path) -> None:
    """Make a database as the previous version of Rock-DMQ wrote it."""
    with closing(RocksEngine(database)) as engine:
        batch = Batch()
        batch.puts.append((Family.META, keys.META_FORMAT, keys.pack_u64(6)))
        without_settings(engine, batch)
        engine.write(batch)
        engine.sync()
        assert engine._db is not None
        engine._handles.pop()
        engine._dicts.pop().close()
        engine._db.drop_column_family("property")
