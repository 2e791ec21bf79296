"""Pending retries for operators: list them, run them now, or end them as dead letters."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.message import unpack_id
from dmq.broker.failures.outcomes import FailedMessage, Outcomes
from dmq.broker.topics import BrokerPart, Group, SharedParts
from dmq.store import Store
from dmq.store.schema.accounting.counts import BUCKET_MS
from dmq.store.schema.accounting.ledger import Term
from dmq.store.schema.keys import HELD_BEGIN, Family, pack_timeline_key, timeline_key, unpack_timeline_key
from dmq.store.schema.messages.failure_reason import decode_reason
from dmq.store.schema.messages.index import EntryState, failed_id
from dmq.store.schema.messages.record import (
    WAITING_HEADER_BYTES,
    EntryKind,
    History,
    QueuedMessage,
    decode_queued,
    decode_waiting,
    encode_queued,
)
from dmq.store.writer.operations import Append, IfKnown, Op, Tally, Withdraw
from dmq.trail.events import LANE, NO_QUEUE, EventKind, encode_event
from retry.failure_reason import FailureReason
from retry.policy import Reason

_ROWS_PER_SCAN = 1_000
ROWS_PER_CALL_MAX = 20_000  # scanned by one list call
BYTES_PER_CALL_MAX = 16 * 1024 * 1024
ENTRIES_PER_UNIT_MAX = 32  # each may be 4 MiB in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingRetry:
    """Pending retry. ``entry`` identifies it for ``run_now`` and ``end``."""

    entry: str
    group: str
    topic: str
    message_id: str
    attempt: int  # the next one
    due_at_ms: int
    first_failed_at_ms: int
    last_failed_at_ms: int
    payload: bytes
    failure: FailureReason | None = None  # of the last attempt; None: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPage:
    """Page of retries in the order of their due times; ``next_token`` continues the list and is empty at the end.

    A page may be short or empty before the end, because one call scans a limited number of rows.
    """

    retries: Sequence[WaitingRetry]
    next_token: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryOutcomes:
    """Result of a command on a list of retries; each retry is counted once."""

    moved: int = 0
    gone: int = 0  # delivered, moved or ended before


class _Retry(NamedTuple):
    """Pending retry as stored on the timeline."""

    key: bytes
    due_at_ms: int
    lane_id: int
    message: QueuedMessage  # as it will be stored in its lane
    history: History
    value: bytes  # encoded for its lane

    @property
    def index_id(self) -> bytes:
        """Index id of the retry."""
        return failed_id(self.message.message_id, self.history, self.message.attempts_before)


_Instead = Callable[[_Retry], tuple[list[Op], list[Append | Tally]]]


class WaitingRetries(BrokerPart):
    """Pending retries of all groups. It belongs to the event loop, and scans a limited number of rows in a call.

    Calls raise ``Refused`` for a group or a topic that does not exist, and for an invalid entry.
    """

    def __init__(self, shared: SharedParts, outcomes: Outcomes) -> None:
        super().__init__(shared)
        self._outcomes = outcomes

    async def page(self, group: str, *, topic: str, token: str, limit: int) -> RetryPage:
        """Return pending retries of a group in the order of their due times."""
        found = self._catalog.known_group(group)
        topic_id = 0
        if topic:
            topic_id = self._catalog.known_topic(topic).topic_id
        start = _key_of(token) if token else timeline_key(self._store.marks.low())
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, self._retries, found, topic_id, start, limit)

    def _retries(self, group: Group, topic_id: int, at: bytes, limit: int) -> RetryPage:
        found: list[WaitingRetry] = []
        if not self._store.pending_of(group.group_id)[0]:
            return RetryPage(retries=found)
        looked = size = 0
        while looked < ROWS_PER_CALL_MAX and size < BYTES_PER_CALL_MAX:
            at = next_of(self._store, group.group_id, at)
            rows = self._store.scan(
                Family.TIMELINE, at, HELD_BEGIN, limit=_ROWS_PER_SCAN, bytes_max=BYTES_PER_CALL_MAX - size
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
                if not topic_id or retry.history.topic_id == topic_id:
                    found.append(self._shown(group, retry))
            if rows.is_complete:
                return RetryPage(retries=found)
            at = timeline_key(int.from_bytes(rows.rows[-1][0], "big") + 1)
        return RetryPage(retries=found, next_token=_entry_of(at))

    def _shown(self, group: Group, retry: _Retry) -> WaitingRetry:
        message, history = retry.message, retry.history
        return WaitingRetry(
            entry=_entry_of(retry.key),
            group=group.name,
            topic=self._names.topics_by_id[history.topic_id].name,
            message_id=unpack_id(message.message_id),
            attempt=message.attempts_before + 1,
            due_at_ms=retry.due_at_ms,
            first_failed_at_ms=history.first_failed_at_ms,
            last_failed_at_ms=history.last_failed_at_ms,
            payload=message.payload,
            failure=decode_reason(history.failure) if history.failure else None,
        )

    async def run_now(self, group: str, entries: Sequence[str]) -> RetryOutcomes:
        """Make pending retries visible at once, durable on return."""
        found = self._catalog.known_group(group)

        def moved(retry: _Retry) -> tuple[list[Op], list[Append | Tally]]:
            place = retry.history.topic_id, found.group_id, LANE, retry.message.attempts_before + 1
            event = encode_event(EventKind.RETRY_MOVED, *place, retry.due_at_ms, retry.message.message_id)
            return [], [Append(found.group_id, retry.index_id, retry.lane_id, 0, retry.value, event)]

        return (await self._withdraw(found, entries, moved))[0]

    async def end(self, group: str, entries: Sequence[str]) -> RetryOutcomes:
        """Move pending retries to the group's dead-letter queue, durable on return."""
        found = self._catalog.known_group(group)

        def ended(retry: _Retry) -> tuple[list[Op], list[Append | Tally]]:
            place = found.group_id, retry.history.topic_id, NO_QUEUE, retry.message.attempts_before
            failed = FailedMessage(*place, retry.message, retry.history)
            before, copy = self._outcomes.bury(failed, Reason.OPERATOR, self._store.clock.now_ms())
            return before, [copy, Tally(retry.history.topic_id, found.group_id, Term.DEAD_WAITING, 1)]

        outcomes, by_topic = await self._withdraw(found, entries, ended)
        for topic_id, count in by_topic.items():
            self._outcomes.count_dead(topic_id, count)
        return outcomes

    async def _withdraw(
        self, group: Group, entries: Sequence[str], instead: _Instead
    ) -> tuple[RetryOutcomes, Counter[int]]:
        """Withdraw retries from the timeline in small units, each together with its replacement ops.

        Return the outcomes, and the number of withdrawn retries by topic.
        """
        keys = list(dict.fromkeys(_key_of(entry) for entry in entries))
        moved = Counter[int]()
        for start in range(0, len(keys), ENTRIES_PER_UNIT_MAX):
            moved += await self._withdraw_unit(group, keys[start : start + ENTRIES_PER_UNIT_MAX], instead)
        return RetryOutcomes(moved=moved.total(), gone=len(keys) - moved.total()), moved

    async def _withdraw_unit(self, group: Group, keys: Sequence[bytes], instead: _Instead) -> Counter[int]:
        loop = asyncio.get_running_loop()
        values = await loop.run_in_executor(None, self._store.get_many, Family.TIMELINE, keys)
        ops: list[Op] = []
        topic_ids: list[int] = []  # of each op
        for key, value in zip(keys, values, strict=True):
            entry = decode_waiting(value) if value is not None else None
            if value is None or entry is None or entry.kind != EntryKind.RETRY or entry.scope != group.group_id:
                continue
            retry = _retry_of(key, value, entry.deliver_at_ms, now_ms=self._store.clock.now_ms())
            before, then = instead(retry)
            ops += before
            ops.append(
                # ``before`` creates a dead-letter queue, which stays empty if the retry is gone.
                Withdraw(
                    *(key, group.group_id, retry.index_id, entry.deliver_at_ms, len(value)),
                    instead=tuple(then),
                    if_gone=IfKnown.ANSWER,
                )
            )
            topic_ids += [retry.history.topic_id] * (len(before) + 1)
        # Also without ops: a unit that is not durable yet may have removed the retries.
        receipts = await self._commits.commit(ops)
        told = zip(topic_ids, receipts, strict=True)
        return Counter(topic_id for topic_id, receipt in told if receipt.state is EntryState.WITHDRAWN)


def next_of(store: Store, scope: int, at: bytes) -> bytes:
    """Return the first key at or after ``at`` where a scope can have an entry.

    The due counts of the scope allow the scan to skip empty time buckets.
    """
    at_ms = unpack_timeline_key(at)[0]
    if at_ms <= store.clock.now_ms() + BUCKET_MS:
        return at
    following = store.due_counts(scope, at_ms, 2**53, limit=1)
    if not following:
        return HELD_BEGIN
    return max(at, pack_timeline_key(following[0].until_ms - BUCKET_MS, 0))


def _retry_of(key: bytes, value: bytes, due_at_ms: int, *, now_ms: int = 0) -> _Retry:
    entry = decode_waiting(value)
    queued = encode_queued(entry.retry_count, now_ms, 0, value[WAITING_HEADER_BYTES:], has_history=True)
    message = decode_queued(queued)
    assert message.history is not None
    return _Retry(key, due_at_ms, entry.topic_id, message, message.history, queued)


def _entry_of(key: bytes) -> str:
    return "-".join(str(number) for number in unpack_timeline_key(key))


def _key_of(entry: str) -> bytes:
    due, _, sequence = entry.partition("-")
    if not (due.isdecimal() and sequence.isdecimal() and max(len(due), len(sequence)) <= 19):
        raise Refused(Rule.REQUEST, "not an entry of the list of retries", value=entry)
    return pack_timeline_key(int(due), int(sequence))
