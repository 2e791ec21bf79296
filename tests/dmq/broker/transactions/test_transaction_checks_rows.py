"""Half messages that nobody decides: what a check writes, how pauses grow, when they are given up, format 2."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest
from support.forges.messages.half import DEAD, EVERY_MS, FIRST_MS, Producer, a_half, halves, prepare
from support.forges.messages.letters import told
from support.rigs.broker.rig import TOPIC, EmbeddedRig, End, every_durable_broker, ids, play, receive
from support.rigs.store.rows import GatedEngine, all_rows

from broker_adapter.contracts.message import pack_id
from dmq.broker.handles.entry_handle import EntryHandle, HandleKind
from dmq.broker.transactions.transaction_checks import GIVEN_UP_GROUP, PAUSE_MS_MAX, CheckOptions, pause_of
from dmq.store.engines.engine import Batch, Engine
from dmq.store.schema.keys import FORMAT_VERSION, META_FORMAT, Family, half_scope, pack_u64
from dmq.store.schema.messages.record import EntryKind, Terms, encode_body, encode_terms, encode_waiting
from dmq.store.writer.operations import Put, Schedule
from dmq.trail.events import NO_QUEUE, EventKind, encode_event
from retry.dead_letter import DeadFilter
from retry.policy import Reason

pytestmark = pytest.mark.contract
BODY_BYTES = 1_000_000
DAY_MS = 86_400_000


def written(batches: list[Batch]) -> int:
    """Return how many bytes the engine was given."""
    return sum(len(key) + len(value) for batch in batches for _, key, value in batch.puts)


@pytest.mark.parametrize("is_there", [False, True])
def test_a_check_writes_no_body(tmp_path: Path, is_there: bool) -> None:
    """The body is given to the engine when it is accepted and when it has its outcome; a check writes little."""
    gates: list[GatedEngine] = []

    def gated(engine: Engine) -> Engine:
        gates.append(GatedEngine(engine))
        return gates[-1]

    async def scenario(rig: EmbeddedRig) -> None:
        producer = Producer(rig, is_there=is_there)
        (receipt,) = await prepare(rig, a_half(payload=b"x" * BODY_BYTES))
        assert written(gates[-1].batches) > BODY_BYTES
        gates[-1].batches.clear()
        await rig.pass_ms(FIRST_MS)
        await rig.pass_ms(EVERY_MS)
        assert 0 < written(gates[-1].batches) < 10_000
        if is_there:
            assert [len(each.payload) for each in await producer.heard(2)] == [BODY_BYTES] * 2
        await rig.broker.transactions.commit(TOPIC, receipt.transaction_id)
        (found,) = await receive(rig)
        assert len(found.payload) == BODY_BYTES
        assert not all_rows(rig.store, Family.TIMELINE), "the body goes with the half message"

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False, wrap=gated), scenario))


def test_pauses_grow_and_end() -> None:
    """Twice as long each time while there is nobody to ask, shorter by a quarter at most, and never above the bound."""
    assert pause_of(30_000, 1, 7) == 30_000
    for sequence in range(1, 200):
        pauses = [pause_of(30_000, unasked, sequence) for unasked in range(1, 70_000, 1 + sequence * 50)]
        assert max(pauses) <= PAUSE_MS_MAX
        for unasked in range(2, 60):
            full = min(30_000 << unasked - 1, PAUSE_MS_MAX)
            assert full * 3 // 4 <= pause_of(30_000, unasked, sequence) <= full
    assert pause_of(DAY_MS, 9, 1) <= DAY_MS
    assert len({pause_of(30_000, 9, sequence) for sequence in range(100)}) > 50


@every_durable_broker()
async def test_it_is_checked_ever_less_while_no_producer_can_be_asked(rig: EmbeddedRig) -> None:
    """An hour takes a few looks; one producer that is there again, and it is asked in its old rhythm."""
    producer = Producer(rig, is_there=False)
    await prepare(rig)
    await rig.pass_ms(FIRST_MS)
    looks = 1
    for _ in range(3_600):
        rig.clock.advance(1_000)
        while rig.scheduler.turn().handed_over:
            looks += 1
    assert 8 <= looks <= 15
    producer.is_there = True
    await rig.pass_ms(PAUSE_MS_MAX)
    await rig.pass_ms(EVERY_MS)
    assert [each.number for each in await producer.heard(2)] == [1, 2]


@every_durable_broker()
async def test_it_is_given_up_in_time_also_without_a_producer(rig: EmbeddedRig) -> None:
    """After the longest age in all, as a dead letter that says so; a restart changes nothing about that."""
    await prepare(rig, a_half())
    waited_ms = 0
    while halves(rig):
        assert waited_ms < 2 * CheckOptions().max_age_ms
        await rig.pass_ms(PAUSE_MS_MAX)
        waited_ms += PAUSE_MS_MAX
        if waited_ms == 12 * PAUSE_MS_MAX:
            await rig.restart(End.KILL)
    assert waited_ms >= CheckOptions().max_age_ms
    page = await rig.broker.dead_letters.page(GIVEN_UP_GROUP, DeadFilter(), offset=0, limit=9, with_outcome=False)
    (letter,) = page.letters
    assert letter.dead.reason == Reason.TOO_OLD
    (event,) = told(rig, EventKind.TX_TOO_OLD)
    assert (event.attempt, told(rig, EventKind.TX_CHECKED), told(rig, EventKind.TX_GIVEN_UP)) == (0, [], [])
    assert ids(await receive(rig, group="u", topic=DEAD)) == ["m-1"]
    assert not all_rows(rig.store, Family.TIMELINE)


@every_durable_broker()
async def test_a_step_of_the_clock_makes_nothing_old(rig: EmbeddedRig) -> None:
    """A year at once is one pause: the age is what it waited, not what the clock says."""
    producer = Producer(rig, is_there=False)
    await prepare(rig)
    await rig.pass_ms(365 * DAY_MS)
    await rig.pass_ms(365 * DAY_MS)
    producer.is_there = True
    await rig.pass_ms(PAUSE_MS_MAX)
    (asked,) = await producer.heard(1)
    await rig.broker.transactions.commit(TOPIC, asked.transaction_id)
    assert ids(await receive(rig)) == ["m-1"]


@pytest.mark.parametrize("how", ["commit", "roll back", "check", "remove"])
def test_half_messages_of_format_2_are_taken_over(tmp_path: Path, how: str) -> None:
    """They held their body in their own row: decided as they are, or put right by their next check."""
    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=True), partial(take_over, how)))


async def take_over(how: str, rig: EmbeddedRig) -> None:
    """End a half message of format 2."""
    await prepare(rig, a_half("other"))  # makes the names
    topic_id, packed = rig.broker.names.topics[TOPIC].topic_id, pack_id("old")
    now_ms, scope = rig.clock.now_ms(), half_scope(topic_id)
    body = encode_body(packed, b"red", b"", b"payload")
    record = encode_waiting(
        EntryKind.WHOLE_HALF, 3, topic_id, scope, now_ms + 5_000, now_ms, encode_terms(Terms(0, 0)) + body
    )
    event = encode_event(EventKind.HALF, topic_id, 0, NO_QUEUE, 0, now_ms + 5_000, packed)
    schedule = Schedule(scope, packed, now_ms + 5_000, record, event)
    receipt, _ = rig.store.commit([schedule, Put(Family.META, META_FORMAT, pack_u64(2))])
    await rig.restart(End.KILL)
    producer = Producer(rig)
    handle = rig.broker.handles.encode(HandleKind.TRANSACTION, EntryHandle(receipt.sequence, TOPIC, packed))
    (version,) = rig.store.get_many(Family.META, [META_FORMAT])
    assert version == pack_u64(FORMAT_VERSION)
    if how == "check":
        await rig.pass_ms(5_000)
        (asked,) = await producer.heard(1)
        assert (asked.message_id, asked.transaction_id, asked.number, asked.payload) == ("old", handle, 4, b"payload")
    if how in {"commit", "check"}:
        await rig.broker.transactions.commit(TOPIC, handle)
        (found,) = await receive(rig, tags=["red"])
        assert (found.message_id, found.payload) == ("old", b"payload")
    elif how == "roll back":
        await rig.broker.transactions.roll_back(TOPIC, handle)
    else:
        await rig.broker.operator.remove_topic(TOPIC, is_forced=True)
        assert not all_rows(rig.store, Family.TIMELINE)
        return
    assert halves(rig) == 1
    assert not [value for _, value in all_rows(rig.store, Family.TIMELINE) if packed in value]
