"""What operators do to groups, retries and dead letters: the second half of ``AdminSource``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from broker_adapter.errors import Refused, Rule, group_unknown, topic_unknown
from broker_adapter.message import unpack_id
from broker_adapter.topics import DEAD_LETTER_PREFIX, dead_letter_topic
from dmq.admin.source import (
    DeadPage,
    DeadStatus,
    DueBucket,
    GroupStatus,
    RetryOutcomes,
    RetryPage,
    Unread,
    WaitingRetry,
)
from dmq.audit.events import LANE, EventKind, encode_event
from dmq.embedded.broker import EmbeddedBroker
from dmq.embedded.dead_letters import Letter
from dmq.embedded.names import Group, Topic
from dmq.embedded.registry import DEFAULT_POLICY
from dmq.store.counts import BUCKET_MS
from dmq.store.keys import pack_timeline_key, timeline_key, unpack_timeline_key
from dmq.store.ops import Append, EntryState, Family, IfKnown, Op, Withdraw
from dmq.store.record import (
    WAITING_HEADER_BYTES,
    EntryKind,
    QueuedMessage,
    decode_queued,
    decode_waiting,
    encode_queued,
    failed_id,
)
from dmq.store.store import Store
from retry.dead_letter import DeadFilter, Job
from retry.policy import Reason, RetryPolicy

_DUE_BUCKETS_MAX = 10_000
_ROWS_PER_SCAN = 1_000
ROWS_PER_CALL_MAX = 20_000  # looked at by one call that lists retries
BYTES_PER_CALL_MAX = 16 * 1024 * 1024
ENTRIES_PER_UNIT_MAX = 32  # each may be 4 MiB in memory
_JOBS_SHOWN_MAX = 100
_END_OF_TIMELINE = b"\xff" * 17


class _Retry(NamedTuple):
    """A waiting retry, as it stands on the timeline."""

    key: bytes
    due_at_ms: int
    lane_id: int
    message: QueuedMessage  # as it will lie in its lane
    value: bytes  # of its lane


_Instead = Callable[[_Retry], tuple[list[Op], list[Append]]]


class Operations:
    """Fits the second half of ``AdminSource``."""

    store: Store
    broker: EmbeddedBroker

    # -- groups -------------------------------------------------------------------------------------------------------

    async def groups(self, *, with_removed: bool = False) -> Sequence[GroupStatus]:
        """Return every consumer group, by name; and names that only dead letters lie under."""
        names = self.broker.names
        pending = await asyncio.get_running_loop().run_in_executor(None, self.store.pending)
        found = [await self._group(group, pending) for group in list(names.groups.values())]
        if with_removed:
            left = [each for each in names.topics.values() if names.is_left(each)]
            found += [await self._left(each) for each in left]
        return sorted(found, key=lambda group: group.name)

    async def _left(self, letters: Topic) -> GroupStatus:
        """Return what there is of a group that was removed, or never was: its dead letters."""
        name = letters.name.removeprefix(DEAD_LETTER_PREFIX)
        group = self.broker.names.group_of_letters(name)
        return GroupStatus(
            name=name,
            created_at_ms=group.created_at_ms if group is not None else letters.created_at_ms,
            policy=DEFAULT_POLICY,
            is_default_policy=True,
            is_fifo=False,
            is_fifo_set=False,
            dead=await self.broker.dead_letters.count(letters),
            is_removed=True,
        )

    async def group(self, name: str, *, with_unread: bool = False) -> GroupStatus:
        """Return one group, with when its retries are due; if asked for, with what it has not finished by topic."""
        group = self._known(name)
        loop = asyncio.get_running_loop()
        pending = await loop.run_in_executor(None, self.store.pending)
        due = await loop.run_in_executor(None, self._due_counts, group.group_id)
        status = await self._group(group, pending, due)
        if not with_unread:
            return status
        return replace(status, unread=[Unread(**each._asdict()) for each in await self.broker.operator.unread(group)])

    def _due_counts(self, scope: int) -> list[DueBucket]:
        found = self.store.due_counts(scope, 0, 2**53, limit=_DUE_BUCKETS_MAX)
        return [DueBucket(until_ms=bucket.until_ms, count=bucket.count) for bucket in found]

    async def _group(self, group: Group, pending: dict[int, int], due: Sequence[DueBucket] = ()) -> GroupStatus:
        letters = self.broker.names.topics.get(dead_letter_topic(group.name))
        subscribed = [
            found for (group_id, _), found in self.broker.registry.subscriptions.items() if group_id == group.group_id
        ]
        return GroupStatus(
            name=group.name,
            created_at_ms=group.created_at_ms,
            policy=group.policy or DEFAULT_POLICY,
            is_default_policy=group.policy is None,
            is_fifo=self.broker.group_settings(group.name, [each.topic.name for each in subscribed]).is_fifo,
            is_fifo_set=group.is_fifo is not None,
            waiting=pending.get(group.group_id, 0),
            dead=await self.broker.dead_letters.count(letters) if letters is not None else 0,
            leased=sum(len(queue.leases) for found in subscribed for queue in found.all_queues),
            due=due,
        )

    async def set_group(
        self, name: str, *, policy: RetryPolicy | None, reset_policy: bool, is_fifo: bool | None
    ) -> GroupStatus:
        """Change a group, durable on return."""
        await self.broker.set_group(name, policy=policy, reset_policy=reset_policy, is_fifo=is_fifo)
        return await self.group(name)

    def _known(self, name: str) -> Group:
        group = self.broker.names.groups.get(name)
        if group is None:
            raise group_unknown(name)
        return group

    # -- retries ------------------------------------------------------------------------------------------------------

    async def retries(self, group: str, *, topic: str, token: str, limit: int) -> RetryPage:
        """Return waiting retries of a group in the order of their time."""
        found = self._known(group)
        topic_id = 0
        if topic:
            if topic not in self.broker.names.topics:
                raise topic_unknown(topic)
            topic_id = self.broker.names.topics[topic].topic_id
        start = _key_of(token) if token else timeline_key(self.store.marks.low())
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, self._retries, found, topic_id, start, limit)

    def _retries(self, group: Group, topic_id: int, at: bytes, limit: int) -> RetryPage:
        found: list[WaitingRetry] = []
        if not self.store.pending().get(group.group_id):
            return RetryPage(retries=found)
        looked = size = 0
        while looked < ROWS_PER_CALL_MAX and size < BYTES_PER_CALL_MAX:
            at = self._jump(group.group_id, at)
            rows = self.store.scan(
                Family.TIMELINE, at, _END_OF_TIMELINE, limit=_ROWS_PER_SCAN, bytes_max=BYTES_PER_CALL_MAX - size
            )
            for key, value in rows.rows:
                looked += 1
                size += len(value)
                if len(found) == limit:
                    return RetryPage(retries=found, next_token=_entry_of(key))
                entry = decode_waiting(value)
                if entry.kind != EntryKind.RETRY or entry.scope != group.group_id:
                    continue
                retry = _retry_of(key, value, entry.deliver_at_ms)
                history = retry.message.history
                assert history is not None
                if not topic_id or history.topic_id == topic_id:
                    found.append(self._shown(group, retry))
            if rows.is_complete:
                return RetryPage(retries=found)
            at = timeline_key(int.from_bytes(rows.rows[-1][0], "big") + 1)
        return RetryPage(retries=found, next_token=_entry_of(at))

    def _jump(self, group_id: int, at: bytes) -> bytes:
        """Return where the group's next entry can be: what is due later lies under its own time, and is counted."""
        at_ms = unpack_timeline_key(at)[0]
        if at_ms <= self.store.clock.now_ms() + BUCKET_MS:
            return at
        following = self.store.due_counts(group_id, at_ms, 2**53, limit=1)
        if not following:
            return _END_OF_TIMELINE[:16]
        return max(at, pack_timeline_key(following[0].until_ms - BUCKET_MS, 0))

    def _shown(self, group: Group, retry: _Retry) -> WaitingRetry:
        message, history = retry.message, retry.message.history
        assert history is not None
        return WaitingRetry(
            entry=_entry_of(retry.key),
            group=group.name,
            topic=self.broker.names.topics_by_id[history.topic_id].name,
            message_id=unpack_id(message.message_id),
            attempt=message.attempts_before + 1,
            due_at_ms=retry.due_at_ms,
            first_failed_at_ms=history.first_failed_at_ms,
            last_failed_at_ms=history.last_failed_at_ms,
            payload=message.payload,
        )

    async def run_retries_now(self, group: str, entries: Sequence[str]) -> RetryOutcomes:
        """Make waiting retries visible at once, durable on return."""
        found = self._known(group)

        def moved(retry: _Retry) -> tuple[list[Op], list[Append]]:
            history = retry.message.history
            assert history is not None
            event = encode_event(
                EventKind.RETRY_MOVED,
                history.topic_id,
                found.group_id,
                LANE,
                retry.message.attempts_before + 1,
                retry.due_at_ms,
                retry.message.message_id,
            )
            return [], [Append(found.group_id, _index_id(retry), retry.lane_id, 0, retry.value, event)]

        return await self._withdraw(found, entries, moved)

    async def end_retries(self, group: str, entries: Sequence[str]) -> RetryOutcomes:
        """Send waiting retries to the group's dead-letter queue, durable on return."""
        found = self._known(group)

        def ended(retry: _Retry) -> tuple[list[Op], list[Append]]:
            history = retry.message.history
            assert history is not None
            ended = history._replace(reason=Reason.OPERATOR)
            before, copy = self.broker.failures.bury_ops(
                found.group_id, history.topic_id, retry.message, ended, retry.message.attempts_before
            )
            return before, [copy]

        outcomes = await self._withdraw(found, entries, ended)
        self.broker.failures.dead_total += outcomes.moved
        return outcomes

    async def _withdraw(self, group: Group, entries: Sequence[str], instead: _Instead) -> RetryOutcomes:
        """Take retries off the timeline, a few at a time, each with what is done instead in one unit."""
        keys = list(dict.fromkeys(_key_of(entry) for entry in entries))
        moved = 0
        for start in range(0, len(keys), ENTRIES_PER_UNIT_MAX):
            moved += await self._withdraw_unit(group, keys[start : start + ENTRIES_PER_UNIT_MAX], instead)
        return RetryOutcomes(moved=moved, gone=len(keys) - moved)

    async def _withdraw_unit(self, group: Group, keys: Sequence[bytes], instead: _Instead) -> int:
        loop = asyncio.get_running_loop()
        values = await loop.run_in_executor(None, self.store.get_many, Family.TIMELINE, keys)
        ops: list[Op] = []
        for key, value in zip(keys, values, strict=True):
            entry = decode_waiting(value) if value is not None else None
            if value is None or entry is None or entry.kind != EntryKind.RETRY or entry.scope != group.group_id:
                continue
            retry = _retry_of(key, value, entry.deliver_at_ms, now_ms=self.store.clock.now_ms())
            before, then = instead(retry)
            ops += before
            retry_id = _index_id(retry)
            ops.append(
                # What is beside it makes a dead-letter queue, which may stay empty.
                Withdraw(key, group.group_id, retry_id, entry.deliver_at_ms, tuple(then), if_gone=IfKnown.ANSWER)
            )
        # Also with nothing to write: what is gone may be so by a unit that is not durable yet.
        receipts = await self.broker.registry.committed(self.broker.registry.submit(ops))
        return sum(receipt.state is EntryState.WITHDRAWN for receipt in receipts)

    # -- dead letters -------------------------------------------------------------------------------------------------

    async def dead_letters(
        self, group: str, chosen: DeadFilter, *, offset: int, limit: int, with_outcome: bool
    ) -> DeadPage:
        """Return dead letters of a group in the order of their death."""
        self._known_letters(group)
        page = await self.broker.dead_letters.page(group, chosen, offset=offset, limit=limit, with_outcome=with_outcome)
        return DeadPage(letters=[_shown(letter) for letter in page.letters], next_offset=page.next_offset)

    async def start_job(self, job: Job, *, is_dry_run: bool) -> Job:
        """Start a redrive or a purge."""
        self._known_letters(job.group)
        return await self.broker.dead_letters.start(job, is_dry_run=is_dry_run)

    async def jobs(self, group: str) -> Sequence[Job]:
        """Return the jobs of a group, or of all, newest first."""
        return self.broker.dead_letters.jobs(group)[:_JOBS_SHOWN_MAX]

    async def stop_job(self, job_id: int) -> Job:
        """End a running job where it is, durable on return."""
        return await self.broker.dead_letters.stop(job_id)

    def _known_letters(self, group: str) -> None:
        """Refuse a group that does not exist, unless it left dead letters."""
        if dead_letter_topic(group) not in self.broker.names.topics:
            self._known(group)


def _shown(letter: Letter) -> DeadStatus:
    outcome = letter.outcome
    return DeadStatus(
        dead=letter.dead,
        payload=letter.payload,
        dead_at_ms=letter.dead_at_ms,
        outcome=outcome.what if outcome is not None else "",
        outcome_at_ms=outcome.at_ms if outcome is not None else 0,
        outcome_note=outcome.note if outcome is not None else "",
    )


def _retry_of(key: bytes, value: bytes, due_at_ms: int, *, now_ms: int = 0) -> _Retry:
    entry = decode_waiting(value)
    queued = encode_queued(entry.retry_count, now_ms, 0, value[WAITING_HEADER_BYTES:], has_history=True)
    return _Retry(key, due_at_ms, entry.topic_id, decode_queued(queued), queued)


def _index_id(retry: _Retry) -> bytes:
    message, history = retry.message, retry.message.history
    assert history is not None
    return failed_id(message.message_id, history, message.attempts_before)


def _entry_of(key: bytes) -> str:
    return "-".join(str(number) for number in unpack_timeline_key(key))


def _key_of(entry: str) -> bytes:
    due, _, sequence = entry.partition("-")
    if not (due.isdecimal() and sequence.isdecimal() and max(len(due), len(sequence)) <= 19):
        raise Refused(Rule.REQUEST, "not an entry of the list of retries", value=entry)
    return pack_timeline_key(int(due), int(sequence))
