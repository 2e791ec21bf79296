"""A burst of one scope holds nobody else up: entries of others wait for their turn and not for its end.

A turn is taken by hand and lasts as long as the test says. What falls due within the same few milliseconds as the burst
is part of it; what falls due later is what these tests are about.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from support.clients.embedded.failing import CLIENT, change, pushed
from support.models.broker.trail import read_lines
from support.rigs.broker.rig import (
    GROUP,
    TOPIC,
    EmbeddedRig,
    End,
    ack,
    an_envelope,
    every_durable_broker,
    ids,
    play,
    receive,
)

from broker_adapter.contracts.message import unpack_id
from dmq.scheduler.scheduler import BUSY_LAG_MS, ROWS_PER_CURSOR_MAX
from dmq.store.schema.keys import Family, pack_queue_key
from dmq.store.schema.messages.record import decode_queued

pytestmark = pytest.mark.contract
BURST = 4 * ROWS_PER_CURSOR_MAX  # entries that are due in the same millisecond
MANY = 64
BATCH = 512  # messages of one send
TURN_MS = BUSY_LAG_MS + 5  # what a turn lasts here
SOON_MS = 10_000
OTHERS = tuple(f"other-{number}" for number in range(9))


async def send_delayed(rig: EmbeddedRig, topic: str, at_ms: int, *names: str) -> None:
    """Send messages that are due at ``at_ms``; those whose names begin with ``A-`` or ``B-`` have a message group."""
    for first in range(0, len(names), BATCH):
        await rig.broker.send(
            [
                an_envelope(
                    name,
                    topic=topic,
                    deliver_at_ms=at_ms,
                    message_group=name[0] if name[:2] in {"A-", "B-"} else "",
                )
                for name in names[first : first + BATCH]
            ]
        )


async def burst_of_messages(rig: EmbeddedRig, count: int = BURST) -> str:
    """Many messages of one topic are due at once, and soon."""
    await send_delayed(rig, TOPIC, rig.clock.now_ms() + SOON_MS, *(f"m-{number}" for number in range(count)))
    return TOPIC


async def burst_of_retries(rig: EmbeddedRig) -> str:
    """Many messages that a group failed are due again at once, and soon."""
    await rig.set_group(GROUP, max_attempts=5, delays_ms=(SOON_MS,))
    for first in range(0, BURST, BATCH):
        await rig.broker.send([an_envelope(f"m-{number}") for number in range(first, first + BATCH)])
    while found := await receive(rig, batch_max=BATCH, renew_for=CLIENT):
        await asyncio.gather(*(change(rig, each) for each in found))
    return GROUP


def waiting_of(rig: EmbeddedRig, scope: str) -> int:
    """How many entries of a topic or a group wait."""
    names = rig.broker.names
    scope_id = names.topics[scope].topic_id if scope in names.topics else names.groups[scope].group_id
    return rig.store.pending().get(scope_id, 0)


def queued(rig: EmbeddedRig, topic: str) -> list[str]:
    """The message ids in the queues of a topic, queue by queue."""
    known = rig.broker.names.topics[topic]
    start, stop = pack_queue_key(known.topic_id, 0, 0), pack_queue_key(known.topic_id, known.queues, 0)
    rows = rig.store.scan(Family.QUEUE, start, stop, limit=100_000).rows
    return [unpack_id(decode_queued(value).message_id) for _, value in rows]


def turn(rig: EmbeddedRig) -> int:
    """Let a turn's time pass and take it; say how many entries it handed over."""
    rig.clock.advance(TURN_MS)
    return rig.scheduler.turn().handed_over


def finish_turns(rig: EmbeddedRig) -> None:
    """Take turns until nothing is due."""
    while turn(rig):
        pass


@pytest.mark.parametrize("burst", [burst_of_messages, burst_of_retries])
def test_a_burst_delays_no_other_scope(burst: Callable[[EmbeddedRig], Awaitable[str]]) -> None:
    """While it lasts, what falls due for another topic, be it a millisecond behind it, waits for one turn at most."""

    async def scenario(rig: EmbeddedRig) -> None:
        await rig.pass_ms(0)
        due_ms = rig.clock.now_ms() + SOON_MS
        scope = await burst(rig)
        for number, topic in enumerate(OTHERS):
            await send_delayed(rig, topic, due_ms + 1 + number * TURN_MS, f"{topic}-1", f"{topic}-2")
        rig.clock.advance(SOON_MS)
        assert rig.scheduler.turn().handed_over  # the burst begins
        for number in range(1, len(OTHERS) + 1):
            left = waiting_of(rig, scope)
            assert left > 0, "the burst is over too early to prove anything"
            turn(rig)
            assert waiting_of(rig, scope) < left  # it has its share of every turn, too
            for topic in OTHERS[: number - 1]:
                assert sorted(queued(rig, topic)) == [f"{topic}-1", f"{topic}-2"]
        turn(rig)
        assert all(len(queued(rig, topic)) == 2 for topic in OTHERS)
        finish_turns(rig)
        assert waiting_of(rig, scope) == 0

    asyncio.run(play(EmbeddedRig(Path(), on_disk=False), scenario))


@every_durable_broker()
async def test_another_groups_retries_pass_a_burst_of_retries(rig: EmbeddedRig) -> None:
    """Its consumer gets them to the millisecond of a turn, while most of the burst still waits."""
    await rig.pass_ms(0)
    await rig.set_group("calm", max_attempts=5, delays_ms=(SOON_MS + 2 * TURN_MS,))
    await rig.broker.send([an_envelope("calm-1", topic="calm-topic")])
    (delivery,) = await pushed(rig, group="calm", topic="calm-topic")
    await change(rig, delivery, group="calm")
    await burst_of_retries(rig)
    rig.clock.advance(SOON_MS)
    rig.scheduler.turn()
    turn(rig)
    assert not await pushed(rig, group="calm", topic="calm-topic")
    turn(rig)
    await rig.store.commit_async([])  # behind it, the broker was told
    (again,) = await pushed(rig, group="calm", topic="calm-topic")
    assert (again.message_id, again.delivery_attempt) == ("calm-1", 2)
    assert waiting_of(rig, GROUP) > 0


def test_a_burst_alone_has_whole_turns() -> None:
    """Its small share is for others' sake: where there are none it is handed over as quickly as ever."""

    async def scenario(rig: EmbeddedRig) -> None:
        await rig.pass_ms(0)
        await burst_of_messages(rig)
        rig.clock.advance(SOON_MS)
        turns = 1
        while turn(rig):
            turns += 1
        assert turns <= BURST // ROWS_PER_CURSOR_MAX + 1
        assert waiting_of(rig, TOPIC) == 0

    asyncio.run(play(EmbeddedRig(Path(), on_disk=False), scenario))


@pytest.mark.parametrize("restarts", [False, True], ids=["in one run", "with a kill in the middle"])
def test_message_groups_keep_their_order_behind_a_backlog(*, restarts: bool) -> None:
    """What is due later never passes an earlier one of its group that still lies in the backlog; others do pass."""

    async def scenario(rig: EmbeddedRig) -> None:
        await rig.pass_ms(0)
        due_ms = rig.clock.now_ms() + SOON_MS
        await burst_of_messages(rig, 2 * BURST)
        await send_delayed(rig, "ordered", due_ms, "A-1", "B-1", "A-2")  # behind the burst, by their acceptance
        for step in range(1, 6):
            at_ms = due_ms + (step + 1) * TURN_MS - 3
            await send_delayed(rig, "ordered", at_ms, f"A-{step + 2}", f"B-{step + 1}", f"u-{step}")
        rig.clock.advance(SOON_MS)
        rig.scheduler.turn()
        turn(rig)
        for step in range(1, 6):
            turn(rig)
            passed = queued(rig, "ordered")
            assert sorted(passed) == [f"u-{number}" for number in range(1, step + 1)]  # only those without a group
            if restarts and step == 3:
                await rig.restart(End.KILL)
                for _ in range(2):  # the first finds out that there is a burst, the second leaves it to the backlog
                    rig.scheduler.turn()
        finish_turns(rig)
        assert read_lines(rig.broker, "ordered") == {
            name: [("ordered", f"{name}-{number}") for number in range(1, last + 1)]
            for name, last in (("A", 7), ("B", 6))
        }
        assert len(queued(rig, TOPIC)) == 2 * BURST

    asyncio.run(play(EmbeddedRig(Path(), on_disk=False), scenario))


@every_durable_broker()
async def test_a_group_that_never_finishes_delays_no_other(rig: EmbeddedRig) -> None:
    """Its own messages come back to it again and again; another group, and another topic, see none of it."""
    await rig.set_group("stuck", max_attempts=9, delays_ms=(1,))
    await rig.broker.send([an_envelope(f"m-{number}") for number in range(MANY)])
    for attempt in range(1, 5):
        for each in [*await pushed(rig, group="stuck"), *await pushed(rig, group="stuck")]:
            assert each.delivery_attempt == attempt
            await change(rig, each, group="stuck")
        at_ms = rig.clock.now_ms() + 1
        await send_delayed(rig, "calm-topic", at_ms, f"calm-{attempt}")
        await rig.pass_ms(1)
        found = await receive(rig, group="calm", topic="calm-topic")
        assert ids(found) == [f"calm-{attempt}"]
        await ack(rig, *found, group="calm", topic="calm-topic")
    found = [*await receive(rig, group="calm"), *await receive(rig, group="calm")]
    assert sorted(ids(found)) == sorted(f"m-{number}" for number in range(MANY))
    assert {each.delivery_attempt for each in found} == {1}
