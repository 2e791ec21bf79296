"""A message that nobody wants after some time: it becomes a dead letter instead of coming late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.clients.embedded.failing import change, pushed, pushed_one
from support.forges.messages.letters import DEAD, REDRIVE, UNDERTAKER, a_message, finish, letters, told
from support.rigs.broker.rig import GROUP, EmbeddedRig, End, ack, every_durable_broker, ids, receive

from broker_adapter.contracts.message import Envelope
from broker_adapter.wire.mapping import NOT_AFTER_MS, decode, encode
from dmq.trail.events import EventKind
from retry.policy import Reason

pytestmark = pytest.mark.contract
S = 1_000


def wanted_for(
    rig: EmbeddedRig, message_id: str, for_ms: int, *, message_group: str = "", tag: str = "", deliver_at_ms: int = 0
) -> Envelope:
    """A message that is of use for so long from now on."""
    made = a_message(message_id, message_group=message_group, tag=tag, deliver_at_ms=deliver_at_ms)
    message = decode(made.payload)
    return encode(replace(message, properties={NOT_AFTER_MS: str(rig.clock.now_ms() + for_ms)}))


async def nobody_gets_it(rig: EmbeddedRig) -> None:
    """A receive finds nothing, now and later."""
    assert not await receive(rig)
    await rig.settle()
    assert not await receive(rig)


async def dead(rig: EmbeddedRig) -> Sequence[tuple[str, Reason | None, int]]:
    """The dead letters of the group: which, why, and after how many attempts."""
    return [(each.dead.message_id, each.dead.reason, each.dead.attempts) for each in await letters(rig)]


@every_durable_broker()
async def test_it_comes_until_then_and_is_a_dead_letter_after_it(rig: EmbeddedRig) -> None:
    """For each group on its own; the last millisecond is in time. Its event says until when it was wanted."""
    until_ms = rig.clock.now_ms() + S
    await rig.broker.send([wanted_for(rig, "m-1", S)])
    await receive(rig, group="others", topic="elsewhere")
    await rig.pass_ms(S)
    assert ids(await receive(rig, group="others")) == ["m-1"]
    await rig.pass_ms(1)
    await nobody_gets_it(rig)
    assert await dead(rig) == [("m-1", Reason.TOO_LATE, 0)]
    (event,) = told(rig, EventKind.DEAD_TOO_LATE)
    assert (event.attempt, event.time_ms) == (0, until_ms)


@every_durable_broker()
async def test_a_delayed_one_that_is_handed_over_late_is_not_delivered(rig: EmbeddedRig) -> None:
    """The daemon was down when it was due."""
    await rig.broker.send([wanted_for(rig, "m-1", 5 * S, deliver_at_ms=rig.clock.now_ms() + S)])
    await rig.restart(End.KILL, down_ms=6 * S)
    await rig.settle()
    await nobody_gets_it(rig)
    assert await dead(rig) == [("m-1", Reason.TOO_LATE, 0)]


@every_durable_broker()
async def test_no_retry_is_made_after_it(rig: EmbeddedRig) -> None:
    """A failure whose next attempt would be too late is the last one, and so is a lease that ends too late."""
    await rig.set_group(GROUP, max_attempts=9, delays_ms=(S, 10 * S))
    await rig.broker.send([wanted_for(rig, "m-1", 5 * S)])
    await change(rig, await pushed_one(rig))
    await rig.pass_ms(S)
    await change(rig, await pushed_one(rig))
    assert await dead(rig) == [("m-1", Reason.TOO_LATE, 2)]
    await rig.broker.send([wanted_for(rig, "m-2", 5 * S)])
    assert ids(await receive(rig, invisible_ms=10 * S)) == ["m-2"]
    await rig.pass_ms(10 * S)
    await nobody_gets_it(rig)
    assert (await dead(rig))[1:] == [("m-2", Reason.TOO_LATE, 1)]


@every_durable_broker()
async def test_a_message_group_continues_after_it(rig: EmbeddedRig) -> None:
    """Nothing of the group comes out of its order, and nothing waits for what nobody gets."""
    await rig.set_group(GROUP, max_attempts=3, delays_ms=(S,), is_fifo=True)
    await rig.broker.send([wanted_for(rig, "m-1", S, message_group="a")])
    await rig.broker.send([wanted_for(rig, "m-2", 60 * S, message_group="a")])
    await rig.pass_ms(2 * S)
    assert not await pushed(rig)
    await rig.settle()
    assert ids(await pushed(rig)) == ["m-2"]
    assert await dead(rig) == [("m-1", Reason.TOO_LATE, 0)]


@every_durable_broker()
async def test_its_letter_can_be_read_and_sent_again(rig: EmbeddedRig) -> None:
    """Who reads the dead-letter queue gets it, however late; a redriven one has no such time any more."""
    await rig.broker.send([wanted_for(rig, "m-1", S)])
    await rig.pass_ms(2 * S)
    await nobody_gets_it(rig)
    (letter,) = await receive(rig, group=UNDERTAKER, topic=DEAD)
    assert letter.dead_letter is not None
    assert letter.dead_letter.reason == "too_late"
    await finish(rig, REDRIVE)
    (again,) = await receive(rig)
    assert NOT_AFTER_MS not in decode(again.payload).properties
    assert list(await ack(rig, again)) == [None]


@every_durable_broker()
async def test_no_message_dies_of_a_clock_that_cannot_be_believed(rig: EmbeddedRig) -> None:
    """The host's clock jumps by a day: until somebody believes it, messages come as if nothing was."""
    await rig.broker.send([wanted_for(rig, "m-1", 60 * S)])
    rig.clock.step_to(rig.clock.now_ms() + 24 * 3_600 * S)
    assert not rig.store.clock.is_steady()
    assert ids(await receive(rig)) == ["m-1"]
    assert not await dead(rig)


@every_durable_broker()
async def test_copies_know_it_too(rig: EmbeddedRig) -> None:
    """A retry that waits keeps its time through a restart, also with a tag that takes the longer head."""
    await rig.set_group(GROUP, max_attempts=9, delays_ms=(S,))
    await rig.broker.send([wanted_for(rig, "m-1", 5 * S, tag="t" * 300)])
    await change(rig, await pushed_one(rig))
    await rig.restart(End.KILL, down_ms=10 * S)
    await rig.settle()
    await nobody_gets_it(rig)
    assert await dead(rig) == [("m-1", Reason.TOO_LATE, 1)]
