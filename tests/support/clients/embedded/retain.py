"""Retention in tests: what a topic keeps, a turn, and what it took away."""

from __future__ import annotations

from collections import Counter

from support.models.store.outbox import read_outbox
from support.rigs.broker.rig import GROUP, TOPIC, EmbeddedRig, ack, ids, receive

from dmq.broker.operations.retention import RemovedMessages
from dmq.broker.topics.settings import KeepChange
from dmq.store.schema.keys import Family
from dmq.trail.events import EventKind

SECOND = KeepChange(1_000)
TOLD = KeepChange(1_000, unread="no")


async def keep(rig: EmbeddedRig, wanted: KeepChange, topic: str = TOPIC) -> None:
    """Say how long a topic keeps what it has."""
    await rig.broker.catalog.topic(topic)
    await rig.broker.operator.set_topic(topic, queues=0, settings=None, keep=wanted)


async def turn(rig: EmbeddedRig) -> RemovedMessages:
    """One turn, and what it took away."""
    return await rig.broker.retention.turn()


def expired(rig: EmbeddedRig) -> Counter[int]:
    """The offsets of EXPIRED events, with how many there are."""
    found = [each for each in read_outbox(rig.store) if each.event.kind is EventKind.EXPIRED]
    return Counter(each.record.queue_offset for each in found)


def lying(rig: EmbeddedRig) -> int:
    """How many messages are in queues and lanes."""
    return len(rig.store.scan(Family.QUEUE, b"", b"\xff" * 40, limit=100_000).rows)


async def bounds(rig: EmbeddedRig) -> tuple[int, int]:
    """Begin and end of queue 0, as clients are told."""
    return await rig.broker.pulls.queue_range(TOPIC, 0)


def sends(first: int, count: int) -> list[str]:
    return [f"m-{number}" for number in range(first, first + count)]


async def read(rig: EmbeddedRig, *, group: str = GROUP, batch_max: int = 32) -> list[str]:
    """Receive and acknowledge; return the ids."""
    found = await receive(rig, group=group, batch_max=batch_max)
    await ack(rig, *found, group=group)
    return ids(found)
