"""Dead letters made by hand, for tests of what is done with them: how messages die, and what is in the store after."""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from hypothesis import event
from support.clients.embedded.admin_answers import ask
from support.clients.embedded.failing import change, pushed
from support.models.store.outbox import read_outbox
from support.rigs.broker.rig import GROUP, TOPIC, EmbeddedRig, End, Rig, play, receive, until
from support.rigs.store.rows import GatedEngine, all_rows

from broker_adapter.contracts.errors import BrokerUnavailable
from broker_adapter.contracts.message import Envelope, Message
from broker_adapter.contracts.topics import dead_letter_topic
from broker_adapter.runtime.clock import ManualClock
from broker_adapter.wire.mapping import decode, encode
from dmq.admin import admin_v1 as wire
from dmq.admin.requests.mapping import wire_policy
from dmq.broker.failures.waiting_retries import RetryOutcomes, WaitingRetry
from dmq.broker.operations import dead_letters as dead_letters_module
from dmq.broker.operations.dead_letters import Letter, Page
from dmq.errors import StoreError, StoreFailed
from dmq.store.engines.engine import Batch, Engine
from dmq.store.schema.keys import Family, pack_queue_key, queue_offset_of
from dmq.store.schema.messages.record import QueuedMessage, decode_queued
from dmq.store.writer.operations import Put
from dmq.trail.events import AuditEvent, EventKind
from retry.dead_letter import PARENT_MESSAGE_ID, DeadFilter, Job, JobKind, JobState
from retry.policy import Fixed, RetryPolicy

DEAD = dead_letter_topic(GROUP)
UNDERTAKER = "undertaker"  # a group that reads dead letters
ALL = DeadFilter()
REDRIVE = Job(job_id=0, kind=JobKind.REDRIVE, group=GROUP)
TO_ALL = replace(REDRIVE, all_groups=True)
PURGE = Job(job_id=0, kind=JobKind.PURGE, group=GROUP, why="too old to matter")
SLOW = replace(REDRIVE, rate_per_s=0.001)  # one message now, the next one when the clock says so
OTHERS = "others"  # another group


class Child(NamedTuple):
    """A redriven message, where it lies and as it lies there."""

    topic: str
    queue_id: int
    message: Message
    record: QueuedMessage
    group: str = ""  # in whose lane it lies


def a_message(
    message_id: str,
    *,
    topic: str = TOPIC,
    body: bytes = b"body",
    tag: str = "",
    keys: Sequence[str] = (),
    message_group: str = "",
    deliver_at_ms: int = 0,
) -> Envelope:
    """A message whose payload is one."""
    return encode(
        Message(
            topic=topic,
            message_id=message_id,
            body=body,
            tag=tag,
            keys=keys,
            properties={"color": "red"},
            message_group=message_group,
            deliver_at_ms=deliver_at_ms,
        )
    )


async def die(rig: EmbeddedRig, *envelopes: Envelope, group: str = GROUP) -> None:
    """Send messages, and let ``group`` give each of them up, in their order."""
    for each in envelopes:
        await rig.broker.send([each])
        await forward(rig, group=group, topic=each.topic)


async def forward(rig: EmbeddedRig, *, group: str = GROUP, topic: str = TOPIC) -> None:
    """Let ``group`` give up the one message that is there for it."""
    (delivery,) = await receive(rig, group=group, topic=topic)
    await rig.broker.dead_letter(group, topic, delivery.receipt_handle, attempts=1)


async def die_many(rig: EmbeddedRig, count: int, *, first: int = 0) -> list[str]:
    """Let messages ``m-<number>`` die; return their ids."""
    ids = [f"m-{number}" for number in range(first, first + count)]
    await die(rig, *(a_message(each) for each in ids))
    return ids


def only(*message_ids: str) -> DeadFilter:
    """These letters."""
    return DeadFilter(message_ids=frozenset(message_ids))


@contextmanager
def units_of(rows: int) -> Iterator[None]:
    """Jobs that take a few letters at a time."""
    with patch.object(dead_letters_module, "ROWS_PER_UNIT_MAX", rows):
        yield


async def page(
    rig: EmbeddedRig, chosen: DeadFilter = ALL, *, offset: int = 0, limit: int = 1_000, with_outcome: bool = False
) -> Page:
    """One page of letters."""
    return await rig.broker.dead_letters.page(GROUP, chosen, offset=offset, limit=limit, with_outcome=with_outcome)


async def letters(rig: EmbeddedRig, chosen: DeadFilter = ALL, *, with_outcome: bool = False) -> list[Letter]:
    """All letters, however many pages that takes."""
    found: list[Letter] = []
    offset = 0
    while offset >= 0:
        some = await page(rig, chosen, offset=offset, with_outcome=with_outcome)
        found += some.letters
        assert some.next_offset < 0 or some.next_offset > offset
        offset = some.next_offset
    return found


async def letter_ids(rig: EmbeddedRig, chosen: DeadFilter = ALL, *, with_outcome: bool = False) -> list[str]:
    """The message ids of all letters."""
    return [each.dead.message_id for each in await letters(rig, chosen, with_outcome=with_outcome)]


async def dead_count(rig: EmbeddedRig) -> int:
    """How many letters have no outcome, as it is counted."""
    return await rig.broker.dead_letters.count(rig.broker.names.topics[DEAD])


async def start(rig: EmbeddedRig, job: Job) -> Job:
    """Start a job."""
    return await rig.broker.dead_letters.start(job, is_dry_run=False)


async def dry(rig: EmbeddedRig, job: Job) -> Job:
    """Count what a job would do."""
    return await rig.broker.dead_letters.start(job, is_dry_run=True)


async def finish(rig: EmbeddedRig, job: Job) -> Job:
    """Start a job and return it when it has ended."""
    return await ended(rig, await start(rig, job))


async def ended(rig: EmbeddedRig, job: Job) -> Job:
    """Return a job when it has ended, durable."""
    await until(lambda: is_over(rig, job))
    await rig.store.commit_async([])
    return job_now(rig, job)


def job_now(rig: EmbeddedRig, job: Job) -> Job:
    """A job as it is now."""
    (found,) = [each for each in rig.broker.dead_letters.jobs() if each.job_id == job.job_id]
    return found


def is_over(rig: EmbeddedRig, job: Job) -> bool:
    """Whether a job has ended."""
    return job_now(rig, job).state is not JobState.RUNNING


def counts(job: Job) -> tuple[int, int, int]:
    """What a job counted: done, passed, failed."""
    return job.done, job.passed, job.failed


def queued(rig: EmbeddedRig, topic: str) -> list[tuple[int, int, QueuedMessage]]:
    """What lies in the queues of a topic: queue, offset, message."""
    topic_id = rig.broker.names.topics[topic].topic_id
    return [
        (int.from_bytes(key[4:6], "big"), queue_offset_of(key), decode_queued(value))
        for key, value in all_rows(rig.store, Family.QUEUE)
        if int.from_bytes(key[:4], "big") == topic_id
    ]


def children(rig: EmbeddedRig, *topics: str) -> dict[str, list[Child]]:
    """Redriven messages in ``topics``, by the message id of their letter."""
    found: dict[str, list[Child]] = {}
    for topic in topics or (TOPIC,):
        lying = [(queue_id, record, "") for queue_id, _, record in queued(rig, topic)]
        for queue_id, record, group in [*lying, *((0, record, group) for group, record in in_lanes(rig, topic))]:
            message = decode(record.payload)
            if PARENT_MESSAGE_ID in message.properties:
                child = Child(topic, queue_id, message, record, group)
                found.setdefault(message.properties[PARENT_MESSAGE_ID], []).append(child)
    return found


def in_lanes(rig: EmbeddedRig, topic: str) -> list[tuple[str, QueuedMessage]]:
    """What lies in the lanes of a topic: the group whose lane it is, and the message."""
    names = rig.broker.names
    topic_id = names.topics[topic].topic_id
    groups = {lane.topic_id: names.groups_by_id[of[0]].name for of, lane in names.lanes.items() if of[1] == topic_id}
    return [
        (groups[lane_id], decode_queued(value))
        for key, value in all_rows(rig.store, Family.QUEUE)
        if (lane_id := int.from_bytes(key[:4], "big")) in groups
    ]


def child_of(rig: EmbeddedRig, message_id: str, *topics: str) -> Child:
    """The one message made of a letter."""
    (child,) = children(rig, *topics)[message_id]
    return child


def told(rig: EmbeddedRig, *kinds: EventKind) -> list[AuditEvent]:
    """Events of these kinds, in their order."""
    return [event for _, event in read_outbox(rig.store) if event.kind in kinds]


def everything(rig: EmbeddedRig) -> list[list[tuple[bytes, bytes]]]:
    """Every row of the store."""
    return [all_rows(rig.store, family) for family in Family]


async def damage(rig: EmbeddedRig, offset: int, value: bytes = b"\xff") -> None:
    """Write something over a letter's record."""
    topic_id = rig.broker.names.topics[DEAD].topic_id
    await rig.store.commit_async([Put(Family.QUEUE, pack_queue_key(topic_id, 0, offset), value)])


@contextmanager
def sleeping_moves(clock: ManualClock, watch: Callable[[], None] = lambda: None) -> Iterator[None]:
    """A job that sleeps lets as much time pass on ``clock``, and none in this world; ``watch`` is called around it."""
    really = asyncio.sleep

    async def sleep(seconds: float) -> None:
        task = asyncio.current_task()
        if task is None or not task.get_name().startswith("dmq-job-"):
            return await really(seconds)
        watch()
        clock.advance(math.ceil(seconds * 1000))
        watch()
        return await really(0)

    with patch.object(asyncio, "sleep", sleep):
        yield


# -- what operators do ------------------------------------------------------------------------------------------------


async def set_policy(rig: EmbeddedRig, max_attempts: int, delay_ms: int, *, group: str = GROUP) -> wire.Group:
    """Set a group's policy."""
    policy = wire_policy(RetryPolicy(backoff=Fixed(delay_ms), max_attempts=max_attempts))
    found: wire.Group = (await ask(rig, wire.SetGroupRequest(group=group, policy=policy))).group
    return found


async def fail(rig: EmbeddedRig, *message_ids: str, group: str = GROUP, topic: str = TOPIC) -> None:
    """Send messages and let ``group`` fail each of them once."""
    await rig.broker.send([a_message(each, topic=topic) for each in message_ids])
    await fail_again(rig, group=group, topic=topic)


async def fail_again(rig: EmbeddedRig, *, group: str = GROUP, topic: str = TOPIC) -> None:
    """Let ``group`` fail what is there."""
    for each in await pushed(rig, group=group, topic=topic):
        await change(rig, each, group=group)


async def waiting(rig: EmbeddedRig, *, group: str = GROUP, topic: str = "", limit: int = 1_000) -> list[WaitingRetry]:
    """All retries that wait, however many pages that takes."""
    found: list[WaitingRetry] = []
    token = ""
    while True:
        page = await rig.broker.retries.page(group, topic=topic, token=token, limit=limit)
        assert len(page.retries) <= limit
        found += page.retries
        if not page.next_token:
            return found
        token = page.next_token


async def entries(rig: EmbeddedRig, *, group: str = GROUP) -> list[str]:
    """The entries of all retries that wait."""
    return [each.entry for each in await waiting(rig, group=group)]


async def run_now(rig: EmbeddedRig, *named: str) -> RetryOutcomes:
    """Make retries visible."""
    return await rig.broker.retries.run_now(GROUP, named)


async def to_dead(rig: EmbeddedRig, *named: str) -> RetryOutcomes:
    """End retries."""
    return await rig.broker.retries.end(GROUP, named)


Command = Callable[..., Coroutine[Any, Any, RetryOutcomes]]
COMMANDS = (run_now, to_dead)


# -- commits that break -----------------------------------------------------------------------------------------------


class Break(Enum):
    """Where a commit breaks."""

    BEFORE_WRITE = "not written"
    BEFORE_SYNC = "written, not synced"
    AFTER_SYNC = "synced, not answered"

    def leaves(self, end: End) -> bool:
        """Whether what the commit did is there after such an end of the run."""
        return self is Break.AFTER_SYNC or (self is Break.BEFORE_SYNC and end is End.KILL)


class BreakingEngine(GatedEngine):
    """Breaks once in the commit that it was told to."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self._where: Break | None = None
        self._commits_before = 0

    def break_at(self, where: Break, *, commits_before: int = 0) -> None:
        """Let the commit break that comes after ``commits_before`` others."""
        self._where, self._commits_before = where, commits_before

    def write(self, batch: Batch) -> None:
        self._pass(Break.BEFORE_WRITE)
        super().write(batch)

    def sync(self) -> None:
        self.flush()  # a write without it is in memory alone
        self._pass(Break.BEFORE_SYNC)
        super().sync()
        self._pass(Break.AFTER_SYNC)
        self._commits_before -= 1

    def _pass(self, where: Break) -> None:
        if where is self._where and self._commits_before <= 0:
            self._where = None
            raise StoreFailed(f"broken on purpose: {where.value}")


class BreakingRig(EmbeddedRig):
    """A broker whose commits break when told; ``engine`` is that of the present run."""

    def __init__(self, path: Path, *, on_disk: bool) -> None:
        self.engine: BreakingEngine
        super().__init__(path, on_disk=on_disk, queues=1, wrap=self._wrapped)

    def _wrapped(self, engine: Engine) -> Engine:
        self.engine = BreakingEngine(engine)
        return self.engine


async def broke(rig: BreakingRig, step: Awaitable[None], name: str, end: End) -> bool:
    """Await a step of a history; if the store broke in it, end the run, start the next one, and return True."""
    try:
        await step
    except (BrokerUnavailable, StoreError):
        assert rig.store.failure is not None
    if rig.store.failure is None:
        return False
    event(f"broke in {name}")
    await rig.restart(end)
    return True


def play_history(scenario: Callable[[BreakingRig], Awaitable[None]], *, on_disk: bool) -> None:
    """Play one history on a new broker, which hypothesis does many times in a test."""

    async def body(rig: Rig) -> None:
        assert isinstance(rig, BreakingRig)
        await scenario(rig)

    with tempfile.TemporaryDirectory(prefix="dmq-history-") as folder:
        asyncio.run(play(BreakingRig(Path(folder), on_disk=on_disk), body))
