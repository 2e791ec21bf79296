"""Recall, as every ``PopBroker`` promises it: what waited is gone for good, and every other answer is true."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.models.store.outbox import read_outbox
from support.rigs.broker.rig import (
    TOPIC,
    EmbeddedRig,
    End,
    Rig,
    ack,
    an_envelope,
    every_broker,
    ids,
    play,
    receive,
    send,
)

from broker_adapter.contracts.errors import BrokerUnavailable, Refused, Rule
from broker_adapter.contracts.message import pack_id
from dmq.broker.delayed.recall import decode_recall
from dmq.broker.handles.entry_handle import EntryHandle, EntryHandles, HandleKind
from dmq.config.units import format_time
from dmq.store.files.identity import draw
from dmq.store.schema.accounting.counts import BUCKET_MS
from dmq.store.schema.accounting.outbox import NOT_APPLICABLE
from dmq.store.schema.cell.identity import StorePlace
from dmq.store.schema.messages.index import EntryState
from dmq.store.store import StoreOptions
from dmq.trail.events import NO_QUEUE, EventKind, gap_event

pytestmark = pytest.mark.contract

SOON_MS, LATER_MS = 5_000, 60_000


async def handle_of(rig: Rig, message_id: str = "m-1", *, after_ms: int = SOON_MS, message_group: str = "") -> str:
    """Send a delayed message and return its handle."""
    at_ms = rig.clock.now_ms() + after_ms
    (receipt,) = await rig.broker.send([an_envelope(message_id, deliver_at_ms=at_ms, message_group=message_group)])
    assert receipt.recall_handle
    return receipt.recall_handle


async def refused(rig: Rig, handle: str, topic: str = TOPIC) -> Refused:
    """Recall, and return why not."""
    with pytest.raises(Refused) as caught:
        await rig.broker.recall(topic, handle)
    return caught.value


@every_broker()
async def test_a_recalled_message_never_comes(rig: Rig) -> None:
    """The others do, at their time."""
    handle = await handle_of(rig)
    await handle_of(rig, "m-2")
    receipt = await rig.broker.recall(TOPIC, handle)
    assert receipt == ("m-1", rig.clock.now_ms(), False)
    await rig.pass_ms(LATER_MS)
    assert ids(await receive(rig)) == ["m-2"]


@every_broker()
async def test_recalling_again_gets_the_first_answer(rig: Rig) -> None:
    """A client whose answer was lost is told what is true: it is recalled, and since when; also after its time."""
    handle = await handle_of(rig)
    first = await rig.broker.recall(TOPIC, handle)
    for _ in range(2):
        await rig.pass_ms(SOON_MS)
        assert await rig.broker.recall(TOPIC, handle) == first._replace(repeated=True)
    assert not await receive(rig)


@every_broker()
async def test_a_delivered_message_cannot_be_recalled(rig: Rig) -> None:
    """The answer says when it was delivered; it stays delivered."""
    handle = await handle_of(rig)
    await rig.pass_ms(SOON_MS)
    at = format_time(rig.clock.now_ms())
    rig.clock.advance(1)
    error = await refused(rig, handle)
    assert (error.rule, error.why) == (Rule.NOT_FOUND, f"the message was delivered at {at}")
    found = await receive(rig)
    assert ids(found) == ["m-1"]
    await ack(rig, *found)
    assert (await refused(rig, handle)).why == error.why


@every_broker()
async def test_only_pending_messages_have_a_handle(rig: Rig) -> None:
    """Not what is in its queue at once; and a repeated send gets the handle of the first."""
    receipts = await rig.broker.send([an_envelope("now"), an_envelope("past", deliver_at_ms=1)])
    assert [each.recall_handle for each in receipts] == ["", ""]
    handle = await handle_of(rig)
    assert await handle_of(rig, after_ms=LATER_MS) == handle


@every_broker()
async def test_a_recalled_id_is_not_taken_again(rig: Rig) -> None:
    """A send that was on its way while its message was recalled must not bring it back; it is told, not lost."""
    recalled = await rig.broker.recall(TOPIC, await handle_of(rig))
    for after_ms in (SOON_MS, 0):
        (receipt,) = await send(rig, "m-1", deliver_at_ms=after_ms and rig.clock.now_ms() + after_ms)
        assert receipt == ("m-1", -1, -1, True, "", recalled.recalled_at_ms)
    await rig.pass_ms(LATER_MS)
    assert not await receive(rig)


@every_broker()
async def test_a_handle_is_good_for_its_own_topic_only(rig: Rig) -> None:
    """Another topic's, nonsense and an empty one are bad requests; a topic nobody knows is said to be unknown."""
    handle = await handle_of(rig)
    await rig.broker.route("others")
    for wrong, topic in ((handle, "others"), ("nonsense", TOPIC), ("", TOPIC), ("ä", TOPIC)):
        assert (await refused(rig, wrong, topic)).rule is Rule.REQUEST
    assert (await refused(rig, handle, "never-named")).rule is Rule.TOPIC_UNKNOWN
    await rig.pass_ms(SOON_MS)
    assert ids(await receive(rig)) == ["m-1"]


@every_broker()
async def test_a_grouped_message_can_be_recalled(rig: Rig) -> None:
    """Those behind it in its message group come in their order, and do not wait for it."""
    handles = [await handle_of(rig, f"m-{number}", after_ms=number, message_group="g") for number in range(1, 5)]
    await rig.broker.recall(TOPIC, handles[0])
    await rig.broker.recall(TOPIC, handles[2])
    await rig.pass_ms(SOON_MS)
    assert ids(await receive(rig)) == ["m-2", "m-4"]


# -- the embedded broker ----------------------------------------------------------------------------------------------


def on_both(scenario: object) -> object:
    """Run a scenario of the embedded broker on both engines."""

    def test(on_disk: bool, tmp_path: Path) -> None:
        options = StoreOptions(gap_event=gap_event, idempotency_window_ms=LATER_MS)
        assert callable(scenario)
        asyncio.run(play(EmbeddedRig(tmp_path, on_disk=on_disk, queues=1, options=options), scenario))

    test.__name__, test.__doc__ = getattr(scenario, "__name__", ""), scenario.__doc__
    return pytest.mark.parametrize("on_disk", [True, False], ids=["rocksdb", "memory"])(test)


@on_both
async def test_a_recall_outlives_a_kill(rig: EmbeddedRig) -> None:
    """It is durable when it is answered, and so is the answer to the next one."""
    handle = await handle_of(rig)
    first = await rig.broker.recall(TOPIC, handle)
    await rig.restart(End.KILL, down_ms=SOON_MS)
    await rig.settle()
    assert not await receive(rig)
    assert await rig.broker.recall(TOPIC, handle) == first._replace(repeated=True)
    (receipt,) = await send(rig, "m-1", deliver_at_ms=rig.clock.now_ms() + SOON_MS)
    assert receipt.recalled_at_ms == first.recalled_at_ms


@on_both
async def test_the_trail_has_the_recall_once(rig: EmbeddedRig) -> None:
    """Of the entry that was scheduled, with its delivery time, however often it is recalled; the counts are right."""
    handle = await handle_of(rig)
    due_ms = rig.clock.now_ms() + SOON_MS
    for _ in range(3):
        await rig.broker.recall(TOPIC, handle)
    scope = rig.broker.names.topics[TOPIC].topic_id
    assert rig.store.pending().get(scope, 0) == 0
    assert not rig.store.due_counts(scope, due_ms - BUCKET_MS, due_ms + BUCKET_MS)
    assert rig.store.find(scope, pack_id("m-1")) is None, "for those who ask where it is, it is nowhere"
    found = rig.store.find(scope, pack_id("m-1"), with_withdrawn=True)
    assert found is not None
    assert found.state is EntryState.WITHDRAWN
    trail = [each for each in read_outbox(rig.store) if each.event.message_id]
    scheduled, recalled = trail
    assert [each.event.kind for each in trail] == [EventKind.SCHEDULED, EventKind.RECALLED]
    assert recalled.record.entry_sequence == scheduled.record.entry_sequence == decode_recall(handle).sequence
    assert recalled.record.queue_offset == NOT_APPLICABLE
    assert (recalled.event.topic_id, recalled.event.group_id, recalled.event.queue_id) == (scope, 0, NO_QUEUE)
    assert recalled.event.time_ms == due_ms
    assert rig.broker.delayed.cancelled_total == 1


@on_both
async def test_a_forgotten_message_is_unknown(rig: EmbeddedRig) -> None:
    """Two windows later nobody knows whether it was recalled or delivered, and the answer does not pretend to."""
    handles = [await handle_of(rig, name, after_ms=1) for name in ("recalled", "delivered")]
    await rig.broker.recall(TOPIC, handles[0])
    await rig.pass_ms(1)
    for _ in range(3):
        rig.clock.advance(LATER_MS)
        await send(rig, f"another-{rig.clock.now_ms()}")
    for handle in handles:
        error = await refused(rig, handle)
        assert error.rule is Rule.NOT_FOUND
        assert "unknown" in error.why
        assert "delivered at" not in error.why


@on_both
async def test_an_old_handle_does_not_recall_a_later_message(rig: EmbeddedRig) -> None:
    """The id may be used again when it is forgotten; the handle is the first message's."""
    handle = await handle_of(rig)
    await rig.broker.recall(TOPIC, handle)
    for _ in range(3):
        rig.clock.advance(LATER_MS)
        await send(rig, f"another-{rig.clock.now_ms()}")
    again = await handle_of(rig)
    assert "unknown" in (await refused(rig, handle)).why
    await rig.pass_ms(SOON_MS)
    assert "m-1" in ids(await receive(rig))
    assert "delivered at" in (await refused(rig, again)).why


@on_both
async def test_many_recalls_of_one_message_take_it_once(rig: EmbeddedRig) -> None:
    """All at once: one takes it, all are told the same."""
    handle = await handle_of(rig)
    receipts = await asyncio.gather(*(rig.broker.recall(TOPIC, handle) for _ in range(50)))
    assert {each[:2] for each in receipts} == {("m-1", rig.clock.now_ms())}
    assert sorted(each.repeated for each in receipts) == [False] + [True] * 49


def test_a_recall_in_doubt_is_answered_when_it_is_repeated(tmp_path: Path) -> None:
    """The sync failed: in doubt. After a kill the recall is there, after power loss the message; either is told."""

    async def scenario(rig: EmbeddedRig) -> None:
        for end in (End.KILL, End.POWER_LOSS):
            handle = await handle_of(rig, f"m-{end.value}")
            rig.memory.fail_next_sync = True
            with pytest.raises(BrokerUnavailable):
                await rig.broker.recall(TOPIC, handle)
            await rig.restart(end)
            receipt = await rig.broker.recall(TOPIC, handle)
            assert receipt.repeated == (end is End.KILL)
        await rig.pass_ms(SOON_MS)
        assert not await receive(rig)

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False), scenario))


def test_a_delivery_in_doubt_is_not_reported_as_done(tmp_path: Path) -> None:
    """A hand-over that is written and not synced may be undone by power loss: "delivered at" waits for the sync."""

    async def scenario(rig: EmbeddedRig) -> None:
        handle = await handle_of(rig)
        rig.clock.advance(SOON_MS)
        rig.memory.fail_next_sync = True
        turn = asyncio.get_running_loop().run_in_executor(None, rig.scheduler.turn)
        await asyncio.wait({turn})
        assert turn.exception() is not None
        with pytest.raises(BrokerUnavailable):
            await rig.broker.recall(TOPIC, handle)
        await rig.restart(End.POWER_LOSS)
        assert not (await rig.broker.recall(TOPIC, handle)).repeated

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False), scenario))


@pytest.mark.parametrize("message_id", [b"\x01" * 17, "\0Ü-1".encode(), b"\0" + b"7" * 254])
def test_handles_come_back(message_id: bytes) -> None:
    """Any sequence, any topic, any packed id; every change of a character makes it a bad one."""
    handle = EntryHandle(2**63, "%DLQ%a|b", message_id)
    handles = EntryHandles(draw(StorePlace()))
    text = handles.encode(HandleKind.RECALL, handle)
    assert decode_recall(text) == decode_recall(text + "=" * (-len(text) % 4), handles) == handle
    for at in range(len(text) - 1):  # the last one may hold bits of no meaning
        other = "A" if text[at] != "A" else "B"
        with pytest.raises(Refused, match="not one of this store"):
            decode_recall(text[:at] + other + text[at + 1 :], handles)
    for cut in range(1, len(text)):
        with pytest.raises(Refused):
            decode_recall(text[:cut], handles)
