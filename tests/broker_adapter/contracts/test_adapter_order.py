"""Message groups, as every ``PopBroker`` promises them: in order, through failures, and nobody else held up by it."""

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
    give_up,
    pushed,
    pushed_one,
)
from support.rigs.broker.rig import GROUP, INVISIBLE_MS, Rig, ack, an_envelope, every_broker, ids, receive

pytestmark = pytest.mark.contract


async def send_grouped(rig: Rig, *message_ids: str) -> None:
    """Send messages; what is before the dash is the message group, ``u`` for none."""
    await rig.broker.send(
        [an_envelope(each, message_group="" if each[0] == "u" else each.partition("-")[0]) for each in message_ids]
    )


@every_broker()
async def test_a_push_consumer_gets_one_message_of_a_message_group_at_a_time(rig: Rig) -> None:
    """In one receive and over many: its client might go on to the next one when the first has failed."""
    await send_grouped(rig, "a-1", "a-2", "b-1", "a-3", "b-2", "u-1", "u-2")
    for wave in (["a-1", "b-1", "u-1", "u-2"], ["a-2", "b-2"], ["a-3"], []):
        found = await pushed(rig)
        assert sorted(ids(found)) == wave
        assert not await pushed(rig)
        assert not await receive(rig)
        assert list(await ack(rig, *found)) == [None] * len(wave)


@every_broker()
async def test_a_simple_consumer_gets_a_run_of_a_message_group(rig: Rig) -> None:
    """In order, in one receive; nothing behind it goes out before the whole run is finished, also not to others."""
    await send_grouped(rig, "a-1", "a-2", "a-3", "a-4", "b-1", "u-1")
    run = [each for each in await receive(rig, batch_max=6) if each.message_id[0] == "a"]
    assert ids(run) == ["a-1", "a-2", "a-3", "a-4"]
    await send_grouped(rig, "a-5")
    for order in ((0, 3), (1,)):
        assert not await receive(rig)
        await ack(rig, *(run[position] for position in order))
    assert not await pushed(rig)
    await ack(rig, run[2])
    assert ids(await receive(rig)) == ["a-5"]


@every_broker(queues=1)
async def test_a_run_is_cut_by_the_batch_bound(rig: Rig) -> None:
    """What did not fit waits for the end of what did, while other message groups go out."""
    await send_grouped(rig, "a-1", "a-2", "a-3", "b-1")
    first = await receive(rig, batch_max=2)
    assert ids(first) == ["a-1", "a-2"]
    assert ids(await receive(rig, batch_max=2)) == ["b-1"]
    await ack(rig, *first)
    assert ids(await receive(rig, batch_max=2)) == ["a-3"]


@every_broker()
async def test_a_failed_message_blocks_only_its_message_group(rig: Rig) -> None:
    """The rest waits until it came again by the policy and is finished, in a FIFO group and in a plain one."""
    await send_grouped(rig, "a-1", "a-2", "b-1", "b-2", "u-1", "u-2")
    for group, is_fifo in (("plain", False), ("fifo", True)):
        await rig.set_group(group, max_attempts=ATTEMPTS, delays_ms=DELAYS_MS, is_fifo=is_fifo)
        found = {each.message_id: each for each in await pushed(rig, group=group)}
        assert sorted(found) == ["a-1", "b-1", "u-1", "u-2"]
        await change(rig, found.pop("a-1"), group=group)
        await change(rig, found.pop("u-1"), group=group)
        assert not await pushed(rig, group=group)
        await ack(rig, *found.values(), group=group)
        assert ids(await pushed(rig, group=group)) == ["b-2"]
        await rig.pass_ms(999)
        assert not await pushed(rig, group=group)
        await rig.pass_ms(1)
        again = await pushed(rig, group=group)
        assert sorted((each.message_id, each.delivery_attempt) for each in again) == [("a-1", 2), ("u-1", 2)]
        await ack(rig, *again, group=group)
        assert ids(await pushed(rig, group=group)) == ["a-2"]


@every_broker()
async def test_a_message_group_continues_when_its_head_is_dead(rig: Rig) -> None:
    """Not before, and at once: each message has all its attempts, and order holds to the last."""
    await rig.set_group(GROUP, max_attempts=2, delays_ms=(1_000,))
    await send_grouped(rig, "a-1", "a-2", "a-3")
    for message_id in ("a-1", "a-2"):
        head = await pushed_one(rig)
        assert (head.message_id, head.delivery_attempt) == (message_id, 1)
        await change(rig, head)
        again = await comes_after(rig, 1_000)
        assert (again.message_id, again.delivery_attempt) == (message_id, 2)
        await change(rig, again)
    assert (await pushed_one(rig)).message_id == "a-3"
    assert [message_id for message_id, _ in await dead_letters(rig)] == ["a-1", "a-2"]


@every_broker()
async def test_a_message_group_continues_when_its_head_is_given_up(rig: Rig) -> None:
    """By a consumer that is believed; after one that is not, it waits for the head's retry."""
    await rig.set_group(GROUP, max_attempts=2, delays_ms=(1_000,), is_fifo=True)
    await send_grouped(rig, "a-1", "a-2")
    await give_up(rig, await pushed_one(rig), 1)
    again = await comes_after(rig, 1_000)
    assert (again.message_id, again.delivery_attempt) == ("a-1", 2)
    await give_up(rig, again, 2)
    assert (await pushed_one(rig)).message_id == "a-2"


@every_broker()
async def test_a_lease_that_ends_brings_the_head_back_first(rig: Rig) -> None:
    """A run of a simple consumer that vanished comes again in order, all of it."""
    await send_grouped(rig, "a-1", "a-2", "a-3")
    assert ids(await receive(rig, batch_max=2)) == ["a-1", "a-2"]
    await rig.pass_ms(INVISIBLE_MS - 1)
    assert not await receive(rig)
    await rig.pass_ms(1)
    again = await receive(rig)
    assert [(each.message_id, each.delivery_attempt) for each in again] == [("a-1", 2), ("a-2", 2), ("a-3", 1)]


@every_broker()
async def test_a_message_that_fails_inside_a_run_goes_before_later_ones(rig: Rig) -> None:
    """Its neighbours are finished; it waits for its time, and everything later for it."""
    await send_grouped(rig, "a-1", "a-2", "a-3", "a-4")
    first, second, third = await receive(rig, batch_max=3)
    await ack(rig, first, third)
    await change(rig, second, 5_000)
    await rig.pass_ms(4_999)
    assert not await receive(rig)
    await rig.pass_ms(1)
    assert ids(await pushed(rig)) == ["a-2"]
    assert not await pushed(rig)


@every_broker()
async def test_a_suspended_head_holds_up_its_message_group(rig: Rig) -> None:
    """It is not finished, however its time was set."""
    await send_grouped(rig, "a-1", "a-2", "b-1")
    found = {each.message_id: each for each in await pushed(rig)}
    await change(rig, found["a-1"], 5_000, suspend=True)
    await ack(rig, found["b-1"])
    head = await comes_after(rig, 5_000)
    assert (head.message_id, head.delivery_attempt) == ("a-1", 1)
    await ack(rig, head)
    assert (await pushed_one(rig)).message_id == "a-2"


@every_broker()
async def test_each_group_has_its_own_order(rig: Rig) -> None:
    """One that is stuck at the head does not hold up another."""
    await send_grouped(rig, "a-1", "a-2")
    assert ids(await pushed(rig, group="stuck")) == ["a-1"]
    for message_id in ("a-1", "a-2"):
        delivery = await pushed_one(rig, group="quick")
        assert delivery.message_id == message_id
        await ack(rig, delivery, group="quick")
    assert not await pushed(rig, group="stuck")


@every_broker()
async def test_a_waiter_gets_the_next_of_a_message_group_when_the_head_is_finished(rig: Rig) -> None:
    """By an ack, or by its death; no interval passes."""
    await rig.set_group(GROUP, max_attempts=1, delays_ms=DELAYS_MS)
    await send_grouped(rig, "a-1", "a-2", "a-3")
    delivery = await pushed_one(rig)
    for message_id in ("a-2", "a-3"):
        waiting = asyncio.ensure_future(receive(rig, wait_ms=60_000, renew_for=CLIENT))
        await asyncio.sleep(0.02)  # until it waits
        assert not waiting.done()
        if message_id == "a-2":
            await ack(rig, delivery)
        else:
            await change(rig, delivery)
        (delivery,) = await waiting
        assert delivery.message_id == message_id
