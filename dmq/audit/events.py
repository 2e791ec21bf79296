"""Audit events: one fact about one message (or about the cell), as it goes into the outbox.

    event      kind 1 | topic_id 4 | group_id 4 | queue_id 2 | attempt 2 | time_ms 8 | packed message id

The outbox block around it (``dmq.store.outbox``) adds the audit sequence, the run of the daemon, the commit time, the
entry's sequence and the queue offset. ``time_ms`` is what the kind says below; zero ids mean "none". Kinds are part of
the trail's format: numbers are never used again for something else.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from dmq.errors import StoreCorrupt

_EVENT = struct.Struct(">BIIHHQ")
_COUNT = struct.Struct(">Q")
NO_QUEUE = 0xFFFF


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
    GAP = 13  # events cut from the outbox before they were exported [sequence of the first; the id is their count]


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


def decode_event(event: bytes) -> AuditEvent:
    """Undo ``encode_event``; ``StoreCorrupt`` for an unknown kind or a short event."""
    try:
        kind, topic_id, group_id, queue_id, attempt, time_ms = _EVENT.unpack_from(event)
        return AuditEvent(EventKind(kind), topic_id, group_id, queue_id, attempt, time_ms, event[_EVENT.size :])
    except (struct.error, ValueError) as error:
        raise StoreCorrupt(f"an audit event of {len(event)} bytes cannot be read: {error}") from error


def name_event(kind: EventKind, name_id: int) -> bytes:
    """Encode that a topic or a group was created."""
    is_topic = kind is EventKind.TOPIC_CREATED
    return encode_event(kind, name_id if is_topic else 0, 0 if is_topic else name_id, NO_QUEUE, 0, 0, b"")


def cell_event(kind: EventKind) -> bytes:
    """Encode that a run began or ended."""
    return encode_event(kind, 0, 0, NO_QUEUE, 0, 0, b"")


def gap_event(first_sequence: int, count: int) -> bytes:
    """Encode that ``count`` events from ``first_sequence`` on were cut from the outbox."""
    return encode_event(EventKind.GAP, 0, 0, NO_QUEUE, 0, first_sequence, _COUNT.pack(count))


def gap_count(event: AuditEvent) -> int:
    """Return how many events a gap event stands for."""
    count: int = _COUNT.unpack(event.message_id)[0]
    return count
