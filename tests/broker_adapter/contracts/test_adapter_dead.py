"""Giving up, as every ``PopBroker`` promises it: when a message is dead, who is believed, and what its letter says."""

from __future__ import annotations

import asyncio

import pytest
from support.clients.embedded.failing import (
    ATTEMPTS,
    DELAYS_MS,
    UNDERTAKER,
    change,
    comes_after,
    dead_letters,
    give_up,
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

from broker_adapter.contracts.errors import Refused, Rule
from retry.policy import MAX_ATTEMPTS_LIMIT

pytestmark = pytest.mark.contract
DEAD = f"%DLQ%{GROUP}"


@every_broker()
async def test_the_last_failure_makes_a_dead_letter_with_its_facts(rig: Rig) -> None:
    """At once and once, as it was sent, with where it came from and when it failed."""
    await rig.set_group(GROUP, max_attempts=ATTEMPTS, delays_ms=DELAYS_MS)
    await rig.broker.send([an_envelope("m-1", payload=b"as sent", tag="red")])
    delivery = await pushed_one(rig)
    await rig.pass_ms(77)  # of work
    first_failed_at_ms = rig.clock.now_ms()
    for delay_ms in DELAYS_MS:
        await change(rig, delivery)
        delivery = await comes_after(rig, delay_ms)
    await change(rig, delivery)
    last_failed_at_ms = rig.clock.now_ms()
    await rig.pass_ms(77)
    (dead,) = await receive(rig, group=UNDERTAKER, topic=DEAD, tags=["red"])
    assert (dead.topic, dead.payload, dead.delivery_attempt, dead.deliver_at_ms) == (DEAD, b"as sent", 1, 0)
    assert dead.dead_letter == (TOPIC, "m-1", ATTEMPTS, "exhausted", first_failed_at_ms, last_failed_at_ms)
    assert list(await ack(rig, dead, group=UNDERTAKER, topic=DEAD)) == [None]
    assert await is_over(rig)
    assert not await dead_letters(rig)


@every_broker()
async def test_a_message_sent_to_a_dead_letter_queue_is_an_ordinary_message(rig: Rig) -> None:
    """It has no end to tell of, and goes to whoever reads the queue."""
    await rig.broker.send([an_envelope("m-1", topic=DEAD)])
    (delivery,) = await receive(rig, group=UNDERTAKER, topic=DEAD)
    assert (delivery.message_id, delivery.topic, delivery.dead_letter) == ("m-1", DEAD, None)


@every_broker()
async def test_a_waiter_for_dead_letters_gets_them_at_once(rig: Rig) -> None:
    """The death of a message wakes them."""
    await rig.set_group(GROUP, max_attempts=1, delays_ms=DELAYS_MS)
    await send(rig, "m-1")
    waiting = asyncio.ensure_future(receive(rig, group=UNDERTAKER, topic=DEAD, wait_ms=60_000))
    await asyncio.sleep(0.02)  # until it waits
    await change(rig, await pushed_one(rig))
    assert ids(await waiting) == ["m-1"]


@every_broker()
async def test_a_simple_consumer_that_gives_up_is_believed(rig: Rig) -> None:
    """At its first attempt, in a FIFO group too: the application said so. The message never comes back."""
    await send(rig, "m-1")
    for group, is_fifo in (("plain", False), ("fifo", True)):
        await rig.set_group(group, max_attempts=9, delays_ms=DELAYS_MS, is_fifo=is_fifo)
        delivery = await receive_one(rig, group=group)
        await rig.pass_ms(77)
        now_ms = rig.clock.now_ms()
        await give_up(rig, delivery, group=group)
        assert await dead_letters(rig, group=group) == [("m-1", (TOPIC, "m-1", 1, "forwarded", now_ms, now_ms))]
        assert await is_over(rig, group=group)


@every_broker()
async def test_a_push_consumer_that_gives_up_is_believed_at_the_maximum_only(rig: Rig) -> None:
    """Below it the message comes back by the policy, and the handle is refused: clients give up at the first failure.

    In a FIFO group and in a plain one, whose clients may not know it yet; with a message group and without.
    """
    for group, message_group in (("plain", ""), ("plain", "a"), ("fifo", ""), ("fifo", "a")):
        topic = message_id = f"{group}-{message_group}"
        await rig.set_group(group, max_attempts=ATTEMPTS, delays_ms=DELAYS_MS, is_fifo=group == "fifo")
        await rig.broker.send([an_envelope(message_id, topic=topic, message_group=message_group)])
        (delivery,) = await pushed(rig, group=group, topic=topic)
        first_failed_at_ms = rig.clock.now_ms()
        for attempt, delay_ms in enumerate(DELAYS_MS, start=1):
            await give_up(rig, delivery, attempt, group=group)
            assert await is_refused(rig, delivery, group=group)
            assert not await dead_letters(rig, group=group)
            delivery = await comes_after(rig, delay_ms, group=group, topic=topic)
            assert (delivery.message_id, delivery.delivery_attempt) == (message_id, attempt + 1)
        await give_up(rig, delivery, ATTEMPTS, group=group)
        ((dead_id, facts),) = await dead_letters(rig, group=group)
        assert (dead_id, facts[:3]) == (message_id, (topic, message_id, ATTEMPTS))
        assert facts.reason in {"forwarded", "exhausted"}
        assert facts[4:] == (first_failed_at_ms, rig.clock.now_ms())
        assert await is_over(rig, group=group, topic=topic)


@every_broker()
async def test_a_consumer_that_tried_by_itself_is_believed(rig: Rig) -> None:
    """It was delivered once, and says that it failed as often as the group allows."""
    await rig.set_group(GROUP, max_attempts=ATTEMPTS, delays_ms=DELAYS_MS, is_fifo=True)
    await send(rig, "m-1")
    await give_up(rig, await pushed_one(rig), ATTEMPTS)
    ((message_id, facts),) = await dead_letters(rig)
    assert (message_id, facts.reason in {"forwarded", "exhausted"}) == ("m-1", True)
    assert await is_over(rig)


@every_broker()
async def test_attempts_end_against_the_will_of_a_consumer(rig: Rig) -> None:
    """A client that says each time it was the first is not believed, and still cannot go on for ever."""
    await rig.set_group(GROUP, max_attempts=2, delays_ms=(1_000,), is_fifo=True)
    await send(rig, "m-1")
    await give_up(rig, await pushed_one(rig), 1)
    await give_up(rig, await comes_after(rig, 1_000), 1)
    assert [(message_id, facts.attempts) for message_id, facts in await dead_letters(rig)] == [("m-1", 2)]
    assert await is_over(rig)


@every_broker()
async def test_a_push_consumer_that_means_it_is_believed(rig: Rig) -> None:
    """It says so with more attempts than any policy has: its letter has those that there were."""
    for group, message_group in (("plain", ""), ("plain", "a"), ("fifo", ""), ("fifo", "a")):
        topic = message_id = f"{group}-{message_group}"
        await rig.set_group(group, max_attempts=ATTEMPTS, delays_ms=DELAYS_MS, is_fifo=group == "fifo")
        await rig.broker.send([an_envelope(message_id, topic=topic, message_group=message_group)])
        (delivery,) = await pushed(rig, group=group, topic=topic)
        now_ms = rig.clock.now_ms()
        await give_up(rig, delivery, MAX_ATTEMPTS_LIMIT + 1, group=group)
        assert await dead_letters(rig, group=group) == [
            (message_id, (topic, message_id, 1, "forwarded", now_ms, now_ms))
        ]
        assert await is_over(rig, group=group, topic=topic)


@every_broker()
async def test_only_a_good_handle_gives_up(rig: Rig) -> None:
    """Garbage, another group's, another topic's, a finished one, an earlier hand-out's: refused, nothing dies."""
    await rig.set_group(GROUP, max_attempts=ATTEMPTS, delays_ms=DELAYS_MS)
    await send(rig, "m-1", "m-2")
    await receive(rig, group="others")
    stale, finished = await receive(rig)
    await ack(rig, finished)
    await rig.pass_ms(INVISIBLE_MS)
    current = await receive_one(rig)
    for group, topic, handle in (
        (GROUP, TOPIC, ""),
        (GROUP, TOPIC, "garbage"),
        ("others", TOPIC, current.receipt_handle),
        ("nobody", TOPIC, current.receipt_handle),
        (GROUP, "refunds", current.receipt_handle),
        (GROUP, TOPIC, finished.receipt_handle),
        (GROUP, TOPIC, stale.receipt_handle),
    ):
        with pytest.raises(Refused) as error:
            await rig.broker.dead_letter(group, topic, handle, attempts=ATTEMPTS)
        assert error.value.rule is Rule.RECEIPT_HANDLE
    assert list(await ack(rig, current)) == [None]
    for group in (GROUP, "others"):
        assert not await dead_letters(rig, group=group)
