"""What a step of the host's clock does: nothing is stuck, nothing is destroyed early, and no id is forgotten."""

from __future__ import annotations

import pytest
from support.clients.embedded.retain import TOLD, keep, lying, turn
from support.models.store.outbox import read_outbox
from support.rigs.broker.rig import (
    GROUP,
    INVISIBLE_MS,
    TOPIC,
    EmbeddedRig,
    End,
    ack,
    an_envelope,
    every_durable_broker,
    ids,
    receive,
    receive_one,
    send,
)

from dmq.store.schema import keys
from dmq.store.schema.keys import Family
from dmq.store.schema.topics.group import GroupKind
from dmq.store.writer.operations import Delete, Put
from dmq.trail.events import EventKind

pytestmark = pytest.mark.contract
YEAR_MS = 365 * 24 * 3_600_000
GLITCH_MS = 600  # how long the clock is wrong
SECOND_MS = 1_000
MINUTE_MS = 60_000


def step(rig: EmbeddedRig, by_ms: int) -> None:
    """Set the wall clock."""
    rig.clock.step_to(rig.clock.now_ms() + by_ms)


async def look(rig: EmbeddedRig) -> None:
    """Let the daemon have its look at the clock."""
    await rig.settle()


@every_durable_broker()
async def test_a_lease_ends_at_its_time_through_clock_steps(rig: EmbeddedRig) -> None:
    """Taken while the clock was a year ahead: 30 s later it is back, and not a millisecond before."""
    await send(rig, "m-1")
    step(rig, YEAR_MS)
    await receive_one(rig)
    rig.clock.advance(GLITCH_MS)
    await look(rig)
    step(rig, -YEAR_MS)
    await rig.pass_ms(INVISIBLE_MS - GLITCH_MS - 1)
    assert not await receive(rig)
    await rig.pass_ms(1)
    assert (await receive_one(rig)).delivery_attempt == 2


@every_durable_broker()
async def test_a_lease_is_not_ended_by_a_step_forward(rig: EmbeddedRig) -> None:
    """Its consumer has the time it was given."""
    await send(rig, "m-1")
    delivery = await receive_one(rig)
    step(rig, YEAR_MS)
    await rig.settle()
    assert not await receive(rig)
    assert list(await ack(rig, delivery)) == [None]


@every_durable_broker()
async def test_a_renewed_lease_is_not_stuck_after_a_kill(rig: EmbeddedRig) -> None:
    """It is a row with a time a year ahead; the next run gives it its own length at most."""
    await send(rig, "m-1")
    delivery = await receive_one(rig)
    step(rig, YEAR_MS)
    await rig.broker.change_invisible(GROUP, TOPIC, delivery.receipt_handle, INVISIBLE_MS)
    step(rig, -YEAR_MS)
    await rig.restart(End.KILL)
    await rig.settle()
    assert not await receive(rig)
    await rig.pass_ms(INVISIBLE_MS)
    assert (await receive_one(rig)).delivery_attempt == 2


@every_durable_broker()
async def test_a_retry_that_was_set_while_the_clock_was_ahead_comes_in_its_time(rig: EmbeddedRig) -> None:
    """It waits on the timeline, a year away; after the step back it waits for what is left of its second."""
    await rig.set_group(GROUP, max_attempts=3, delays_ms=(SECOND_MS,))
    await send(rig, "m-1")
    delivery = (await receive(rig, renew_for="client-1"))[0]
    step(rig, YEAR_MS)
    await rig.broker.change_invisible(GROUP, TOPIC, delivery.receipt_handle, 1)
    rig.clock.advance(GLITCH_MS)
    await look(rig)
    step(rig, -YEAR_MS)
    await rig.settle()
    await rig.pass_ms(SECOND_MS - GLITCH_MS - 1)
    assert not await receive(rig)
    await rig.pass_ms(1)
    assert (await receive_one(rig)).delivery_attempt == 2


@every_durable_broker()
async def test_a_retry_is_not_stuck_after_a_kill_at_the_step_back(rig: EmbeddedRig) -> None:
    """Nobody noticed the step before the kill: the next run does, by the boot clock."""
    await rig.set_group(GROUP, max_attempts=3, delays_ms=(SECOND_MS,))
    await send(rig, "m-1")
    delivery = (await receive(rig, renew_for="client-1"))[0]
    step(rig, YEAR_MS)
    await look(rig)
    await rig.broker.change_invisible(GROUP, TOPIC, delivery.receipt_handle, 1)
    step(rig, -YEAR_MS)
    await rig.restart(End.KILL)
    await rig.settle()
    await rig.pass_ms(SECOND_MS)
    assert (await receive_one(rig)).delivery_attempt == 2


@every_durable_broker()
async def test_a_message_group_continues_after_the_glitch(rig: EmbeddedRig) -> None:
    """Its first message was failed meanwhile, and hides where it lies."""
    await rig.set_group(GROUP, max_attempts=3, delays_ms=(SECOND_MS,), is_fifo=True)
    await rig.broker.send([an_envelope(each, message_group="g") for each in ("m-1", "m-2")])
    delivery = (await receive(rig, renew_for="client-1"))[0]
    step(rig, YEAR_MS)
    await rig.broker.change_invisible(GROUP, TOPIC, delivery.receipt_handle, 1)
    rig.clock.advance(GLITCH_MS)
    await look(rig)
    step(rig, -YEAR_MS)
    for end in (None, End.KILL):
        if end is not None:
            await rig.restart(end)
        await rig.settle()
        assert not await receive(rig)  # who comes first after a restart has what is hidden loaded
    await rig.pass_ms(SECOND_MS)
    assert [(each.message_id, each.delivery_attempt) for each in await receive(rig)] == [("m-1", 2), ("m-2", 1)]


@every_durable_broker()
async def test_a_relative_delay_is_moved_back_and_a_delivery_timestamp_is_not(rig: EmbeddedRig) -> None:
    """A second from the send is a second; the day that somebody named is that day."""
    step(rig, YEAR_MS)
    at_ms = rig.clock.now_ms() + SECOND_MS
    await rig.broker.send(
        [
            an_envelope("relative", deliver_at_ms=at_ms)._replace(is_relative=True),
            an_envelope("absolute", deliver_at_ms=at_ms),
        ]
    )
    rig.clock.advance(GLITCH_MS)
    await look(rig)
    step(rig, -YEAR_MS)
    await rig.settle()
    await rig.pass_ms(SECOND_MS - GLITCH_MS - 1)
    assert not await receive(rig)
    await rig.pass_ms(1)
    assert ids(await receive(rig)) == ["relative"]
    await rig.pass_ms(at_ms - rig.clock.now_ms())
    assert "absolute" in ids(await receive(rig))


@every_durable_broker(queues=1)
async def test_a_step_forward_ages_nothing(rig: EmbeddedRig) -> None:
    """66 s forward with a short keep_time: what nobody has read is there, until the clock was steady for a while."""
    await keep(rig, TOLD)
    await send(rig, "m-1", "m-2")
    step(rig, 66 * SECOND_MS)
    assert (await turn(rig))[:2] == (0, 0)
    assert lying(rig) == 2
    await rig.restart(End.KILL)
    assert (await turn(rig))[:2] == (0, 0)
    rig.clock.advance(10 * MINUTE_MS)
    assert (await turn(rig))[:2] == (2, 2)


@every_durable_broker()
async def test_flapping_forgets_no_id(rig: EmbeddedRig) -> None:
    """16 minutes forward and back, again and again: a repeated id is a repeated id."""
    await send(rig, "m-1")
    for _ in range(6):
        for by_ms in (16 * MINUTE_MS, -16 * MINUTE_MS):
            step(rig, by_ms)
            (receipt,) = await send(rig, "m-1")
            assert receipt.repeated
    assert ids(await receive(rig)) == ["m-1"]


@every_durable_broker()
async def test_flapping_over_restarts_forgets_no_id(rig: EmbeddedRig) -> None:
    """The age of what is known is kept over a kill."""
    await send(rig, "m-1")
    for by_ms in (16 * MINUTE_MS, -16 * MINUTE_MS, 16 * MINUTE_MS):
        step(rig, by_ms)
        await rig.restart(End.KILL)
        (receipt,) = await send(rig, "m-1")
        assert receipt.repeated


@every_durable_broker()
async def test_a_step_is_an_event_once(rig: EmbeddedRig) -> None:
    """Recorded with what it was; one that came while the daemon was down as well."""
    step(rig, YEAR_MS)
    await look(rig)
    await look(rig)
    await rig.restart(End.KILL)
    step(rig, -YEAR_MS)
    await rig.restart(End.KILL)
    await look(rig)
    found = [each.event for each in read_outbox(rig.store) if each.event.kind is EventKind.CLOCK_CHANGED]
    assert [b"step_ms=%d " % by_ms in each.message_id for each, by_ms in zip(found, (YEAR_MS, -YEAR_MS), strict=True)]


@every_durable_broker()
async def test_a_store_of_format_2_is_taken_over(rig: EmbeddedRig) -> None:
    """No row of the clocks, a generation by wall time, a lease without its length: ids are known, the lease ends."""
    await send(rig, "m-1")
    delivery = await receive_one(rig)
    await rig.broker.change_invisible(GROUP, TOPIC, delivery.receipt_handle, INVISIBLE_MS)
    rows = rig.store.scan(Family.GROUP, b"", b"\xff" * 20, limit=100).rows
    ((key, value),) = [(key, value) for key, value in rows if key[10] == GroupKind.EXCEPTION]
    (generation,) = rig.store.get_many(Family.META, [keys.META_GENERATION])
    assert generation is not None
    number, _ = keys.unpack_pair(generation)
    await rig.store.commit_async([
        Put(Family.GROUP, key, value[:26] + b"\0" + value[35:]),
        Put(Family.META, keys.META_FORMAT, keys.pack_u64(2)),
        Put(Family.META, keys.META_GENERATION, keys.pack_pair(number, rig.clock.now_ms())),
        Delete(Family.META, keys.META_CLOCK),
    ])  # fmt: skip
    await rig.restart(End.KILL)
    assert not rig.store.clock.is_steady(), "nothing is known of it"
    (receipt,) = await send(rig, "m-1")
    assert receipt.repeated
    assert not await receive(rig)
    await rig.pass_ms(INVISIBLE_MS)
    assert (await receive_one(rig)).delivery_attempt == 2
