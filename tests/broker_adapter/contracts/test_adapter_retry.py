"""Failing, as every ``PopBroker`` promises it: a group's policy, who is bound by it, and what counts as an attempt."""

from __future__ import annotations

import asyncio

import pytest
from support.clients.embedded.failing import (
    ATTEMPTS,
    CLIENT,
    DELAYS_MS,
    change,
    comes_after,
    dead_letters,
    is_over,
    is_refused,
    pushed,
    pushed_one,
)
from support.rigs.broker.rig import (
    GROUP,
    INVISIBLE_MS,
    TOPIC,
    Rig,
    ack,
    an_envelope,
    every_broker,
    ids,
    receive,
    receive_one,
    send,
)

from broker_adapter.contracts.adapter import GroupSettings

pytestmark = pytest.mark.contract


@every_broker()
async def test_a_group_shows_its_delivery_settings(rig: Rig) -> None:
    """What was set for it last; a group that nobody knows gets a default that makes sense."""
    nobody = rig.broker.group_settings("nobody")
    assert not nobody.is_fifo
    assert nobody.max_attempts > 1
    assert nobody.delays_ms
    assert all(delay_ms > 0 for delay_ms in nobody.delays_ms)
    await rig.set_group("strict", max_attempts=3, delays_ms=(7, 9), is_fifo=True)
    assert rig.broker.group_settings("strict") == GroupSettings(True, 3, (7, 9))
    await rig.set_group("strict", max_attempts=2, delays_ms=(8,))
    assert rig.broker.group_settings("strict") == GroupSettings(False, 2, (8,))
    assert rig.broker.group_settings("nobody") == nobody


@every_broker()
async def test_a_group_that_reads_ordered_topics_only_is_fifo(rig: Rig) -> None:
    """Unless somebody said otherwise; a topic with one message out of order is none, nor is one nobody sent to."""
    await rig.broker.send([an_envelope("m-1", topic="ordered", message_group="a")])
    await rig.broker.send([an_envelope("m-2", topic="plain")])
    await rig.broker.send([an_envelope("m-3", topic="mixed", message_group="a")])
    await rig.broker.send([an_envelope("m-4", topic="mixed")])
    for topics in ([], ["plain"], ["mixed"], ["nowhere"], ["ordered", "plain"], ["ordered", "nowhere"]):
        assert not rig.broker.group_settings("nobody", topics).is_fifo, topics
    assert rig.broker.group_settings("nobody", ["ordered"]).is_fifo
    await rig.set_group("strict", max_attempts=3, delays_ms=(7,), is_fifo=True)
    assert rig.broker.group_settings("strict", ["plain"]).is_fifo
    await rig.set_group("strict", max_attempts=3, delays_ms=(7,))
    assert not rig.broker.group_settings("strict", ["ordered"]).is_fifo


# -- a push consumer that failed --------------------------------------------------------------------------------------


@every_broker()
async def test_a_failed_message_comes_back_at_the_policys_time(rig: Rig) -> None:
    """Never a millisecond early, under the topic it was sent to, with the next attempt; the last delay repeats."""
    await rig.set_group(GROUP, max_attempts=5, delays_ms=DELAYS_MS)
    await rig.broker.send([an_envelope("m-1", payload=b"as sent", tag="red")])
    delivery = await pushed_one(rig)
    for attempt, delay_ms in ((2, 1_000), (3, 5_000), (4, 5_000)):
        await change(rig, delivery)
        delivery = await comes_after(rig, delay_ms)
        assert (delivery.topic, delivery.message_id, delivery.payload) == (TOPIC, "m-1", b"as sent")
        assert (delivery.delivery_attempt, delivery.dead_letter) == (attempt, None)
    assert list(await ack(rig, delivery)) == [None]
    assert await is_over(rig)
    assert not await dead_letters(rig)


@every_broker()
async def test_a_consumer_may_wish_for_more_time_but_not_for_less(rig: Rig) -> None:
    """Node asks for 0, and would burn all attempts in a moment."""
    await send(rig, "m-1")
    for wished_ms, waits_ms in ((0, 1_000), (999, 1_000), (1_001, 1_001), (7_000, 7_000)):
        group = f"wishes-{wished_ms}"
        await rig.set_group(group, max_attempts=ATTEMPTS, delays_ms=DELAYS_MS)
        await change(rig, await pushed_one(rig, group=group), wished_ms, group=group)
        assert (await comes_after(rig, waits_ms, group=group)).delivery_attempt == 2


@every_broker()
async def test_the_handle_of_a_failed_delivery_is_refused(rig: Rig) -> None:
    """Before the message is back and after: a late word of the same consumer changes nothing."""
    await rig.set_group(GROUP, max_attempts=ATTEMPTS, delays_ms=DELAYS_MS)
    await send(rig, "m-1")
    failed = await pushed_one(rig)
    await change(rig, failed)
    assert await is_refused(rig, failed)
    again = await comes_after(rig, 1_000)
    assert await is_refused(rig, failed)
    assert list(await ack(rig, again)) == [None]
    assert await is_over(rig)


@every_broker()
async def test_a_suspended_delivery_is_no_failure(rig: Rig) -> None:
    """Its duration is obeyed to the letter and costs no attempt, also of a push consumer on its last one."""
    await rig.set_group(GROUP, max_attempts=1, delays_ms=DELAYS_MS)
    await send(rig, "m-1")
    delivery = await pushed_one(rig)
    for invisible_ms in (3, 60_000, 0):
        await change(rig, delivery, invisible_ms, suspend=True)
        delivery = await comes_after(rig, invisible_ms)
        assert delivery.delivery_attempt == 1
    assert list(await ack(rig, delivery)) == [None]
    assert await is_over(rig)
    assert not await dead_letters(rig)


@every_broker()
async def test_a_suspended_delivery_may_still_be_finished(rig: Rig) -> None:
    """Its handle stays good until it is handed out again, also for saying that it failed."""
    await rig.set_group(GROUP, max_attempts=ATTEMPTS, delays_ms=DELAYS_MS)
    await send(rig, "m-1", "m-2")
    for delivery in await pushed(rig):
        await change(rig, delivery, 60_000, suspend=True)
        if delivery.message_id == "m-1":
            assert list(await ack(rig, delivery)) == [None]
        else:
            await change(rig, delivery)
    assert (await comes_after(rig, 1_000)).message_id == "m-2"


@every_broker()
async def test_a_policy_that_changes_counts_from_the_next_failure(rig: Rig) -> None:
    """What waits already keeps its time."""
    await rig.set_group(GROUP, max_attempts=ATTEMPTS, delays_ms=(5_000,))
    await send(rig, "m-1")
    await change(rig, await pushed_one(rig))
    await rig.set_group(GROUP, max_attempts=2, delays_ms=(1_000,))
    await change(rig, await comes_after(rig, 5_000))
    assert [(message_id, facts.attempts) for message_id, facts in await dead_letters(rig)] == [("m-1", 2)]


@every_broker()
async def test_a_message_waits_for_each_group_by_itself(rig: Rig) -> None:
    """Two groups fail the same message at once, each with its policy; a third is done with it."""
    await rig.set_group("first", max_attempts=2, delays_ms=(1_000,))
    await rig.set_group("second", max_attempts=3, delays_ms=(4_000,))
    await send(rig, "m-1")
    for group in ("first", "second"):
        await change(rig, await pushed_one(rig, group=group), group=group)
    await ack(rig, *await receive(rig, group="third"), group="third")
    first = await comes_after(rig, 1_000, group="first")
    assert not await pushed(rig, group="second")
    await change(rig, first, group="first")
    second = await comes_after(rig, 3_000, group="second")
    assert (first.delivery_attempt, second.delivery_attempt) == (2, 2)
    assert list(await ack(rig, second, group="second")) == [None]
    for group in ("first", "second", "third"):
        assert await is_over(rig, group=group)
    assert [message_id for message_id, _ in await dead_letters(rig, group="first")] == ["m-1"]
    assert not await dead_letters(rig, group="second")


@every_broker()
async def test_many_messages_fail_and_come_back_by_themselves(rig: Rig) -> None:
    """Each once, whatever queue it was in."""
    await rig.set_group(GROUP, max_attempts=ATTEMPTS, delays_ms=DELAYS_MS)
    sent = [f"m-{number}" for number in range(20)]
    await send(rig, *sent)
    for delivery in await pushed(rig):
        await change(rig, delivery)
    await rig.pass_ms(1_000)
    again = await pushed(rig)
    assert sorted(ids(again)) == sorted(sent)
    assert {each.delivery_attempt for each in again} == {2}
    assert list(await ack(rig, *again)) == [None] * 20
    assert await is_over(rig)


@every_broker()
async def test_retries_reach_a_consumer_that_changes_queues(rig: Rig) -> None:
    """Consumers of a FIFO group name a queue in each receive; no retry may lie where none of them looks."""
    await rig.set_group(GROUP, max_attempts=ATTEMPTS, delays_ms=DELAYS_MS, is_fifo=True)
    await send(rig, *(f"m-{number}" for number in range(4)))
    for delivery in await pushed(rig):
        await change(rig, delivery)
    await rig.pass_ms(1_000)
    found = [each for queue_id in range(4) for each in await pushed(rig, queue_id=queue_id)]
    assert sorted(ids(found)) == [f"m-{number}" for number in range(4)]
    assert list(await ack(rig, *found)) == [None] * 4


@every_broker()
async def test_a_retry_passes_the_filter_it_passed_before(rig: Rig) -> None:
    """Its tag is still there."""
    await rig.set_group(GROUP, max_attempts=ATTEMPTS, delays_ms=DELAYS_MS)
    await rig.broker.send([an_envelope("m-1", tag="red")])
    (delivery,) = await receive(rig, tags=["red"], renew_for=CLIENT)
    await change(rig, delivery)
    await rig.pass_ms(1_000)
    assert ids(await receive(rig, tags=["red"], renew_for=CLIENT)) == ["m-1"]


@every_broker()
async def test_a_waiter_gets_a_message_when_its_retry_is_due(rig: Rig) -> None:
    """No interval passes."""
    await rig.set_group(GROUP, max_attempts=ATTEMPTS, delays_ms=DELAYS_MS)
    await send(rig, "m-1")
    await change(rig, await pushed_one(rig))
    waiting = asyncio.ensure_future(receive(rig, wait_ms=60_000, renew_for=CLIENT))
    await asyncio.sleep(0.02)  # until it waits
    assert not waiting.done()
    await rig.pass_ms(1_000)
    assert ids(await waiting) == ["m-1"]


# -- simple consumers, and leases that end ----------------------------------------------------------------------------


@every_broker()
async def test_a_simple_consumer_is_obeyed_to_the_letter(rig: Rig) -> None:
    """Shorter than the policy's delay, longer, or none at all; it may change its mind."""
    await rig.set_group(GROUP, max_attempts=9, delays_ms=DELAYS_MS)
    await send(rig, "m-1")
    for attempt, invisible_ms in enumerate((3, 60_000, 0, 999), start=1):
        delivery = await receive_one(rig)
        assert delivery.delivery_attempt == attempt
        await change(rig, delivery, invisible_ms)
        if invisible_ms:
            await rig.pass_ms(invisible_ms - 1)
            assert not await receive(rig)
            await rig.pass_ms(1)
    delivery = await receive_one(rig)
    await change(rig, delivery, 2_000)
    assert list(await ack(rig, delivery)) == [None]
    assert await is_over(rig)


@every_broker()
async def test_a_lease_that_ends_is_a_failure(rig: Rig) -> None:
    """It comes back at once, because the wait was the lease; after the last attempt the message is dead, once."""
    await send(rig, "m-1")
    for group, renew_for in (("simple", ""), ("push", CLIENT)):
        await rig.set_group(group, max_attempts=ATTEMPTS, delays_ms=DELAYS_MS)
        began_at_ms = rig.clock.now_ms()
        for attempt in (1, 2, 3):
            (delivery,) = await receive(rig, group=group, renew_for=renew_for)
            assert delivery.delivery_attempt == attempt
            rig.broker.client_gone(CLIENT)  # or its lease is renewed
            await rig.pass_ms(INVISIBLE_MS)
        ((message_id, facts),) = await dead_letters(rig, group=group)
        assert (message_id, facts.attempts, facts.reason) == ("m-1", 3, "exhausted")
        assert began_at_ms < facts.first_failed_at_ms < facts.last_failed_at_ms <= rig.clock.now_ms()
        assert await is_over(rig, group=group)
        assert not await dead_letters(rig, group=group)


@every_broker()
async def test_a_simple_consumer_that_gives_its_last_attempt_back_ends_it(rig: Rig) -> None:
    """When the time that it asked for is over: until then it may still acknowledge."""
    await rig.set_group(GROUP, max_attempts=1, delays_ms=DELAYS_MS)
    await send(rig, "m-1", "m-2", "m-3")
    for delivery in await receive(rig):
        await change(rig, delivery, 0 if delivery.message_id == "m-1" else 2_000)
        if delivery.message_id == "m-2":
            assert list(await ack(rig, delivery)) == [None]
    assert [message_id for message_id, _ in await dead_letters(rig)] == ["m-1"]
    await rig.pass_ms(1_999)
    assert not await dead_letters(rig)
    await rig.pass_ms(1)
    ((message_id, facts),) = await dead_letters(rig)
    assert (message_id, facts.attempts, facts.reason) == ("m-3", 1, "exhausted")
    assert await is_over(rig)


@every_broker()
async def test_failures_of_every_kind_count_together(rig: Rig) -> None:
    """A nack, an ended lease, a nack: three attempts."""
    await rig.set_group(GROUP, max_attempts=ATTEMPTS, delays_ms=DELAYS_MS)
    await send(rig, "m-1")
    await change(rig, await pushed_one(rig))
    await rig.pass_ms(1_000)
    assert (await receive_one(rig)).delivery_attempt == 2
    await rig.pass_ms(INVISIBLE_MS)
    last = await pushed_one(rig)
    assert last.delivery_attempt == 3
    await change(rig, last)
    assert [facts.attempts for _, facts in await dead_letters(rig)] == [3]
    assert await is_over(rig)
