"""Finishing, as every ``PopBroker`` promises it: acks, leases that end, attempts, handles that are good or refused."""

from __future__ import annotations

import asyncio

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
    leased,
    receive,
    receive_one,
    send,
)

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.limits import RETRY_STEPS_MS

pytestmark = pytest.mark.contract
SOON_MS = 5_000


@every_broker()
async def test_an_acknowledged_message_never_comes_back(rig: Rig) -> None:
    """Not at the end of its lease, nor ever."""
    await send(rig, "m-1")
    assert list(await ack(rig, await receive_one(rig))) == [None]
    await rig.pass_ms(INVISIBLE_MS * 10)
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
        await rig.pass_ms(INVISIBLE_MS - 1)
        assert not await receive(rig)
        await rig.pass_ms(1)
    assert len(handles) == 3


@every_broker()
async def test_the_handle_of_an_earlier_hand_out_is_refused(rig: Rig) -> None:
    """It would finish what somebody else works on; the current one goes on being good."""
    await send(rig, "m-1")
    stale = await receive_one(rig)
    await rig.pass_ms(INVISIBLE_MS)
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
    await rig.pass_ms(1_000)
    second = await receive_one(rig)
    await rig.pass_ms(INVISIBLE_MS)
    assert [type(each) for each in await ack(rig, first)] == [Refused]
    assert list(await ack(rig, second)) == [None]


@every_broker()
async def test_an_expired_handle_is_honoured_until_the_message_is_handed_out_again(rig: Rig) -> None:
    """Who was only a little late has done the work once."""
    await send(rig, "m-1")
    delivery = await receive_one(rig)
    await rig.pass_ms(INVISIBLE_MS * 2)
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
    await rig.pass_ms(INVISIBLE_MS - 1)
    assert not await receive(rig)
    await rig.pass_ms(1)
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
    await rig.pass_ms(INVISIBLE_MS)
    assert not await receive(rig)


@every_broker()
async def test_a_lease_may_be_made_shorter(rig: Rig) -> None:
    """The later time that was set first means nothing then, and nothing comes back twice."""
    await send(rig, "m-1")
    delivery = await receive_one(rig)
    await rig.broker.change_invisible(GROUP, TOPIC, delivery.receipt_handle, 1_000)
    await rig.pass_ms(INVISIBLE_MS)
    again = await receive_one(rig)
    assert again.delivery_attempt == 2
    assert not await receive(rig)
    assert list(await ack(rig, again)) == [None]


@every_broker()
async def test_an_expired_delivery_may_be_extended_until_it_is_handed_out_again(rig: Rig) -> None:
    """Its attempt stays what it was."""
    await send(rig, "m-1")
    delivery = await receive_one(rig)
    await rig.pass_ms(INVISIBLE_MS)
    await rig.broker.change_invisible(GROUP, TOPIC, delivery.receipt_handle, INVISIBLE_MS)
    assert not await receive(rig)
    await rig.pass_ms(INVISIBLE_MS)
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
        await rig.pass_ms(invisible_ms)
    assert (await receive_one(rig)).delivery_attempt == 1
    await rig.pass_ms(INVISIBLE_MS)
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
    await rig.pass_ms(INVISIBLE_MS)
    assert not await receive(rig)


@every_broker()
async def test_returned_messages_are_delivered_before_new_ones(rig: Rig) -> None:
    """A message does not wait behind everything that was sent since."""
    await rig.broker.send([an_envelope("m-1", message_group="g"), an_envelope("m-2", message_group="g")])
    (first,) = await receive(rig, batch_max=1)
    await rig.broker.change_invisible(GROUP, TOPIC, first.receipt_handle, 0)
    assert ids(await receive(rig)) == ["m-1", "m-2"]


@every_broker()
async def test_messages_that_did_not_reach_their_client_come_again_at_once(rig: Rig) -> None:
    """As the next attempt, also to a push consumer, whose leases are renewed; the handle that got lost is refused."""
    for number, renew_for in enumerate(("", "push-1")):
        await send(rig, f"first-{number}", f"second-{number}")
        lost = await receive(rig, renew_for=renew_for)
        assert sorted(ids(lost)) == [f"first-{number}", f"second-{number}"]
        assert list(await ack(rig, lost[0])) == [None]
        await rig.broker.not_taken(GROUP, leased(lost))
        await rig.settle()
        (again,) = await receive(rig)
        assert (again.message_id, again.delivery_attempt) == (lost[1].message_id, 2)
        (refused,) = await ack(rig, lost[1])
        assert isinstance(refused, Refused)
        assert list(await ack(rig, again)) == [None]
        await rig.broker.not_taken(GROUP, leased([*lost, again]))
        assert not await receive(rig)


@every_durable_broker(queues=1)
async def test_a_failure_that_comes_while_the_message_is_on_its_way_back_counts(rig: EmbeddedRig) -> None:
    """Danger: its client had it, lost its front, failed it through another one, was told OK, and got it at once."""
    await send(rig, "m-1")
    (lost,) = await receive(rig, renew_for="push-1")
    coming_back = asyncio.ensure_future(rig.broker.not_taken(GROUP, leased([lost])))
    await asyncio.sleep(0)
    found = await rig.broker.subscriptions.subscribe(GROUP, TOPIC)
    assert found.queues[lost.queue_id].leases[lost.queue_offset].is_returning
    await rig.broker.change_invisible(GROUP, TOPIC, lost.receipt_handle, 0)
    await coming_back
    await rig.settle()
    assert not await receive(rig)
    await rig.pass_ms(RETRY_STEPS_MS[0] - 1)
    assert not await receive(rig)
    await rig.pass_ms(1)
    (again,) = await receive(rig)
    assert (again.message_id, again.delivery_attempt) == ("m-1", 2)


@every_broker()
async def test_a_message_hidden_by_its_client_stays_hidden_when_others_return(rig: Rig) -> None:
    """It had that one: the time it was promised for its change holds."""
    await send(rig, "hidden", "lost")
    both = {each.message_id: each for each in await receive(rig)}
    await rig.broker.change_invisible(GROUP, TOPIC, both["hidden"].receipt_handle, INVISIBLE_MS * 2)
    await rig.broker.not_taken(GROUP, leased(list(both.values())))
    await rig.settle()
    (again,) = await receive(rig)
    assert again.message_id == "lost"
    assert list(await ack(rig, again)) == [None]
    await rig.pass_ms(INVISIBLE_MS * 2 - 1)
    assert not await receive(rig)
    await rig.pass_ms(1)
    assert ids(await receive(rig)) == ["hidden"]
