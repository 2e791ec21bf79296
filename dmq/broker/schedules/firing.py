"""Firing of due schedules in the scheduler's thread: the occurrences to send now, and the next due time.

A schedule has a timeline entry at the time of its next occurrence. When it is due, one op appends the occurrence to its
queue, counts it, and moves the entry to the next time. A kill leaves all of that or nothing. Each occurrence is a
message with its own id, and with its schedule name and number in its properties.

The reads and writes of a turn are limited, regardless of how many schedules are due and how much has to be caught up.
A schedule that does not fit is retried shortly afterwards, with the same occurrence time.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from google.protobuf.message import DecodeError

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.limits import MESSAGE_ID_BYTES_MAX
from broker_adapter.contracts.message import pack_id, unpack_id
from broker_adapter.contracts.message_id import new_message_id
from broker_adapter.contracts.schedules import OCCURRENCE, SCHEDULE
from broker_adapter.runtime.log import LibraryLog
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.mapping import resource_of, set_timestamp, to_envelope
from dmq.broker.schedules.cron import RuleError, RuleTurn, due_ms, turn
from dmq.broker.sending import Placement
from dmq.broker.topics import Names, Topic
from dmq.errors import StoreCorrupt
from dmq.store.schema.keys import Family, recurring_scope
from dmq.store.schema.messages.record import (
    WAITING_HEADER_BYTES,
    EntryKind,
    body_facts,
    body_payload,
    decode_waiting,
    encode_body,
    encode_queued,
    encode_waiting,
)
from dmq.store.schema.messages.recurring import (
    Phase,
    RecurrenceRule,
    ScheduleProgress,
    decode_message,
    decode_progress,
    decode_schedule,
    encode_progress,
    schedule_keys,
)
from dmq.store.writer.operations import IfKnown, Occurrence, Put, Recur, Reschedule
from dmq.trail.events import NO_QUEUE, EventKind, encode_event

AT_ONCE_MAX = 64  # maximum occurrences of one schedule in a turn
BYTES_PER_TURN_MAX = 8 * 1024 * 1024
SCHEDULES_PER_TURN_MAX = 64  # one search of a cron expression costs 0.5 ms of the turn
_BUSY_MS, _NO_ROOM_MS, _PAUSED_MS = 20, 1_000, 5_000  # delays before the next try
_GetMany = Callable[[Family, Sequence[bytes]], Sequence[bytes | None]]

log = LibraryLog("dmq.scheduler")


class _Due(NamedTuple):
    """Due schedule."""

    key: bytes
    value: bytes
    name: str
    topic: Topic
    schedule: RecurrenceRule
    progress: ScheduleProgress


class Recurring:
    """Planner of due schedules, in the scheduler's thread. While ``is_disk_low()``, it stores no new messages."""

    def __init__(
        self, names: Names, placement: Placement, get_many: _GetMany, is_disk_low: Callable[[], bool] = lambda: False
    ) -> None:
        self._names = names
        self._placement = placement
        self._get_many = get_many
        self._is_disk_low = is_disk_low
        self._room_bytes = 0

    def plan(self, rows: Sequence[tuple[bytes, bytes]], now_ms: int) -> list[Recur | Reschedule]:
        """Return the ops for due schedules, in the order of ``rows``.

        Rows withdrawn since they were read may be left out.
        """
        if self._is_disk_low():
            return [_later(key, value, now_ms + _NO_ROOM_MS) for key, value in rows]
        self._room_bytes = BYTES_PER_TURN_MAX
        names = [unpack_id(body_facts(value[WAITING_HEADER_BYTES:])[0]) for _, value in rows]
        wanted = [key for name in names for key in schedule_keys(name)[:2]]
        found = self._get_many(Family.META, wanted)
        planned: list[Recur | Reschedule] = []
        for number, (name, (key, value)) in enumerate(zip(names, rows, strict=True)):
            schedule, progress = found[2 * number : 2 * number + 2]
            if self._room_bytes <= 0 or number >= SCHEDULES_PER_TURN_MAX:
                planned.append(_later(key, value, now_ms + _BUSY_MS))
            elif (op := self._plan(key, value, name, schedule, progress, now_ms)) is not None:
                planned.append(op)
        return planned

    def _plan(
        self, key: bytes, value: bytes, name: str, schedule: bytes | None, progress: bytes | None, now_ms: int
    ) -> Recur | Reschedule | None:
        (message,) = self._get_many(Family.META, [schedule_keys(name)[2]])
        if schedule is None or progress is None or message is None:
            if self._get_many(Family.TIMELINE, [key])[0] is not None:  # all parts are deleted together
                raise StoreCorrupt(f"the pending schedule {name!r} is incomplete")
            return None
        entry = decode_waiting(value)
        topic = self._names.topics_by_id.get(entry.topic_id)
        if topic is None:
            raise StoreCorrupt(f"the schedule {name!r} belongs to topic {entry.topic_id}, which has no record")
        due = _Due(key, value, name, topic, decode_schedule(schedule), decode_progress(progress))
        if due.progress.phase is not Phase.WAITING or not due.progress.next_ms:  # of a later one with this name
            return None
        if topic.paused_since_ms is not None:
            return _later(key, value, now_ms + _PAUSED_MS)
        body = decode_message(message)
        at_most = max(1, min(AT_ONCE_MAX, self._room_bytes // max(1, len(body))))
        why = ""
        try:
            now = turn(due.schedule, name, due.progress, now_ms, at_most)
        except RuleError as error:  # a time zone no longer known on this host
            why = str(error)
            log.error("schedule_paused", schedule=name, why=why)  # noqa: TRY400 - not a bug, so no traceback
            now = RuleTurn((due.progress.next_ms,), None)
        self._room_bytes -= len(body) * len(now.times)
        return _recur(due, now, self._occurrences(due, body, now, now_ms), now_ms, why)

    def _occurrences(self, due: _Due, body: bytes, now: RuleTurn, now_ms: int) -> list[Occurrence]:
        if not now.times:
            return []
        _, message_group = body_facts(body)
        try:
            message = wire.Message.FromString(body_payload(body))
        except DecodeError as error:
            raise StoreCorrupt(f"the message of the schedule {due.name!r} cannot be read") from error
        made: list[Occurrence] = []
        for number, at_ms in enumerate(now.times, due.progress.occurrences + 1):
            at = due_ms(due.schedule, due.name, at_ms)
            system = message.system_properties
            system.message_id = new_message_id(now_ms, os.getpid(), secrets.token_bytes(10))
            set_timestamp(system.born_timestamp, now_ms)
            message.user_properties[SCHEDULE], message.user_properties[OCCURRENCE] = due.name, str(number)
            made.append(self._occurrence(due.topic, message, message_group, at, number, now_ms))
        return made

    def _occurrence(
        self, topic: Topic, message: wire.Message, message_group: bytes, at_ms: int, number: int, now_ms: int
    ) -> Occurrence:
        envelope = to_envelope(message, deliver_at_ms=at_ms, topic=topic.name)
        message_id = pack_id(envelope.message_id)
        queue_id = self._placement.choose(topic, envelope.message_group)
        body = encode_body(message_id, envelope.tag.encode(), message_group, envelope.payload)

        def event(kind: EventKind, in_queue: int, time_ms: int) -> bytes:
            return encode_event(kind, topic.topic_id, 0, in_queue, 0, time_ms, message_id)

        return Occurrence(
            message_id,
            queue_id,
            encode_queued(0, now_ms, at_ms, body),
            event(EventKind.SCHEDULED, NO_QUEUE, at_ms),
            event(EventKind.DELIVERED, queue_id, at_ms),
            event(EventKind.OCCURRED, NO_QUEUE, number),
        )


def sample(
    topic: str,
    body: bytes,
    *,
    tag: str,
    keys: Iterable[str],
    message_group: str,
    encoding: int,
    properties: Mapping[str, str],
) -> wire.Message:
    """Return the message that a schedule sends for each occurrence, without an id; ``encoding`` is a wire enum value.

    Raise ``Refused(PROPERTY_KEY)`` for a property that the schedule sets on each occurrence.
    """
    for name in (SCHEDULE, OCCURRENCE):
        if name in properties:
            raise Refused(Rule.PROPERTY_KEY, "this property is set by the schedule", value=name)
    message = wire.Message(topic=resource_of(topic), user_properties=dict(properties), body=body)
    system = message.system_properties
    system.keys.extend(keys)
    system.body_encoding = encoding  # type: ignore[assignment]  # a wire enum value
    if tag:
        system.tag = tag
    if message_group:
        system.message_group = message_group
    return message


def largest(message: wire.Message, name: str) -> wire.Message:
    """Return an occurrence of a schedule's message with the maximum size."""
    found = wire.Message()
    found.CopyFrom(message)
    found.system_properties.message_id = "0" * min(34, MESSAGE_ID_BYTES_MAX)
    found.user_properties[SCHEDULE], found.user_properties[OCCURRENCE] = name, str(2**64)
    return found


def changed_event(topic_id: int, what: str, name: str, next_ms: int) -> bytes:
    """Encode the audit event of a change of a schedule."""
    return encode_event(EventKind.SCHEDULE_CHANGED, topic_id, 0, NO_QUEUE, 0, next_ms, pack_id(f"{what} {name}"))


def waiting_record(topic_id: int, name: str, message_group: str, deliver_at_ms: int, now_ms: int) -> bytes:
    """Return the timeline value of a schedule."""
    body = encode_body(pack_id(name), b"", message_group.encode(), b"")
    return encode_waiting(EntryKind.RECURRING, 0, topic_id, recurring_scope(topic_id), deliver_at_ms, now_ms, body)


def _recur(due: _Due, now: RuleTurn, occurrences: list[Occurrence], now_ms: int, why: str) -> Recur:
    key, value, name, topic, schedule, progress = due
    phase = Phase.PAUSED if why else Phase.WAITING if now.next_ms is not None else Phase.ENDED
    progress = progress._replace(
        phase=phase,
        occurrences=progress.occurrences + len(now.times),
        last_ms=now.times[-1] if now.times else progress.last_ms,
        next_ms=now.next_ms or 0,
        why=why,
    )
    entry = decode_waiting(value)
    message_id, message_group = body_facts(value[WAITING_HEADER_BYTES:])
    row = Put(Family.META, schedule_keys(name)[1], encode_progress(progress))
    op = Recur(key, entry.scope, message_id, entry.deliver_at_ms, topic.topic_id, occurrences, row)
    if now.next_ms is None:
        return op._replace(event=changed_event(topic.topic_id, "paused" if why else "ended", name, 0))
    at_ms = due_ms(schedule, name, now.next_ms)
    record = waiting_record(topic.topic_id, name, message_group.decode(), at_ms, now_ms)
    return op._replace(deliver_at_ms=at_ms, record=record)


def _later(key: bytes, value: bytes, at_ms: int) -> Reschedule:
    """Return the op that postpones a schedule unchanged."""
    entry = decode_waiting(value)
    message_id = body_facts(value[WAITING_HEADER_BYTES:])[0]
    record = encode_waiting(
        entry.kind,
        entry.retry_count,
        entry.topic_id,
        entry.scope,
        at_ms,
        entry.accepted_at_ms,
        value[WAITING_HEADER_BYTES:],
    )
    return Reschedule(key, entry.scope, message_id, entry.deliver_at_ms, at_ms, record, b"", if_gone=IfKnown.ANSWER)
