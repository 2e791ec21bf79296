"""Half messages that nobody decided, in the scheduler's thread: who is asked, how often, and what becomes of the rest.

A half message waits on the timeline under the time of its next check, in a scope of its own per topic. When that time
comes it is not handed over: it waits again, with one more check counted, and once that is durable its producers are
asked. With no producer to ask it waits again and nothing is counted. After its last check it becomes a dead letter of
the group ``unresolved-transactions``, where operators find it, send it again or throw it away.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from broker_adapter.message import unpack_id
from broker_adapter.topics import dead_letter_topic
from broker_adapter.transactions import Check
from dmq.audit.events import NO_QUEUE, EventKind, encode_event
from dmq.embedded.entry_handle import EntryHandle, EntryHandles, HandleKind
from dmq.embedded.names import Names
from dmq.errors import StoreCorrupt
from dmq.store.ops import EntryState, HandOver, Receipt, Reschedule
from dmq.store.record import (
    TERMS_BYTES,
    WAITING_HEADER_BYTES,
    EntryKind,
    History,
    WaitingEntry,
    body_facts,
    body_payload,
    decode_terms,
    decode_waiting,
    encode_history,
    encode_queued,
    encode_waiting,
)
from retry.policy import Reason

GIVEN_UP_GROUP = "unresolved-transactions"
UNDER_WAY_MAX = 1024  # checks that are decided and not yet on their way to a producer
UNDER_WAY_BYTES_MAX = 32 * 1024 * 1024
BUSY_MS = 1_000  # until a check is tried again for which there was no room
_SCOPE = 0x8000_0000
_HALF = bytes((EntryKind.TRANSACTION,))


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """When producers are asked, and how often; RocketMQ's defaults."""

    first_after_ms: int = 6_000
    every_ms: int = 30_000
    checks_max: int = 15


def scope_of(topic_id: int) -> int:
    """Return the scope of a topic's half messages; ids of names are far smaller."""
    return topic_id | _SCOPE


class Checks:
    """Decides in the scheduler's thread; ``settled`` and the totals are for any thread."""

    def __init__(self, names: Names, options: CheckOptions) -> None:
        self._names = names
        self.options = options
        self.handles: EntryHandles  # set by the owner, as what follows
        # Set by the owner: whether a topic has a producer, and what to do with checks that are durable. Both are called
        # in the scheduler's thread and return at once.
        self.is_live: Callable[[str], bool] = lambda _: False
        self.on_checks: Callable[[list[Check]], None] = lambda _: None
        self._lock = threading.Lock()
        self._under_way = 0
        self._under_way_bytes = 0
        self.counted_total = 0
        self.given_up_total = 0

    def plan(self, rows: Sequence[tuple[bytes, bytes]], now_ms: int) -> list[HandOver | Reschedule]:
        """Return what becomes of half messages whose time has come, one op each, in the order of ``rows``."""
        return [self._plan(key, value, now_ms) for key, value in rows]

    def planned(self, ops: Sequence[HandOver | Reschedule], receipts: Sequence[Receipt]) -> None:
        """What was planned is durable: pass on the checks, but of those that were decided meanwhile."""
        checks: list[Check] = []
        for op, receipt in zip(ops, receipts, strict=True):
            if isinstance(op, HandOver):
                self.given_up_total += receipt.state is EntryState.DELIVERED
            elif op.event:
                check = self._check_of(op)
                if receipt.state is EntryState.WAITING:
                    checks.append(check)
                else:
                    self.settled(check)
        if checks:
            self.counted_total += len(checks)
            self.on_checks(checks)

    def settled(self, check: Check) -> None:
        """Say that a check is on its way, or will never be."""
        with self._lock:
            self._under_way -= 1
            self._under_way_bytes -= len(check.payload)

    def _plan(self, key: bytes, value: bytes, now_ms: int) -> HandOver | Reschedule:
        entry = decode_waiting(value)
        rest = value[WAITING_HEADER_BYTES:]
        decode_terms(rest, 0)
        body = rest[TERMS_BYTES:]
        message_id, _ = body_facts(body)
        topic = self._names.topics_by_id.get(entry.topic_id)
        if topic is None:
            raise StoreCorrupt(f"a half message belongs to topic {entry.topic_id}, which has no record")
        if entry.retry_count >= self.options.checks_max:
            return self._give_up(key, entry, message_id, body, now_ms)
        number, event = entry.retry_count, b""
        next_ms = now_ms + self.options.every_ms
        if self.is_live(topic.name):
            if self._has_room(len(body_payload(body))):
                number += 1
                event = encode_event(EventKind.TX_CHECKED, entry.topic_id, 0, NO_QUEUE, number, next_ms, message_id)
            else:
                next_ms = now_ms + min(BUSY_MS, self.options.every_ms)
        record = encode_waiting(entry.kind, number, entry.topic_id, entry.scope, next_ms, entry.accepted_at_ms, rest)
        return Reschedule(key, entry.scope, message_id, entry.deliver_at_ms, next_ms, record, event)

    def _give_up(self, key: bytes, entry: WaitingEntry, message_id: bytes, body: bytes, now_ms: int) -> HandOver:
        letters = self._names.topics.get(dead_letter_topic(GIVEN_UP_GROUP))
        group = self._names.groups.get(GIVEN_UP_GROUP)
        if letters is None or group is None:
            raise StoreCorrupt("there is a half message and no place for those that are given up")
        accepted_ms = entry.accepted_at_ms
        history = History(entry.topic_id, NO_QUEUE, 0, accepted_ms, accepted_ms, now_ms, Reason.EXHAUSTED)
        record = encode_queued(entry.retry_count, now_ms, 0, encode_history(history) + body, has_history=True)
        event = encode_event(
            EventKind.TX_GIVEN_UP,
            entry.topic_id,
            group.group_id,
            NO_QUEUE,
            entry.retry_count,
            accepted_ms,
            message_id,
        )
        due_ms = entry.deliver_at_ms
        return HandOver(key, entry.scope, message_id, due_ms, letters.topic_id, 0, record, event)

    def _has_room(self, payload_bytes: int) -> bool:
        with self._lock:
            is_full = self._under_way >= UNDER_WAY_MAX or self._under_way_bytes >= UNDER_WAY_BYTES_MAX
            if not is_full:
                self._under_way += 1
                self._under_way_bytes += payload_bytes
            return not is_full

    def _check_of(self, op: Reschedule) -> Check:
        entry = decode_waiting(op.record)
        topic = self._names.topics_by_id[entry.topic_id].name
        transaction = EntryHandle(int.from_bytes(op.key[8:], "big"), topic, op.message_id)
        payload = body_payload(op.record[WAITING_HEADER_BYTES + TERMS_BYTES :])
        message_id = unpack_id(op.message_id)
        text = self.handles.encode(HandleKind.TRANSACTION, transaction)
        return Check(topic, message_id, text, payload, entry.retry_count)


def is_half(value: bytes) -> bool:
    """Say whether a timeline value is that of a half message."""
    return value[1:2] == _HALF
