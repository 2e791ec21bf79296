"""What a removed group leaves: dead letters that are listed, read, attributed and removed under its name."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from support.clients.embedded.admin_answers import group_of, groups_of
from support.forges.messages.letters import (
    DEAD,
    PURGE,
    REDRIVE,
    SLOW,
    TO_ALL,
    UNDERTAKER,
    a_message,
    counts,
    die,
    die_many,
    fail,
    finish,
    job_now,
    letter_ids,
    only,
    start,
    told,
)
from support.rigs.broker.rig import GROUP, EmbeddedRig, End, every_durable_broker, ids, play, receive, until
from support.rigs.store.rows import all_rows

from broker_adapter.contracts.errors import Refused
from dmq.store.schema.keys import Family
from dmq.trail.events import EventKind

pytestmark = pytest.mark.contract


async def listed(rig: EmbeddedRig) -> list[tuple[str, int, bool]]:
    """Every name that dead letters lie under."""
    found = await groups_of(rig, with_removed=True)
    return [(each.name, each.dead, each.is_removed) for each in found if each.dead]


def attributed(rig: EmbeddedRig) -> list[tuple[str, str]]:
    """The outcomes that the trail tells of, with the group they name."""
    names = rig.broker.names.groups_by_id
    ends = told(rig, EventKind.PURGED, EventKind.REDRIVEN)
    return [(each.kind.name, names[each.group_id].name if each.group_id else "") for each in ends]


@every_durable_broker(queues=1)
async def test_dead_letters_outlive_their_group_under_its_name(rig: EmbeddedRig) -> None:
    """They are listed and read, and what becomes of them names the group; in a later run too."""
    await die_many(rig, 4)
    await rig.broker.operator.remove_group(GROUP, is_forced=True)
    for _ in range(2):
        assert await listed(rig) == [(GROUP, 4, True)]
        assert GROUP not in [each.name for each in await groups_of(rig)]
        assert await letter_ids(rig) == ["m-0", "m-1", "m-2", "m-3"]
        assert len(ids(await receive(rig, group=UNDERTAKER, topic=DEAD))) == 4
        await rig.restart(End.KILL)
    await rig.broker.operator.create_topic("elsewhere", queues=0, message_type=None)
    await finish(rig, replace(PURGE, filter=only("m-0")))
    await finish(rig, replace(TO_ALL, filter=only("m-1")))
    await finish(rig, replace(REDRIVE, filter=only("m-2"), to_topic="elsewhere"))
    assert attributed(rig) == [("PURGED", GROUP), ("REDRIVEN", GROUP), ("REDRIVEN", GROUP)]
    assert await listed(rig) == [(GROUP, 1, True)]


@every_durable_broker(queues=1)
async def test_a_recreated_group_has_the_dead_letters_of_its_name(rig: EmbeddedRig) -> None:
    """It is another group with the same dead-letter queue, and gets what is redriven."""
    await die_many(rig, 2)
    before = rig.broker.names.groups[GROUP].group_id
    await rig.broker.operator.remove_group(GROUP, is_forced=True)
    await rig.broker.operator.create_group(GROUP)
    await die(rig, a_message("m-2", topic="refunds"))
    assert rig.broker.names.groups[GROUP].group_id != before
    assert await listed(rig) == [(GROUP, 3, False)]
    assert counts(await finish(rig, REDRIVE)) == (3, 0, 0)
    assert attributed(rig) == [("REDRIVEN", GROUP)] * 3
    assert len(await receive(rig)) == 4  # two from the beginning of the topic, two in the lane


@every_durable_broker(queues=1)
async def test_the_topic_of_dead_letters_goes_when_its_group_has_gone(rig: EmbeddedRig) -> None:
    """Not while there is the group, a job at work, or, unless forced, a letter without an outcome."""
    await die_many(rig, 3)
    rig_operator = rig.broker.operator
    with pytest.raises(Refused, match="with their group"):
        await rig_operator.remove_topic(DEAD, is_forced=True)
    await rig_operator.remove_group(GROUP, is_forced=True)
    with pytest.raises(Refused, match="3 dead letters have no outcome"):
        await rig_operator.remove_topic(DEAD, is_forced=False)
    await rig.broker.operator.create_topic("elsewhere", queues=0, message_type=None)
    job = await start(rig, replace(SLOW, to_topic="elsewhere"))
    await until(lambda: job_now(rig, job).done == 1)
    with pytest.raises(Refused, match="a job on the dead letters"):
        await rig_operator.remove_topic(DEAD, is_forced=True)
    await rig.broker.dead_letters.stop(job.job_id)
    await finish(rig, PURGE)
    topic_id = rig.broker.names.topics[DEAD].topic_id
    await rig_operator.remove_topic(DEAD, is_forced=False)
    await check_no_letters(rig, topic_id)
    assert attributed(rig) == [("REDRIVEN", GROUP), ("PURGED", GROUP), ("PURGED", GROUP)]
    await rig.restart(End.KILL)
    await check_no_letters(rig, topic_id)
    await die(rig, a_message("m-9", topic="refunds"))
    assert await letter_ids(rig) == ["m-9"]


async def check_no_letters(rig: EmbeddedRig, topic_id: int) -> None:
    """Nothing is left of the dead letters, their outcomes, and who read them."""
    assert DEAD not in rig.broker.names.topics
    assert await listed(rig) == []
    packed = topic_id.to_bytes(4, "big")
    assert not [key for key, _ in all_rows(rig.store, Family.QUEUE) if key[:4] == packed]
    assert not [key for key, _ in all_rows(rig.store, Family.GROUP) if key[4:8] == packed]


@every_durable_broker(queues=1)
async def test_a_group_goes_with_its_dead_letters(rig: EmbeddedRig) -> None:
    """Each of them is purged in the trail; those that had an outcome keep it. Not while a job is at work."""
    await die_many(rig, 4)
    await receive(rig, group=UNDERTAKER, topic=DEAD)
    await finish(rig, replace(REDRIVE, filter=only("m-0")))
    job = await start(rig, SLOW)
    with pytest.raises(Refused, match="a job on the dead letters"):
        await rig.broker.operator.remove_group(GROUP, is_forced=True, with_dead_letters=True)
    await rig.broker.dead_letters.stop(job.job_id)
    left = await letter_ids(rig)
    topic_id = rig.broker.names.topics[DEAD].topic_id
    await rig.broker.operator.remove_group(GROUP, is_forced=True, with_dead_letters=True)
    await check_no_letters(rig, topic_id)
    assert [kind for kind, group in attributed(rig) if group == GROUP].count("PURGED") == len(left)
    assert len(attributed(rig)) == 4
    assert rig.broker.dead_letters.jobs(GROUP)  # what was done is still told


@pytest.mark.parametrize("kill_at", range(10))
def test_a_kill_while_a_group_goes_with_its_dead_letters_leaves_nothing_half_done(tmp_path: Path, kill_at: int) -> None:
    """Whichever unit was the last one: the next run goes on, and each letter has one outcome."""

    async def scenario(rig: EmbeddedRig) -> None:
        await die_many(rig, 3)
        await finish(rig, replace(REDRIVE, filter=only("m-0")))
        await fail(rig, "m-7")
        submit, left = rig.broker.commits.submit, kill_at
        dead = asyncio.Event()

        def counted(ops: object, **more: object) -> asyncio.Future[object]:
            nonlocal left
            if not left:
                dead.set()
                return asyncio.get_running_loop().create_future()
            left -= 1
            return submit(ops, **more)  # type: ignore[arg-type,return-value]

        rig.broker.commits.submit = counted  # type: ignore[method-assign,assignment]
        topic_id = rig.broker.names.topics[DEAD].topic_id
        removal = asyncio.ensure_future(rig.broker.operator.remove_group(GROUP, is_forced=True, with_dead_letters=True))
        await asyncio.wait((removal, asyncio.ensure_future(dead.wait())), return_when=asyncio.FIRST_COMPLETED)
        await rig.store.commit_async([])
        removal.cancel()
        await rig.restart(End.KILL)
        await until(lambda: not rig.broker.names.removing)
        if kill_at:
            await check_no_letters(rig, topic_id)
            assert sorted(attributed(rig)) == [("PURGED", GROUP), ("PURGED", GROUP), ("REDRIVEN", GROUP)]
        else:
            assert await letter_ids(rig) == ["m-1", "m-2"]

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False, queues=1), scenario))


@every_durable_broker(queues=1)
async def test_messages_in_a_group_can_be_listed(rig: EmbeddedRig) -> None:
    """How much of each topic it has not finished, beside what waits, is on a lease, or dead."""
    await die_many(rig, 1)
    await fail(rig, "m-1")
    await rig.broker.send([a_message("m-2"), a_message("m-3", topic="refunds")])
    await receive(rig)
    await receive(rig, topic="refunds")
    found = await group_of(rig, with_unread=True)
    assert [(each.topic, each.unread) for each in found.unread] == [("orders", 1), ("refunds", 1)]
    assert (found.waiting, found.dead, found.leased) == (1, 1, 2)
    assert (await group_of(rig)).unread == []
