"""Audit events: one fact about one message (or about the cell), as it goes into the outbox.

    event      kind 1 | topic_id 4 | group_id 4 | queue_id 2 | attempt 2 | time_ms 8 | packed message id
    of a failure whose reason or client is known, in place of the id, marked by what no packed id begins with:
               ... | 0 255 | length of the id 2 | packed message id | length of the error 2 | error | client, UTF-8 both

The outbox block around it (``dmq.store.schema.outbox``) adds the audit sequence, the run of the daemon, the commit
time, the entry's sequence and the queue offset (of DEAD_* that in the dead-letter queue, while the event's queue is the
one in which the message failed). ``time_ms`` is what the kind says below; zero ids mean "none". Kinds are part of the
trail's format: numbers are never used again for something else.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from broker_adapter.contracts.message import pack_id
from dmq.errors import StoreCorrupt
from retry.failure_reason import FailureReason

_EVENT = struct.Struct(">BIIHHQ")
_COUNT = struct.Struct(">Q")
_LENGTH = struct.Struct(">H")
_REASONED = b"\0\xff"  # what a packed id begins with that has a zero byte goes on in UTF-8
USUAL_ID_BYTES = 17
NO_QUEUE = 0xFFFF
LANE = 0xFFFE  # where what a group failed of the topic becomes visible to it again; its offsets are its own


class EventKind(IntEnum):
    """What happened; in brackets what ``time_ms`` is."""

    SCHEDULED = 1  # accepted, waits [its delivery time]
    QUEUED = 2  # accepted, in its queue at once [its delivery time, 0 if it has none]
    DELIVERED = 3  # waited, handed over to its queue [its delivery time]
    ACKED = 4  # a group finished it [its queue offset]
    LEASE_EXPIRED = 5  # a group did not finish it in time; attempt is the one that comes next [its queue offset]
    GIVEN_BACK = 6  # a group gave it back at once; attempt is the one that comes next [its queue offset]
    INVISIBLE_CHANGED = 7  # hidden longer or shorter [when it becomes visible]
    FILTERED = 8  # passed over for a group by its filter [its queue offset]
    TOPIC_CREATED = 9
    GROUP_CREATED = 10
    OPENED = 11  # a run of the daemon began; the block's boot says which [0]
    CLOSED = 12  # it ended in order [0]
    NACKED = 14  # a group failed it, a copy waits in its stead; attempt is the one that failed [when the copy is due]
    RETRIED = 15  # the copy's time has come, it is visible again; attempt is the one that comes next [when it was due]
    RETRY_MOVED = 16  # the same before its time, by hand [when it was due]
    DEAD_EXHAUSTED = 17  # in the group's dead-letter queue; attempt is the last one [attempts allowed]
    DEAD_TOO_OLD = 18  # the same, because of its age [when it became visible first]
    DEAD_FORWARDED = 19  # the same, given up by its consumer [0]
    DEAD_SENT_BACK = 20  # the same, sent back with delay level -1 [0]
    DEAD_BY_OPERATOR = 21  # the same, by hand [0]
    REDRIVEN = 22  # a dead letter was sent again as a new message [its offset in the dead-letter queue]
    PURGED = 23  # a dead letter was thrown away by hand [its offset in the dead-letter queue]
    GROUP_CHANGED = 24  # a group's settings; the id says whether it was paused or resumed, if so
    SENT = 25  # of a spool: its handler sent it; attempt is the one that succeeded [when it was due]
    SEND_FAILED = 26  # of a spool: an attempt that counts failed, it waits again; attempt is that one [when it is due]
    SEND_DEAD = 27  # of a spool: in the dead set; attempt is the last one [when it was made]
    REQUEUED = 28  # of a spool: from the dead set, waits again [when it is due]
    DROPPED = 29  # of a spool: thrown away because a bound was reached, as configured [when it was made]
    HEARTBEAT = 30  # it runs, and had nothing else to tell [0]
    SUBSCRIBED = 31  # a group begins on a queue [the first offset it gets]
    TAIL_LOST = 32  # the store lost its own end, which was exported [sequence of the first; the id is their count]
    POSTPONED = 33  # a group failed it, it stays where it is; attempt is the one that failed [when it becomes visible]
    RECALLED = 34  # waited, was cancelled by its sender [its delivery time]
    EXPIRED = 35  # retention removed it from its queue [its delivery time, 0 if it has none]
    HALF = 36  # a half message was accepted, which nobody sees until it is committed [when it is checked first]
    COMMITTED = 37  # it was committed: SCHEDULED or QUEUED follows [its delivery time, 0 if it has none]
    ROLLED_BACK = 38  # it was rolled back, and is gone [0]
    TX_CHECKED = 39  # its producers are asked for its outcome; attempt is the number of the check [its next check]
    TX_GIVEN_UP = 40  # a dead letter after all its checks; attempt is their number [when it was accepted]
    TX_TOO_OLD = 51  # the same because of its age, which no producer decided [when it was accepted]
    TOPIC_CHANGED = 41  # its queues or settings; the id says what: paused, resumed, deliver_rate=N, max_pending=N ...
    TOPIC_REMOVED = 42  # nobody finds it any more; what is left of it goes from here on
    GROUP_REMOVED = 43
    RESET = 44  # a group goes on from another offset, after it left all below an end [that end]
    OFFSET_SET = 45  # a group that pulls said where it continues on a queue [that offset]
    FORWARDED = 46  # the cluster has it; attempt says how often it was sent [its offset in the cluster's queue]
    FORWARD_REFUSED = 47  # in the forwarder's dead-letter queue; attempt is the cluster's code [0]
    FORWARD_IN_DOUBT = 48  # the cluster may have it, and gets it again; attempt is that one [its queue offset, or 0]
    FETCHED = 49  # accepted from the inner topic; attempt is the cluster's delivery attempt [its offset there]
    QUEUED_FOR_GROUP = 50  # accepted for one group: a redriven letter is in its lane [offset in the dead-letter queue]
    CLOCK_CHANGED = 56  # the wall clock was stepped, held, believed; the id says what [the wall clock]
    CLOCK_ACCEPTED = 57  # an operator said that it is right [the wall clock]
    TAKEN_OVER = (
        58  # a group failed what a cluster handed out, or what it pulled; its end is here; that attempt [offset there]
    )
    DEAD_TOO_LATE = 69  # as DEAD_TOO_OLD, since its sender did not want it any more [after this time]
    OCCURRED = 60  # a schedule sent this message; the entry is the schedule's, attempt 0 [number of the occurrence]
    SCHEDULE_CHANGED = 61  # a schedule was made, paused, resumed, removed, or ended: the id says what [its next time]
    RESCHEDULED = 59  # waits until another time from here on [that time]
    REPLACED = 62  # waited, until another message with its own key came: that one's event follows [its delivery time]
    ABSORBED = 63  # not stored: another one waits under its own key, whose entry it is [that one's delivery time]
    OPERATED = 64  # an operator's call changed something, or tried to; the id says who, what, why, as JSON [its number]
    GAP = 13  # events cut from the outbox before they were exported [sequence of the first; the id is their count]


# Events of a failure, which may have a reason.
FAILURES = frozenset(
    {
        *(EventKind.NACKED, EventKind.POSTPONED, EventKind.INVISIBLE_CHANGED, EventKind.LEASE_EXPIRED),
        *(EventKind.DEAD_EXHAUSTED, EventKind.DEAD_TOO_OLD, EventKind.DEAD_TOO_LATE, EventKind.DEAD_FORWARDED),
        *(EventKind.DEAD_SENT_BACK, EventKind.DEAD_BY_OPERATOR, EventKind.FORWARD_REFUSED),
    }
)
_OF_TOPICS = frozenset({EventKind.TOPIC_CREATED, EventKind.TOPIC_CHANGED, EventKind.TOPIC_REMOVED})


class AuditEvent(NamedTuple):
    """An event, taken apart."""

    kind: EventKind
    topic_id: int
    group_id: int
    queue_id: int
    attempt: int
    time_ms: int
    message_id: bytes  # packed


def encode_event(  # noqa: PLR0917 - the layout, in its order; called once per message
    kind: int, topic_id: int, group_id: int, queue_id: int, attempt: int, time_ms: int, message_id: bytes
) -> bytes:
    """Encode an event."""
    return _EVENT.pack(kind, topic_id, group_id, queue_id, attempt, time_ms) + message_id


def with_reason(event: bytes, reason: FailureReason | None) -> bytes:
    """Return an event of a failure with its reason; the event itself if nothing is known of that."""
    if reason is None or not any(reason):
        return event
    message_id, error = event[_EVENT.size :], reason.error.encode()
    tail = _REASONED + _LENGTH.pack(len(message_id)) + message_id + _LENGTH.pack(len(error)) + error
    tail += reason.client.encode()
    if len(tail) == USUAL_ID_BYTES:  # who reads many at once tells it from an id by its length
        tail += b" "
    return event[: _EVENT.size] + tail


def has_reason(tail: bytes) -> bool:
    """Return True if what follows on the head of an event of a message is an id with a reason, and no id alone."""
    return tail.startswith(_REASONED)


def split_reason(tail: bytes) -> tuple[bytes, str, str]:
    """Return packed message id, error and client of a tail that ``has_reason``.

    Raises ``struct.error`` or ``UnicodeDecodeError`` if it cannot be one.
    """
    id_at = len(_REASONED) + _LENGTH.size
    (id_length,) = _LENGTH.unpack_from(tail, len(_REASONED))
    (error_length,) = _LENGTH.unpack_from(tail, id_at + id_length)
    error_at = id_at + id_length + _LENGTH.size
    client_at = error_at + error_length
    error, client = tail[error_at:client_at].decode(), tail[client_at:].decode().rstrip()
    return tail[id_at : id_at + id_length], error, client


def decode_event(event: bytes) -> AuditEvent:
    """Undo ``encode_event``, leaving a reason out; ``StoreCorrupt`` for an unknown kind or a short event."""
    try:
        kind, topic_id, group_id, queue_id, attempt, time_ms = _EVENT.unpack_from(event)
        tail = event[_EVENT.size :]
        message_id = split_reason(tail)[0] if has_reason(tail) and kind in FAILURES else tail
        return AuditEvent(EventKind(kind), topic_id, group_id, queue_id, attempt, time_ms, message_id)
    except (struct.error, ValueError) as error:
        raise StoreCorrupt(f"an audit event of {len(event)} bytes cannot be read: {error}") from error


def name_event(kind: EventKind, name_id: int, said: str = "") -> bytes:
    """Encode that a topic or a group was created, changed or removed; ``said`` is what was changed of how it flows."""
    is_topic = kind in _OF_TOPICS  # else a group's
    message_id = pack_id(said) if said else b""
    return encode_event(kind, name_id if is_topic else 0, 0 if is_topic else name_id, NO_QUEUE, 0, 0, message_id)


def operated_event(number: int, said: str) -> bytes:
    """Encode that an operator's call ended; ``said`` is who made it, what it changed, and how it ended."""
    return encode_event(EventKind.OPERATED, 0, 0, NO_QUEUE, 0, number, pack_id(said))


def cell_event(kind: EventKind) -> bytes:
    """Encode that a run began or ended, or goes on."""
    return encode_event(kind, 0, 0, NO_QUEUE, 0, 0, b"")


def gap_event(first_sequence: int, count: int) -> bytes:
    """Encode that ``count`` events from ``first_sequence`` on were cut from the outbox."""
    return encode_event(EventKind.GAP, 0, 0, NO_QUEUE, 0, first_sequence, _COUNT.pack(count))


def subscribed_event(topic_id: int, group_id: int, queue_id: int, offset: int) -> bytes:
    """Encode that a group begins on a queue at ``offset``."""
    return encode_event(EventKind.SUBSCRIBED, topic_id, group_id, queue_id, 0, offset, b"")


def offset_set_event(topic_id: int, group_id: int, queue_id: int, offset: int) -> bytes:
    """Encode that a group that pulls continues on a queue at ``offset``."""
    return encode_event(EventKind.OFFSET_SET, topic_id, group_id, queue_id, 0, offset, b"")


def reset_event(topic_id: int, group_id: int, queue_id: int, end: int) -> bytes:
    """Encode that a group left everything below ``end``; the offset it goes on from is that of the ``Emit``."""
    return encode_event(EventKind.RESET, topic_id, group_id, queue_id, 0, end, b"")


def tail_lost_event(first_sequence: int, count: int) -> bytes:
    """Encode that the store does not hold what ``count`` exported events from ``first_sequence`` on tell of."""
    return encode_event(EventKind.TAIL_LOST, 0, 0, NO_QUEUE, 0, first_sequence, _COUNT.pack(count))


def gap_count(event: AuditEvent) -> int:
    """Return how many events a gap event, or that of a lost tail, stands for."""
    count: int = _COUNT.unpack(event.message_id)[0]
    return count
