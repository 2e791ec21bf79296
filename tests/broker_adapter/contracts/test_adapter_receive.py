"""Receiving, as every ``PopBroker`` promises it: order and bounds, filters, groups, and waiting for what comes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from unittest.mock import patch

import pytest
from support.rigs.broker.rig import (
    GROUP,
    INVISIBLE_MS,
    TOPIC,
    EmbeddedRig,
    Rig,
    ack,
    an_envelope,
    every_broker,
    every_durable_broker,
    ids,
    receive,
    receive_one,
    send,
)

from broker_adapter.contracts.adapter import TopicRoute
from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.message import Delivery, Envelope
from dmq.broker.filters import filters
from dmq.broker.io import reader
from dmq.store.schema.messages.record import QueuedMessage

pytestmark = pytest.mark.contract
LONG_MS = 60_000  # of waiting: never reached, the manual clock stands still
SOON_MS = 5_000


def ids_of(sent: Sequence[Envelope], message_group: str = "") -> list[str]:
    """Return the ids of messages, of all or of those of a message group."""
    return [each.message_id for each in sent if not message_group or each.message_group == message_group]


@every_broker(queues=1)
async def test_a_queue_is_received_in_order_and_within_the_batch_bound(rig: Rig) -> None:
    """Offsets ascend within and across receives, no more than asked for."""
    sent = [f"m-{number}" for number in range(10)]
    await send(rig, *sent)
    batches = [await receive(rig, batch_max=4) for _ in range(3)]
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert [each for batch in batches for each in ids(batch)] == sent
    assert not await receive(rig)


@every_durable_broker(queues=1, fronted=True)
async def test_large_messages_come_a_few_at_a_time(rig: Rig) -> None:
    """No receive reads much more than it may hand out; what it leaves comes next, in order, also of a message group."""
    with patch.object(reader, "READ_BYTES_MAX", 3_000), patch.object(reader, "_RECENT_BYTES_MAX", 0):
        sent = [
            an_envelope(f"m-{number:02}", message_group="g" if number % 3 else "", payload=bytes(1_000))
            for number in range(32)
        ]
        await rig.broker.send(sent)
        found: list[Delivery] = []
        while batch := await receive(rig):
            assert len(batch) <= 8
            found += batch
            await ack(rig, *batch)
        assert sorted(ids(found)) == ids_of(sent)
        assert [each for each in ids(found) if each in ids_of(sent, "g")] == ids_of(sent, "g")
        assert {each.delivery_attempt for each in found} == {1}


@every_durable_broker(queues=1)
async def test_a_slow_filter_looks_at_a_few_messages_in_a_turn(rig: EmbeddedRig) -> None:
    """Danger: one receive by an expression that took long held up everybody for 8 s. The next gets the rest."""
    sent = [f"m-{number}" for number in range(9)]
    await rig.broker.send([an_envelope(each, message_group="g") for each in sent])

    def slow(message: QueuedMessage) -> bool:
        rig.clock.advance(1)
        return not message.message_id.endswith(b"4")

    found: list[Delivery] = []
    with patch.object(filters, "filter_of", lambda _: slow):
        while batch := await receive(rig):
            assert len(batch) <= 3
            found += batch
            await ack(rig, *batch)
    assert ids(found) == [each for each in sent if each != "m-4"]
    assert {each.delivery_attempt for each in found} == {1}


@every_broker()
async def test_a_message_group_is_received_in_order(rig: Rig) -> None:
    """A message group has one queue, so its order survives any number of queues."""
    sent = [an_envelope(f"{group}-{number}", message_group=group) for number in range(6) for group in ("a", "b", "c")]
    await rig.broker.send(sent)
    received = ids(await receive(rig))
    for group in ("a", "b", "c"):
        assert [each for each in received if each.startswith(group)] == [f"{group}-{number}" for number in range(6)]


@every_broker()
async def test_a_batch_is_filled_from_all_queues(rig: Rig) -> None:
    """One receive empties every queue of the topic."""
    await send(rig, *(f"m-{number}" for number in range(12)))
    assert len(await receive(rig, batch_max=12)) == 12


@every_durable_broker(fronted=True)
async def test_a_batch_is_bounded_in_bytes(rig: Rig) -> None:
    """Large messages come in several answers, each at least one, none lost, attempts not counted for what stayed."""
    sent = [f"m-{number}" for number in range(5)]
    await rig.broker.send([an_envelope(each, payload=bytes(3 * 1024 * 1024)) for each in sent])
    received: list[Delivery] = []
    while batch := await receive(rig):
        assert 0 < sum(len(each.payload) for each in batch) <= 8 * 1024 * 1024
        received += batch
    assert sorted(ids(received)) == sent
    assert {each.delivery_attempt for each in received} == {1}


@every_broker(queues=1)
async def test_a_filter_passes_its_tags_only(rig: Rig) -> None:
    """Other tags, and none, are passed over, however many lie in front."""
    await rig.broker.send([an_envelope(f"none-{number}") for number in range(100)])
    await rig.broker.send([an_envelope("m-red", tag="red"), an_envelope("m-blue", tag="blue"), an_envelope("m-x")])
    assert ids(await receive(rig, tags=["blue", "green"])) == ["m-blue"]
    assert not await receive(rig, tags=["blue", "green"])


@every_broker()
async def test_a_receive_may_name_its_queue(rig: Rig) -> None:
    """Only that queue is looked at; a queue that is not there is refused."""
    receipts = await send(rig, *(f"m-{number}" for number in range(8)))
    wanted = receipts[0].queue_id
    expected = [each.message_id for each in receipts if each.queue_id == wanted]
    assert ids(await receive(rig, queue_id=wanted)) == expected
    with pytest.raises(Refused) as refused:
        await receive(rig, queue_id=4)
    assert refused.value.rule is Rule.NOT_FOUND


@every_broker()
async def test_groups_are_independent(rig: Rig) -> None:
    """Each group gets every message, and its acks and attempts are its own."""
    await send(rig, "m-1", "m-2")
    await ack(rig, *await receive(rig, group="first"), group="first")
    second = await receive(rig, group="second")
    assert sorted(ids(second)) == ["m-1", "m-2"]
    await rig.pass_ms(INVISIBLE_MS)
    assert not await receive(rig, group="first")
    assert {each.delivery_attempt for each in await receive(rig, group="second")} == {2}


@every_broker()
async def test_a_new_group_starts_with_the_existing_messages(rig: Rig) -> None:
    """The default start is the earliest message."""
    await send(rig, "m-1", "m-2", "m-3")
    await rig.broker.ensure_group("late")
    await rig.broker.ensure_group("late")
    assert sorted(ids(await receive(rig, group="late"))) == ["m-1", "m-2", "m-3"]


@every_broker()
async def test_a_topic_is_made_on_first_use(rig: Rig) -> None:
    """A route and a receive know topics nobody sent to yet."""
    assert await rig.broker.route("fresh") == TopicRoute("fresh", 4)
    assert not await receive(rig, topic="another")
    assert (await rig.broker.route("another")).queues == 4


def waiting(rig: Rig, count: int, *, group: str = GROUP, batch_max: int = 32) -> list[asyncio.Task[Sequence[Delivery]]]:
    """Start receives that wait."""
    return [
        asyncio.ensure_future(receive(rig, wait_ms=LONG_MS, group=group, batch_max=batch_max)) for _ in range(count)
    ]


async def let_them_wait(rig: Rig, *receiving: asyncio.Task[Sequence[Delivery]]) -> None:
    """Return when those that have not ended have found nothing and wait, and nobody else does."""
    while rig.receives_waiting != sum(not task.done() for task in receiving):  # noqa: ASYNC110 - no event tells of it
        await asyncio.sleep(0.001)


async def call_off(tasks: Sequence[asyncio.Task[Sequence[Delivery]]]) -> None:
    """Cancel what still waits."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@every_broker()
async def test_a_receive_that_finds_nothing_ends_when_its_time_is_up(rig: Rig) -> None:
    """Empty, not an error."""
    receiving = asyncio.ensure_future(receive(rig, wait_ms=20))
    await let_them_wait(rig, receiving)
    rig.clock.advance(20)
    assert not await receiving


@every_broker()
async def test_a_waiting_receive_gets_a_sent_message(rig: Rig) -> None:
    """A send wakes it; no interval passes."""
    (receiving,) = waiting(rig, 1)
    await let_them_wait(rig, receiving)
    await send(rig, "m-1")
    assert ids(await receiving) == ["m-1"]


@every_broker()
async def test_a_waiting_receive_gets_a_message_that_becomes_due(rig: Rig) -> None:
    """So does a delivery time that comes."""
    await send(rig, "m-1", deliver_at_ms=rig.clock.now_ms() + SOON_MS)
    (receiving,) = waiting(rig, 1)
    await let_them_wait(rig, receiving)
    assert not receiving.done()
    await rig.pass_ms(SOON_MS)
    assert ids(await receiving) == ["m-1"]


@every_broker()
async def test_a_waiting_receive_gets_a_message_that_comes_back(rig: Rig) -> None:
    """So do the end of a lease, and a delivery that is given back."""
    await send(rig, "m-1")
    await receive_one(rig)
    (receiving,) = waiting(rig, 1)
    await let_them_wait(rig, receiving)
    await rig.pass_ms(INVISIBLE_MS)
    (expired,) = await receiving
    assert expired.delivery_attempt == 2
    (receiving,) = waiting(rig, 1)
    await let_them_wait(rig, receiving)
    await rig.broker.change_invisible(GROUP, TOPIC, expired.receipt_handle, 0)
    (given_back,) = await receiving
    assert given_back.delivery_attempt == 3


@every_broker()
async def test_one_message_goes_to_one_of_many_waiters(rig: Rig) -> None:
    """The others go on waiting and get what follows, each its own."""
    receiving = waiting(rig, 8)
    await let_them_wait(rig, *receiving)
    for number in range(8):
        still = [task for task in receiving if not task.done()]
        await send(rig, f"m-{number}")  # it may be received before its sender is told
        await asyncio.wait(still, return_when=asyncio.FIRST_COMPLETED)
        await let_them_wait(rig, *receiving)
        assert sum(task.done() for task in receiving) == number + 1
    assert sorted(ids([each for task in receiving for each in await task])) == [f"m-{number}" for number in range(8)]


@every_broker()
async def test_many_messages_at_once_reach_all_waiters(rig: Rig) -> None:
    """One send of many wakes as many as it can serve."""
    receiving = waiting(rig, 5, batch_max=1)
    await let_them_wait(rig, *receiving)
    await send(rig, *(f"m-{number}" for number in range(5)))
    assert sorted(ids([each for task in receiving for each in await task])) == [f"m-{number}" for number in range(5)]


@every_broker(queues=1)
async def test_many_messages_of_one_queue_reach_all_waiters(rig: Rig) -> None:
    """The same with a single queue, which is one arrival for many."""
    receiving = waiting(rig, 5, batch_max=1)
    await let_them_wait(rig, *receiving)
    await send(rig, *(f"m-{number}" for number in range(5)))
    assert sorted(ids([each for task in receiving for each in await task])) == [f"m-{number}" for number in range(5)]


@every_durable_broker(fronted=True)
async def test_a_waiter_for_another_queue_is_no_obstacle(rig: Rig) -> None:
    """However long it has waited: a message of one queue goes to somebody who can use it."""
    receipts = await send(rig, *(f"m-{number}" for number in range(4)))
    assert [each.queue_id for each in receipts] == [0, 1, 2, 3]
    assert len(await receive(rig)) == 4
    others = [asyncio.ensure_future(receive(rig, queue_id=queue, wait_ms=LONG_MS)) for queue in (1, 2)]
    await let_them_wait(rig, *others)
    (receiving,) = waiting(rig, 1)
    await let_them_wait(rig, receiving, *others)
    await send(rig, "m-4")
    assert ids(await receiving) == ["m-4"]
    await send(rig, "m-5")
    assert ids(await others[0]) == ["m-5"]
    await call_off(others)


@every_broker()
async def test_every_waiting_group_gets_a_message(rig: Rig) -> None:
    """Waking is per group."""
    receiving = [*waiting(rig, 1, group="first"), *waiting(rig, 1, group="second")]
    await let_them_wait(rig, *receiving)
    await send(rig, "m-1")
    assert [ids(await task) for task in receiving] == [["m-1"], ["m-1"]]


@every_broker()
async def test_a_cancelled_receive_hands_out_nothing(rig: Rig) -> None:
    """Cancelled at any moment around the arrival: the message is there for the next one, on its first attempt."""
    for steps in range(12):
        (receiving,) = waiting(rig, 1)
        await let_them_wait(rig, receiving)
        await send(rig, f"m-{steps}")
        for _ in range(steps):
            await asyncio.sleep(0)
        receiving.cancel()
        (outcome,) = await asyncio.gather(receiving, return_exceptions=True)
        if not isinstance(outcome, BaseException):
            assert ids(outcome) == [f"m-{steps}"]
            await ack(rig, *outcome)
        else:
            await rig.settle()  # what was on its way to a front is given back
            delivery = await receive_one(rig)
            assert (delivery.message_id, delivery.delivery_attempt) == (f"m-{steps}", 1)
            await ack(rig, delivery)


@every_broker()
async def test_a_cancelled_receive_passes_its_message_on(rig: Rig) -> None:
    """Somebody else who waits gets it, without another arrival."""
    for steps in range(12):
        receiving = waiting(rig, 2)
        await let_them_wait(rig, *receiving)
        await send(rig, f"m-{steps}")
        for _ in range(steps):
            await asyncio.sleep(0)
        receiving[0].cancel()
        await asyncio.wait(receiving, return_when=asyncio.FIRST_COMPLETED)
        if receiving[0].cancelled():
            await receiving[1]
        got = [task.result() for task in receiving if task.done() and not task.cancelled()]
        assert [ids(each) for each in got] == [[f"m-{steps}"]]
        await call_off(receiving)
        await ack(rig, *got[0])
