"""Retention beside what else goes on: dead letters, retries, message groups, who comes, who is set back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from unittest.mock import AsyncMock, patch

import pytest
from support.clients.embedded.retain import SECOND, TOLD, bounds, keep, lying, read, sends, turn
from support.forges.messages.letters import die, finish, only
from support.models.store.outbox import read_outbox
from support.rigs.broker.rig import (
    GROUP,
    TOPIC,
    EmbeddedRig,
    End,
    an_envelope,
    every_durable_broker,
    ids,
    receive,
    send,
    until,
)

from broker_adapter.contracts.errors import Refused
from broker_adapter.contracts.topics import dead_letter_topic
from dmq.broker.groups.group_queue import GroupQueue
from dmq.broker.io.reader import StoredProgress
from dmq.broker.operations.admin import BEGIN
from dmq.broker.operations.retention import RemovedMessages
from dmq.store.schema.keys import Family, pack_queue_key
from dmq.store.schema.topics.group import outcome_key
from dmq.store.store import Store
from dmq.store.writer.operations import Put
from dmq.trail.events import EventKind
from retry.dead_letter import Job, JobKind

pytestmark = pytest.mark.contract


@every_durable_broker(queues=1)
async def test_dead_letters_stay_until_they_are_removed(rig: EmbeddedRig) -> None:
    """The configuration is not for them; by their own setting those go that have an outcome, then all."""
    await die(rig, *[an_envelope(each) for each in ("d-1", "d-2", "d-3")])
    letters = dead_letter_topic(GROUP)
    before = await rig.broker.dead_letters.count(rig.broker.names.topics[letters])
    rig.clock.advance(10**9)
    await turn(rig)
    assert await rig.broker.dead_letters.count(rig.broker.names.topics[letters]) == before
    await finish(rig, Job(job_id=0, kind=JobKind.PURGE, group=GROUP, filter=only("d-1"), why="test"))
    await keep(rig, SECOND, letters)
    outcomes = outcome_key(rig.broker.names.topics[letters].topic_id, 0)
    assert len(rig.store.scan(Family.GROUP, outcomes, outcomes[:-8] + b"\xff" * 8, limit=9).rows) == 1
    await turn(rig)
    assert not rig.store.scan(Family.GROUP, outcomes, outcomes[:-8] + b"\xff" * 8, limit=9).rows
    assert await rig.broker.dead_letters.count(rig.broker.names.topics[letters]) == before - 1
    await keep(rig, TOLD, letters)
    await rig.restart(End.KILL)
    await turn(rig)
    assert await rig.broker.dead_letters.count(rig.broker.names.topics[letters]) == 0
    with pytest.raises(Refused, match="only the retention of a dead-letter queue"):
        await rig.broker.operator.set_topic(letters, queues=3, settings=None)


@every_durable_broker(queues=1)
async def test_retries_go_once_their_group_has_finished_them(rig: EmbeddedRig) -> None:
    """Not before, whatever the topic's bounds say; also of a group that is away."""
    await rig.set_group(GROUP, max_attempts=5, delays_ms=(1_000,))
    await keep(rig, TOLD)
    await send(rig, *sends(0, 2))
    for failed in await receive(rig, renew_for="push"):
        await rig.broker.change_invisible(GROUP, TOPIC, failed.receipt_handle, 0)
    await rig.pass_ms(2_000)
    assert (await turn(rig))[:2] == (2, 0)  # the originals: each went on as a copy
    assert lying(rig) == 2
    assert await turn(rig) == RemovedMessages()
    assert len(await read(rig, batch_max=1)) == 1
    assert (await turn(rig)).retries == 1
    assert len(await read(rig, batch_max=1)) == 1
    await rig.restart(End.KILL)
    assert (await turn(rig)).retries == 1
    assert lying(rig) == 0
    await send(rig, "m-2")
    (failed,) = await receive(rig, renew_for="push")
    await rig.broker.change_invisible(GROUP, TOPIC, failed.receipt_handle, 0)
    await rig.pass_ms(1_000)
    assert await read(rig) == ["m-2"]


@every_durable_broker(queues=1)
async def test_a_group_set_back_is_unread_again(rig: EmbeddedRig) -> None:
    """What it asked for again stays until it has it; a reset that was ordered before a removal begins behind it."""
    await keep(rig, SECOND)
    await send(rig, *sends(0, 4))
    await read(rig)
    await rig.broker.operator.reset_group(GROUP, TOPIC, BEGIN)
    rig.clock.advance(1_000)
    assert await turn(rig) == RemovedMessages()
    procedures, look = rig.broker.procedures, rig.broker.reader.begins
    assert await read(rig) == sends(0, 4)
    with patch.object(rig.broker.procedures, "is_at_work", lambda _: False):

        async def removed_meanwhile(topic_id: int, queues: int) -> list[int]:
            await turn(rig)
            return await look(topic_id, queues)

        with patch.object(rig.broker.reader, "begins", removed_meanwhile):
            topic, group = rig.broker.names.topics[TOPIC], rig.broker.names.groups[GROUP]
            await procedures.reset(topic, group, [0], [4])
    assert await receive(rig) == []
    assert await rig.broker.operator._progress.unread(group, topic) == 0
    resets = [each.record.queue_offset for each in read_outbox(rig.store) if each.event.kind is EventKind.RESET]
    assert resets == [0, 4]


@every_durable_broker(queues=1)
async def test_a_message_group_continues_when_its_head_is_removed(rig: EmbeddedRig) -> None:
    """What waits behind a message that was removed is offered, in order."""
    await keep(rig, TOLD)
    await rig.broker.send([an_envelope(each, message_group="g") for each in sends(0, 3)])
    (head,) = await receive(rig, renew_for="push", invisible_ms=10_000)
    await receive(rig)  # looks at the others, and parks them
    rig.clock.advance(500)
    await rig.broker.send([an_envelope("m-3", message_group="g")])
    await receive(rig)
    await rig.broker.change_invisible(GROUP, TOPIC, head.receipt_handle, 0, suspend=True)
    rig.clock.advance(500)
    assert (await turn(rig))[:2] == (3, 3)
    assert ids(await receive(rig)) == ["m-3"]


@every_durable_broker(queues=1)
async def test_a_group_created_during_a_step_is_known(rig: EmbeddedRig) -> None:
    """A group that subscribes or commits an offset between the look and the removal keeps what it has not read."""
    await keep(rig, SECOND)
    await send(rig, *sends(0, 3))
    rig.clock.advance(1_000)
    reader = rig.broker.reader
    run, comes = reader.run, {"pulls": rig.broker.pulls.commit_offset("puller", TOPIC, 0, 2), "pops": receive(rig)}

    for how, removed in (("pulls", 2), ("pops", 0)):

        async def looked(read: Callable[[Store], object], how: str = how) -> object:
            found = await run(read)
            if "front" in repr(read) and how in comes:
                await comes.pop(how)
            return found

        with patch.object(reader, "run", looked):
            assert (await turn(rig)).messages == removed
    assert comes == {}


@every_durable_broker(queues=1)
async def test_a_group_that_is_being_loaded_is_waited_for(rig: EmbeddedRig) -> None:
    """Nothing goes while somebody is about to begin; who looked before a removal was written begins behind it."""
    await keep(rig, TOLD)
    await send(rig, *sends(0, 3))
    rig.clock.advance(1_000)
    reader, go_on = rig.broker.reader, asyncio.Event()
    progress = reader.progress
    before = await progress([GroupQueue(0, rig.broker.names.topics[TOPIC].topic_id, 0)])

    async def held(queues: Sequence[GroupQueue]) -> list[StoredProgress]:
        await go_on.wait()
        return await progress(queues)

    with patch.object(reader, "progress", held):
        comes = asyncio.ensure_future(receive(rig))
        await until(lambda: bool(rig.broker.subscriptions.all()))
        assert await turn(rig) == RemovedMessages()
        go_on.set()
        assert len(await comes) == 3
    await rig.broker.operator.remove_group(GROUP, is_forced=True)
    assert (await turn(rig)).messages == 3
    await send(rig, "m-3")
    stale = StoredProgress([], before[0].begin, before[0].end)
    with patch.object(reader, "progress", AsyncMock(return_value=[stale])):
        first = ids(await receive(rig))
    await send(rig, "m-4")
    assert first + ids(await receive(rig)) == ["m-3", "m-4"]


@every_durable_broker(queues=1)
async def test_a_queue_that_cannot_be_read_keeps_no_other(rig: EmbeddedRig) -> None:
    """The damage is left as it is, and the next topic is looked at."""
    for topic in ("damaged", TOPIC):
        await keep(rig, SECOND, topic)
        await rig.broker.send([an_envelope("m-1", topic=topic)])
    place = (rig.broker.names.topics["damaged"].topic_id, 0)
    await rig.store.commit_async([Put(Family.QUEUE, pack_queue_key(*place, 0), b"\xff")])
    rig.clock.advance(1_000)
    assert (await turn(rig)).messages == 1
    assert (rig.store.queue_begin(*place), await bounds(rig)) == (0, (1, 1))
