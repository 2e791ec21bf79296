"""Jobs on dead letters at their work: what they look at, how fast, with which space, and what they refuse."""

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
    a_message,
    children,
    counts,
    damage,
    die,
    die_many,
    dry,
    ended,
    everything,
    finish,
    is_over,
    job_now,
    letter_ids,
    only,
    sleeping_moves,
    start,
    units_of,
)
from support.rigs.broker.rig import GROUP, TOPIC, EmbeddedRig, End, an_envelope, every_durable_broker, play, until

from broker_adapter.contracts.errors import Refused, Rule
from dmq.broker.operations import dead_letters as dead_letters_module
from retry.dead_letter import DeadFilter, Job, JobState

pytestmark = pytest.mark.contract


@every_durable_broker(queues=1)
async def test_a_job_looks_at_every_letter_once(rig: EmbeddedRig) -> None:
    """However many units that takes; it is over when it was at the end, and says so after a restart."""
    await die_many(rig, 11)
    for rows in (1, 2, 3, 5, 100):
        with units_of(rows):
            job = await finish(rig, replace(PURGE, filter=only("m-9", f"m-{rows}")))
        assert (job.state, job.next_offset, job.end_offset) == (JobState.DONE, 11, 11)
        assert counts(job) == ((2, 9, 0) if rows == 1 else (1, 10, 0) if rows < 9 else (0, 11, 0))
    before = rig.broker.dead_letters.jobs()
    await rig.restart(End.KILL)
    assert rig.broker.dead_letters.jobs() == before


@every_durable_broker(queues=1)
async def test_a_job_skips_messages_that_die_after_its_start(rig: EmbeddedRig) -> None:
    """Else one that sends letters back to a group that fails them would never end."""
    await die_many(rig, 3)
    job = await start(rig, SLOW)
    await until(lambda: job_now(rig, job).done == 1)
    await die(rig, a_message("m-late", topic="refunds"))
    with sleeping_moves(rig.clock):
        job = await ended(rig, job)
    assert (job.end_offset, *counts(job)) == (3, 3, 0, 0)
    assert await letter_ids(rig) == ["m-late"]


@every_durable_broker(queues=1)
async def test_a_dry_run_counts_the_same_and_writes_nothing(rig: EmbeddedRig) -> None:
    """Not a row, not a topic, not a job; whatever is in the way of some letters."""
    await die(rig, a_message("m-0"), an_envelope("m-1", payload=b"\xff\xff"), a_message("m-2", topic="refunds"))
    await die_many(rig, 3, first=3)
    await rig.broker.send([a_message("by-hand", topic=DEAD)])
    await damage(rig, 4)
    await finish(rig, replace(REDRIVE, filter=only("m-3")))
    for job in (
        replace(REDRIVE, to_topic="refunds"),
        replace(REDRIVE, filter=DeadFilter(topics=frozenset({"refunds"}))),
        replace(REDRIVE, filter=only("m-1")),
        REDRIVE,
        PURGE,
    ):
        rows, jobs = everything(rig), rig.broker.dead_letters.jobs()
        with patch.object(dead_letters_module, "ROWS_PER_CALL_MAX", 2):
            told = await dry(rig, job)
        assert (everything(rig), rig.broker.dead_letters.jobs()) == (rows, jobs)
        assert (told.job_id, told.state, told.next_offset) == (0, JobState.DONE, told.end_offset)
        if job.to_topic:
            assert counts(told) == (4, 1, 2)
        else:
            done = await finish(rig, job)
            assert counts(told) == counts(done)
            assert (told.first_offset, told.end_offset) == (done.first_offset, done.end_offset)


# -- rates ------------------------------------------------------------------------------------------------------------


class Pace:
    """What a job had done, when; in memory, where what is tested is above the engine."""

    def __init__(self, path: Path) -> None:
        self.rig = EmbeddedRig(path, on_disk=False, queues=1)
        self.seen: list[tuple[float, int]] = []
        self.stall_ms = 0  # for which everything stands still, once, when 20 are done

    def look(self) -> None:
        jobs = self.rig.broker.dead_letters.jobs()
        done = jobs[0].done if jobs else 0
        if done >= 20 and self.stall_ms:
            self.rig.clock.advance(self.stall_ms)
            self.stall_ms = 0
        self.seen.append((self.rig.clock.monotonic_s(), done))

    async def run(self, job: Job) -> tuple[Job, float]:
        """Run a job, and return it and how long it took."""
        with sleeping_moves(self.rig.clock, self.look):
            began_s = self.rig.clock.monotonic_s()
            job = await finish(self.rig, job)
        self.look()
        return job, self.rig.clock.monotonic_s() - began_s

    def check(self, rate: float, burst: int) -> None:
        """In no span of time was more done than the rate allows, and one unit."""
        for number, (from_s, before) in enumerate(self.seen):
            for until_s, after in self.seen[number:]:
                assert after - before <= rate * (until_s - from_s) + burst + 1e-6, (from_s, until_s)


@pytest.mark.parametrize(("rate", "burst"), [(0.5, 1), (1, 1), (7, 1), (40, 4), (2_000, 128)])
def test_a_rate_is_never_exceeded(tmp_path: Path, rate: float, burst: int) -> None:
    """In no span of time is more done than it allows, and one unit; nor does a job take longer than it must."""
    pace = Pace(tmp_path)
    count = 300 if rate > 1_000 else 24

    async def scenario(rig: EmbeddedRig) -> None:
        await die_many(rig, count)
        job, took_s = await pace.run(replace(REDRIVE, rate_per_s=rate))
        assert job.done == count
        assert took_s <= count / rate * 1.1 + 0.1
        pace.check(rate, burst)

    asyncio.run(play(pace.rig, scenario))


def test_a_rate_does_not_make_up_for_a_pause(tmp_path: Path) -> None:
    """After a minute in which nothing could be done it goes on as slowly as before."""
    pace = Pace(tmp_path)

    async def scenario(rig: EmbeddedRig) -> None:
        await die_many(rig, 60)
        pace.stall_ms = 60_000
        await pace.run(replace(REDRIVE, rate_per_s=10))
        pace.check(10, 1)

    asyncio.run(play(pace.rig, scenario))


def test_letters_that_are_not_meant_cost_no_rate(tmp_path: Path) -> None:
    """They are passed over at full speed, a whole unit at a time."""
    pace = Pace(tmp_path)

    async def scenario(rig: EmbeddedRig) -> None:
        await die_many(rig, 60)
        batches = rig.store.commit_stats.batches
        job, took_s = await pace.run(replace(REDRIVE, rate_per_s=1, filter=only("m-40", "m-41", "m-59")))
        assert counts(job) == (3, 57, 0)
        assert 2 <= took_s <= 2.5
        assert rig.store.commit_stats.batches - batches <= 6
        assert set(children(rig)) == {"m-40", "m-41", "m-59"}
        pace.check(1, 1)

    asyncio.run(play(pace.rig, scenario))


# -- space ------------------------------------------------------------------------------------------------------------


@every_durable_broker(queues=1)
async def test_on_a_full_disk_a_redrive_waits_and_a_purge_does_not(rig: EmbeddedRig) -> None:
    """A redrive sends; a purge deletes. When there is room again the redrive goes on by itself."""
    await die_many(rig, 2)
    await die(rig, a_message("m-9", topic="refunds"), group=OTHERS)
    is_low = True
    with patch.object(rig.store, "is_disk_low", lambda: is_low), sleeping_moves(rig.clock):
        job = await start(rig, REDRIVE)
        assert (await finish(rig, replace(PURGE, group=OTHERS))).done == 1
        assert not is_over(rig, job)
        assert children(rig) == {}
        is_low = False
        assert (await ended(rig, job)).done == 2


# -- refused ----------------------------------------------------------------------------------------------------------


@every_durable_broker(queues=1)
async def test_a_target_that_cannot_be_is_refused_at_once(rig: EmbeddedRig) -> None:
    """An illegal topic, a retry topic, the queue itself, one that is not there; for a dry run too. None is made."""
    await die_many(rig, 1)
    for to_topic in ("illegal topic", f"%RETRY%{GROUP}", DEAD, "RMQ_SYS_TRANS_HALF_TOPIC"):
        for call in (start, dry):
            with pytest.raises(Refused) as refused:
                await call(rig, replace(REDRIVE, to_topic=to_topic))
            assert refused.value.rule is Rule.TOPIC
    for call in (start, dry):
        with pytest.raises(Refused, match="create it with 'dmq topic create' first") as refused:
            await call(rig, replace(REDRIVE, to_topic="brandnew"))
        assert refused.value.rule is Rule.TOPIC_UNKNOWN
    assert rig.broker.dead_letters.jobs() == []
    assert set(rig.broker.names.topics) == {TOPIC, DEAD}


@every_durable_broker(queues=1)
async def test_a_job_on_nothing_is_done_at_once(rig: EmbeddedRig) -> None:
    """A group without dead letters, or without a dead-letter queue; it is in the list like any other."""
    await rig.broker.ensure_group(GROUP)
    first = await start(rig, REDRIVE)
    await rig.broker.route(DEAD)
    second = await start(rig, PURGE)
    assert [(each.job_id, each.state, *counts(each)) for each in (first, second)] == [
        (1, JobState.DONE, 0, 0, 0),
        (2, JobState.DONE, 0, 0, 0),
    ]
    await rig.restart(End.KILL)
    assert rig.broker.dead_letters.jobs() == [second, first]
