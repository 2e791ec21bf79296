"""A copy of a store is another store: what the original gave out means nothing to it."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar
from unittest.mock import patch

import pytest
from support.rigs.broker.rig import GROUP, INVISIBLE_MS, TOPIC, an_envelope

from broker_adapter.contracts.adapter import Subscription
from broker_adapter.contracts.errors import BrokerError, Refused, Rule
from broker_adapter.contracts.message import Delivery
from broker_adapter.contracts.transactions import Half
from broker_adapter.runtime.clock import ManualClock
from dmq.broker.broker import EmbeddedBroker
from dmq.recovery import check_store, salvage_store
from dmq.store.backup import back_up, back_up_stopped
from dmq.store.files.cell import Cell
from dmq.store.schema import keys
from dmq.store.schema.cell.identity import Identity
from dmq.store.schema.keys import Family
from dmq.store.store import Store
from dmq.store.writer.operations import Delete, Put

pytestmark = pytest.mark.integration
_T = TypeVar("_T")
CLOCK = ManualClock()
LATER_MS = 3_600_000


def run(path: Path, scenario: Callable[[EmbeddedBroker], Awaitable[_T]]) -> _T:
    """Run a scenario on the store in ``path``, opened as the daemon does, and close it."""

    async def whole() -> _T:
        store = Store.open(path, CLOCK)
        broker = EmbeddedBroker(store, queues_per_topic=1)
        try:
            return await scenario(broker)
        finally:
            await broker.close()
            store.close()

    return asyncio.run(whole())


def identity_of(path: Path) -> Identity:
    """The identity that a store has once it is open."""
    store = Store.open(path, CLOCK)
    store.close()
    return store.identity


async def take(broker: EmbeddedBroker) -> Delivery:
    """Receive one message."""
    (found,) = await broker.receive(
        GROUP, Subscription(TOPIC, -1, frozenset()), batch_max=1, invisible_ms=INVISIBLE_MS, wait_ms=0
    )
    return found


def copied(how: str, source: Path, target: Path) -> None:
    """Make a copy of a store whose process is stopped."""
    if how == "backup":
        back_up_stopped(source, target)
    elif how == "salvage":
        salvage_store(source, target, CLOCK, lambda _: None)
    else:
        shutil.copytree(source, target, copy_function=shutil.copy2)  # as cp -a


COPIES = pytest.mark.parametrize("how", ["backup", "salvage", "cp"])


@COPIES
def test_a_handle_from_before_a_restore_finishes_nothing(tmp_path: Path, how: str) -> None:
    """Boot, offset and epoch are those of another message in the copy; the handle is refused, and that one comes."""
    data, copy = tmp_path / "data", tmp_path / "copy"

    run(data, lambda broker: broker.send([an_envelope("zero")]))
    copied(how, data, copy)
    before = run(data, lambda broker: _after(broker, "lost"))

    async def other(broker: EmbeddedBroker) -> None:
        here = await _after(broker, "another")
        assert (here.queue_id, here.queue_offset) == (before.queue_id, before.queue_offset)
        for call in (
            broker.change_invisible(GROUP, TOPIC, before.receipt_handle, 1_000),
            broker.dead_letter(GROUP, TOPIC, before.receipt_handle, attempts=1),
            broker.send_back(GROUP, TOPIC, before.receipt_handle, -1),
        ):
            with pytest.raises(Refused) as refused:
                await call
            assert refused.value.rule is Rule.RECEIPT_HANDLE
        (told,) = await broker.ack(GROUP, TOPIC, [before.receipt_handle])
        assert isinstance(told, Refused)
        assert told.rule is Rule.RECEIPT_HANDLE
        assert await broker.ack(GROUP, TOPIC, [here.receipt_handle]) == [None]

    run(copy, other)
    assert not check_store(copy, lambda _: None).findings.count


async def _after(broker: EmbeddedBroker, message_id: str) -> Delivery:
    """Finish the first message, send another one and take it."""
    first = await take(broker)
    assert await broker.ack(GROUP, TOPIC, [first.receipt_handle]) == [None]
    await broker.send([an_envelope(message_id)])
    return await take(broker)


@COPIES
def test_handles_of_an_entry_are_invalid_in_a_copy(tmp_path: Path, how: str) -> None:
    """Recall handles and transaction ids: the sequences of the copy are those of other entries."""
    data, copy = tmp_path / "data", tmp_path / "copy"
    due_ms = CLOCK.now_ms() + LATER_MS

    async def accept(broker: EmbeddedBroker) -> tuple[str, str]:
        (sent,) = await broker.send([an_envelope("m-1", deliver_at_ms=due_ms)])
        (half,) = await broker.transactions.prepare([Half(an_envelope("half"))])
        return sent.recall_handle, half.transaction_id

    run(data, lambda broker: broker.send([an_envelope("zero")]))
    copied(how, data, copy)
    handle, transaction = run(data, accept)

    async def refuses(broker: EmbeddedBroker) -> None:
        here = await accept(broker)
        assert here != (handle, transaction)
        for call, rule in (
            (broker.recall(TOPIC, handle), Rule.REQUEST),
            (broker.transactions.commit(TOPIC, transaction), Rule.TRANSACTION_ID),
            (broker.transactions.roll_back(TOPIC, transaction), Rule.TRANSACTION_ID),
        ):
            with pytest.raises(Refused) as refused:
                await call
            assert refused.value.rule is rule
        assert (await broker.recall(TOPIC, here[0])).message_id == "m-1"
        await broker.transactions.commit(TOPIC, here[1])

    run(copy, refuses)


def test_a_running_store_is_copied_without_its_identity(tmp_path: Path) -> None:
    """Also one that was copied while it ran; the original keeps its own."""
    data, copy = tmp_path / "data", tmp_path / "copy"

    async def backed_up(broker: EmbeddedBroker) -> Identity:
        back_up(broker.store, data, copy)
        return broker.store.identity

    first = run(data, backed_up)
    assert identity_of(copy) not in {first, identity_of(data)}
    assert identity_of(data) == first
    assert identity_of(copy) == identity_of(copy)


def test_a_store_that_is_renamed_or_killed_is_the_same(tmp_path: Path) -> None:
    """Handles outlive both."""
    data, moved, killed = tmp_path / "data", tmp_path / "moved", tmp_path / "killed"
    run(data, lambda broker: broker.send([an_envelope("m-1")]))
    handle = run(data, take).receipt_handle
    data.rename(moved)
    first = identity_of(moved)
    moved.rename(killed)
    (killed / "CLOSED").unlink()
    assert identity_of(killed) == first
    assert run(killed, lambda broker: broker.ack(GROUP, TOPIC, [handle])) == [None]


def test_a_copy_put_in_the_place_of_the_original_is_another_store(tmp_path: Path) -> None:
    """As after ``rm -r data; cp -a copy data``, where the marker may get the inode that was just set free."""
    data, copy = tmp_path / "data", tmp_path / "copy"
    seen = {identity_of(data)}
    for count in range(2, 6):
        copied("cp", data, copy)
        shutil.rmtree(data)
        shutil.copytree(copy, data, copy_function=shutil.copy2)
        shutil.rmtree(copy)
        seen.add(identity_of(data))
        assert len({each.number for each in seen}) == count


@pytest.mark.parametrize("step", ["mark_created", "mark_original", "place"])
@pytest.mark.parametrize("is_copy", [False, True], ids=["new", "copy"])
def test_an_opening_that_ends_half_way_gives_nothing_out(tmp_path: Path, step: str, *, is_copy: bool) -> None:
    """Whatever step it ends at, the next one draws an identity, and that one stays."""
    data, copy = tmp_path / "data", tmp_path / "copy"
    original = identity_of(data)
    path = tmp_path / "new"
    if is_copy:
        back_up_stopped(data, copy)
        path = copy

    class Killed(Exception):
        pass

    calls = 0

    def dies(self: Cell) -> object:
        nonlocal calls
        calls += 1
        if step == "place" and calls == 1:  # asked before the identity is written, too
            return real(self)
        raise Killed

    real = getattr(Cell, step)
    with patch.object(Cell, step, dies), pytest.raises(Killed):
        Store.open(path, CLOCK)
    found = identity_of(path)
    assert found.number != original.number
    assert identity_of(path) == found
    assert not json.loads((path / "CELL").read_text(encoding="utf-8")).get("is_copy", False)


def test_a_store_of_format_2_is_taken_over(tmp_path: Path) -> None:
    """It gets an identity; what it gave out before is refused, and its messages come again."""
    data = tmp_path / "data"
    run(data, lambda broker: broker.send([an_envelope("m-1")]))
    run(data, take)

    async def as_format_2(broker: EmbeddedBroker) -> None:
        await broker.store.commit_async(
            [
                Delete(Family.META, keys.META_IDENTITY),
                Put(Family.META, keys.META_FORMAT, keys.pack_u64(2)),
            ]
        )

    run(data, as_format_2)
    old = "03" + "00" * 34

    async def refuses(broker: EmbeddedBroker) -> None:
        (told,) = await broker.ack(GROUP, TOPIC, [old])
        assert isinstance(told, BrokerError)
        found = await take(broker)
        assert await broker.ack(GROUP, TOPIC, [found.receipt_handle]) == [None]

    run(data, refuses)
    assert not check_store(data, lambda _: None).findings.count


def test_a_handle_is_of_its_message_also_where_everything_else_is_the_same(tmp_path: Path) -> None:
    """Files that are set back below the file system, as a snapshot of a machine is: same store, boot, offset, epoch."""
    data, saved = tmp_path / "data", tmp_path / "saved"
    identity_of(data)

    async def one(broker: EmbeddedBroker, message_id: str) -> Delivery:
        await broker.send([an_envelope(message_id)])
        return await take(broker)

    shutil.copytree(data / "rocksdb", saved)
    before = run(data, lambda broker: one(broker, "lost"))
    for each in (data / "rocksdb").iterdir():
        each.unlink()
    for each in saved.iterdir():
        shutil.copy2(each, data / "rocksdb" / each.name)
    (data / "CLOSED").unlink()

    async def other(broker: EmbeddedBroker) -> None:
        here = await one(broker, "another")
        assert (here.queue_id, here.queue_offset) == (before.queue_id, before.queue_offset)
        (told,) = await broker.ack(GROUP, TOPIC, [before.receipt_handle])
        assert isinstance(told, Refused)
        assert "another message" in told.why
        assert await broker.ack(GROUP, TOPIC, [here.receipt_handle]) == [None]

    run(data, other)
