"""Topics that are paused or slowed: what falls due for them is held, nothing is lost, and nobody else is later."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.clients.embedded.admin_answers import ask, message_of
from support.models.store.outbox import read_outbox
from support.rigs.broker.rig import (
    GROUP,
    TOPIC,
    EmbeddedRig,
    End,
    ack,
    an_envelope,
    every_durable_broker,
    ids,
    play,
    receive,
    receive_one,
    send,
    until,
)

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.message import unpack_id
from dmq.admin import admin_v1 as wire
from dmq.broker.limits.flow import RAMP_FIRST_PER_S
from dmq.broker.topics.settings import DELIVER_RATE_MAX, FlowChange
from dmq.scheduler.held import HeldTopics, ReadSoFar
from dmq.scheduler.scheduler import ROWS_PER_CURSOR_MAX
from dmq.store.engines.engine import Rows
from dmq.store.schema.keys import HELD_TOPIC_ID_MAX, Family, is_held_key, pack_queue_key, timeline_mark
from dmq.store.schema.messages.record import decode_queued
from dmq.store.writer.assemble import _WITHDRAWN_KEPT
from dmq.store.writer.marks import Marks
from dmq.store.writer.operations import Hold, Withdraw
from dmq.trail.events import EventKind

pytestmark = pytest.mark.contract

SOON_MS, LATER_MS, HOUR_MS = 5_000, 60_000, 3_600_000
OTHER = "other"


async def pause(rig: EmbeddedRig, topic: str = TOPIC) -> None:
    """Pause a topic, made if need be."""
    await rig.broker.catalog.topic(topic)
    await rig.broker.operator.set_topic(topic, flow=FlowChange(is_paused=True))


async def resume(rig: EmbeddedRig, topic: str = TOPIC) -> None:
    """Let it go on."""
    await rig.broker.operator.set_topic(topic, flow=FlowChange(is_paused=False))


async def slow(rig: EmbeddedRig, rate: int, topic: str = TOPIC) -> None:
    """Give a topic a rate."""
    await rig.broker.catalog.topic(topic)
    await rig.broker.operator.set_topic(topic, flow=FlowChange(deliver_rate=rate))


async def delayed(
    rig: EmbeddedRig, *names: str, after_ms: int = SOON_MS, topic: str = TOPIC, message_group: str = ""
) -> list[str]:
    """Send delayed messages, and return their handles."""
    at_ms = rig.clock.now_ms() + after_ms
    sent = await rig.broker.send(
        [an_envelope(each, topic=topic, deliver_at_ms=at_ms, message_group=message_group) for each in names]
    )
    return [each.recall_handle for each in sent]


async def drained(rig: EmbeddedRig) -> None:
    """Let time pass until nothing is held."""
    for _ in range(2_000):
        if not rig.store.held():
            return
        await rig.pass_ms(50)
    raise AssertionError(f"still held: {rig.store.held()}")


def queued(rig: EmbeddedRig, topic: str = TOPIC) -> list[str]:
    """The ids in the queues of a topic, in the order in which they came."""
    known = rig.broker.names.topics[topic]
    start, stop = pack_queue_key(known.topic_id, 0, 0), pack_queue_key(known.topic_id, known.queues, 0)
    rows = [decode_queued(value) for _, value in rig.store.scan(Family.QUEUE, start, stop, limit=100_000).rows]
    return [unpack_id(each.message_id) for each in sorted(rows, key=lambda row: row.stored_at_ms)]


def held(rig: EmbeddedRig, topic: str = TOPIC) -> int:
    """How many a topic holds, by the figure; it is the number of its rows."""
    topic_id = rig.broker.names.topics[topic].topic_id
    rows = rig.store.scan(Family.TIMELINE, b"", b"\xff" * 16, limit=100_000).rows
    assert sum(rig.store.held().values()) == sum(is_held_key(key) for key, _ in rows)
    return rig.store.held().get(topic_id, 0)


@every_durable_broker(queues=1)
async def test_messages_that_fall_due_in_a_pause_come_when_it_ends(rig: EmbeddedRig) -> None:
    """It waits as before, is counted as such, and comes once; over a kill as well."""
    await delayed(rig, "m-1", "m-2")
    await pause(rig)
    await rig.pass_ms(SOON_MS)
    assert (queued(rig), held(rig), sum(rig.store.pending().values())) == ([], 2, 2)
    await rig.restart(End.KILL, down_ms=HOUR_MS)
    await rig.settle()
    assert (queued(rig), held(rig)) == ([], 2)
    await resume(rig)
    await drained(rig)
    assert queued(rig) == ["m-1", "m-2"]
    assert (rig.store.pending(), rig.store.next_due_ms()) == ({}, None)
    found = await receive(rig)
    assert await ack(rig, *found) == [None, None]


@every_durable_broker(queues=1)
async def test_held_messages_continue_at_the_next_start_if_their_topic_is_not_paused(rig: EmbeddedRig) -> None:
    """A kill right behind the resume leaves rows that no setting speaks of."""
    await pause(rig)
    await delayed(rig, *(f"m-{number}" for number in range(8)))
    await rig.pass_ms(SOON_MS)
    await resume(rig)
    await rig.restart(End.KILL)
    await drained(rig)
    assert sorted(queued(rig)) == [f"m-{number}" for number in range(8)]


@every_durable_broker(queues=1)
async def test_a_paused_topic_stays_paused_until_it_is_resumed(rig: EmbeddedRig) -> None:
    """Twice paused is paused since the first time; another setting changes nothing of it, nor does a restart."""
    await pause(rig)
    since_ms = rig.broker.names.topics[TOPIC].paused_since_ms
    rig.clock.advance(HOUR_MS)
    await pause(rig)
    await slow(rig, 7)
    await rig.restart(End.CLOSE)
    found = rig.broker.names.topics[TOPIC]
    assert (found.paused_since_ms, found.deliver_rate) == (since_ms, 7)
    await rig.broker.operator.set_topic(TOPIC, flow=FlowChange(is_paused=False, deliver_rate=0))
    assert not rig.broker.names.slowed
    assert not rig.store.get_many(Family.META, [b"p" + found.topic_id.to_bytes(4, "big")])[0]


@every_durable_broker(queues=1)
async def test_another_topic_is_not_held_up(rig: EmbeddedRig) -> None:
    """Its message goes out in the very turn in which those of the paused one are held."""
    await pause(rig)
    await delayed(rig, *(f"m-{number}" for number in range(100)))
    await delayed(rig, "o-1", topic=OTHER)
    rig.clock.advance(SOON_MS)
    rig.scheduler.turn()
    assert (queued(rig), queued(rig, OTHER), held(rig)) == ([], ["o-1"], 100)


@every_durable_broker(queues=1)
async def test_an_undelayed_message_passes(rig: EmbeddedRig) -> None:
    """A pause holds what waits on the timeline; a send that is due is none of that."""
    await pause(rig)
    await delayed(rig, "m-1")
    await send(rig, "m-2")
    await rig.pass_ms(SOON_MS)
    assert ids(await receive(rig)) == ["m-2"]


@every_durable_broker(queues=1)
async def test_a_retry_of_a_paused_topic_comes_at_its_time(rig: EmbeddedRig) -> None:
    """A retry is the group's."""
    await rig.set_group(GROUP, max_attempts=3, delays_ms=(SOON_MS,))
    await send(rig, "m-1")
    delivery = (await receive(rig, renew_for="client"))[0]
    await pause(rig)
    await rig.broker.change_invisible(GROUP, TOPIC, delivery.receipt_handle, SOON_MS)
    await rig.pass_ms(SOON_MS)
    assert (await receive_one(rig)).delivery_attempt == 2


@every_durable_broker(queues=1)
async def test_a_held_message_can_be_recalled(rig: EmbeddedRig) -> None:
    """By the handle of its send, before and after a restart; it never comes, and the others do."""
    handles = await delayed(rig, "m-1", "m-2", "m-3")
    await pause(rig)
    await rig.pass_ms(SOON_MS)
    assert (await rig.broker.recall(TOPIC, handles[0])).message_id == "m-1"
    await rig.restart(End.KILL)
    await rig.settle()
    rig.broker.recalls._handles = rig.broker.handles
    assert (await rig.broker.recall(TOPIC, handles[1])).message_id == "m-2"
    assert held(rig) == 1
    await resume(rig)
    await drained(rig)
    assert queued(rig) == ["m-3"]
    with pytest.raises(Refused) as caught:
        await rig.broker.recall(TOPIC, handles[2])
    assert "was delivered" in caught.value.why


@every_durable_broker(queues=1)
async def test_a_repeated_send_of_a_held_message_is_stored_once(rig: EmbeddedRig) -> None:
    """Its id is known as long as it waits."""
    await pause(rig)
    await delayed(rig, "m-1")
    await rig.pass_ms(SOON_MS)
    (again,) = await rig.broker.send([an_envelope("m-1", deliver_at_ms=rig.clock.now_ms() + SOON_MS)])
    assert again.repeated
    await resume(rig)
    await drained(rig)
    await rig.pass_ms(SOON_MS)
    assert queued(rig) == ["m-1"]


@every_durable_broker(queues=1)
async def test_a_topic_with_held_messages_can_be_removed(rig: EmbeddedRig) -> None:
    """Not unless it is forced, since something waits for it; then all of that goes, and nothing is left of it."""
    await pause(rig)
    await delayed(rig, *(f"m-{number}" for number in range(100)))
    await rig.pass_ms(SOON_MS)
    with pytest.raises(Refused) as caught:
        await rig.broker.operator.remove_topic(TOPIC, is_forced=False)
    assert "100 wait for their time" in caught.value.why
    await rig.broker.operator.remove_topic(TOPIC, is_forced=True)
    await rig.settle()
    assert (rig.store.held(), rig.store.pending(), rig.broker.names.slowed) == ({}, {}, {})
    events = [found.event.kind for found in read_outbox(rig.store)]
    assert events.count(EventKind.RECALLED) == 100


@every_durable_broker(queues=1)
async def test_a_resume_begins_slowly(rig: EmbeddedRig) -> None:
    """In the first second go about as many as the ramp says, the oldest first; what falls due then comes behind."""
    await pause(rig)
    names = [f"m-{number:04}" for number in range(1_000)]
    for number, name in enumerate(names):
        await delayed(rig, name, after_ms=SOON_MS + number)
    await rig.pass_ms(2 * SOON_MS)
    await resume(rig)
    await delayed(rig, "n-1", after_ms=150)
    counts = []
    for _ in range(4):
        for _ in range(10):
            await rig.pass_ms(100)
        counts.append(len(queued(rig)))
    assert abs(counts[0] - RAMP_FIRST_PER_S) <= 10
    assert abs(counts[1] - 3 * RAMP_FIRST_PER_S) <= 20
    assert counts[3] == 1_001
    assert queued(rig) == [*names, "n-1"]


@every_durable_broker(queues=1)
async def test_a_herd_continues_at_the_rate_of_its_topic(rig: EmbeddedRig) -> None:
    """A thousand are due at once; 100 a second go on, the oldest first, and what falls due meanwhile behind them."""
    await slow(rig, 100)
    herd = [f"m-{number:04}" for number in range(1_000)]
    for first in range(0, 1_000, 100):
        await delayed(rig, *herd[first : first + 100])
    await delayed(rig, "late-1", after_ms=SOON_MS + 500)
    await delayed(rig, "o-1", after_ms=SOON_MS + 500, topic=OTHER)
    await rig.pass_ms(SOON_MS)
    before = 0
    for second in range(1, 10):
        for _ in range(20):
            await rig.pass_ms(50)
        count = len(queued(rig))
        assert count - before <= 100 * (1 if second > 1 else 1.25) + 2
        before = count
        assert queued(rig, OTHER) == ["o-1"]
    await drained(rig)
    found = queued(rig)
    assert sorted(found) == sorted([*herd, "late-1"])
    assert found[-1] == "late-1"
    await slow(rig, 0)
    await delayed(rig, "m-last")
    await rig.pass_ms(SOON_MS)
    assert queued(rig)[-1] == "m-last"


@every_durable_broker(queues=1)
async def test_a_flood_of_a_slowed_topic_continues_in_order(rig: EmbeddedRig) -> None:
    """More than a turn takes is due at once: what falls due behind it does not pass what is still to be read."""
    await slow(rig, 100_000)
    count = 2 * ROWS_PER_CURSOR_MAX
    for first in range(0, count, 512):
        await delayed(rig, *(f"m-{number:05}" for number in range(first, first + 512)))
    await delayed(rig, "n-1", "n-2", after_ms=SOON_MS + 1)
    rig.clock.advance(SOON_MS + 1)
    for _ in range(200):
        rig.scheduler.turn()
        rig.clock.advance(1)
    assert queued(rig) == [*(f"m-{number:05}" for number in range(count)), "n-1", "n-2"]


@every_durable_broker(queues=1)
async def test_a_held_message_waits_for_older_unread_ones(rig: EmbeddedRig) -> None:
    """A row goes on only if the timeline was read beyond where it was due, as far as its topic may lie there."""
    await pause(rig)
    await delayed(rig, "m-1")
    await delayed(rig, "m-2", after_ms=SOON_MS + 1)
    due_ms = rig.clock.now_ms() + SOON_MS
    await rig.pass_ms(LATER_MS)
    await resume(rig)
    topics = HeldTopics(rig.store, rig.broker.names.slowed)
    before, behind = timeline_mark(due_ms, 0), timeline_mark(due_ms + 1, 0)
    now_ms = rig.clock.now_ms()
    own = next(iter(rig.store.held())).to_bytes(4, "big")
    for read in (ReadSoFar(before, before, ()), ReadSoFar(before, behind, None), ReadSoFar(before, behind, {own})):
        assert topics.take(read, now_ms, 10) == []
    found = topics.take(ReadSoFar(before, behind, {b"else"}), now_ms, 10)
    assert [op.deliver_at_ms for op in rig.broker.placement.hand_over(found, 0)] == [due_ms]


@every_durable_broker()
async def test_message_groups_keep_their_order(rig: EmbeddedRig) -> None:
    """Through a pause, a rate and a backlog after a restart: each group in the order of its times."""
    await pause(rig)
    for number in range(60):
        await delayed(rig, f"A-{number:02}", after_ms=SOON_MS + number, message_group="A")
        await delayed(rig, f"B-{number:02}", after_ms=SOON_MS + number, message_group="B")
    await rig.pass_ms(SOON_MS + 20)
    await rig.restart(End.KILL, down_ms=LATER_MS)
    await rig.broker.operator.set_topic(TOPIC, flow=FlowChange(is_paused=False, deliver_rate=50))
    await drained(rig)
    for letter in "AB":
        assert [each for each in queued(rig) if each[0] == letter] == [f"{letter}-{number:02}" for number in range(60)]


@every_durable_broker(queues=1)
async def test_no_step_of_the_clock_delivers_early(rig: EmbeddedRig) -> None:
    """Held while the clock was an hour ahead: back, it comes at its time and no earlier, paused or not."""
    await delayed(rig, "m-1", after_ms=HOUR_MS // 2)
    await pause(rig)
    rig.clock.step_to(rig.clock.now_ms() + HOUR_MS)
    await rig.settle()
    assert held(rig) == 1
    rig.clock.step_to(rig.clock.now_ms() - HOUR_MS)
    await resume(rig)
    for _ in range(10):
        await rig.pass_ms(1_000)
    assert not queued(rig)
    await rig.pass_ms(HOUR_MS // 2 - 10_000 - 1)
    assert not queued(rig)
    await rig.pass_ms(1)
    await drained(rig)
    assert queued(rig) == ["m-1"]


@every_durable_broker(queues=1)
async def test_a_held_delay_that_a_step_stretched_is_moved_back(rig: EmbeddedRig) -> None:
    """Its delay began while the clock was ahead, and was over then; the clock is back: it counts from there."""
    await pause(rig)
    rig.clock.step_to(rig.clock.now_ms() + HOUR_MS)
    at_ms = rig.clock.now_ms() + SOON_MS
    await rig.broker.send([an_envelope("m-1", deliver_at_ms=at_ms)._replace(is_relative=True)])
    await rig.pass_ms(SOON_MS)
    assert held(rig) == 1
    rig.clock.step_to(rig.clock.now_ms() - HOUR_MS)
    await rig.settle()
    assert held(rig) == 0
    await rig.pass_ms(SOON_MS)
    assert held(rig) == 1
    await resume(rig)
    await drained(rig)
    assert queued(rig) == ["m-1"]


@every_durable_broker(queues=1)
async def test_a_listing_shows_held_messages(rig: EmbeddedRig) -> None:
    """Page by page, forwards and backwards, with what is to come; by its time and by its id as well."""
    await pause(rig)
    for number in range(5):
        await delayed(rig, f"m-{number}", after_ms=SOON_MS + number)
        await delayed(rig, f"n-{number}", after_ms=HOUR_MS + number)
    await delayed(rig, "o-1", topic=OTHER)
    await pause(rig, OTHER)
    due_ms = rig.clock.now_ms() + SOON_MS
    await rig.pass_ms(2 * SOON_MS)

    async def listed(**wanted: Any) -> list[str]:  # noqa: ANN401 - fields of the request
        found: list[str] = []
        request = wire.ListMessagesRequest(topic=TOPIC, limit=2, **wanted)
        for _ in range(100):
            page = await ask(rig, request)
            found += [each.message_id for each in page.messages]
            request.token = page.next_token
            if not request.token:
                return found
        raise AssertionError("it has no end")

    everything = [*(f"m-{number}" for number in range(5)), *(f"n-{number}" for number in range(5))]
    assert await listed() == everything
    assert await listed(newest_first=True) == everything[::-1]
    assert await listed(due_before_ms=due_ms + 2) == everything[:2]
    assert await listed(due_after_ms=due_ms + 3, due_before_ms=due_ms + LATER_MS) == everything[3:5]
    assert await listed(newest_first=True, due_after_ms=due_ms + 3) == everything[:2:-1]
    assert (await message_of(rig, "m-1")).is_held
    assert not (await message_of(rig, "n-1")).is_held


@every_durable_broker(queues=1)
async def test_the_trail_shows_when_a_topic_was_paused(rig: EmbeddedRig) -> None:
    """And nothing of each message but that it came."""
    await delayed(rig, "m-1")
    await pause(rig)
    await rig.pass_ms(SOON_MS)
    await rig.broker.operator.set_topic(TOPIC, flow=FlowChange(is_paused=False, deliver_rate=9))
    await drained(rig)
    found = [(each.event.kind, unpack_id(each.event.message_id)) for each in read_outbox(rig.store)][-4:]
    assert found == [
        (EventKind.SCHEDULED, "m-1"),
        (EventKind.TOPIC_CHANGED, "paused"),
        (EventKind.TOPIC_CHANGED, "resumed deliver_rate=9"),
        (EventKind.DELIVERED, "m-1"),
    ]


@pytest.mark.parametrize("rate", [-1, DELIVER_RATE_MAX + 1])
def test_a_rate_out_of_range_is_refused(tmp_path: Path, rate: int) -> None:
    """The refusal says what is allowed, and nothing is changed."""

    async def scenario(rig: EmbeddedRig) -> None:
        with pytest.raises(Refused) as caught:
            await slow(rig, rate)
        assert (caught.value.rule, caught.value.value) == (Rule.REQUEST, rate)
        assert not rig.broker.names.slowed

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False), scenario))


@every_durable_broker()
async def test_a_topic_of_no_messages_is_not_paused(rig: EmbeddedRig) -> None:
    """Dead letters have no delay; a topic whose id has no place among the held ones cannot hold."""
    await rig.broker.catalog.group(GROUP)
    letters = (await rig.broker.catalog.topic(f"%DLQ%{GROUP}")).name
    with pytest.raises(Refused) as caught:
        await pause(rig, letters)
    assert "pause its group" in caught.value.why
    rig.broker.names._next_id = HELD_TOPIC_ID_MAX + 1
    with pytest.raises(Refused) as caught:
        await pause(rig, "far")
    assert "an id above" in caught.value.why
    assert not rig.broker.names.slowed


# -- the writer decides ------------------------------------------------------------------------------------------------


def hold_of(rig: EmbeddedRig) -> Hold:
    """The op that holds the one message that waits."""
    ((key, value),) = rig.store.scan(Family.TIMELINE, b"", b"\xff" * 16, limit=2).rows
    topic = rig.broker.names.topics[TOPIC]
    found = rig.broker.placement.hand_over([(key, value)], 0)[0]
    return Hold(key, topic.topic_id, found.message_id, value)


@every_durable_broker(queues=1)
async def test_a_message_withdrawn_after_it_was_read_is_not_held(rig: EmbeddedRig) -> None:
    """And what was held since it was read is not withdrawn there: who asks has to look again."""
    rig.is_whole = False  # nobody is told of what is withdrawn here
    await delayed(rig, "m-1")
    hold = hold_of(rig)
    due_ms = rig.clock.now_ms() + SOON_MS
    withdraw = Withdraw(hold.key, hold.scope, hold.message_id, due_ms, len(hold.record))
    told = await rig.store.commit_async([withdraw])
    told += await rig.store.commit_async([hold])
    assert told[0].state is not None
    assert told[1].state is None
    assert (held(rig), rig.store.pending()) == (0, {})
    await delayed(rig, "m-2")
    hold = hold_of(rig)
    withdraw = withdraw._replace(key=hold.key, message_id=hold.message_id)
    told = await rig.store.commit_async([hold, withdraw])
    told += await rig.store.commit_async([withdraw])
    assert [each.state is None for each in told] == [False, True, True]
    assert held(rig) == 1


@every_durable_broker(queues=1)
async def test_a_message_recalled_after_it_was_read_does_not_come(rig: EmbeddedRig) -> None:
    """It is recalled while the scheduler has it in its hand, and so much else that the writer forgets what it can."""
    rig.is_whole = False  # nobody is told of what is withdrawn here
    await pause(rig)
    await delayed(rig, *(f"m-{number}" for number in range(3)))
    await rig.pass_ms(SOON_MS)
    await resume(rig)
    store, read = rig.store, rig.store.scan
    recalled: list[bytes] = []

    def scan(family: Family, start: bytes, stop: bytes, *, limit: int, bytes_max: int = 2**62) -> Rows:
        found = read(family, start, stop, limit=limit, bytes_max=bytes_max)
        if family is Family.TIMELINE and is_held_key(start) and not recalled:
            for op in rig.broker.placement.hand_over(found.rows, 0):
                recalled.append(op.message_id)
                store.commit([Withdraw(op.key, op.scope, op.message_id, op.deliver_at_ms, op.size)])
            others = {b"\xff" * 12 + number.to_bytes(4, "big") for number in range(_WITHDRAWN_KEPT)}
            store._assembler._withdrawn |= others
            store.commit([])
            assert not store._assembler._withdrawn & others
        return found

    store.scan = scan  # type: ignore[method-assign]
    rig.scheduler.turn()
    assert recalled
    await drained(rig)
    assert len(queued(rig)) == 3 - len(recalled)


# -- groups ------------------------------------------------------------------------------------------------------------


async def pause_group(rig: EmbeddedRig, *, is_paused: bool = True) -> None:
    """Pause the group, or let it go on."""
    await rig.broker.set_group(GROUP, is_paused=is_paused)


@every_durable_broker(queues=1)
async def test_a_paused_group_gets_nothing(rig: EmbeddedRig) -> None:
    """Other groups do; what it has in hand it may finish; it stays paused over a restart."""
    await send(rig, "m-1")
    delivery = await receive_one(rig)
    await pause_group(rig)
    await send(rig, "m-2")
    assert not await receive(rig)
    assert ids(await receive(rig, group="others")) == ["m-1", "m-2"]
    assert await ack(rig, delivery) == [None]
    await rig.restart(End.KILL)
    assert not await receive(rig)
    await pause_group(rig, is_paused=False)
    rig.clock.advance(100)
    assert ids(await receive(rig)) == ["m-2"]


@every_durable_broker(queues=1)
async def test_a_receive_of_a_paused_group_waits_until_it_is_resumed(rig: EmbeddedRig) -> None:
    """Whether the message was there before, or came meanwhile."""
    await send(rig, "m-1")
    await rig.broker.catalog.group(GROUP)
    await pause_group(rig)
    waiting = [asyncio.ensure_future(receive(rig, wait_ms=20_000, batch_max=1)) for _ in range(2)]
    await until(lambda: rig.receives_waiting + len(rig.broker.flows._resumed) > 0)
    await send(rig, "m-2")
    await asyncio.sleep(0)
    assert not any(each.done() for each in waiting)
    await pause_group(rig, is_paused=False)
    found = []
    while waiting:
        done, rest = await asyncio.wait(waiting, timeout=5, return_when=asyncio.FIRST_COMPLETED)
        assert done
        found += [each for task in done for each in ids(task.result())]
        waiting = list(rest)
        rig.clock.advance(100)
    assert sorted(found) == ["m-1", "m-2"]


@every_durable_broker(queues=1)
async def test_a_resumed_group_begins_slowly(rig: EmbeddedRig) -> None:
    """In the first second it gets about as many as the ramp says, and after a while whatever it asks for."""
    await rig.broker.catalog.group(GROUP)
    await pause_group(rig)
    await send(rig, *(f"m-{number:03}" for number in range(500)))
    await pause_group(rig, is_paused=False)
    found: list[str] = []
    for _ in range(20):
        rig.clock.advance(50)
        found += ids(await receive(rig))
    assert abs(len(found) - RAMP_FIRST_PER_S) <= 5
    assert found == sorted(found)
    rig.clock.advance(HOUR_MS)
    assert len(await receive(rig)) == 32
    assert not rig.broker.flows._flows


@every_durable_broker(queues=1)
async def test_a_lease_that_ends_in_a_pause_counts_once(rig: EmbeddedRig) -> None:
    """It comes back with its next attempt, however long the pause is."""
    await send(rig, "m-1")
    delivery = await receive_one(rig, invisible_ms=SOON_MS)
    await pause_group(rig)
    for _ in range(3):
        await rig.pass_ms(HOUR_MS)
    await pause_group(rig, is_paused=False)
    rig.clock.advance(100)
    again = await receive_one(rig)
    assert (delivery.delivery_attempt, again.delivery_attempt) == (1, 2)


@every_durable_broker(queues=1)
async def test_only_a_group_that_is_there_is_paused(rig: EmbeddedRig) -> None:
    """A name that nobody knows is refused, and makes none; one that was removed leaves no pause behind."""
    with pytest.raises(Refused) as caught:
        await pause_group(rig)
    assert caught.value.rule is Rule.GROUP_UNKNOWN
    await rig.broker.catalog.group(GROUP)
    await pause_group(rig)
    await rig.broker.operator.remove_group(GROUP, is_forced=True)
    await send(rig, "m-1")
    assert ids(await receive(rig)) == ["m-1"]


@every_durable_broker(queues=1)
async def test_a_request_at_another_queue_waits_for_the_group_too(rig: EmbeddedRig) -> None:
    """As a receive of a cluster's topics does: it is told what is left of its time, or that the pause goes on."""
    flows = rig.broker.flows
    assert await flows.left_ms(GROUP, 500) == 500
    await rig.broker.catalog.group(GROUP)
    await pause_group(rig)
    assert await flows.left_ms(GROUP, 1) == -1
    waiting = asyncio.ensure_future(flows.left_ms(GROUP, 20_000))
    await until(lambda: GROUP in flows._resumed)
    await pause_group(rig, is_paused=False)
    assert await asyncio.wait_for(waiting, 5) == 20_000


def test_the_readers_possible_rows_are_a_range() -> None:
    """From the first to the last of what it reads in a turn, and nothing once the next turn begins."""
    marks = Marks(0)
    marks.begin_turn()
    marks.read_held(b"\x80b", b"\x80c")
    marks.read_held(b"\x80a", b"\x80b")
    assert marks.held_range() == (b"\x80a", b"\x80c")
    marks.begin_turn()
    assert marks.held_range() == (b"", b"")
