"""What every ``PopBroker`` promises, on all of them (``broker_adapter.adapter``). Parts: sending, receiving, waiting,
finishing. What needs a restart is in ``test_pop_broker_restart.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from support.rigs import (
    GROUP,
    INVISIBLE_MS,
    TOPIC,
    Rig,
    ack,
    an_envelope,
    every_broker,
    every_durable_broker,
    ids,
    receive,
    receive_one,
    send,
    until,
)

from broker_adapter.errors import Refused, Rule
from broker_adapter.limits import MESSAGE_ID_BYTES_MAX
from broker_adapter.message import Delivery

LONG_MS = 60_000  # of waiting: never reached, the manual clock stands still
SOON_MS = 5_000

# -- sending ----------------------------------------------------------------------------------------------------------


@every_broker()
async def test_a_message_arrives_as_it_was_sent(rig: Rig) -> None:
    """Payload, id, topic and tag pass untouched, and the delivery says where the receipt said."""
    envelope = an_envelope("0A" * 17, payload=bytes(range(256)), tag="blue")
    (receipt,) = await rig.broker.send([envelope])
    delivery = await receive_one(rig)
    assert (delivery.topic, delivery.message_id, delivery.payload) == (TOPIC, "0A" * 17, bytes(range(256)))
    assert (receipt.message_id, receipt.repeated) == ("0A" * 17, False)
    assert (delivery.queue_id, delivery.queue_offset) == (receipt.queue_id, receipt.queue_offset)
    assert (delivery.delivery_attempt, delivery.invisible_ms) == (1, INVISIBLE_MS)
    assert (delivery.stored_at_ms, delivery.deliver_at_ms) == (rig.clock.now_ms(), 0)


@every_broker()
async def test_ids_of_any_form_come_back_unchanged(rig: Rig) -> None:
    """Clients' 34 hex digits, lower case, other lengths, text of other scripts: an id is opaque."""
    message_ids = ["01" + "AB" * 16, "01" + "ab" * 16, "00" + "AB" * 16, "x", "Ü-1", "7" * MESSAGE_ID_BYTES_MAX, "01" + "AB" * 17]
    await send(rig, *message_ids)
    assert sorted(ids(await receive(rig))) == sorted(message_ids)


@every_broker()
async def test_a_delayed_message_is_invisible_until_its_time(rig: Rig) -> None:
    """Nothing one millisecond before, the message at its millisecond."""
    at_ms = rig.clock.now_ms() + SOON_MS
    (receipt,) = await send(rig, "m-1", deliver_at_ms=at_ms)
    assert (receipt.queue_id, receipt.queue_offset, receipt.repeated) == (-1, -1, False)
    for step in (0, SOON_MS - 1):
        rig.clock.advance(step)
        await rig.settle()
        assert await receive(rig) in ([], ())
    rig.clock.advance(1)
    await rig.settle()
    delivery = await receive_one(rig)
    assert (delivery.message_id, delivery.deliver_at_ms, delivery.delivery_attempt) == ("m-1", at_ms, 1)


@every_broker()
async def test_a_time_that_has_come_means_at_once(rig: Rig) -> None:
    """Now and the past are not delays: in the queue on return."""
    now_ms = rig.clock.now_ms()
    for number, at_ms in enumerate((now_ms, now_ms - 1, 1)):
        (receipt,) = await send(rig, f"m-{number}", deliver_at_ms=at_ms)
        assert receipt.queue_offset >= 0
        assert (await receive_one(rig)).deliver_at_ms == at_ms


@every_broker()
async def test_delayed_messages_become_visible_in_the_order_of_their_times(rig: Rig) -> None:
    """Whatever order they were sent in."""
    now_ms = rig.clock.now_ms()
    for delay_ms in (300, 100, 200):
        await send(rig, f"m-{delay_ms}", deliver_at_ms=now_ms + delay_ms)
    seen: list[str] = []
    for _ in range(3):
        rig.clock.advance(100)
        await rig.settle()
        seen += ids(await receive(rig))
    assert seen == ["m-100", "m-200", "m-300"]


@every_broker()
async def test_a_repeated_send_of_a_waiting_message_is_not_stored_again(rig: Rig) -> None:
    """Same id, waiting: marked repeated, delivered once, at the first time."""
    at_ms = rig.clock.now_ms() + SOON_MS
    await send(rig, "m-1", deliver_at_ms=at_ms)
    for again_at_ms in (at_ms, at_ms + SOON_MS, 0):
        (receipt,) = await send(rig, "m-1", deliver_at_ms=again_at_ms)
        assert receipt == ("m-1", -1, -1, True)
    assert not await receive(rig)
    rig.clock.advance(SOON_MS)
    await rig.settle()
    assert (await receive_one(rig)).deliver_at_ms == at_ms
    rig.clock.advance(SOON_MS)
    await rig.settle()
    assert not await receive(rig)


@every_broker()
async def test_a_repeated_send_of_a_queued_message_gets_the_first_receipt(rig: Rig) -> None:
    """Same place, marked repeated; also once it was delivered and acknowledged."""
    (first,) = await send(rig, "m-1")
    (second,) = await send(rig, "m-1")
    assert second == first._replace(repeated=True)
    await ack(rig, await receive_one(rig))
    (third,) = await send(rig, "m-1")
    assert third == first._replace(repeated=True)
    assert not await receive(rig)


@every_broker()
async def test_a_repeated_send_of_a_handed_over_message_is_not_stored_again(rig: Rig) -> None:
    """Same id, delayed and delivered since: still known."""
    at_ms = rig.clock.now_ms() + SOON_MS
    await send(rig, "m-1", deliver_at_ms=at_ms)
    rig.clock.advance(SOON_MS)
    await rig.settle()
    await ack(rig, await receive_one(rig))
    for again_at_ms in (at_ms, at_ms + SOON_MS):
        (receipt,) = await send(rig, "m-1", deliver_at_ms=again_at_ms)
        assert receipt.repeated
    rig.clock.advance(SOON_MS)
    await rig.settle()
    assert not await receive(rig)


@every_broker()
async def test_an_id_twice_in_one_call_is_stored_once(rig: Rig) -> None:
    """Receipts in the order of the call; the second one is the repeated one."""
    receipts = await send(rig, "m-1", "m-2", "m-1")
    assert [(each.message_id, each.repeated) for each in receipts] == [("m-1", False), ("m-2", False), ("m-1", True)]
    assert receipts[2] == receipts[0]._replace(repeated=True)
    assert sorted(ids(await receive(rig))) == ["m-1", "m-2"]


@every_broker()
async def test_ids_are_known_per_topic(rig: Rig) -> None:
    """The same id in another topic is another message."""
    (here,) = await send(rig, "m-1")
    (there,) = await rig.broker.send([an_envelope("m-1", topic="refunds")])
    assert not here.repeated
    assert not there.repeated
    assert ids(await receive(rig)) == ids(await receive(rig, topic="refunds")) == ["m-1"]


@every_broker()
async def test_concurrent_repeats_are_stored_once(rig: Rig) -> None:
    """However many producers' retries are under way at the same time, one is the first."""
    receipts = [(await each)[0] for each in [asyncio.ensure_future(send(rig, "m-1")) for _ in range(20)]]
    assert sorted(each.repeated for each in receipts) == [False] + [True] * 19
    assert len({(each.queue_id, each.queue_offset) for each in receipts}) == 1
    assert ids(await receive(rig)) == ["m-1"]


# -- receiving --------------------------------------------------------------------------------------------------------


@every_broker(queues=1)
async def test_a_queue_is_received_in_order_and_within_the_batch_bound(rig: Rig) -> None:
    """Offsets ascend within and across receives, no more than asked for."""
    sent = [f"m-{number}" for number in range(10)]
    await send(rig, *sent)
    batches = [await receive(rig, batch_max=4) for _ in range(3)]
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert [each for batch in batches for each in ids(batch)] == sent
    assert not await receive(rig)


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


@every_durable_broker()
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


@every_broker()
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
    rig.clock.advance(INVISIBLE_MS)
    await rig.settle()
    assert not await receive(rig, group="first")
    assert {each.delivery_attempt for each in await receive(rig, group="second")} == {2}


@every_broker()
async def test_a_new_group_starts_with_what_is_there(rig: Rig) -> None:
    """The default start is the earliest message."""
    await send(rig, "m-1", "m-2", "m-3")
    await rig.broker.ensure_group("late")
    await rig.broker.ensure_group("late")
    assert sorted(ids(await receive(rig, group="late"))) == ["m-1", "m-2", "m-3"]


@every_broker()
async def test_a_topic_is_made_on_first_use(rig: Rig) -> None:
    """A route and a receive know topics nobody sent to yet."""
    assert await rig.broker.route("fresh") == ("fresh", 4)
    assert not await receive(rig, topic="another")
    assert (await rig.broker.route("another")).queues == 4


# -- waiting ----------------------------------------------------------------------------------------------------------


def waiting(rig: Rig, count: int, *, group: str = GROUP, batch_max: int = 32) -> list[asyncio.Task[Sequence[Delivery]]]:
    """Start receives that wait."""
    return [
        asyncio.ensure_future(receive(rig, wait_ms=LONG_MS, group=group, batch_max=batch_max)) for _ in range(count)
    ]


async def let_them_wait() -> None:
    """Return when receives that were started have found nothing and wait."""
    await asyncio.sleep(0.02)


async def call_off(tasks: Sequence[asyncio.Task[Sequence[Delivery]]]) -> None:
    """Cancel what still waits."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@every_broker()
async def test_a_receive_that_finds_nothing_ends_when_its_time_is_up(rig: Rig) -> None:
    """Empty, not an error."""
    receiving = asyncio.ensure_future(receive(rig, wait_ms=20))
    await let_them_wait()
    rig.clock.advance(20)
    assert not await receiving


@every_broker()
async def test_a_waiting_receive_gets_what_is_sent(rig: Rig) -> None:
    """A send wakes it; no interval passes."""
    (receiving,) = waiting(rig, 1)
    await let_them_wait()
    await send(rig, "m-1")
    assert ids(await receiving) == ["m-1"]


@every_broker()
async def test_a_waiting_receive_gets_what_becomes_due(rig: Rig) -> None:
    """So does a delivery time that comes."""
    await send(rig, "m-1", deliver_at_ms=rig.clock.now_ms() + SOON_MS)
    (receiving,) = waiting(rig, 1)
    await let_them_wait()
    assert not receiving.done()
    rig.clock.advance(SOON_MS)
    await rig.settle()
    assert ids(await receiving) == ["m-1"]


@every_broker()
async def test_a_waiting_receive_gets_what_comes_back(rig: Rig) -> None:
    """So do the end of a lease, and a delivery that is given back."""
    await send(rig, "m-1")
    await receive_one(rig)
    (receiving,) = waiting(rig, 1)
    await let_them_wait()
    rig.clock.advance(INVISIBLE_MS)
    await rig.settle()
    (expired,) = await receiving
    assert expired.delivery_attempt == 2
    (receiving,) = waiting(rig, 1)
    await let_them_wait()
    await rig.broker.change_invisible(GROUP, TOPIC, expired.receipt_handle, 0)
    (given_back,) = await receiving
    assert given_back.delivery_attempt == 3


@every_broker()
async def test_one_message_goes_to_one_of_many_who_wait(rig: Rig) -> None:
    """The others go on waiting and get what follows, each its own."""
    receiving = waiting(rig, 8)
    await let_them_wait()
    for number in range(8):
        await send(rig, f"m-{number}")
        await until(lambda: sum(task.done() for task in receiving) > number)
        assert sum(task.done() for task in receiving) == number + 1
    assert sorted(ids([each for task in receiving for each in await task])) == [f"m-{number}" for number in range(8)]


@every_broker()
async def test_many_messages_at_once_reach_all_who_wait(rig: Rig) -> None:
    """One send of many wakes as many as it can serve."""
    receiving = waiting(rig, 5, batch_max=1)
    await let_them_wait()
    await send(rig, *(f"m-{number}" for number in range(5)))
    assert sorted(ids([each for task in receiving for each in await task])) == [f"m-{number}" for number in range(5)]


@every_broker(queues=1)
async def test_many_messages_of_one_queue_reach_all_who_wait(rig: Rig) -> None:
    """The same with a single queue, which is one arrival for many."""
    receiving = waiting(rig, 5, batch_max=1)
    await let_them_wait()
    await send(rig, *(f"m-{number}" for number in range(5)))
    assert sorted(ids([each for task in receiving for each in await task])) == [f"m-{number}" for number in range(5)]


@every_broker()
async def test_every_waiting_group_gets_a_message(rig: Rig) -> None:
    """Waking is per group."""
    receiving = [*waiting(rig, 1, group="first"), *waiting(rig, 1, group="second")]
    await let_them_wait()
    await send(rig, "m-1")
    assert [ids(await task) for task in receiving] == [["m-1"], ["m-1"]]


@every_broker()
async def test_a_cancelled_receive_hands_out_nothing(rig: Rig) -> None:
    """Cancelled at any moment around the arrival: the message is there for the next one, on its first attempt."""
    for steps in range(12):
        (receiving,) = waiting(rig, 1)
        await let_them_wait()
        await send(rig, f"m-{steps}")
        for _ in range(steps):
            await asyncio.sleep(0)
        receiving.cancel()
        (outcome,) = await asyncio.gather(receiving, return_exceptions=True)
        if not isinstance(outcome, BaseException):
            assert ids(outcome) == [f"m-{steps}"]
            await ack(rig, *outcome)
        else:
            delivery = await receive_one(rig)
            assert (delivery.message_id, delivery.delivery_attempt) == (f"m-{steps}", 1)
            await ack(rig, delivery)


@every_broker()
async def test_a_cancelled_receive_passes_its_message_on(rig: Rig) -> None:
    """Somebody else who waits gets it, without another arrival."""
    for steps in range(12):
        receiving = waiting(rig, 2)
        await let_them_wait()
        await send(rig, f"m-{steps}")
        for _ in range(steps):
            await asyncio.sleep(0)
        receiving[0].cancel()
        await until(lambda: any(task.done() and not task.cancelled() for task in receiving))
        got = [task.result() for task in receiving if task.done() and not task.cancelled()]
        assert [ids(each) for each in got] == [[f"m-{steps}"]]
        await call_off(receiving)
        await ack(rig, *got[0])


# -- finishing --------------------------------------------------------------------------------------------------------


@every_broker()
async def test_an_acknowledged_message_never_comes_back(rig: Rig) -> None:
    """Not at the end of its lease, nor ever."""
    await send(rig, "m-1")
    assert list(await ack(rig, await receive_one(rig))) == [None]
    rig.clock.advance(INVISIBLE_MS * 10)
    await rig.settle()
    assert not await receive(rig)


@every_broker()
async def test_acknowledging_twice_is_fine(rig: Rig) -> None:
    """In one call and in two."""
    await send(rig, "m-1")
    delivery = await receive_one(rig)
    assert list(await ack(rig, delivery, delivery)) == [None, None]
    assert list(await ack(rig, delivery)) == [None]


@every_broker()
async def test_an_unfinished_message_comes_back_with_the_next_attempt(rig: Rig) -> None:
    """Not before its invisible duration is over, then each time one attempt more, with a handle of its own."""
    await send(rig, "m-1")
    handles = set()
    for attempt in (1, 2, 3):
        delivery = await receive_one(rig)
        assert delivery.delivery_attempt == attempt
        handles.add(delivery.receipt_handle)
        rig.clock.advance(INVISIBLE_MS - 1)
        await rig.settle()
        assert not await receive(rig)
        rig.clock.advance(1)
        await rig.settle()
    assert len(handles) == 3


@every_broker()
async def test_the_handle_of_an_earlier_hand_out_is_refused(rig: Rig) -> None:
    """It would finish what somebody else works on; the current one goes on being good."""
    await send(rig, "m-1")
    stale = await receive_one(rig)
    rig.clock.advance(INVISIBLE_MS)
    await rig.settle()
    current = await receive_one(rig)
    (refused,) = await ack(rig, stale)
    assert isinstance(refused, Refused)
    assert refused.rule is Rule.RECEIPT_HANDLE
    with pytest.raises(Refused) as error:
        await rig.broker.change_invisible(GROUP, TOPIC, stale.receipt_handle, 0)
    assert error.value.rule is Rule.RECEIPT_HANDLE
    assert not await receive(rig)
    assert list(await ack(rig, current)) == [None]


@every_broker()
async def test_a_stale_handle_stays_stale_after_the_next_lease_ended_too(rig: Rig) -> None:
    """Only the last hand-out's handle is honoured, whoever holds the message now."""
    await send(rig, "m-1")
    first = await receive_one(rig)
    await rig.broker.change_invisible(GROUP, TOPIC, first.receipt_handle, 1_000, suspend=True)
    rig.clock.advance(1_000)
    await rig.settle()
    second = await receive_one(rig)
    rig.clock.advance(INVISIBLE_MS)
    await rig.settle()
    assert [type(each) for each in await ack(rig, first)] == [Refused]
    assert list(await ack(rig, second)) == [None]


@every_broker()
async def test_an_expired_handle_is_honoured_until_the_message_is_handed_out_again(rig: Rig) -> None:
    """Who was only a little late has done the work once."""
    await send(rig, "m-1")
    delivery = await receive_one(rig)
    rig.clock.advance(INVISIBLE_MS * 2)
    await rig.settle()
    assert list(await ack(rig, delivery)) == [None]
    assert not await receive(rig)


@every_broker()
async def test_handles_that_are_none_are_refused(rig: Rig) -> None:
    """Garbage, and a handle with one character changed, each on its own; the good one beside them is honoured."""
    await send(rig, "m-1")
    good = (await receive_one(rig)).receipt_handle
    changed = ("B" if good[0] == "A" else "A") + good[1:]
    bad = ["", "garbage", "ÄÖÜ", "=" * 40, "A" * 44, changed, good + "AAAA", good[:-4]]
    results = await rig.broker.ack(GROUP, TOPIC, [*bad, good])
    assert [each.rule if isinstance(each, Refused) else each for each in results] == [
        *[Rule.RECEIPT_HANDLE] * len(bad),
        None,
    ]
    with pytest.raises(Refused) as error:
        await rig.broker.change_invisible(GROUP, TOPIC, "garbage", 0)
    assert error.value.rule is Rule.RECEIPT_HANDLE


@every_broker()
async def test_the_handle_of_another_group_or_topic_is_refused(rig: Rig) -> None:
    """A handle is good where it was handed out, and nothing else is finished by it."""
    await send(rig, "m-1")
    await rig.broker.send([an_envelope("m-2", topic="refunds")])
    delivery = await receive_one(rig)
    await receive(rig, group="others")
    for group, topic in (("others", TOPIC), (GROUP, "refunds")):
        (refused,) = await rig.broker.ack(group, topic, [delivery.receipt_handle])
        assert isinstance(refused, Refused)
        assert refused.rule is Rule.RECEIPT_HANDLE
        with pytest.raises(Refused) as error:
            await rig.broker.change_invisible(group, topic, delivery.receipt_handle, 0)
        assert error.value.rule is Rule.RECEIPT_HANDLE
    assert list(await ack(rig, delivery)) == [None]


@every_broker()
async def test_an_extension_hides_longer_and_costs_no_attempt(rig: Rig) -> None:
    """From now on, not from the end of the lease; both the handle returned and the first one stay good."""
    await send(rig, "m-1")
    delivery = await receive_one(rig)
    rig.clock.advance(INVISIBLE_MS // 2)
    handle = await rig.broker.change_invisible(GROUP, TOPIC, delivery.receipt_handle, INVISIBLE_MS)
    handle = await rig.broker.change_invisible(GROUP, TOPIC, handle, INVISIBLE_MS)
    await rig.broker.change_invisible(GROUP, TOPIC, delivery.receipt_handle, INVISIBLE_MS)
    rig.clock.advance(INVISIBLE_MS - 1)
    await rig.settle()
    assert not await receive(rig)
    rig.clock.advance(1)
    await rig.settle()
    again = await receive_one(rig)
    assert again.delivery_attempt == 2
    assert [type(each) for each in await rig.broker.ack(GROUP, TOPIC, [handle])] == [Refused]


@every_broker()
async def test_either_handle_acknowledges_after_an_extension(rig: Rig) -> None:
    """Clients send the first handle all along."""
    await send(rig, "m-1", "m-2")
    first, second = await receive(rig)
    await rig.broker.change_invisible(GROUP, TOPIC, first.receipt_handle, INVISIBLE_MS)
    handle = await rig.broker.change_invisible(GROUP, TOPIC, second.receipt_handle, INVISIBLE_MS)
    assert list(await rig.broker.ack(GROUP, TOPIC, [first.receipt_handle, handle])) == [None, None]
    rig.clock.advance(INVISIBLE_MS)
    await rig.settle()
    assert not await receive(rig)


@every_broker()
async def test_a_lease_may_be_made_shorter(rig: Rig) -> None:
    """The later time that was set first means nothing then, and nothing comes back twice."""
    await send(rig, "m-1")
    delivery = await receive_one(rig)
    await rig.broker.change_invisible(GROUP, TOPIC, delivery.receipt_handle, 1_000)
    rig.clock.advance(INVISIBLE_MS)
    await rig.settle()
    again = await receive_one(rig)
    assert again.delivery_attempt == 2
    assert not await receive(rig)
    assert list(await ack(rig, again)) == [None]


@every_broker()
async def test_an_expired_delivery_may_be_extended_until_it_is_handed_out_again(rig: Rig) -> None:
    """Its attempt stays what it was."""
    await send(rig, "m-1")
    delivery = await receive_one(rig)
    rig.clock.advance(INVISIBLE_MS)
    await rig.settle()
    await rig.broker.change_invisible(GROUP, TOPIC, delivery.receipt_handle, INVISIBLE_MS)
    assert not await receive(rig)
    rig.clock.advance(INVISIBLE_MS)
    await rig.settle()
    assert (await receive_one(rig)).delivery_attempt == 2
    assert not await receive(rig)


@every_broker()
async def test_zero_gives_a_delivery_back_at_once(rig: Rig) -> None:
    """The next receive has it, with the next attempt."""
    await send(rig, "m-1")
    delivery = await receive_one(rig)
    await rig.broker.change_invisible(GROUP, TOPIC, delivery.receipt_handle, 0)
    again = await receive_one(rig)
    assert (again.message_id, again.delivery_attempt) == ("m-1", 2)
    assert not await receive(rig)


@every_broker()
async def test_a_suspended_delivery_comes_back_without_an_attempt_more(rig: Rig) -> None:
    """Once: the attempt after it counts again. The same for giving it back at once."""
    await send(rig, "m-1")
    for invisible_ms in (5_000, 0):
        delivery = await receive_one(rig)
        await rig.broker.change_invisible(GROUP, TOPIC, delivery.receipt_handle, invisible_ms, suspend=True)
        rig.clock.advance(invisible_ms)
        await rig.settle()
    assert (await receive_one(rig)).delivery_attempt == 1
    rig.clock.advance(INVISIBLE_MS)
    await rig.settle()
    assert (await receive_one(rig)).delivery_attempt == 2


@every_broker()
async def test_a_finished_delivery_cannot_be_hidden(rig: Rig) -> None:
    """Refused, and it does not come back."""
    await send(rig, "m-1")
    delivery = await receive_one(rig)
    await ack(rig, delivery)
    for invisible_ms in (0, INVISIBLE_MS):
        with pytest.raises(Refused) as error:
            await rig.broker.change_invisible(GROUP, TOPIC, delivery.receipt_handle, invisible_ms)
        assert error.value.rule is Rule.RECEIPT_HANDLE
    rig.clock.advance(INVISIBLE_MS)
    await rig.settle()
    assert not await receive(rig)


@every_broker()
async def test_what_came_back_is_handed_out_before_what_is_new(rig: Rig) -> None:
    """A message does not wait behind everything that was sent since."""
    await rig.broker.send([an_envelope("m-1", message_group="g"), an_envelope("m-2", message_group="g")])
    (first,) = await receive(rig, batch_max=1)
    await rig.broker.change_invisible(GROUP, TOPIC, first.receipt_handle, 0)
    assert ids(await receive(rig)) == ["m-1", "m-2"]
