"""Retention: what leaves the front of a queue, what stays, and what everybody else sees of it."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

import pytest
from support.clients.embedded.retain import SECOND, TOLD, bounds, expired, keep, lying, read, sends, turn
from support.models.store.outbox import read_outbox
from support.rigs.broker.rig import (
    GROUP,
    TOPIC,
    EmbeddedRig,
    End,
    ack,
    an_envelope,
    every_durable_broker,
    ids,
    receive,
    send,
    until,
)

from broker_adapter.contracts.adapter import Subscription
from broker_adapter.contracts.errors import Refused, Rule
from dmq.broker.groups.pull_offsets import NOBODY
from dmq.broker.groups.queue_front import Edges, readers_from, sizes
from dmq.broker.operations import retention
from dmq.broker.operations.admin import BEGIN
from dmq.broker.operations.retention import RemovedMessages
from dmq.broker.topics.settings import KeepChange
from dmq.store.schema.keys import Family
from dmq.store.schema.topics.names import Keep
from dmq.trail.events import EventKind

pytestmark = pytest.mark.contract


@every_durable_broker(queues=1)
async def test_old_messages_that_all_groups_read_are_removed(rig: EmbeddedRig) -> None:
    """The last message too, without an event of its own; offsets go on behind it, also after a kill."""
    await keep(rig, SECOND)
    await send(rig, *sends(0, 3))
    await read(rig)
    rig.clock.advance(999)
    assert await turn(rig) == RemovedMessages()
    rig.clock.advance(1)
    assert (await turn(rig))[:2] == (3, 0)
    assert (lying(rig), expired(rig), await bounds(rig)) == (0, {}, (3, 3))
    await rig.restart(End.KILL)
    assert await bounds(rig) == (3, 3)
    (receipt,) = await send(rig, "m-3")
    assert receipt.queue_offset == 3
    assert await read(rig) == ["m-3"]
    (again,) = await send(rig, "m-0")
    assert (again.repeated, again.queue_offset) == (True, 0)  # its id outlives it


@every_durable_broker(queues=1)
async def test_unread_messages_of_a_known_group_stay(rig: EmbeddedRig) -> None:
    """Whether the group is here, away since a restart, or pulls; nothing goes that lies behind what stays."""
    await keep(rig, SECOND)
    await send(rig, *sends(0, 6))
    await read(rig)
    await read(rig, group="slow", batch_max=2)
    await rig.broker.pulls.commit_offset("puller", TOPIC, 0, 1)
    rig.clock.advance(5_000)
    assert (await turn(rig))[:2] == (1, 0)
    assert rig.broker.retention.held_queues == 0
    await rig.broker.pulls.commit_offset("puller", TOPIC, 0, 6)
    await rig.restart(End.KILL)
    assert (await turn(rig))[:2] == (1, 0)
    assert await turn(rig) == RemovedMessages()
    assert (await bounds(rig), rig.broker.retention.held_queues) == ((2, 6), 1)
    assert await read(rig, group="slow") == sends(2, 4)
    assert (await turn(rig))[:2] == (4, 0)


@every_durable_broker(queues=1)
async def test_a_topic_set_so_removes_unread_messages(rig: EmbeddedRig) -> None:
    """Each leaves an event unless everybody had read it; all groups go on behind, and count right."""
    await keep(rig, TOLD)
    await send(rig, *sends(0, 5))
    await read(rig)
    first, second, *_ = await receive(rig, group="slow")
    await ack(rig, second, group="slow")
    await rig.restart(End.KILL)  # nobody is here but who comes now
    await receive(rig, group="late", batch_max=1, invisible_ms=10_000)
    rig.clock.advance(1_000)
    assert await turn(rig) == RemovedMessages()  # what somebody has in hand stays
    await rig.pass_ms(10_000)
    assert (await turn(rig))[:2] == (5, 5)  # nobody had the last three, "late" none
    assert expired(rig) == Counter(range(5))
    await send(rig, "m-5")
    for group in (GROUP, "slow", "late"):
        topic = rig.broker.names.topics[TOPIC]
        assert await rig.broker.operator._progress.unread(rig.broker.names.groups[group], topic) == 1
        assert ids(await receive(rig, group=group)) == ["m-5"]
    (told,) = await ack(rig, first, group="slow")
    assert told is None


@every_durable_broker(queues=1)
async def test_where_no_group_reads_the_bounds_decide(rig: EmbeddedRig) -> None:
    """A message that nobody was there for goes when it is old, with an event, and a new group begins behind it."""
    await keep(rig, SECOND)
    await send(rig, *sends(0, 3))
    rig.clock.advance(1_000)
    await send(rig, "m-3")
    assert (await turn(rig))[:2] == (3, 3)
    assert expired(rig) == Counter(range(3))
    assert await read(rig) == ["m-3"]
    subscribed = [each for each in read_outbox(rig.store) if each.event.kind is EventKind.SUBSCRIBED]
    assert [each.record.queue_offset for each in subscribed] == [3]


@every_durable_broker(queues=2)
async def test_a_topic_that_is_too_large_loses_its_oldest(rig: EmbeddedRig) -> None:
    """Down to its bound, evenly from its queues, whatever their age; what is unread stays."""
    await rig.broker.catalog.topic(TOPIC)
    await rig.broker.send([an_envelope(each, payload=bytes(1_000)) for each in sends(0, 40)])
    await receive(rig)
    await keep(rig, KeepChange(0, 20_000))
    assert await turn(rig) == RemovedMessages()
    while await read(rig):
        await rig.pass_ms(30_000)
    removed = await turn(rig)
    assert (removed.messages, removed.unread) == (22, 0)  # of 1,028 bytes each
    assert {each.begin for each in [await rig.broker.pulls.queue_range(TOPIC, n) for n in (0, 1)]} == {11}
    assert await turn(rig) == RemovedMessages()


@every_durable_broker(queues=1)
async def test_the_size_of_a_queue_is_found_by_a_few_looks(rig: EmbeddedRig) -> None:
    """Exact for a few messages; of thousands that differ it is right to a few percent."""
    await rig.broker.catalog.topic(TOPIC)
    true = 0
    for first in range(0, 3_000, 500):
        payloads = [bytes(10 + (number * 7919) % 1_000) for number in range(first, first + 500)]
        true += sum(28 + len(each) + (len(f"m-{n}") - 5) for n, each in enumerate(payloads, first))
        await rig.broker.send([an_envelope(f"m-{n}", payload=each) for n, each in enumerate(payloads, first)])
    topic_id = rig.broker.names.topics[TOPIC].topic_id
    stored = [len(value) for _, value in rig.store.scan(Family.QUEUE, b"", b"\xff" * 40, limit=10_000).rows]
    assert sizes(rig.store, topic_id, [Edges(100, 300, 0)]) == [sum(stored[100:300])]
    (found,) = sizes(rig.store, topic_id, [Edges(0, 3_000, 0)])
    assert abs(found - sum(stored)) < 0.05 * sum(stored)
    assert sizes(rig.store, topic_id, [Edges(7, 7, 0)]) == [0]


@every_durable_broker(queues=1)
async def test_everybody_reads_from_the_new_begin(rig: EmbeddedRig) -> None:
    """Pull, the offset of a time, a new group, a group that is set back, and who commits a place that is gone."""
    await keep(rig, SECOND)
    await send(rig, *sends(0, 3))
    await read(rig)
    rig.clock.advance(1_000)
    await send(rig, *sends(3, 2))
    await turn(rig)
    pulls = rig.broker.pulls
    with pytest.raises(Refused) as refused:
        await pulls.pull(Subscription(TOPIC, 0), 0, batch_max=8, wait_ms=0)
    assert (refused.value.rule, refused.value.limit) == (Rule.OFFSET, "3..5")
    assert [
        each.queue_offset for each in (await pulls.pull(Subscription(TOPIC, 0), 3, batch_max=8, wait_ms=0)).messages
    ] == [
        3,
        4,
    ]
    assert await pulls.offset_at(TOPIC, 0, 0) == 3
    assert await read(rig, group="new") == sends(3, 2)
    assert await rig.broker.operator.reset_group(GROUP, TOPIC, BEGIN) == (3,)
    assert await read(rig) == sends(3, 2)
    await pulls.commit_offset("puller", TOPIC, 0, 0)
    assert await pulls.committed_offset("puller", TOPIC, 0) == 0
    topic = rig.broker.names.topics[TOPIC]
    assert await rig.broker.operator.stored(topic) == 2


@every_durable_broker(queues=1)
async def test_a_turn_is_bounded_and_the_next_one_continues(rig: EmbeddedRig) -> None:
    """A long backlog goes in many units, and it is said that there is more."""
    await keep(rig, SECOND)
    await send(rig, *sends(0, 40))
    rig.clock.advance(1_000)
    with patch("dmq.broker.groups.queue_front.ROWS_PER_STEP_MAX", 2):
        assert (await turn(rig)).messages == 2 * retention.STEPS_PER_TURN
        more = [rig.broker.retention._has_more]
        assert (await turn(rig)).messages == 8
        more.append(rig.broker.retention._has_more)
    assert more == [True, False]
    assert rig.broker.retention.total.messages == 40
    topic_id = rig.broker.names.topics[TOPIC].topic_id
    assert rig.store.queue_begin(topic_id, 0) == 40
    assert readers_from(rig.store, b"", 1) == (set(), b"")
    assert NOBODY > 2**63


@every_durable_broker(queues=1)
async def test_the_interval_of_looks_follows_from_the_retention(rig: EmbeddedRig) -> None:
    """Also for topics that are still to be made by using them."""
    for configured, pause_s in ((Keep(72 * 3_600_000, 0), 60), (Keep(8_000, 0), 2), (Keep(0, 1), 5)):
        with patch.object(rig.broker.retention, "_keep", configured):
            assert rig.broker.retention._pause_s() == pause_s
    await keep(rig, SECOND)
    assert rig.broker.retention._pause_s() == 1


@every_durable_broker(queues=1)
async def test_it_continues_by_itself(rig: EmbeddedRig) -> None:
    """Started, it takes away what may go, and says how old the oldest message is."""
    await keep(rig, SECOND)
    await send(rig, "m-0")
    rig.clock.advance(500)
    stored_ms = rig.clock.now_ms()
    await send(rig, "m-1")
    rig.clock.advance(500)
    with patch.object(retention, "_PAUSE_S_MIN", 0.01), patch.object(retention, "_PAUSE_S_MAX", 0.01):
        rig.broker.retention.start()
        await until(lambda: rig.broker.retention.oldest_ms == {TOPIC: stored_ms})
    assert rig.broker.retention.total.messages == 1
