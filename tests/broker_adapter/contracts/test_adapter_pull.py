"""What ``PullBroker`` promises of messages, on everything that fits it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from support.forges.messages.letters import DEAD, PURGE, a_message, die, finish, only
from support.rigs.broker.rig import (
    PATIENCE_S,
    TOPIC,
    EmbeddedRig,
    End,
    ack,
    an_envelope,
    every_durable_broker,
    play,
    receive,
    send,
    until,
)
from support.rigs.store.rows import GatedEngine

from broker_adapter.contracts.adapter import Pulled, QueueRange, Subscription
from broker_adapter.contracts.errors import BrokerUnavailable, Refused, Rule
from dmq.broker.filters import filters
from dmq.broker.pulling import pulls as pull_module
from dmq.store.engines.engine import Engine
from dmq.store.schema.keys import Family, pack_queue_key
from dmq.store.schema.messages.record import QueuedMessage
from dmq.store.writer.operations import Delete

pytestmark = pytest.mark.contract


async def pull(
    rig: EmbeddedRig,
    offset: int = 0,
    *,
    topic: str = TOPIC,
    queue_id: int = 0,
    tags: Sequence[str] = (),
    sql: str = "",
    batch_max: int = 32,
    wait_ms: int = 0,
) -> Pulled:
    """Pull, by default what is there."""
    wanted = Subscription(topic, queue_id, frozenset(tags), sql)
    return await rig.broker.pulls.pull(wanted, offset, batch_max=batch_max, wait_ms=wait_ms)


def names(pulled: Pulled) -> list[str]:
    """The message ids, in their order."""
    return [each.message_id for each in pulled.messages]


def waiting(rig: EmbeddedRig) -> int:
    """How many pulls wait."""
    return rig.broker.pulls.tails.waiting


async def drop_before(rig: EmbeddedRig, offset: int) -> None:
    """Remove the front of queue 0, as retention would."""
    topic_id = rig.broker.names.topics[TOPIC].topic_id
    await rig.store.commit_async([Delete(Family.QUEUE, pack_queue_key(topic_id, 0, each)) for each in range(offset)])


@every_durable_broker(queues=1)
async def test_messages_come_in_the_order_of_their_offsets(rig: EmbeddedRig) -> None:
    """In batches, each from where the one before said; as often as anybody asks."""
    await send(rig, *(f"m-{number}" for number in range(5)))
    found = await pull(rig, batch_max=2)
    assert (names(found), found.next_offset) == (["m-0", "m-1"], 2)
    assert [(each.queue_id, each.queue_offset) for each in found.messages] == [(0, 0), (0, 1)]
    assert found.messages[0].payload == b"payload"
    assert found.messages[0].stored_at_ms == rig.clock.now_ms()
    rest = await pull(rig, found.next_offset)
    assert (names(rest), rest.next_offset) == (["m-2", "m-3", "m-4"], 5)
    assert await pull(rig, 5) == Pulled((), 5)
    assert names(await pull(rig, batch_max=2)) == ["m-0", "m-1"]


@every_durable_broker(queues=1)
async def test_pulling_changes_nothing(rig: EmbeddedRig) -> None:
    """What was pulled is there for who receives, at its first attempt; what was acknowledged can be pulled."""
    await send(rig, "m-0", "m-1")
    events = rig.store.outbox_state.next_sequence
    await pull(rig)
    assert rig.store.outbox_state.next_sequence == events
    deliveries = await receive(rig)
    assert [(each.message_id, each.delivery_attempt) for each in deliveries] == [("m-0", 1), ("m-1", 1)]
    await ack(rig, *deliveries)
    assert names(await pull(rig)) == ["m-0", "m-1"]


@every_durable_broker(queues=2)
async def test_a_queue_is_read_by_itself(rig: EmbeddedRig) -> None:
    """Each message lies in one of them; the other one does not show it."""
    receipts = await send(rig, "m-0", "m-1", "m-2")
    for queue_id in (0, 1):
        there = [each.message_id for each in receipts if each.queue_id == queue_id]
        assert names(await pull(rig, queue_id=queue_id)) == there


@every_durable_broker(queues=2)
async def test_missing_objects_are_refused(rig: EmbeddedRig) -> None:
    """A topic that nobody knows, a queue that it does not have; asking creates neither."""
    with pytest.raises(Refused) as caught:
        await pull(rig)
    assert caught.value.rule is Rule.TOPIC_UNKNOWN
    assert TOPIC not in rig.broker.names.topics
    await rig.broker.pulls.route(TOPIC)
    for queue_id in (-1, 2):
        with pytest.raises(Refused, match=r"limit 0\.\.1") as caught:
            await pull(rig, queue_id=queue_id)
        assert caught.value.rule is Rule.REQUEST


@every_durable_broker(queues=1)
async def test_an_offset_outside_is_refused_with_the_range(rig: EmbeddedRig) -> None:
    """Below the begin, which may have moved, and behind the end; the end itself is where new messages come."""
    rig.is_whole = False  # what retention does not do: the end goes with the last message
    await send(rig, "m-0", "m-1", "m-2")
    await drop_before(rig, 1)
    for offset in (-(2**63), -1, 0, 4, 2**63 - 1):
        with pytest.raises(Refused, match=r"limit 1\.\.3") as caught:
            await pull(rig, offset)
        assert caught.value.rule is Rule.OFFSET
    assert await rig.broker.pulls.queue_range(TOPIC, 0) == QueueRange(1, 3)
    assert names(await pull(rig, 1)) == ["m-1", "m-2"]
    assert await pull(rig, 3) == Pulled((), 3)
    await drop_before(rig, 3)
    with pytest.raises(Refused, match=r"limit 3\.\.3"):
        await pull(rig, 2)


@every_durable_broker(queues=1)
async def test_a_hole_in_a_queue_is_damage(rig: EmbeddedRig) -> None:
    """Not a shorter answer that looks whole."""
    await send(rig, "m-0", "m-1", "m-2")
    topic_id = rig.broker.names.topics[TOPIC].topic_id
    await rig.store.commit_async([Delete(Family.QUEUE, pack_queue_key(topic_id, 0, 1))])
    with pytest.raises(BrokerUnavailable, match="has no message 1"):
        await pull(rig)


@every_durable_broker(queues=1)
async def test_all_waiters_are_woken(rig: EmbeddedRig) -> None:
    """At the end of a queue, by a message sent or handed over; each gets it, and who waits in vain gets nothing."""
    await rig.broker.route(TOPIC)
    due_ms = rig.clock.now_ms() + 1_000
    await send(rig, "later", deliver_at_ms=due_ms)
    pulls = [asyncio.ensure_future(pull(rig, wait_ms=20_000)) for _ in range(3)]
    await until(lambda: waiting(rig) == 3)
    await send(rig, "now")
    async with asyncio.timeout(PATIENCE_S):
        assert [names(await each) for each in pulls] == [["now"]] * 3
    last = asyncio.ensure_future(pull(rig, 1, wait_ms=20_000))
    await until(lambda: waiting(rig) == 1)
    await rig.pass_ms(1_000)
    assert [(each.message_id, each.deliver_at_ms) for each in (await last).messages] == [("later", due_ms)]
    in_vain = asyncio.ensure_future(pull(rig, 2, wait_ms=1))
    await until(lambda: waiting(rig) == 1)
    rig.clock.advance(1)
    assert await in_vain == Pulled((), 2)
    assert not waiting(rig)


@every_durable_broker(queues=1)
async def test_a_pull_that_is_cancelled_waits_no_more(rig: EmbeddedRig) -> None:
    """Clients hang up all the time; nothing of it stays."""
    await rig.broker.route(TOPIC)
    pulling = asyncio.ensure_future(pull(rig, wait_ms=20_000))
    await until(lambda: waiting(rig) == 1)
    pulling.cancel()
    await asyncio.wait((pulling,))
    assert not waiting(rig)


@every_durable_broker(queues=1)
async def test_filtered_messages_are_before_the_next_offset(rig: EmbeddedRig) -> None:
    """By tag and by SQL; a wrong expression is refused with its position."""
    for number in range(6):
        await rig.broker.send([a_message(f"m-{number}", tag="odd" if number % 2 else "even")])
    await rig.broker.send([a_message("m-6", tag="even")])
    found = await pull(rig, tags=["odd"], batch_max=2)
    assert (names(found), found.next_offset) == (["m-1", "m-3"], 5)
    assert await pull(rig, 6, tags=["odd"]) == Pulled((), 7)
    assert names(await pull(rig, sql="color = 'red' AND TAGS = 'odd'")) == ["m-1", "m-3", "m-5"]
    with pytest.raises(Refused) as caught:
        await pull(rig, sql="color =")
    assert caught.value.rule is Rule.FILTER


@every_durable_broker(queues=1)
async def test_one_pull_looks_at_a_bounded_number_of_messages(rig: EmbeddedRig) -> None:
    """A filter that matches nothing ends early and says where to go on, so the next call does not look again."""
    await send(rig, *(f"m-{number}" for number in range(90)))
    with patch.object(pull_module, "PASSED_OVER_MAX", 16):
        found = await pull(rig, tags=["none"], batch_max=4, wait_ms=60_000)
    assert not found.messages
    assert 16 <= found.next_offset < 90


@every_durable_broker(queues=1)
async def test_a_slow_filter_looks_at_a_few_messages_in_a_turn(rig: EmbeddedRig) -> None:
    """Danger: one pull by an expression that took long held up everybody for 8 s. The next one goes on behind them."""
    await send(rig, *(f"m-{number}" for number in range(9)))

    def slow(message: QueuedMessage) -> bool:
        rig.clock.advance(1)
        return not message.message_id.endswith(b"4")

    with patch.object(filters, "filter_of", lambda _: slow):
        found, at = list[str](), 0
        while at < 9:
            batch = await pull(rig, at)
            assert len(batch.messages) <= 3
            found, at = found + names(batch), batch.next_offset
    assert found == [f"m-{number}" for number in range(9) if number != 4]


@every_durable_broker(queues=1)
async def test_the_bytes_of_one_answer_are_bounded(rig: EmbeddedRig) -> None:
    """One message always fits, and the rest comes with the next call."""
    await rig.broker.send([an_envelope(f"m-{number}", payload=bytes(100)) for number in range(3)])
    with patch.object(pull_module, "RECEIVE_BYTES_MAX", 250):
        found = await pull(rig)
        assert (names(found), found.next_offset) == (["m-0", "m-1"], 2)
    with patch.object(pull_module, "RECEIVE_BYTES_MAX", 50):
        assert names(await pull(rig)) == ["m-0"]


def test_nothing_is_shown_before_it_is_durable(tmp_path: Path) -> None:
    """After a power cut something else could lie there, and who had gone past it would never see that."""
    gates: list[GatedEngine] = []

    def gated(engine: Engine) -> Engine:
        gates.append(GatedEngine(engine))
        return gates[-1]

    async def scenario(rig: EmbeddedRig) -> None:
        await send(rig, "m-0")
        await rig.restart(End.KILL)
        gate = gates[-1]
        gate.hold()
        sending = asyncio.ensure_future(send(rig, "m-1"))
        await asyncio.to_thread(gate.await_sync)
        pulling = asyncio.ensure_future(pull(rig))  # of a queue that is looked at for the first time in this run
        done, _ = await asyncio.wait({pulling}, timeout=0.05)
        gate.let_go()
        assert not done
        await sending
        assert names(await pulling) == ["m-0", "m-1"]
        gate.hold()
        sending = asyncio.ensure_future(send(rig, "m-2"))
        await asyncio.to_thread(gate.await_sync)
        assert await pull(rig, 2) == Pulled((), 2)
        gate.let_go()
        await sending
        assert names(await pull(rig, 2)) == ["m-2"]

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False, wrap=gated, queues=1), scenario))


@every_durable_broker(queues=1)
async def test_dead_letters_carry_their_facts(rig: EmbeddedRig) -> None:
    """One that has an outcome is passed over, as a receive does."""
    await die(rig, a_message("m-0"), a_message("m-1"))
    found = await pull(rig, topic=DEAD)
    assert names(found) == ["m-0", "m-1"]
    facts = found.messages[0].dead_letter
    assert facts is not None
    assert (facts.origin_topic, facts.origin_message_id, facts.reason) == (TOPIC, "m-0", "forwarded")
    await finish(rig, replace(PURGE, filter=only("m-0")))
    await rig.broker.pulls.commit_offset("readers", DEAD, 0, 1)
    await rig.restart(End.KILL)  # the account of outcomes and the committed offset lie side by side
    again = await pull(rig, topic=DEAD)
    assert (names(again), again.next_offset) == (["m-1"], 2)
    assert await rig.broker.pulls.committed_offset("readers", DEAD, 0) == 1
