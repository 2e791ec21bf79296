"""Builds of property indexes: earlier messages, damage of any row, kills, changes and a full disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import closing
from pathlib import Path
from unittest.mock import patch

import pytest
from support.clients.embedded.admin_answers import ask
from support.clients.embedded.failing import change
from support.forges.messages.half import a_half, prepare
from support.forges.messages.letters import a_message, die
from support.forges.store.store_rig import CellRig, checked, killed_cell, run_cell
from support.rigs.broker.rig import GROUP, TOPIC, EmbeddedRig, End, every_durable_broker, receive
from support.rigs.store.rows import all_rows

from broker_adapter.contracts.errors import BrokerUnavailable
from dmq.admin import admin_v1 as wire
from dmq.broker.operations import index_builds
from dmq.broker.topics import IndexChange, Topic
from dmq.store.engines.engine import Batch
from dmq.store.engines.rocks import RocksEngine
from dmq.store.schema.keys import Family, pack_u64
from dmq.store.schema.messages.index import Receipt
from dmq.store.schema.messages.properties import BUILT, DAMAGED, PROPERTY, START, value_digest
from dmq.store.writer.operations import IndexBuilt, IndexMessages

pytestmark = pytest.mark.integration
HOUR_MS = 3_600_000
COLOR = IndexChange(("color",))
VALUE = "red"  # of each message of ``a_message``
PLACES = ["DEAD", "QUEUED", "QUEUED", "READY", "RETRYING", "RETRYING", "WAITING", "WAITING"]
Damage = Callable[[RocksEngine, Batch], None]


async def fill(rig: EmbeddedRig) -> None:
    """A message at each kind of place; "dead" is at four of them."""
    await rig.set_group(GROUP, max_attempts=2, delays_ms=(1_000,))
    await die(rig, a_message("dead"), group="theirs")
    for delivery in await receive(rig, renew_for="client"):
        await change(rig, delivery)
    await rig.pass_ms(1_000)
    await rig.broker.send([a_message("again")])
    for delivery in await receive(rig, group="others", renew_for="client"):
        await change(rig, delivery, group="others")
    await rig.broker.send([a_message("late", deliver_at_ms=rig.clock.now_ms() + HOUR_MS)])
    await prepare(rig, a_half("half", a_message("half").payload))


async def found(rig: EmbeddedRig) -> list[str]:
    """States of the messages found by their color, of a complete index."""
    answer = await ask(rig, wire.FindMessagesRequest(topic=TOPIC, property="color", value=VALUE, limit=1000))
    assert not answer.is_building
    return sorted(wire.MessageState.Name(each.state) for each in answer.messages)


def is_built(rig: EmbeddedRig) -> bool:
    """Whether the store has a built row."""
    return any(key[:1] == BUILT for key, _ in all_rows(rig.store, Family.PROPERTY))


@every_durable_broker()
async def test_messages_from_before_the_index_are_found(rig: EmbeddedRig) -> None:
    """At each kind of place; until the index is built, a search answers that it is not."""
    await fill(rig)
    await rig.broker.operator.set_topic(TOPIC, index=COLOR)
    request = wire.FindMessagesRequest(topic=TOPIC, property="color", value=VALUE, limit=1000)
    before = await ask(rig, request)
    assert (before.is_building, list(before.messages)) == (True, [])
    await rig.broker.index_builds.build()
    assert await found(rig) == PLACES
    rig.check_ledger()


@every_durable_broker()
async def test_messages_that_move_during_a_build_are_found(rig: EmbeddedRig) -> None:
    """They are handed over, cancelled, finished and sent before, between and after the units of the build."""
    with patch.object(index_builds, "ROWS_PER_UNIT_MAX", 1):
        await fill(rig)
        await rig.broker.operator.set_topic(TOPIC, index=COLOR)
        submit, units = rig.broker.index_builds._submitted, 0

        def moving(op: IndexMessages | IndexBuilt) -> asyncio.Future[list[Receipt]] | None:
            nonlocal units
            units += 1
            if units == 2:
                rig.clock.advance(HOUR_MS)
                rig.scheduler.turn()
            return submit(op)

        with patch.object(rig.broker.index_builds, "_submitted", moving):
            await rig.broker.index_builds.build()
        await rig.settle()
    assert units > 2
    assert "late" in {each.message_id for each in await receive(rig, group="new", wait_ms=1)}
    rig.check_ledger()
    assert (await found(rig)).count("QUEUED") == 3


@every_durable_broker()
async def test_a_killed_build_is_repeated(rig: EmbeddedRig) -> None:
    """Whichever unit was the last one; the rows are right after each kill, and complete after the next build."""
    with patch.object(index_builds, "ROWS_PER_UNIT_MAX", 1):
        await fill(rig)
        await rig.broker.operator.set_topic(TOPIC, index=COLOR)
        for units in range(5):
            await _kill_after(rig, units)
            assert not is_built(rig)
            rig.check_ledger()
    await rig.broker.index_builds.build()
    assert await found(rig) == PLACES
    rig.check_ledger()


async def _kill_after(rig: EmbeddedRig, units: int) -> None:
    """Kill the run of a build after a number of its units."""
    builds, done, killed = rig.broker.index_builds, 0, asyncio.Event()
    submit = builds._submitted

    def dying(op: IndexMessages | IndexBuilt) -> asyncio.Future[list[Receipt]] | None:
        nonlocal done
        if done == units:
            killed.set()
            return None
        done += 1
        return submit(op)

    with patch.object(builds, "_submitted", dying):
        builds.start()
        await killed.wait()
        await rig.restart(End.KILL)


@every_durable_broker()
async def test_an_index_that_is_removed_during_its_build_leaves_no_row(rig: EmbeddedRig) -> None:
    """And one that is removed and added again is built from the beginning."""
    with patch.object(index_builds, "ROWS_PER_UNIT_MAX", 1):
        await fill(rig)
        await rig.broker.operator.set_topic(TOPIC, index=COLOR)
        builds, changes = rig.broker.index_builds, [[IndexChange((), ("color",)), COLOR], [IndexChange((), ("color",))]]
        units = builds._units

        async def changing(topic: Topic, names: Sequence[str]) -> AsyncIterator[IndexMessages]:
            number = 0
            async for each in units(topic, names):
                number += 1
                if number == 3 and changes:
                    for one in changes.pop(0):
                        await rig.broker.operator.set_topic(TOPIC, index=one)
                yield each

        with patch.object(builds, "_units", changing):
            await builds.build()
    assert not changes
    assert all_rows(rig.store, Family.PROPERTY) == []


@every_durable_broker()
async def test_a_build_waits_while_the_disk_is_almost_full(rig: EmbeddedRig) -> None:
    """It reports that, takes no space of acknowledgements, and continues later."""
    await fill(rig)
    await rig.broker.operator.set_topic(TOPIC, index=COLOR)
    before, is_low, naps = all_rows(rig.store, Family.PROPERTY), True, 0

    async def nap(_: float) -> None:
        nonlocal is_low, naps
        naps += 1
        assert "disk is almost full" in rig.broker.index_builds.problem()
        assert all_rows(rig.store, Family.PROPERTY) == before
        is_low = naps < 3

    with patch.object(rig.store, "is_disk_low", lambda: is_low), patch("asyncio.sleep", nap):
        await rig.broker.index_builds.build()
    assert (naps, rig.broker.index_builds.problem()) == (3, "")
    assert await found(rig) == PLACES


# -- damage -----------------------------------------------------------------------------------------------------------


def rows_of(engine: RocksEngine, letter: bytes) -> list[bytes]:
    """Keys of the rows of a kind."""
    return [key for key, _ in all_rows(engine, Family.PROPERTY) if key[:1] == letter]


def short_start(engine: RocksEngine, batch: Batch) -> None:
    """The key of a start is too short."""
    batch.deletes.append((Family.PROPERTY, rows_of(engine, START)[0]))
    batch.puts.append((Family.PROPERTY, rows_of(engine, START)[0][:-1], pack_u64(1)))


def wrong_number(engine: RocksEngine, batch: Batch) -> None:
    """The number of a start is too short."""
    batch.puts.append((Family.PROPERTY, rows_of(engine, START)[0], b"\0"))


def short_built(engine: RocksEngine, batch: Batch) -> None:
    """The key of a built row is too short."""
    batch.puts.append((Family.PROPERTY, BUILT + b"\0", b""))


def unknown(_: RocksEngine, batch: Batch) -> None:
    """A row of no kind."""
    batch.puts.append((Family.PROPERTY, b"x", b""))


def lost(engine: RocksEngine, batch: Batch) -> None:
    """All rows are gone."""
    batch.deletes += [(Family.PROPERTY, key) for key, _ in all_rows(engine, Family.PROPERTY)]


def not_built(engine: RocksEngine, batch: Batch) -> None:
    """Rows of messages are gone, and the built row."""
    batch.deletes += [(Family.PROPERTY, key) for key in rows_of(engine, PROPERTY)[:3] + rows_of(engine, BUILT)]


def with_damage(folder: Path, damage: Damage) -> Path:
    """Return a killed store with a built index, and damage to it."""

    async def build(rig: CellRig) -> None:
        await fill(rig)
        await rig.broker.operator.set_topic(TOPIC, index=COLOR)
        await rig.broker.index_builds.build()

    path = killed_cell(folder, build)
    with closing(RocksEngine(path / "rocksdb")) as engine:
        batch = Batch()
        damage(engine, batch)
        engine.write(batch)
        engine.sync()
    return path


@pytest.mark.parametrize("damage", [short_start, wrong_number, short_built, unknown, lost, not_built])
def test_damaged_rows_are_built_again(tmp_path: Path, damage: Damage) -> None:
    """The store opens and delivers, and the build leaves an index of all messages; a check finds nothing."""

    async def scenario(rig: CellRig) -> None:
        assert {each.message_id for each in await receive(rig, group="new")} == {"dead", "again"}
        await rig.broker.index_builds.build()
        assert await found(rig) == PLACES
        rig.check_ledger()

    path = with_damage(tmp_path, damage)
    run_cell(path, scenario)
    assert not checked(path).findings.count


def test_an_unreadable_table_is_built_again(tmp_path: Path) -> None:
    """A wrong checksum of a block of the index; the table is gone, so no compaction meets it."""
    path = with_damage(tmp_path, lambda *_: None)
    with closing(RocksEngine(path / "rocksdb")) as engine:
        engine.reclaim(Family.PROPERTY, [(b"", b"\xff")])
        assert engine._db is not None
        (built,) = rows_of(engine, BUILT)
        (table,) = [each["name"] for each in engine._db.live_files() if each["start_key"] == built]
    damaged = path / "rocksdb" / table.lstrip("/")
    content = bytearray(damaged.read_bytes())
    content[20] ^= 0xFF
    damaged.write_bytes(content)
    assert checked(path).findings.count["damage"]

    async def scenario(rig: CellRig) -> None:
        assert {each.message_id for each in await receive(rig, group="new")} == {"dead", "again"}
        await rig.broker.index_builds.build()
        rig.store.reclaim(Family.PROPERTY, [(b"", b"\xff")])
        assert await found(rig) == PLACES

    run_cell(path, scenario)
    assert not checked(path).findings.count


def other_key(engine: RocksEngine, batch: Batch) -> None:
    """The place in the row of a message makes no sense."""
    key = rows_of(engine, PROPERTY)[0]
    batch.puts.append((Family.PROPERTY, key[:29] + b"\x07" + key[30:], b""))


def test_a_search_that_meets_a_damaged_row_reports_it(tmp_path: Path) -> None:
    """Messages are delivered; health names the step, the check has a finding, and the next run builds the index."""

    async def meet(rig: CellRig) -> None:
        assert {each.message_id for each in await receive(rig, group="new")} == {"dead", "again"}
        await rig.broker.index_builds.build()
        with pytest.raises(BrokerUnavailable):
            await found(rig)
        rig.is_whole = False
        assert "restart the daemon" in rig.broker.index_builds.problem()
        assert (DAMAGED, b"") in all_rows(rig.store, Family.PROPERTY)

    async def build(rig: CellRig) -> None:
        await rig.broker.index_builds.build()
        assert (await found(rig), rig.broker.index_builds.problem()) == (PLACES, "")

    path = with_damage(tmp_path, other_key)
    run_cell(path, meet)
    assert "a search met a damaged row" in str(checked(path).findings.first["property"])
    run_cell(path, build)
    assert not checked(path).findings.count


def of_other_values(engine: RocksEngine, batch: Batch) -> None:
    """The rows of the value lead to messages with another value too."""
    batch.puts += [
        (Family.PROPERTY, key[:13] + value_digest("blue") + key[29:], value)
        for key, value in all_rows(engine, Family.PROPERTY)
        if key[:1] == PROPERTY
    ]


def test_surplus_rows_lead_to_no_wrong_message(tmp_path: Path) -> None:
    """A search compares the value; a check finds the rows; an index that is added again has none of them."""

    async def scenario(rig: CellRig) -> None:
        answer = await ask(rig, wire.FindMessagesRequest(topic=TOPIC, property="color", value="blue", limit=1000))
        assert not answer.messages
        await rig.broker.operator.set_topic(TOPIC, index=IndexChange((), ("color",)))
        await rig.broker.operator.set_topic(TOPIC, index=COLOR)
        await rig.broker.index_builds.build()
        assert await found(rig) == PLACES

    path = with_damage(tmp_path, of_other_values)
    assert checked(path).findings.count["property"]
    run_cell(path, scenario)
    assert not checked(path).findings.count
