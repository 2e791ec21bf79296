"""Audit events: one fact about one message (or about the cell), as stored in the outbox.

    event      kind 1 | topic_id 4 | group_id 4 | queue_id 2 | attempt 2 | time_ms 8 | packed message id
    of a failure with a known reason or client, in place of the id, marked by a prefix that no packed id has:
               ... | 0 255 | length of the id 2 | packed message id | length of the error 2 | error | client, UTF-8 both

The outbox block around it (``dmq.store.schema.accounting.outbox``) adds the audit sequence, the run of the daemon, the
commit time, the entry's sequence and the queue offset. The queue offset of DEAD_* is one in the dead-letter queue,
while the event's queue is the one in which the message failed. The meaning of ``time_ms`` depends on the kind, see
below; zero ids mean "none". Kinds are part of the trail's format: their numbers are never reused.
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
_REASONED = b"\0\xff"  # never a prefix of a packed id: after a zero byte an id has UTF-8
USUAL_ID_BYTES = 17
NO_QUEUE = 0xFFFF
LANE = 0xFFFE  # the retry lane of a group and topic, which has its own offsets


class EventKind(IntEnum):
    """Kind of an audit event; the meaning of ``time_ms`` is in brackets."""

    SCHEDULED = 1  # accepted, pending [its delivery time]
    QUEUED = 2  # accepted, in its queue at once [its delivery time, 0 if it has none]
    DELIVERED = 3  # was pending, handed over to its queue [its delivery time]
    ACKED = 4  # a group finished it [its queue offset]
    LEASE_EXPIRED = 5  # a group did not finish it in time; attempt is the next one [its queue offset]
    GIVEN_BACK = 6  # a group returned it at once; attempt is the next one [its queue offset]
    INVISIBLE_CHANGED = 7  # hidden longer or shorter [when it becomes visible]
    FILTERED = 8  # skipped for a group by its filter [its queue offset]
    TOPIC_CREATED = 9
    GROUP_CREATED = 10
    OPENED = 11  # a run of the daemon began; its number is the block's boot [0]
    CLOSED = 12  # the run ended cleanly [0]
    NACKED = 14  # a group failed it, a retry copy is pending; attempt is the failed one [when the copy is due]
    RETRIED = 15  # the copy was due and is visible; attempt is the next one [when it was due]
    RETRY_MOVED = 16  # the same before it was due, by an operator [when it was due]
    DEAD_EXHAUSTED = 17  # in the group's dead-letter queue; attempt is the last one [attempts allowed]
    DEAD_TOO_OLD = 18  # the same, because of its age [when it first became visible]
    DEAD_FORWARDED = 19  # the same, given up by its consumer [0]
    DEAD_SENT_BACK = 20  # the same, sent back with delay level -1 [0]
    DEAD_BY_OPERATOR = 21  # the same, by an operator [0]
    REDRIVEN = 22  # a dead letter was sent again as a new message [its offset in the dead-letter queue]
    PURGED = 23  # a dead letter was purged by an operator [its offset in the dead-letter queue]
    GROUP_CHANGED = 24  # a group's settings were changed; the id has a pause or resume, if any
    SENT = 25  # of a producer store: its handler sent it; attempt is the successful one [when it was due]
    SEND_FAILED = 26  # of a producer store: a counted attempt failed; attempt is that one [when it is due again]
    SEND_DEAD = 27  # of a producer store: moved to the dead set; attempt is the last one [when it was made]
    REQUEUED = 28  # of a producer store: from the dead set, pending again [when it is due]
    DROPPED = 29  # of a producer store: discarded at a bound, as configured [when it was made]
    HEARTBEAT = 30  # the run continues, and recorded no other event for a while [0]
    SUBSCRIBED = 31  # a group begins on a queue [the first offset it gets]
    TAIL_LOST = 32  # the store lost events that were exported [sequence of the first; the id is their count]
    POSTPONED = 33  # a group failed it, it stays in its queue; attempt is the failed one [when it becomes visible]
    RECALLED = 34  # was pending, cancelled by its sender [its delivery time]
    EXPIRED = 35  # retention removed it from its queue [its delivery time, 0 if it has none]
    HALF = 36  # a half message was accepted, invisible until it is committed [its first check]
    COMMITTED = 37  # a half message was committed: SCHEDULED or QUEUED is next [its delivery time, 0 if it has none]
    ROLLED_BACK = 38  # a half message was rolled back and deleted [0]
    TX_CHECKED = 39  # its producers are asked for its outcome; attempt is the number of the check [its next check]
    TX_GIVEN_UP = 40  # a dead letter after all its checks; attempt is their number [when it was accepted]
    TX_TOO_OLD = 51  # the same because of its age, undecided by any producer [when it was accepted]
    TOPIC_CHANGED = 41  # its queues or settings; the id is the change: paused, resumed, deliver_rate=N, max_pending=N
    TOPIC_REMOVED = 42  # it no longer exists for clients; its rows are deleted from now on
    GROUP_REMOVED = 43
    RESET = 44  # a group continues from another offset, having left everything below an end [that end]
    OFFSET_SET = 45  # a pulling group committed an offset on a queue [that offset]
    FORWARDED = 46  # the cluster has it; attempt is the number of sends [its offset in the cluster's queue]
    FORWARD_REFUSED = 47  # in the forwarder's dead-letter queue; attempt is the cluster's code [0]
    FORWARD_IN_DOUBT = 48  # the cluster may have it, it is sent again; attempt is that send [its queue offset, or 0]
    FETCHED = 49  # accepted from the inner topic; attempt is the cluster's delivery attempt [its offset there]
    QUEUED_FOR_GROUP = 50  # accepted for one group: a redriven letter is in its lane [offset in the dead-letter queue]
    CLOCK_CHANGED = 56  # the wall clock was stepped, held or believed; the id has the change [the wall clock]
    CLOCK_ACCEPTED = 57  # an operator accepted the wall clock [the wall clock]
    TAKEN_OVER = 58  # a group failed a cluster's or a pulled message, taken over here; that attempt [offset there]
    DEAD_TOO_LATE = 69  # as DEAD_TOO_OLD, because of its expiry [its expiry]
    OCCURRED = 60  # a schedule sent this message; the entry is the schedule's, attempt 0 [number of the occurrence]
    SCHEDULE_CHANGED = 61  # a schedule was created, paused, resumed, removed or ended: see the id [its next time]
    RESCHEDULED = 59  # its delivery time was changed [the new delivery time]
    REPLACED = 62  # was pending, replaced by a message with its own key: its event is next [its delivery time]
    ABSORBED = 63  # not stored: another one is pending under its own key, with this entry [that one's delivery time]
    OPERATED = 64  # an operator's call changed state, or tried to; the id is the activity as JSON [its number]
    PROMOTED = 70  # this run took over from a lost or stopped primary, as its standby [0]
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
    """Decoded audit event, without a failure reason."""

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
    """Return the bytes of an event."""
    return _EVENT.pack(kind, topic_id, group_id, queue_id, attempt, time_ms) + message_id


def with_reason(event: bytes, reason: FailureReason | None) -> bytes:
    """Return a failure event with its reason added; return it unchanged if the reason is empty."""
    if reason is None or not any(reason):
        return event
    message_id, error = event[_EVENT.size :], reason.error.encode()
    tail = _REASONED + _LENGTH.pack(len(message_id)) + message_id + _LENGTH.pack(len(error)) + error
    tail += reason.client.encode()
    if len(tail) == USUAL_ID_BYTES:  # ``to_columns`` distinguishes it from a usual id by its length
        tail += b" "
    return event[: _EVENT.size] + tail


def has_reason(tail: bytes) -> bool:
    """Return True if ``tail``, the part of an event after its head, has a failure reason in addition to the id."""
    return tail.startswith(_REASONED)


def split_reason(tail: bytes) -> tuple[bytes, str, str]:
    """Return the packed message id, error and client of a tail that ``has_reason``.

    Raise ``struct.error`` or ``UnicodeDecodeError`` if it is invalid.
    """
    id_at = len(_REASONED) + _LENGTH.size
    (id_length,) = _LENGTH.unpack_from(tail, len(_REASONED))
    (error_length,) = _LENGTH.unpack_from(tail, id_at + id_length)
    error_at = id_at + id_length + _LENGTH.size
    client_at = error_at + error_length
    error, client = tail[error_at:client_at].decode(), tail[client_at:].decode().rstrip()
    return tail[id_at : id_at + id_length], error, client


def decode_event(event: bytes) -> AuditEvent:
    """Decode an event without its reason; raise ``StoreCorrupt`` for an unknown kind or a truncated event."""
    try:
        kind, topic_id, group_id, queue_id, attempt, time_ms = _EVENT.unpack_from(event)
        tail = event[_EVENT.size :]
        message_id = split_reason(tail)[0] if has_reason(tail) and kind in FAILURES else tail
        return AuditEvent(EventKind(kind), topic_id, group_id, queue_id, attempt, time_ms, message_id)
    except (struct.error, ValueError) as error:
        raise StoreCorrupt(f"an audit event of {len(event)} bytes cannot be read: {error}") from error


def name_event(kind: EventKind, name_id: int, said: str = "") -> bytes:
    """Return the event of a created, changed or removed topic or group; ``said`` names the changed flow settings."""
    is_topic = kind in _OF_TOPICS  # else a group's
    message_id = pack_id(said) if said else b""
    return encode_event(kind, name_id if is_topic else 0, 0 if is_topic else name_id, NO_QUEUE, 0, 0, message_id)


def operated_event(number: int, said: str) -> bytes:
    """Return the event of an operator's finished call; ``said`` is its activity as JSON (``text_of``)."""
    return encode_event(EventKind.OPERATED, 0, 0, NO_QUEUE, 0, number, pack_id(said))


def cell_event(kind: EventKind) -> bytes:
    """Return the event of a run's start, end or heartbeat."""
    return encode_event(kind, 0, 0, NO_QUEUE, 0, 0, b"")


def gap_event(first_sequence: int, count: int) -> bytes:
    """Return the event of ``count`` events cut from the outbox, from ``first_sequence`` on."""
    return encode_event(EventKind.GAP, 0, 0, NO_QUEUE, 0, first_sequence, _COUNT.pack(count))


def subscribed_event(topic_id: int, group_id: int, queue_id: int, offset: int) -> bytes:
    """Return the event of a group's start on a queue at ``offset``."""
    return encode_event(EventKind.SUBSCRIBED, topic_id, group_id, queue_id, 0, offset, b"")


def offset_set_event(topic_id: int, group_id: int, queue_id: int, offset: int) -> bytes:
    """Return the event of an offset committed by a pulling group on a queue."""
    return encode_event(EventKind.OFFSET_SET, topic_id, group_id, queue_id, 0, offset, b"")


def reset_event(topic_id: int, group_id: int, queue_id: int, end: int) -> bytes:
    """Return the event of a reset: the group left everything below ``end``. Its new offset is in the ``Emit``."""
    return encode_event(EventKind.RESET, topic_id, group_id, queue_id, 0, end, b"")


def tail_lost_event(first_sequence: int, count: int) -> bytes:
    """Return the event of a lost tail.

    The store lacks the changes of ``count`` exported events from ``first_sequence`` on.
    """
    return encode_event(EventKind.TAIL_LOST, 0, 0, NO_QUEUE, 0, first_sequence, _COUNT.pack(count))


def gap_count(event: AuditEvent) -> int:
    """Return the number of events covered by a gap event or a lost-tail event."""
    count: int = _COUNT.unpack(event.message_id)[0]
    return count
