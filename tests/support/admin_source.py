"""An admin source with fixed answers, for the service, the transport and the command line alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from support.admin_status import NOW, STATUS, TOPICS

from broker_adapter.contracts.errors import Refused, Rule, group_unknown
from broker_adapter.contracts.message import Message
from broker_adapter.wire.mapping import encode
from dmq.admin.api.service import AdminService, Operators
from dmq.admin.requests import status as source
from dmq.broker.failures.waiting_retries import RetryOutcomes, RetryPage, WaitingRetry
from dmq.broker.operations.message_states import GroupState
from dmq.broker.topics.settings import FLOW_STAYS, FlowChange
from dmq.states import MessageState
from retry.dead_letter import Dead, DeadFilter, Job, JobState
from retry.policy import Exponential, Reason, RetryPolicy

MESSAGE_ID = "01" + "AB" * 16

MESSAGE = Message(
    topic="orders",
    message_id=MESSAGE_ID,
    body=b"caf\xc3\xa9 \x1b[31mred",
    tag="new",
    keys=("k1", "k2"),
    properties={"b": "2", "a": "1"},
    message_group="g",
    deliver_at_ms=NOW + 60_000,
    born_at_ms=NOW - 1,
    born_host="here",
)

MINUTE = 60_000
DAMAGED = b"\xff\xff"  # no message
SET_POLICY = RetryPolicy(
    backoff=Exponential(5000, 7_200_000), max_attempts=4, jitter=0.25, max_age_ms=3 * 24 * 60 * MINUTE
)

# Their `waiting` and `dead` are counted by the source; `due` is of `RETRIES`.
GROUPS = (
    source.GroupStatus(
        name="billing",
        created_at_ms=NOW - 90 * MINUTE,
        policy=RetryPolicy(),
        is_default_policy=True,
        is_fifo=False,
        is_fifo_set=False,
        leased=7,
        due=(source.DueBucket(until_ms=NOW + MINUTE, count=2), source.DueBucket(until_ms=NOW + 30 * MINUTE, count=1)),
    ),
    source.GroupStatus(
        name="shipping",
        created_at_ms=NOW,
        policy=SET_POLICY,
        is_default_policy=False,
        is_fifo=True,
        is_fifo_set=True,
    ),
)


def retry(entry: int, *, topic: str = "orders", message_id: str = "", due_in_ms: int = 1000) -> WaitingRetry:
    """A retry of ``billing``; its message id follows from its entry."""
    return WaitingRetry(
        entry=f"7-{entry}",
        group="billing",
        topic=topic,
        message_id=message_id or f"M{entry}",
        attempt=3,
        due_at_ms=NOW + due_in_ms,
        first_failed_at_ms=NOW - 40_000,
        last_failed_at_ms=NOW - 10_000,
        payload=encode(MESSAGE).payload,
    )


RETRIES = (
    retry(11, due_in_ms=-5),
    retry(12, topic="refunds", due_in_ms=5000),
    retry(13, message_id="M11", due_in_ms=29 * MINUTE),
)


def letter(
    offset: int, reason: Reason | None = Reason.EXHAUSTED, *, topic: str = "orders", outcome: str = ""
) -> source.DeadStatus:
    """A dead letter of ``billing``; it failed last ``offset`` minutes after ``NOW``."""
    return source.DeadStatus(
        dead=Dead(
            offset=offset,
            message_id=f"D{offset}",
            origin_topic=topic,
            reason=reason,
            attempts=17 if reason is not None else 0,
            first_failed_at_ms=NOW - 60 * MINUTE,
            last_failed_at_ms=NOW + offset * MINUTE,
            tag="new",
            keys=("k1", f"k{offset}"),
        ),
        payload=encode(MESSAGE).payload,
        dead_at_ms=NOW + offset * MINUTE + 1,
        outcome=outcome,
        outcome_at_ms=NOW + 99 * MINUTE if outcome else 0,
        outcome_note="orders R1" if outcome else "",
    )


LETTERS = (
    letter(4),
    letter(5, Reason.TOO_OLD, topic="refunds"),
    letter(6, outcome="redriven"),
    letter(8, None, topic=""),
)


@dataclass
class FixedSource:
    """Knows one waiting message, two groups, and the retries and dead letters of one of them, which can be changed.

    ``failure`` is raised instead of every answer. One call looks at ``rows_per_call`` rows; a job goes on by
    ``letters_per_look`` letters each time somebody looks at it.
    """

    cell: source.CellStatus = STATUS
    failure: Exception | None = None
    found: dict[tuple[str, str], source.MessageStatus] = field(
        default_factory=lambda: {
            ("orders", MESSAGE_ID): source.MessageStatus(
                state=MessageState.WAITING,
                deliver_at_ms=NOW + 60_000,
                stored_at_ms=NOW,
                payload=encode(MESSAGE).payload,
            )
        }
    )
    known: dict[str, source.GroupStatus] = field(default_factory=lambda: {group.name: group for group in GROUPS})
    waiting: list[WaitingRetry] = field(default_factory=lambda: list(RETRIES))
    letters: list[source.DeadStatus] = field(default_factory=lambda: list(LETTERS))
    all_jobs: list[Job] = field(default_factory=list)
    rows_per_call: int = 1000
    letters_per_look: int = 1
    ran: list[list[str]] = field(default_factory=list)
    ended: list[list[str]] = field(default_factory=list)

    async def status(self) -> source.CellStatus:
        """As the real one."""
        self._fail()
        return self.cell

    async def topics(self) -> Sequence[source.TopicStatus]:
        """As the real one."""
        self._fail()
        return TOPICS

    async def message(self, topic: str, message_id: str) -> source.MessageStatus:
        """As the real one."""
        self._fail()
        return self.found.get((topic, message_id), source.MessageStatus(state=MessageState.UNKNOWN))

    async def group_states(self, topic: str, message_id: str, status: source.MessageStatus) -> Sequence[GroupState]:
        """No group has read anything."""
        return ()

    async def groups(self, *, with_removed: bool = False) -> Sequence[source.GroupStatus]:
        """As the real one."""
        return [replace(await self.group(name), due=()) for name in sorted(self.known)]

    async def group(self, name: str, *, with_lag: bool = False, with_unread: bool = False) -> source.GroupStatus:
        """As the real one."""
        self._fail()
        if name not in self.known:
            raise group_unknown(name)
        is_billing = name == "billing"
        return replace(
            self.known[name],
            unread=(source.Unread(topic="orders", unread=1_234),) if is_billing and with_unread else (),
            waiting=len(self.waiting) if is_billing else 0,
            dead=sum(not found.outcome for found in self.letters) if is_billing else 0,
        )

    async def set_group(
        self,
        name: str,
        *,
        policy: RetryPolicy | None,
        reset_policy: bool,
        is_fifo: bool | None,
        retries: str | None = None,
        flow: FlowChange = FLOW_STAYS,
    ) -> source.GroupStatus:
        """As the real one."""
        self._fail()
        group = self.known.get(name, replace(GROUPS[0], name=name, created_at_ms=NOW, leased=0, due=()))
        if policy is not None or reset_policy:
            group = replace(group, policy=policy or RetryPolicy(), is_default_policy=reset_policy)
        if is_fifo is not None:
            group = replace(group, is_fifo=is_fifo, is_fifo_set=True)
        if retries is not None:
            group = replace(group, retries=retries)
        if flow.is_paused is not None:
            group = replace(group, paused_since_ms=NOW if flow.is_paused else 0)
        if flow.deliver_rate is not None:
            group = replace(group, deliver_rate=flow.deliver_rate)
        self.known[name] = group
        return await self.group(name)

    async def page(self, group: str, *, topic: str, token: str, limit: int) -> RetryPage:
        """As the real one."""
        await self.group(group)
        start = int(token or 0)
        rows = self.waiting[start : start + min(self.rows_per_call, limit)] if group == "billing" else []
        end = start + len(rows)
        meant = [row for row in rows if not topic or row.topic == topic]
        return RetryPage(retries=meant, next_token=str(end) if rows and end < len(self.waiting) else "")

    async def run_now(self, group: str, entries: Sequence[str]) -> RetryOutcomes:
        """As the real one."""
        await self.group(group)
        self.ran.append(list(entries))
        return self._take(entries)

    async def end(self, group: str, entries: Sequence[str]) -> RetryOutcomes:
        """As the real one."""
        await self.group(group)
        self.ended.append(list(entries))
        return self._take(entries)

    def _take(self, entries: Sequence[str]) -> RetryOutcomes:
        left = [row for row in self.waiting if row.entry not in entries]
        moved = len(self.waiting) - len(left)
        self.waiting = left
        return RetryOutcomes(moved=moved, gone=len(entries) - moved)

    async def dead_letters(
        self, group: str, chosen: DeadFilter, *, offset: int, limit: int, with_outcome: bool
    ) -> source.DeadPage:
        """As the real one."""
        await self.group(group)
        there = [found for found in self.letters if found.dead.offset >= offset] if group == "billing" else []
        rows = there[: min(self.rows_per_call, limit)]
        meant = [row for row in rows if chosen.matches(row.dead) and (with_outcome or not row.outcome)]
        return source.DeadPage(letters=meant, next_offset=rows[-1].dead.offset + 1 if len(there) > len(rows) else -1)

    async def start_job(self, job: Job, *, is_dry_run: bool) -> Job:
        """As the real one."""
        await self.group(job.group)
        if any(other.group == job.group and other.state is JobState.RUNNING for other in self.all_jobs):
            raise Refused(Rule.REQUEST, "another job of this group runs", value=job.group)
        first = self.letters[0].dead.offset if self.letters else 0
        end = self.letters[-1].dead.offset + 1 if self.letters else 0
        job = replace(job, first_offset=first, next_offset=first, end_offset=end, created_at_ms=NOW)
        if is_dry_run:
            return self._advance(job, len(self.letters), writes=False)
        job = replace(job, job_id=len(self.all_jobs) + 1)
        self.all_jobs.append(job if first < end else job.advanced(end))
        return self.all_jobs[-1]

    async def jobs(self, group: str) -> Sequence[Job]:
        """As the real one."""
        self._fail()
        running = [job for job in self.all_jobs if job.state is JobState.RUNNING]
        for job in running:
            self.all_jobs[job.job_id - 1] = self._advance(job, self.letters_per_look, writes=True)
        return [job for job in reversed(self.all_jobs) if not group or job.group == group]

    async def stop_job(self, job_id: int) -> Job:
        """As the real one."""
        self._fail()
        if not 1 <= job_id <= len(self.all_jobs):
            raise Refused(Rule.NOT_FOUND, "no job has this number", value=job_id)
        job = self.all_jobs[job_id - 1]
        if job.state is JobState.RUNNING:
            self.all_jobs[job_id - 1] = replace(job, state=JobState.STOPPED)
        return self.all_jobs[job_id - 1]

    def _advance(self, job: Job, letters: int, *, writes: bool) -> Job:
        ahead = [number for number, found in enumerate(self.letters) if found.dead.offset >= job.next_offset]
        for number in ahead[:letters]:
            found = self.letters[number]
            is_meant = job.filter.matches(found.dead) and not found.outcome
            is_readable = found.payload != DAMAGED
            job = job.advanced(
                found.dead.offset + 1,
                done=is_meant and is_readable,
                passed=not is_meant,
                failed=is_meant and not is_readable,
            )
            if writes and is_meant and is_readable:
                self.letters[number] = replace(found, outcome="redriven", outcome_at_ms=NOW)
        return job

    def _fail(self) -> None:
        if self.failure is not None:
            raise self.failure


def service_over(source: FixedSource) -> AdminService:
    """The service over fixed answers instead of a broker's."""
    each: Any = source
    return AdminService(Operators(each, each, each, each, each, each, each))
