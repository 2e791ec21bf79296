"""What ``ClassicBroker`` promises, on everything that fits it."""

from __future__ import annotations

import asyncio

import pytest
from support.rigs.rocketmq.classic import (
    ALL,
    PATIENCE_S,
    QUEUES,
    SEND_MS,
    ClassicRig,
    Heard,
    a_message,
    beat,
    every_classic_broker,
    joined,
    pull_all,
    pull_some,
    queues_of,
    send,
)

from broker_adapter.contracts.adapter import QueueRange
from broker_adapter.contracts.classic import Decision, Filter, Outgoing, ReceivedMessage, SendStatus
from broker_adapter.contracts.errors import BrokerUnavailable, Refused, Rule
from broker_adapter.contracts.topics import dead_letter_topic, retry_topic

pytestmark = pytest.mark.contract

_LEVEL_1_MS = 1_000


@every_classic_broker()
async def test_a_route_names_the_queues_in_their_order(rig: ClassicRig) -> None:
    """All that can be written can be read; two clients are told the same."""
    topic = await rig.topic()
    route = await rig.client("a").route(topic)
    assert route.topic == topic
    assert list(route.readable) == sorted(route.readable)
    assert [each.queue_id for each in route.readable if each.broker == route.readable[0].broker] == [*range(QUEUES)]
    assert route.writable == route.readable
    assert await rig.client("b").route(topic) == route


@every_classic_broker()
async def test_a_message_comes_as_it_was_sent(rig: ClassicRig) -> None:
    """With all that its producer said of it, from the queue that the producer chose, where the receipt says."""
    client, group, topic = rig.client("a"), rig.group(), await rig.topic()
    await joined(client, group, topic)
    queue = (await queues_of(client, topic))[2]
    sent = a_message(
        topic, b"\0body\xff", tag="red", keys=("k-1", "k-2"), properties={"color": "blå"}, born_at_ms=1_700_000_000_123
    )
    receipt = await client.send("producers", queue, [Outgoing(message=sent)], timeout_ms=SEND_MS)
    assert (receipt.status, receipt.message_id, receipt.queue) == (SendStatus.STORED, sent.message_id, queue)
    (found,) = await pull_all(rig, client, group, queue, 1, at=receipt.queue_offset)
    came = found.message
    assert (came.topic, came.message_id, came.body, came.tag) == (topic, sent.message_id, sent.body, "red")
    assert (tuple(came.keys), dict(came.properties)) == (("k-1", "k-2"), {"color": "blå"})
    assert came.born_at_ms == sent.born_at_ms
    assert (found.queue, found.queue_offset, found.attempts_failed) == (queue, receipt.queue_offset, 0)
    assert found.stored_at_ms > 0
    assert not found.unreadable
    for other in await queues_of(client, topic):
        assert other == queue or not await pull_some(client, group, other)


@every_classic_broker()
async def test_the_messages_of_a_batch_are_adjacent(rig: ClassicRig) -> None:
    """Its messages follow each other in one queue, each with its id; a delayed one is refused there."""
    client, group, topic = rig.client("a"), rig.group(), await rig.topic()
    await joined(client, group, topic)
    queue = (await queues_of(client, topic))[1]
    messages = [a_message(topic, body) for body in (b"1", b"2", b"3")]
    receipt = await client.send("producers", queue, [Outgoing(message=each) for each in messages], timeout_ms=SEND_MS)
    assert receipt.message_id == ",".join(each.message_id for each in messages)
    found = await pull_all(rig, client, group, queue, 3, at=receipt.queue_offset)
    assert [(each.message.message_id, each.message.body) for each in found] == [
        (each.message_id, each.body) for each in messages
    ]
    first = receipt.queue_offset
    assert [each.queue_offset for each in found] == [first, first + 1, first + 2]


@every_classic_broker()
async def test_a_queue_keeps_its_order(rig: ClassicRig) -> None:
    """In pieces, each from where the one before said."""
    client, group, topic = rig.client("a"), rig.group(), await rig.topic()
    await joined(client, group, topic)
    queue = (await queues_of(client, topic))[0]
    bodies = [b"%d" % number for number in range(7)]
    receipts = await send(client, queue, *bodies)
    await pull_all(rig, client, group, queue, 7, at=receipts[0].queue_offset)
    at, found = receipts[0].queue_offset, list[ReceivedMessage]()
    while len(found) < 7:
        pulled = await client.pull(group, queue, ALL, at, batch_max=3, wait_ms=0)
        assert 0 < len(pulled.messages) <= 3
        found += pulled.messages
        at = pulled.next_offset
    assert [each.message.body for each in found] == bodies


@every_classic_broker()
async def test_a_pull_that_waits_is_woken_by_a_send(rig: ClassicRig) -> None:
    """Another client's; and one way, which says no offset."""
    client, other, group, topic = rig.client("a"), rig.client("b"), rig.group(), await rig.topic()
    await joined(client, group, topic)
    queue = (await queues_of(client, topic))[0]
    end = (await client.queue_range(queue)).end
    pulling = asyncio.ensure_future(client.pull(group, queue, ALL, end, batch_max=32, wait_ms=30_000))
    receipt = await other.send(
        "producers", queue, [Outgoing(message=a_message(topic, b"now"))], timeout_ms=SEND_MS, one_way=True
    )
    assert receipt.queue_offset == -1
    async with asyncio.timeout(PATIENCE_S):
        assert [each.message.body for each in (await pulling).messages] == [b"now"]


@every_classic_broker()
async def test_only_matches_of_a_filter_come(rig: ClassicRig) -> None:
    """By tags and by SQL; the next offset is behind what was passed over; a wrong expression is refused."""
    client, group, topic = rig.client("a"), rig.group(), await rig.topic()
    await joined(client, group, topic)
    queue = (await queues_of(client, topic))[0]
    for tag, size in (("red", "1"), ("blue", "2"), ("green", "3"), ("red", "4")):
        await send(client, queue, f"{tag}-{size}".encode(), tag=tag, properties={"size": size})
    await pull_all(rig, client, group, queue, 4)

    async def bodies(wanted: Filter) -> list[bytes]:
        pulled = await client.pull(group, queue, wanted, 0, batch_max=32, wait_ms=0)
        return [each.message.body for each in pulled.messages]

    assert await bodies(Filter("red || green")) == [b"red-1", b"green-3", b"red-4"]
    assert await bodies(Filter("size > 1 AND size < 4", is_sql=True)) == [b"blue-2", b"green-3"]
    with pytest.raises(Refused) as caught:
        await bodies(Filter("size >", is_sql=True))
    assert caught.value.rule is Rule.FILTER


@every_classic_broker()
async def test_an_unregistered_member_does_not_pull(rig: ClassicRig) -> None:
    """The first heartbeat comes before the first pull."""
    client, group, topic = rig.client("a"), rig.group(), await rig.topic()
    queue = (await queues_of(client, topic))[0]
    with pytest.raises(Refused) as caught:
        await client.pull(group, queue, ALL, 0, batch_max=1, wait_ms=0)
    assert caught.value.rule is Rule.REQUEST


@every_classic_broker()
async def test_a_group_resumes_at_its_committed_offset(rig: ClassicRig) -> None:
    """Whichever member asks; a group that never said is told so."""
    client, other, group, topic = rig.client("a"), rig.client("b"), rig.group(), await rig.topic()
    await joined(client, group, topic)
    queue, second = (await queues_of(client, topic))[:2]
    await send(client, queue, b"1", b"2", b"3")
    assert await client.committed_offset(group, queue) is None
    await client.commit_offset(group, queue, 2)
    assert await other.committed_offset(group, queue) == 2
    assert await client.committed_offset(group, second) is None
    assert await client.committed_offset(rig.group(), queue) is None


@every_classic_broker()
async def test_offsets_outside_are_moved(rig: ClassicRig) -> None:
    """To where the queue ends; a queue says where it begins and ends, and what was stored since a time."""
    client, group, topic = rig.client("a"), rig.group(), await rig.topic()
    await joined(client, group, topic)
    queue = (await queues_of(client, topic))[0]
    assert await client.queue_range(queue) == QueueRange(0, 0)
    await send(client, queue, b"1")
    await rig.later(50)
    await send(client, queue, b"2")
    first, second = await pull_all(rig, client, group, queue, 2)
    assert await client.queue_range(queue) == QueueRange(0, 2)
    moved = await client.pull(group, queue, ALL, 7, batch_max=32, wait_ms=0)
    assert (list(moved.messages), moved.next_offset, moved.moved) == ([], 2, True)
    assert first.stored_at_ms < second.stored_at_ms
    assert await client.offset_at(queue, second.stored_at_ms) == 1
    assert await client.offset_at(queue, first.stored_at_ms) == 0
    assert await client.offset_at(queue, second.stored_at_ms + 60_000) == 2


@every_classic_broker()
async def test_members_learn_of_each_other(rig: ClassicRig) -> None:
    """Who comes and who leaves; the ids are sorted, and those of another group are not among them."""
    group, topic = rig.group(), await rig.topic()
    b, a = rig.client("client-b"), rig.client("client-a")
    heard = await joined(b, group, topic)
    assert list(await b.members(group, topic)) == ["client-b"]
    heard.told.clear()
    await joined(a, group, topic)
    await joined(rig.client("client-c"), rig.group(), topic)
    await _told(heard)
    assert set(heard.changed) == {group}
    assert list(await b.members(group, topic)) == list(await a.members(group, topic)) == ["client-a", "client-b"]
    heard.told.clear()
    await a.leave(consumer=group)
    await _told(heard)
    assert list(await b.members(group, topic)) == ["client-b"]


@every_classic_broker()
async def test_a_client_that_closes_leaves(rig: ClassicRig) -> None:
    """The others are told, its queues are free, and calls of it that wait fail."""
    a, b, group, topic = rig.client("client-a"), rig.client("client-b"), rig.group(), await rig.topic()
    await joined(a, group, topic)
    heard = await joined(b, group, topic)
    queue = (await queues_of(a, topic))[0]
    assert await a.lock(group, [queue]) == {queue}
    pulling = asyncio.ensure_future(a.pull(group, queue, ALL, 0, batch_max=1, wait_ms=30_000))
    await asyncio.sleep(0)
    heard.told.clear()
    await a.unlock(group, [queue])
    await a.leave(consumer=group)
    await a.close()
    with pytest.raises(BrokerUnavailable):
        await pulling
    await _told(heard)
    assert list(await b.members(group, topic)) == ["client-b"]
    assert await b.lock(group, [queue]) == {queue}


@every_classic_broker()
async def test_a_queue_is_locked_by_one_member(rig: ClassicRig) -> None:
    """The other one gets the rest; what is given back is free, and nobody gives back what another one holds."""
    a, b, group, topic = rig.client("client-a"), rig.client("client-b"), rig.group(), await rig.topic()
    await joined(a, group, topic)
    await joined(b, group, topic)
    first, second, *_ = await queues_of(a, topic)
    assert await a.lock(group, [first]) == {first}
    assert await b.lock(group, [first, second]) == {second}
    await b.unlock(group, [first])
    assert await b.lock(group, [first]) == frozenset()
    assert await a.lock(group, [first]) == {first}
    await a.unlock(group, [first])
    assert await b.lock(group, [first]) == {first}


@every_classic_broker()
async def test_a_message_sent_back_comes_again_and_dies_at_last(rig: ClassicRig) -> None:
    """After its delay, from the retry topic, under its own topic and id, with one failure more; then it is dead."""
    client, group, topic = rig.client("a"), rig.group(), await rig.topic()
    await joined(client, group, topic)
    queue = (await queues_of(client, topic))[0]
    await send(client, queue, b"body", tag="red", properties={"color": "blue"})
    (found,) = await pull_all(rig, client, group, queue, 1)
    (retries,) = await queues_of(client, retry_topic(group))
    for failed in (1, 2):
        assert not await pull_some(client, group, retries, at=failed - 1)
        await client.send_back(group, found, delay_level=1, attempts_max=2)
        assert not await pull_some(client, group, retries, at=failed - 1)
        await rig.later(_LEVEL_1_MS)
        (again,) = await pull_all(rig, client, group, retries, 1, at=failed - 1)
        assert (again.queue, again.attempts_failed) == (retries, failed)
        assert (again.message.topic, again.message.message_id) == (topic, found.message.message_id)
        assert (again.message.body, again.message.tag) == (b"body", "red")
        assert again.message.properties["color"] == "blue"
        found = again
    await client.send_back(group, found, delay_level=1, attempts_max=2)
    await rig.later(2 * _LEVEL_1_MS)
    assert not await pull_some(client, group, retries, at=2)
    (dead_queue,) = await queues_of(client, dead_letter_topic(group))
    (dead,) = await pull_all(rig, client, group, dead_queue, 1)
    assert (dead.message.message_id, dead.message.body) == (found.message.message_id, b"body")


@every_classic_broker()
async def test_level_minus_1_is_dead_at_once(rig: ClassicRig) -> None:
    """And never comes again."""
    client, group, topic = rig.client("a"), rig.group(), await rig.topic()
    await joined(client, group, topic)
    queue = (await queues_of(client, topic))[0]
    (receipt,) = await send(client, queue, b"body")
    (found,) = await pull_all(rig, client, group, queue, 1)
    await client.send_back(group, found, delay_level=-1, attempts_max=16)
    (dead_queue,) = await queues_of(client, dead_letter_topic(group))
    (dead,) = await pull_all(rig, client, group, dead_queue, 1)
    assert dead.message.message_id == receipt.message_id
    (retries,) = await queues_of(client, retry_topic(group))
    assert not await pull_some(client, group, retries)


@every_classic_broker()
async def test_a_delayed_message_comes_into_its_queue(rig: ClassicRig) -> None:
    """By delay level, after its time, into the queue it was sent to."""
    client, group, topic = rig.client("a"), rig.group(), await rig.topic()
    await joined(client, group, topic)
    queues = await queues_of(client, topic)
    for queue in reversed(queues):  # not as a broker would go round
        await send(client, queue, b"%d" % queue.queue_id, delay_level=1)
    for queue in queues:
        assert not await pull_some(client, group, queue)
    await rig.later(_LEVEL_1_MS)
    for queue in queues:
        (found,) = await pull_all(rig, client, group, queue, 1)
        assert found.message.body == b"%d" % queue.queue_id


@every_classic_broker()
async def test_a_delayed_message_is_taken_back(rig: ClassicRig) -> None:
    """By its handle, once; then it does not come."""
    client, group, topic = rig.client("a"), rig.group(), await rig.topic()
    await joined(client, group, topic)
    queue = (await queues_of(client, topic))[0]
    due_ms = await _now_ms(rig, topic) + 3_000
    (receipt,) = await send(client, queue, b"late", deliver_at_ms=due_ms)
    assert await client.recall(topic, receipt.recall_handle) == receipt.message_id
    await rig.later(4_000)
    assert not await pull_some(client, group, queue)


@every_classic_broker()
async def test_a_transaction_ends_as_its_producer_decides(rig: ClassicRig) -> None:
    """Nobody sees a half message; committed it is in its queue, rolled back it is gone."""
    client, group, topic = rig.client("a"), rig.group(), await rig.topic()
    await joined(client, group, topic)
    await client.heartbeat(["producers"], [])
    queue = (await queues_of(client, topic))[3]
    kept, gone = await send(client, queue, b"kept", b"gone", is_half=True)
    assert kept.transaction_id
    assert not await pull_some(client, group, queue)
    await client.end_transaction("producers", gone, Decision.ROLLBACK)
    await client.end_transaction("producers", kept, Decision.COMMIT)
    (found,) = await pull_all(rig, client, group, queue, 1)
    assert (found.message.message_id, found.message.body) == (kept.message_id, b"kept")


@every_classic_broker()
async def test_a_producer_is_asked_how_a_transaction_ended(rig: ClassicRig) -> None:
    """One of the group that sent it; its answer is what becomes of it."""
    client, group, topic = rig.client("a"), rig.group(), await rig.topic()
    heard = await joined(client, group, topic)
    await client.heartbeat(["producers"], [])
    queue = (await queues_of(client, topic))[3]
    (receipt,) = await send(client, queue, b"kept", is_half=True)
    async with asyncio.timeout(2 * PATIENCE_S):
        while not heard.checks:
            await rig.later(1_000)
            await client.heartbeat(["producers"], [])
    check = heard.checks[0]
    assert (check.group, check.message.message.message_id) == ("producers", receipt.message_id)
    await client.end_transaction("producers", receipt, Decision.UNKNOWN, check=check)
    assert not await pull_some(client, group, queue)
    await client.end_transaction("producers", receipt, Decision.COMMIT, check=check)
    (found,) = await pull_all(rig, client, group, queue, 1)
    assert found.message.body == b"kept"


async def _told(heard: Heard) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await heard.told.wait()


async def _now_ms(rig: ClassicRig, topic: str) -> int:
    """What time it is at the broker."""
    probe, group = rig.client("probe"), rig.group()
    await beat(probe, group, topic)
    queue = (await queues_of(probe, topic))[-1]
    await send(probe, queue, b"what time is it")
    (found,) = await pull_all(rig, probe, group, queue, 1)
    return found.stored_at_ms
