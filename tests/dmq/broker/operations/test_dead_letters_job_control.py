"""Jobs on dead letters as their keeper sees them: one at a time, stopped, gone on with, never half started, listed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from support.forges.messages.letters import (
    DEAD,
    OTHERS,
    PURGE,
    REDRIVE,
    SLOW,
    Break,
    BreakingRig,
    a_message,
    children,
    counts,
    dead_count,
    die,
    die_many,
    dry,
    ended,
    finish,
    is_over,
    job_now,
    letter_ids,
    only,
    sleeping_moves,
    start,
)
from support.rigs.broker.rig import GROUP, EmbeddedRig, End, every_durable_broker, play, until
from support.rigs.store.rows import GatedEngine

from broker_adapter.contracts.errors import BrokerUnavailable, Refused, Rule
from broker_adapter.contracts.message_id import new_message_id
from dmq.broker.operations import dead_letters as dead_letters_module
from dmq.broker.operations.dead_letters import DeadLetters
from dmq.errors import StoreCorrupt
from dmq.store.engines.engine import Engine
from dmq.store.schema.keys import Family, job_key
from dmq.store.schema.operators.orders import encode_job
from dmq.store.writer.operations import Put
from retry.dead_letter import Job, JobState

pytestmark = pytest.mark.contract


@every_durable_broker(queues=1)
async def test_a_group_has_one_job_at_a_time(rig: EmbeddedRig) -> None:
    """A second one is refused and leaves nothing; another group's is not, nor a dry run, nor one after the first."""
    await die_many(rig, 2)
    await die(rig, a_message("m-9", topic="refunds"), group=OTHERS)
    first = await start(rig, SLOW)
    for second in (PURGE, replace(REDRIVE, to_topic="refunds")):
        with pytest.raises(Refused) as refused:
            await start(rig, second)
        assert (refused.value.rule, refused.value.value) == (Rule.REQUEST, GROUP)
    assert (await finish(rig, replace(PURGE, group=OTHERS))).done == 1
    assert (await dry(rig, PURGE)).job_id == 0
    await rig.broker.dead_letters.stop(first.job_id)
    assert (await finish(rig, PURGE)).done >= 1


@every_durable_broker(queues=1)
async def test_of_two_that_start_at_once_one_is_refused(rig: EmbeddedRig) -> None:
    """Whichever is first."""
    await die_many(rig, 2)
    results = await asyncio.gather(*(start(rig, SLOW) for _ in range(3)), return_exceptions=True)
    assert [type(result) for result in results if not isinstance(result, Job)] == [Refused, Refused]
    assert len(rig.broker.dead_letters.jobs()) == 1


@every_durable_broker(queues=1)
async def test_a_job_that_is_stopped_stays_where_it_is(rig: EmbeddedRig) -> None:
    """In the next run too; what it did stays done, stopping again changes nothing, a new job does the rest."""
    wanted = await die_many(rig, 4)
    job = await start(rig, SLOW)
    await until(lambda: job_now(rig, job).done == 1)
    stopped = await rig.broker.dead_letters.stop(job.job_id)
    assert (stopped.state, stopped.next_offset, *counts(stopped)) == (JobState.STOPPED, 1, 1, 0, 0)
    await rig.restart(End.KILL)
    assert await rig.broker.dead_letters.stop(job.job_id) == stopped
    assert rig.broker.dead_letters.jobs() == [stopped]
    assert await letter_ids(rig) == wanted[1:]
    assert (await finish(rig, REDRIVE)).done == 3
    assert {name: len(made) for name, made in children(rig).items()} == dict.fromkeys(wanted, 1)
    done = rig.broker.dead_letters.jobs()[0]
    assert await rig.broker.dead_letters.stop(done.job_id) == done
    with pytest.raises(Refused) as refused:
        await rig.broker.dead_letters.stop(99)
    assert refused.value.rule is Rule.NOT_FOUND


@every_durable_broker(queues=1)
async def test_a_stopped_job_is_resumed_at_its_position(rig: EmbeddedRig) -> None:
    """Also after a kill; each letter has one outcome, and a job that is done stays done."""
    wanted = await die_many(rig, 8)
    job = await start(rig, SLOW)
    await until(lambda: job_now(rig, job).done == 1)
    await rig.broker.dead_letters.stop(job.job_id)
    await rig.restart(End.KILL)
    other = await start(rig, SLOW)
    await until(lambda: job_now(rig, other).done == 1)
    with pytest.raises(Refused, match="another job"):
        await rig.broker.dead_letters.resume(job.job_id)
    await rig.broker.dead_letters.stop(other.job_id)
    for _ in range(3):  # faster than its task notices
        resumed = await rig.broker.dead_letters.resume(job.job_id)
        assert resumed.state is JobState.RUNNING
        await rig.broker.dead_letters.stop(job.job_id)
    await rig.broker.dead_letters.resume(job.job_id)
    await rig.restart(End.KILL)  # a resumed job is a running one in the next run
    with sleeping_moves(rig.clock):
        assert counts(await ended(rig, job)) == (7, 1, 0)
    assert {name: len(made) for name, made in children(rig).items()} == dict.fromkeys(wanted, 1)
    assert (await rig.broker.dead_letters.resume(job.job_id)).state is JobState.DONE
    with pytest.raises(Refused) as refused:
        await rig.broker.dead_letters.resume(99)
    assert refused.value.rule is Rule.NOT_FOUND


@every_durable_broker(queues=1)
async def test_a_job_on_removed_letters_is_not_resumed(rig: EmbeddedRig) -> None:
    """Not even if the queue was made again: other letters have its offsets."""
    await die_many(rig, 3)
    job = await start(rig, SLOW)
    await until(lambda: job_now(rig, job).done == 1)
    await rig.broker.dead_letters.stop(job.job_id)
    await rig.broker.operator.remove_group(GROUP, is_forced=True, with_dead_letters=True)
    with pytest.raises(Refused):
        await rig.broker.dead_letters.resume(job.job_id)
    rig.clock.advance(1)
    await die(rig, *(a_message(f"n-{number}", topic="refunds") for number in range(3)))
    with pytest.raises(Refused, match="were removed"):
        await rig.broker.dead_letters.resume(job.job_id)


def test_stopping_is_not_answered_before_it_is_durable(tmp_path: Path) -> None:
    """Nor is stopping again what is just being stopped: a crash would take both back."""
    gates: list[GatedEngine] = []

    def gated(engine: Engine) -> Engine:
        gates.append(GatedEngine(engine))
        return gates[-1]

    async def scenario(rig: EmbeddedRig) -> None:
        await die_many(rig, 2)
        job = await start(rig, SLOW)
        await until(lambda: job_now(rig, job).done == 1)
        await rig.store.commit_async([])
        gates[-1].hold()
        stopping = [asyncio.ensure_future(rig.broker.dead_letters.stop(job.job_id)) for _ in range(2)]
        await asyncio.to_thread(gates[-1].await_sync)
        done, _ = await asyncio.wait(stopping, timeout=0.1)
        gates[-1].let_go()
        assert not done
        assert [(await each).state for each in stopping] == [JobState.STOPPED] * 2

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False, queues=1, wrap=gated), scenario))


@every_durable_broker(queues=1)
async def test_a_job_continues_in_the_next_run(rig: EmbeddedRig) -> None:
    """By itself, from where it was, through an orderly end and through a kill."""
    wanted = await die_many(rig, 5)
    job = await start(rig, SLOW)
    for number, end in enumerate((End.CLOSE, End.KILL), start=1):
        await until(lambda number=number: job_now(rig, job).done == number)  # type: ignore[misc]
        await rig.store.commit_async([])
        await rig.restart(end)
    with sleeping_moves(rig.clock):
        assert counts(await ended(rig, job)) == (5, 0, 0)
    assert {name: len(made) for name, made in children(rig).items()} == dict.fromkeys(wanted, 1)
    assert await dead_count(rig) == 0


@every_durable_broker(queues=1)
async def test_a_job_continues_without_its_caller(rig: EmbeddedRig) -> None:
    """A call that was cancelled may have been accepted; what was accepted runs."""
    await die_many(rig, 3)
    starting = asyncio.ensure_future(start(rig, REDRIVE))
    await until(lambda: bool(rig.broker.dead_letters.jobs()))
    starting.cancel()
    await until(starting.done)
    assert counts(await ended(rig, rig.broker.dead_letters.jobs()[0])) == (3, 0, 0)


@every_durable_broker(queues=1)
async def test_a_failure_in_a_job_is_not_its_end(rig: EmbeddedRig) -> None:
    """Nothing of the unit that failed is done; after a pause it is tried again, and everything is done once."""
    await die_many(rig, 3)
    settled = await rig.broker.subscriptions.settled.load(rig.broker.names.topics[DEAD].topic_id)
    calls = 0
    seen: list[tuple[int, int]] = []

    def fails_once(*arguments: object) -> str:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("a bug")
        return new_message_id(*arguments)  # type: ignore[arg-type]

    def look() -> None:
        seen.append((settled.finished_count, len(children(rig))))

    with patch.object(dead_letters_module, "new_message_id", fails_once), sleeping_moves(rig.clock, look):
        assert counts(await finish(rig, REDRIVE)) == (3, 0, 0)
    assert set(seen) == {(0, 0)}
    assert [len(made) for made in children(rig).values()] == [1, 1, 1]


def test_a_job_is_never_half_started(tmp_path: Path) -> None:
    """When the store fails under it: it is there after a restart and runs, or it is not there; nothing else is done."""

    async def scenario(rig: EmbeddedRig) -> None:
        await die_many(rig, 3)
        rig.memory.fail_next_sync = True
        with pytest.raises(BrokerUnavailable):
            await start(rig, REDRIVE)
        await until(lambda: rig.store.failure is not None)
        await rig.restart(End.POWER_LOSS)
        assert rig.broker.dead_letters.jobs() == []
        assert await dead_count(rig) == 3
        rig.memory.fail_next_sync = True
        with pytest.raises(BrokerUnavailable):
            await start(rig, REDRIVE)
        await rig.restart(End.KILL)
        (job,) = rig.broker.dead_letters.jobs()
        assert counts(await ended(rig, job)) == (3, 0, 0)

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False, queues=1), scenario))


def test_a_commit_that_fails_after_its_job_ended_is_harmless(tmp_path: Path) -> None:
    """The broker is closed while a unit is under way, and then the disk fails: who asks is told, nobody else is."""

    async def scenario(rig: BreakingRig) -> None:
        await die_many(rig, 2)
        job = await start(rig, SLOW)
        await until(lambda: job_now(rig, job).done == 1)
        await rig.store.commit_async([])
        rig.engine.hold()
        with sleeping_moves(rig.clock):
            await until(lambda: is_over(rig, job))
            await asyncio.to_thread(rig.engine.await_sync)
        await rig.broker.dead_letters.close()
        rig.engine.break_at(Break.AFTER_SYNC)
        rig.engine.let_go()
        await until(lambda: rig.store.failure is not None)
        await rig.restart(End.KILL)  # and what the failed run left behind goes away

    asyncio.run(play(BreakingRig(tmp_path, on_disk=False), scenario))


# -- the list ---------------------------------------------------------------------------------------------------------


@every_durable_broker(queues=1)
async def test_jobs_are_listed_newest_first(rig: EmbeddedRig) -> None:
    """Of one group or of all, each with an id of its own; in the next run too, where ids go on."""
    await die_many(rig, 2)
    for group in (GROUP, OTHERS, GROUP):
        await rig.broker.ensure_group(group)
        await finish(rig, replace(PURGE, group=group))
    keeper = rig.broker.dead_letters
    assert [(each.job_id, each.group) for each in keeper.jobs()] == [(3, GROUP), (2, OTHERS), (1, GROUP)]
    assert [each.job_id for each in keeper.jobs(GROUP)] == [3, 1]
    before = keeper.jobs()
    await rig.restart(End.KILL)
    assert rig.broker.dead_letters.jobs() == before
    assert (await finish(rig, PURGE)).job_id == 4


@every_durable_broker(queues=1)
async def test_old_jobs_are_forgotten_and_running_ones_are_not(rig: EmbeddedRig) -> None:
    """However many run: none of them is lost by a restart, and no id is used twice."""
    for number in range(7):
        topic = f"t-{number}"
        await die(rig, a_message("m-0", topic=topic), a_message("m-1", topic=topic), group=f"g-{number}")
    with patch.object(dead_letters_module, "JOBS_KEPT", 3):
        for _ in range(5):
            await finish(rig, replace(PURGE, filter=only("nobody")))
        assert [each.job_id for each in rig.broker.dead_letters.jobs()] == [5, 4, 3]
        for number in range(7):
            await start(rig, replace(SLOW, group=f"g-{number}"))
        wanted = [12, 11, 10, 9, 8, 7, 6]
        assert [each.job_id for each in rig.broker.dead_letters.jobs()] == wanted
        await until(lambda: all(each.done == 1 for each in rig.broker.dead_letters.jobs()))
        await rig.store.commit_async([])
        await rig.restart(End.KILL)
        assert [each.job_id for each in rig.broker.dead_letters.jobs()] == wanted
        with sleeping_moves(rig.clock):
            for job in rig.broker.dead_letters.jobs():
                assert (await ended(rig, job)).done == 2


@every_durable_broker(queues=1)
async def test_a_damaged_job_refuses_to_open(rig: EmbeddedRig) -> None:
    """One that cannot be read, and one whose queue has no record: it never looks as if nothing had been asked for."""
    for value in (b"", b"{}", b"no job", encode_job(SLOW)):
        await rig.store.commit_async([Put(Family.META, job_key(1), value)])
        broker = rig.broker
        with pytest.raises(StoreCorrupt):
            DeadLetters(broker.shared, subscriptions=broker.subscriptions, placement=broker.placement)
