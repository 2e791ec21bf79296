"""Bulk changes of pending messages: the selection, one outcome for each message, stops, kills and broken commits."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from support.forges.messages.letters import Break, BreakingRig, a_message, everything, fail, sleeping_moves
from support.forges.messages.schedules import wanted
from support.models.store.outbox import read_outbox
from support.rigs.broker.rig import TOPIC, EmbeddedRig, End, Rig, every_durable_broker, ids, play, receive, until

from broker_adapter.contracts.errors import BrokerUnavailable, Refused, Rule
from broker_adapter.contracts.message import Message, pack_id, unpack_id
from broker_adapter.contracts.transactions import Half
from broker_adapter.wire.mapping import encode
from dmq.broker.delayed import ChangeOutcome, Meant
from dmq.broker.operations import message_jobs as message_jobs_module
from dmq.store.schema.keys import META_JOB_MESSAGE, Family, meta_range
from dmq.store.schema.messages.index import EntryState
from dmq.store.schema.messages.record import decode_waiting
from dmq.store.schema.operators.message_jobs import MessageFilter, MessageJob, MessageJobKind
from dmq.trail.events import EventKind
from retry.dead_letter import JobState

pytestmark = pytest.mark.contract

HOUR_MS = 3_600_000
CANCEL = MessageJob(job_id=0, kind=MessageJobKind.CANCEL, topic=TOPIC)
FIRE = replace(CANCEL, kind=MessageJobKind.FIRE)
LATER = replace(CANCEL, kind=MessageJobKind.RESCHEDULE, delay_by_ms=HOUR_MS)
_O = ChangeOutcome


async def sent(rig: EmbeddedRig, *names: str, tag: str = "", after_ms: int = HOUR_MS, **fields: object) -> None:
    """Send delayed messages that are due at once."""
    at_ms = rig.clock.now_ms() + after_ms
    messages = [a_message(each, tag=tag, deliver_at_ms=at_ms)._replace(**fields) for each in names]  # type: ignore[arg-type]
    await rig.broker.send(messages)


def due(rig: EmbeddedRig) -> dict[str, int]:
    """When each pending message is due, in ms from now."""
    scope = rig.broker.names.topics[TOPIC].topic_id
    found: dict[str, int] = {}
    for name in {unpack_id(event.message_id) for _, event in read_outbox(rig.store) if event.message_id}:
        receipt = rig.store.find(scope, pack_id(name))
        if receipt is not None and receipt.state is EntryState.WAITING:
            (value,) = rig.store.get_many(Family.TIMELINE, [receipt.key])
            assert value is not None
            found[name] = decode_waiting(value).deliver_at_ms - rig.clock.now_ms()
    return found


def job_now(rig: EmbeddedRig, job: MessageJob) -> MessageJob:
    """Return a job as it is now."""
    found = rig.broker.message_jobs.find(job.job_id)
    assert found is not None
    return found


async def ended(rig: EmbeddedRig, job: MessageJob) -> MessageJob:
    """Return a job when it has ended, durable."""
    with sleeping_moves(rig.clock):
        await until(lambda: job_now(rig, job).state is not JobState.RUNNING)
    await rig.store.commit_async([])
    return job_now(rig, job)


async def finish(rig: EmbeddedRig, job: MessageJob) -> MessageJob:
    """Start a job and return it when it has ended."""
    return await ended(rig, await rig.broker.message_jobs.start(job))


async def outcomes(rig: EmbeddedRig, job: MessageJob, *, only_missed: bool = False) -> dict[str, int]:
    """Return the outcome of each message of a job, page by page; no message has two."""
    found: list[tuple[str, int]] = []
    offset = 0
    while offset >= 0:
        page = await rig.broker.message_jobs.outcomes(job.job_id, offset=offset, limit=2, only_missed=only_missed)
        found += [(unpack_id(each.message_id), each.outcome) for each in page.messages]
        assert page.next_offset < 0 or page.next_offset > offset
        offset = page.next_offset
    assert len(dict(found)) == len(found)
    return dict(found)


def counts(job: MessageJob) -> tuple[int, int, int]:
    """Return the counts of a job: done, gone, unchanged."""
    return job.done, job.gone, job.unchanged


def events(rig: EmbeddedRig, kind: EventKind) -> Counter[str]:
    """Return the number of events of a kind for each message."""
    return Counter(unpack_id(event.message_id) for _, event in read_outbox(rig.store) if event.kind is kind)


@every_durable_broker(queues=1)
async def test_each_kind_of_job_changes_its_matches_once(rig: EmbeddedRig) -> None:
    """Cancelled, moved by an offset, moved to a time and delivered; other messages and other topics stay."""
    await sent(rig, "a", "b", tag="t")
    await sent(rig, "c", after_ms=2 * HOUR_MS)
    await rig.broker.send([a_message("x", topic="refunds", deliver_at_ms=rig.clock.now_ms() + HOUR_MS)])
    job = await finish(rig, replace(LATER, filter=MessageFilter(tag="t")))
    assert (job.state, counts(job)) == (JobState.DONE, (2, 0, 0))
    assert due(rig) == {
        "a": 2 * HOUR_MS,
        "b": 2 * HOUR_MS,
        "c": 2 * HOUR_MS,
    }
    assert await outcomes(rig, job) == {"a": _O.DONE, "b": _O.DONE}
    at_ms = rig.clock.now_ms() + 5 * HOUR_MS
    chosen = MessageFilter(message_id="c")
    await finish(rig, replace(LATER, delay_by_ms=0, deliver_at_ms=at_ms, filter=chosen))
    assert due(rig) == {"a": 2 * HOUR_MS, "b": 2 * HOUR_MS, "c": 5 * HOUR_MS}
    await finish(rig, replace(FIRE, filter=MessageFilter(due_before_ms=at_ms)))
    await rig.pass_ms(2)
    assert sorted(ids(await receive(rig, batch_max=9))) == ["a", "b"]
    assert counts(await finish(rig, CANCEL)) == (1, 0, 0)
    assert due(rig) == {}
    assert events(rig, EventKind.RECALLED) == {"c": 1}


@every_durable_broker(queues=1)
async def test_messages_that_change_meanwhile_have_their_own_outcome(rig: EmbeddedRig) -> None:
    """Delivered, recalled, replaced under an own key, expiring before the new time, sent later: none is changed."""
    await sent(rig, "m1", "m2", "m3")
    await sent(rig, "m4", own_key="k")
    await sent(rig, "m5", after_ms=HOUR_MS // 2)
    job = await rig.broker.message_jobs.start(replace(LATER, rate_per_s=1))
    await until(lambda: job_now(rig, job).done == 1)
    await rig.broker.delayed.cancel(TOPIC, [Meant(pack_id("m2"))])
    rig.clock.advance(1)
    await sent(rig, "m6", own_key="k")
    rig.clock.advance(HOUR_MS // 2)
    await rig.settle()  # delivers m5
    job = await ended(rig, job)
    assert await outcomes(rig, job) == {
        "m1": _O.DONE, "m2": _O.CANCELLED, "m3": _O.DONE, "m4": _O.REPLACED, "m5": _O.TOO_LATE
    }  # fmt: skip
    assert await outcomes(rig, job, only_missed=True) == {"m2": _O.CANCELLED, "m4": _O.REPLACED, "m5": _O.TOO_LATE}
    assert (job.state, counts(job)) == (JobState.DONE, (2, 3, 0))
    assert events(rig, EventKind.RESCHEDULED) == {"m1": 1, "m3": 1}


@every_durable_broker(queues=1)
async def test_own_keys_and_expiry_are_those_of_a_single_change(rig: EmbeddedRig) -> None:
    """A moved message keeps its own key, a cancelled one frees it, and a message is not moved beyond its expiry."""
    now_ms = rig.clock.now_ms()
    await sent(rig, "k1", own_key="k")
    expiring = Message(
        topic=TOPIC,
        message_id="e1",
        body=b"x",
        deliver_at_ms=now_ms + HOUR_MS,
        properties={"DMQ_NOT_AFTER_MS": str(now_ms + HOUR_MS + 1)},
    )
    await rig.broker.send([encode(expiring)])
    job = await finish(rig, LATER)
    assert await outcomes(rig, job) == {"k1": _O.DONE, "e1": _O.EXPIRES}
    assert counts(job) == (1, 0, 1)
    assert await rig.broker.delayed.under(TOPIC, ["k"]) != [None]
    assert counts(await finish(rig, CANCEL)) == (2, 0, 0)
    assert await rig.broker.delayed.under(TOPIC, ["k"]) == [None]


@every_durable_broker(queues=1)
async def test_a_job_covers_pending_messages_only(rig: EmbeddedRig) -> None:
    """Neither retries, nor half messages, nor the next occurrence of a schedule, nor queued messages."""
    await fail(rig, "r1")  # waits for its retry
    await rig.broker.send([a_message("q1")])
    await rig.broker.transactions.prepare([Half(a_message("h1"))])
    await rig.broker.schedules.add(wanted("tick"))
    await sent(rig, "d1")
    before = [rows for family, rows in zip(Family, everything(rig), strict=True) if family is Family.TIMELINE]
    job = await finish(rig, CANCEL)
    assert await outcomes(rig, job) == {"d1": _O.DONE}
    after = [rows for family, rows in zip(Family, everything(rig), strict=True) if family is Family.TIMELINE]
    assert len(before[0]) - len(after[0]) == 1


@every_durable_broker(queues=1)
async def test_a_stopped_job_is_resumed_at_its_position(rig: EmbeddedRig) -> None:
    """Also after a kill; no message is moved twice, and a second job of the topic has to wait."""
    await sent(rig, *(f"m{number}" for number in range(5)))
    job = await rig.broker.message_jobs.start(replace(LATER, rate_per_s=1))
    await until(lambda: job_now(rig, job).done == 1)
    with pytest.raises(Refused, match="another job of this topic is running"):
        await rig.broker.message_jobs.start(CANCEL)
    stopped = await rig.broker.message_jobs.stop(job.job_id)
    assert (stopped.state, counts(stopped)) == (JobState.STOPPED, (1, 0, 0))
    await rig.restart(End.KILL)
    assert job_now(rig, job) == stopped
    assert Counter(due(rig).values()) == {HOUR_MS: 4, 2 * HOUR_MS: 1}
    assert (await rig.broker.message_jobs.resume(job.job_id)).state is JobState.RUNNING
    await rig.restart(End.KILL)
    assert counts(await ended(rig, job)) == (5, 0, 0)
    assert set(events(rig, EventKind.RESCHEDULED).values()) == {1}
    assert (await rig.broker.message_jobs.resume(job.job_id)).state is JobState.DONE


@every_durable_broker(queues=1)
async def test_a_job_of_a_removed_topic_stops(rig: EmbeddedRig) -> None:
    """It cannot be resumed, also if a topic is created again under the name."""
    await sent(rig, "a", "b", "c")
    job = await rig.broker.message_jobs.start(replace(LATER, rate_per_s=1))
    await until(lambda: job_now(rig, job).done == 1)
    await rig.broker.operator.remove_topic(TOPIC, is_forced=True)
    assert (await ended(rig, job)).state is JobState.STOPPED
    await sent(rig, "a")
    with pytest.raises(Refused) as refused:
        await rig.broker.message_jobs.resume(job.job_id)
    assert refused.value.rule is Rule.NOT_FOUND
    assert due(rig) == {"a": HOUR_MS}


@every_durable_broker(queues=1)
async def test_a_dry_run_counts_and_shows_the_first_by_delivery_time(rig: EmbeddedRig) -> None:
    """And changes nothing."""
    for number in range(25):
        await sent(rig, f"m{number:02}", after_ms=HOUR_MS - number)
    rows = everything(rig)
    would = await rig.broker.message_jobs.dry_run(CANCEL)
    assert would.matching == 25
    assert [unpack_id(each.message.message_id) for each in would.samples] == [
        f"m{number:02}" for number in range(24, 4, -1)
    ]
    assert (everything(rig), rig.broker.message_jobs.jobs()) == (rows, [])


@every_durable_broker(queues=1)
async def test_old_jobs_make_room(rig: EmbeddedRig) -> None:
    """With the outcomes of their messages; the newest one keeps all of its own."""
    with patch.object(message_jobs_module, "MESSAGES_KEPT", 3):
        for number in range(3):
            await sent(rig, f"a{number}", f"b{number}")
            await finish(rig, CANCEL)
        await finish(rig, CANCEL)
        assert [each.job_id for each in rig.broker.message_jobs.jobs()] == [4, 3]
    rows = rig.store.scan(Family.META, *meta_range(META_JOB_MESSAGE), limit=99).rows
    assert len(rows) == 2


@pytest.mark.parametrize("where", Break)
def test_a_broken_commit_changes_no_message_twice(tmp_path: Path, where: Break) -> None:
    """At each commit of the job, with a kill after it: each message is one hour later at the end, by one event."""

    async def scenario(rig: BreakingRig, commits_before: int) -> bool:
        names = [f"m{number}" for number in range(5)]
        await sent(rig, *names)
        rig.engine.break_at(where, commits_before=commits_before)
        job = LATER
        try:
            job = await rig.broker.message_jobs.start(LATER)
        except BrokerUnavailable:
            job = replace(LATER, job_id=1)
        found = rig.broker.message_jobs.find
        await until(lambda: rig.store.failure is not None or getattr(found(1), "state", 0) is not JobState.RUNNING)
        has_failed = rig.store.failure is not None
        await rig.restart(End.KILL)
        if rig.broker.message_jobs.find(1) is None:
            assert set(due(rig).values()) == {HOUR_MS}
            await rig.broker.message_jobs.start(LATER)
        job = await ended(rig, job)
        assert (job.state, counts(job)) == (JobState.DONE, (5, 0, 0))
        assert due(rig) == dict.fromkeys(names, 2 * HOUR_MS)
        assert events(rig, EventKind.RESCHEDULED) == dict.fromkeys(names, 1)
        assert await outcomes(rig, job) == dict.fromkeys(names, _O.DONE)
        return has_failed

    def breaks(commits_before: int) -> bool:
        async def one(rig: Rig) -> None:
            assert isinstance(rig, BreakingRig)
            broke.append(await scenario(rig, commits_before))

        broke: list[bool] = []
        asyncio.run(play(BreakingRig(tmp_path / str(commits_before), on_disk=False), one))
        return broke[0]

    with patch.object(message_jobs_module, "ROWS_PER_UNIT_MAX", 2), patch.object(message_jobs_module, "_FIRST_READ", 2):
        commits = next(number for number in range(99) if not breaks(number))
    assert commits > 5
