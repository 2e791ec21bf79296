"""What every broker promises (``PopBroker``, ``TransactionalBroker``), in real time, Apache RocketMQ's included."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from support.rigs.rocketmq.real_time import (
    INVISIBLE_MS,
    AllAtOnce,
    Decider,
    Rig,
    a_message,
    every_broker,
    new_id,
    now_ms,
)

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.message import MessageType
from broker_adapter.contracts.topics import dead_letter_topic
from broker_adapter.contracts.transactions import Half
from broker_adapter.wire.mapping import decode

pytestmark = [
    pytest.mark.contract,
    pytest.mark.timeout(600),
]  # the first one has Maven bring the cluster, and starts it
DELAY_MS = 3_000


@pytest.fixture(scope="module")
def at_once(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AllAtOnce]:
    running = AllAtOnce(tmp_path_factory.mktemp, request.session.items)
    yield running
    running.close()


@every_broker()
async def test_a_message_arrives_as_it_was_sent(rig: Rig) -> None:
    """Body, tag, keys and properties; on its first attempt, stored about now."""
    topic, group = rig.topic("NORMAL"), rig.group()
    await rig.broker.ensure_group(group)
    sent_from_ms = now_ms()
    (sent,) = await rig.send(topic, bytes(range(256)), tag="blue", keys=["k1", "k2"], properties={"a": "ä"})
    (delivery,) = await rig.receive(group, topic)
    arrived, meant = decode(delivery.payload), decode(sent.payload)
    assert (arrived.body, arrived.tag, tuple(arrived.keys), arrived.properties) == (
        meant.body,
        meant.tag,
        tuple(meant.keys),
        meant.properties,
    )
    assert (delivery.topic, delivery.message_id, arrived.message_id) == (topic, sent.message_id, sent.message_id)
    assert (delivery.delivery_attempt, delivery.deliver_at_ms) == (1, 0)
    assert delivery.stored_at_ms >= sent_from_ms
    assert list(await rig.broker.ack(group, topic, [delivery.receipt_handle])) == [None]


@every_broker()
async def test_the_route_states_the_types_of_a_topic(rig: Rig) -> None:
    """Queues, and types."""
    route = await rig.broker.route(rig.topic("NORMAL"))
    assert route.queues > 0
    assert MessageType.NORMAL in route.types


@every_broker()
async def test_groups_are_independent(rig: Rig) -> None:
    """Each group gets every message."""
    topic, groups = rig.topic("NORMAL"), [rig.group(), rig.group()]
    sent = await rig.send(topic, b"1", b"2", b"3")
    for group in groups:
        await rig.broker.ensure_group(group)
        deliveries = await rig.receive(group, topic, 3)
        assert {each.message_id for each in deliveries} == {each.message_id for each in sent}
        handles = [each.receipt_handle for each in deliveries]
        assert list(await rig.broker.ack(group, topic, handles)) == [None, None, None]


@every_broker()
async def test_only_unfinished_messages_come_back(rig: Rig) -> None:
    """With the next attempt, and a handle of its own."""
    topic, group = rig.topic("NORMAL"), rig.group()
    await rig.broker.ensure_group(group)
    kept, finished = await rig.send(topic, b"kept", b"finished")
    handles = {each.message_id: each.receipt_handle for each in await rig.receive(group, topic, 2)}
    assert list(await rig.broker.ack(group, topic, [handles[finished.message_id]])) == [None]
    (again,) = await rig.receive(group, topic)
    assert (again.message_id, again.delivery_attempt) == (kept.message_id, 2)
    assert again.receipt_handle != handles[kept.message_id]
    assert list(await rig.broker.ack(group, topic, [again.receipt_handle])) == [None]
    await rig.nothing_comes(group, topic, 1)


@every_broker()
async def test_a_filter_passes_its_tags_only(rig: Rig) -> None:
    """Of what lies in the topic."""
    topic, group = rig.topic("NORMAL"), rig.group()
    await rig.broker.ensure_group(group)
    await rig.send(topic, b"red", tag="red")
    (blue,) = await rig.send(topic, b"blue", tag="blue")
    (found,) = await rig.receive(group, topic, tags=frozenset({"blue", "green"}))
    assert found.message_id == blue.message_id


_NO_TIMERS = "RocketMQ before 5.0 has delay levels only: the daemon keeps what is delayed"


@every_broker(leased_4=_NO_TIMERS)
async def test_a_delayed_message_is_never_early(rig: Rig) -> None:
    """Nothing before its time, and it tells its time."""
    topic, group = rig.topic("DELAY"), rig.group()
    await rig.broker.ensure_group(group)
    at_ms = now_ms() + DELAY_MS
    await rig.send(topic, b"later", deliver_at_ms=at_ms)
    (found,) = await rig.receive(group, topic)
    assert now_ms() >= at_ms
    assert found.deliver_at_ms == at_ms


@every_broker(leased_4=_NO_TIMERS)
async def test_a_recalled_message_does_not_come(rig: Rig) -> None:
    """Its neighbour does."""
    topic, group = rig.topic("DELAY"), rig.group()
    await rig.broker.ensure_group(group)
    at_ms = now_ms() + DELAY_MS * 4
    (receipt,) = await rig.broker.send([a_message(topic, b"recalled", deliver_at_ms=at_ms)])
    (stays,) = await rig.send(topic, b"stays", deliver_at_ms=at_ms)
    assert receipt.recall_handle
    assert (await rig.broker.recall(topic, receipt.recall_handle)).message_id == receipt.message_id
    (found,) = await rig.receive(group, topic)
    assert found.message_id == stays.message_id
    await rig.nothing_comes(group, topic, 1)


@every_broker(
    rocketmq="a proxy says OK to a recall of what does not exist: 'recalled' says nothing there", leased_4=_NO_TIMERS
)
async def test_a_late_recall_is_answered_as_late(rig: Rig) -> None:
    """When it was delivered."""
    topic, group = rig.topic("DELAY"), rig.group()
    await rig.broker.ensure_group(group)
    (receipt,) = await rig.broker.send([a_message(topic, deliver_at_ms=now_ms() + 1_000)])
    await rig.receive(group, topic)
    with pytest.raises(Refused) as refused:
        await rig.broker.recall(topic, receipt.recall_handle)
    assert refused.value.rule is Rule.NOT_FOUND


_NO_IDS = "RocketMQ knows no ids: the same message sent twice is stored twice"


@every_broker(rocketmq=_NO_IDS, leased_5=_NO_IDS, leased_4=_NO_IDS)
async def test_a_repeated_send_is_not_stored_again(rig: Rig) -> None:
    """The same message id: one message."""
    topic, group = rig.topic("NORMAL"), rig.group()
    await rig.broker.ensure_group(group)
    message_id = new_id()
    for _ in range(2):
        await rig.send(topic, b"once", message_id=message_id)
    await rig.receive(group, topic)
    await rig.nothing_comes(group, topic, 1)


@every_broker()
async def test_several_messages_in_one_send(rig: Rig) -> None:
    """A receipt for each, in order, with its own id; all arrive."""
    topic, group = rig.topic("NORMAL"), rig.group()
    await rig.broker.ensure_group(group)
    sent = [a_message(topic, str(number).encode()) for number in range(5)]
    receipts = await rig.broker.send(sent)
    assert [each.message_id for each in receipts] == [each.message_id for each in sent]
    found = await rig.receive(group, topic, 5)
    assert {each.message_id for each in found} == {each.message_id for each in sent}


_NO_DELAYED_BATCH = "the adapter refuses what RocketMQ would not take"


@every_broker(
    rocketmq="RocketMQ takes no delayed messages in a batch",
    sidecar=_NO_DELAYED_BATCH,
    fronts=_NO_DELAYED_BATCH,
    leased_here=_NO_DELAYED_BATCH,
    leased_5=_NO_DELAYED_BATCH,
    leased_4=_NO_DELAYED_BATCH,
)
async def test_several_delayed_messages_in_one_send(rig: Rig) -> None:
    """A receipt and a recall handle for each."""
    topic = rig.topic("DELAY")
    at_ms = now_ms() + DELAY_MS
    receipts = await rig.broker.send([a_message(topic, deliver_at_ms=at_ms) for _ in range(2)])
    assert len({each.recall_handle for each in receipts}) == 2


@every_broker()
async def test_a_message_group_keeps_its_order(rig: Rig) -> None:
    """One after the other, each finished before the next is asked for."""
    topic = rig.topic("FIFO")
    group = rig.group()
    await rig.broker.ensure_group(group)
    sent = await rig.send(topic, b"1", b"2", b"3", b"4", message_group="g")
    came: list[str] = []
    while len(came) < len(sent):
        for each in await rig.receive_some(group, topic):
            came.append(each.message_id)
            assert list(await rig.broker.ack(group, topic, [each.receipt_handle])) == [None]
    assert came == [each.message_id for each in sent]


@every_broker()
async def test_a_hidden_delivery_stays_hidden_and_its_new_handle_finishes_it(rig: Rig) -> None:
    """Hidden for longer than at first."""
    topic, group = rig.topic("NORMAL"), rig.group()
    await rig.broker.ensure_group(group)
    await rig.send(topic, b"long work")
    (delivery,) = await rig.receive(group, topic)
    handle = await rig.broker.change_invisible(group, topic, delivery.receipt_handle, INVISIBLE_MS * 12)
    await rig.nothing_comes(group, topic, INVISIBLE_MS / 1000 + 1)
    assert list(await rig.broker.ack(group, topic, [handle])) == [None]


@every_broker(rocketmq="RocketMQ says OK to an ack with the earlier handle, and acknowledges nothing")
async def test_the_first_handle_stays_good(rig: Rig) -> None:
    """Also behind a change of the invisible duration."""
    topic, group = rig.topic("NORMAL"), rig.group()
    await rig.broker.ensure_group(group)
    await rig.send(topic, b"work")
    (delivery,) = await rig.receive(group, topic)
    await rig.broker.change_invisible(group, topic, delivery.receipt_handle, 2_000)
    assert list(await rig.broker.ack(group, topic, [delivery.receipt_handle])) == [None]
    await rig.nothing_comes(group, topic, 8)


@every_broker()
async def test_handles_that_are_none_are_refused(rig: Rig) -> None:
    """Each on its own; the good one beside them is honoured."""
    topic, group = rig.topic("NORMAL"), rig.group()
    await rig.broker.ensure_group(group)
    await rig.send(topic, b"work")
    (delivery,) = await rig.receive(group, topic)
    results = await rig.broker.ack(group, topic, ["", "garbage", "a b c d", delivery.receipt_handle])
    assert [each.rule if isinstance(each, Refused) else each for each in results] == [
        *[Rule.RECEIPT_HANDLE] * 3,
        None,
    ]


@every_broker()
async def test_a_dead_letter_is_in_its_queue(rig: Rig) -> None:
    """And does not come back to its group."""
    topic, group, reader = rig.topic("NORMAL"), rig.group(), rig.group()
    await rig.broker.ensure_group(group)
    await rig.broker.ensure_group(reader)
    (sent,) = await rig.send(topic, b"poison")
    (delivery,) = await rig.receive(group, topic)
    await rig.broker.dead_letter(group, topic, delivery.receipt_handle, attempts=17)
    (letter,) = await rig.receive(reader, dead_letter_topic(group))
    assert decode(letter.payload).body == b"poison"
    assert letter.message_id == sent.message_id
    await rig.nothing_comes(group, topic, 1)


@every_broker(spins_rocketmq=True)
async def test_a_transaction_is_seen_once_it_is_committed(rig: Rig) -> None:
    """And one that is rolled back is never seen."""
    topic, group = rig.topic("TRANSACTION"), rig.group()
    await rig.broker.ensure_group(group)
    kept, dropped = a_message(topic, b"kept"), a_message(topic, b"dropped")
    (first,) = await rig.transactions.prepare([Half(kept)])
    (second,) = await rig.transactions.prepare([Half(dropped)])
    await rig.nothing_comes(group, topic, 1)
    await rig.transactions.roll_back(topic, second.transaction_id)
    await rig.transactions.commit(topic, first.transaction_id)
    (found,) = await rig.receive(group, topic)
    assert found.message_id == kept.message_id
    await rig.nothing_comes(group, topic, 1)


@every_broker(spins_rocketmq=True)
async def test_the_producer_of_an_open_transaction_is_asked(rig: Rig) -> None:
    """After a while; its answer counts."""
    topic, group = rig.topic("TRANSACTION"), rig.group()
    await rig.broker.ensure_group(group)
    decider = Decider()
    rig.transactions.attach(decider)
    half = a_message(topic, b"open")
    await rig.transactions.prepare([Half(half, check_after_ms=1_000)])
    async with asyncio.timeout(100):
        while (check := await decider.asked.get()).message_id != half.message_id:
            pass  # that of another scenario
    assert check.topic == topic
    await rig.transactions.commit(topic, check.transaction_id)
    (found,) = await rig.receive(group, topic)
    assert found.message_id == half.message_id
