"""Rows of the group family: group progress, outcomes of dead letters, and offsets committed by pulling groups.

    key              group_id 4 | topic_id 4 | queue_id 2 | kind 1 | number 8

    kind 1 floor     number 0        floor 8
    kind 2 chunk     chunk number    bitmap 128
    kind 3 exception offset          attempt 2 | visible_at_ms 8 | epoch 8 | first_failed_at_ms 8 | flags 1
                                     | set_at_ms 8, if flagged | length 2 and failure reason, if flagged | message group
    kind 4 outcome   offset          JSON; of group 0, under queue 1 of the dead-letter queue's topic
    kind 5 committed the group's id  offset 8; of group 0, which no group has, so that the offsets of all groups of a
                                     queue are adjacent, and separate from the progress of receiving groups

Flags: 1 suspended, 2 set_at_ms is present (format 3), 4 a failure reason is present (format 6). Group 0 also has floors
and chunks for dead-letter queues: they mark the letters that have an outcome. Rows of a producer store have 0xff in
place of a group id (``dmq.store.schema.spool``).
"""

from __future__ import annotations

import json
import struct
from enum import IntEnum
from typing import NamedTuple

from dmq.errors import StoreCorrupt

CHUNK_OFFSETS = 1024
CHUNK_BYTES = CHUNK_OFFSETS // 8
NO_GROUP = 0  # for rows that belong to no group, or to all groups
GROUPS_END = b"\xff\xff\xff\xff"  # above all group ids; rows of a producer store follow

_GROUP_QUEUE = struct.Struct(">IIH")
_GROUP = struct.Struct(">IIHBQ")
_EXCEPTION = struct.Struct(">HQQQB")
_SET_AT = struct.Struct(">Q")
_LENGTH = struct.Struct(">H")
SUSPENDED, _TIMED, _FAILED = 1, 2, 4
_OUTCOMES_QUEUE = 1


class GroupKind(IntEnum):
    """Kind of a row in the group family."""

    FLOOR = 1
    CHUNK = 2
    EXCEPTION = 3
    OUTCOME = 4
    COMMITTED = 5


class ExceptionRow(NamedTuple):
    """Stored lease, or a returned message with ``visible_at_ms`` 0."""

    attempt: int
    visible_at_ms: int
    epoch: int
    first_failed_at_ms: int
    is_suspended: bool
    set_at_ms: int  # 0: unknown, the row was written before format 3
    message_group: str
    failure: bytes = b""  # reason of the preceding failed delivery (``failure_reason``); empty: unknown

    def left_ms(self, now_ms: int) -> int:
        """Return the remaining invisible time in ms.

        It never exceeds the invisible duration of the lease, even after a backward clock step.
        """
        left_ms = max(0, self.visible_at_ms - now_ms)
        return min(left_ms, max(0, self.visible_at_ms - self.set_at_ms)) if self.set_at_ms else left_ms


class LetterOutcome(NamedTuple):
    """Outcome of a dead letter: redriven or purged."""

    what: str  # "redriven" or "purged"
    at_ms: int
    note: str


pack_group_key = _GROUP.pack  # (group_id, topic_id, queue_id, kind, number)


def unpack_group_key(key: bytes) -> tuple[int, int, int, int, int]:
    """Return ``(group_id, topic_id, queue_id, kind, number)``; raise ``StoreCorrupt`` if the key's length is wrong."""
    if len(key) != _GROUP.size:
        raise StoreCorrupt(f"a group key of {len(key)} bytes, not {_GROUP.size}: {key[:64].hex()}")
    group_id, topic_id, queue_id, kind, number = _GROUP.unpack(key)
    return group_id, topic_id, queue_id, kind, number


def group_queue_range(group_id: int, topic_id: int, queue_id: int) -> tuple[bytes, bytes]:
    """Return the key range of all rows of a group for a queue."""
    start = _GROUP_QUEUE.pack(group_id, topic_id, queue_id)
    return start, start + b"\xff" * 10


def unpack_group_row(key: bytes) -> tuple[int, int]:
    """Return ``(kind, number)`` from the key of a group row."""
    return key[10], int.from_bytes(key[11:19], "big")


def outcome_key(topic_id: int, offset: int) -> bytes:
    """Return the key of the outcome of a dead letter."""
    return _GROUP.pack(NO_GROUP, topic_id, _OUTCOMES_QUEUE, GroupKind.OUTCOME, offset)


def committed_key(topic_id: int, queue_id: int, group_id: int) -> bytes:
    """Return the key of a group's committed offset on a queue."""
    return _GROUP.pack(NO_GROUP, topic_id, queue_id, GroupKind.COMMITTED, group_id)


def committed_range(topic_id: int, queue_id: int) -> tuple[bytes, bytes]:
    """Return the key range of all committed offsets on a queue."""
    return committed_key(topic_id, queue_id, 0), committed_key(topic_id, queue_id, 2**64 - 1)


def encode_hidden(  # noqa: PLR0917 - the layout, in its order; called once per lease that is a row
    attempt: int,
    visible_at_ms: int,
    epoch: int,
    first_failed_at_ms: int,
    flags: int,
    set_at_ms: int,
    group: str,
    failure: bytes = b"",
) -> bytes:
    """Encode an exception row for a lease. Callers may set only the flag ``SUSPENDED``."""
    flags |= _TIMED | (_FAILED if failure else 0)
    head = _EXCEPTION.pack(attempt, visible_at_ms, epoch, first_failed_at_ms, flags) + _SET_AT.pack(set_at_ms)
    return head + (_LENGTH.pack(len(failure)) + failure if failure else b"") + group.encode()


def encode_returned(attempt: int, epoch: int, first_failed_at_ms: int, before: ExceptionRow | None = None) -> bytes:
    """Encode an exception row for a returned message, which is visible at once.

    ``before`` is the row of its lease, if that stored a failure: its reason and time are kept.
    """
    if before is not None and before.failure:
        return encode_hidden(attempt, 0, epoch, first_failed_at_ms, 0, before.set_at_ms, "", before.failure)
    return _EXCEPTION.pack(attempt, 0, epoch, first_failed_at_ms, 0)


def decode_exception(value: bytes) -> ExceptionRow:
    """Decode an exception row. Raise ``struct.error`` or ``UnicodeDecodeError`` if it is invalid."""
    attempt, visible_at_ms, epoch, first_failed_at_ms, flags = _EXCEPTION.unpack_from(value)
    at, set_at_ms = _EXCEPTION.size, 0
    if flags & _TIMED:
        (set_at_ms,) = _SET_AT.unpack_from(value, at)
        at += _SET_AT.size
    failure = b""
    if flags & _FAILED:
        (length,) = _LENGTH.unpack_from(value, at)
        at += _LENGTH.size
        failure, at = value[at : at + length], at + length
    facts = attempt, visible_at_ms, epoch, first_failed_at_ms, bool(flags & SUSPENDED), set_at_ms
    return ExceptionRow(*facts, value[at:].decode(), failure)


def is_hidden(value: bytes) -> bool:
    """Return True if an exception row is a lease. The row is not decoded."""
    return any(value[2:10])


def encode_outcome(outcome: LetterOutcome) -> bytes:
    """Return the value of a dead letter's outcome row."""
    return json.dumps(outcome._asdict(), separators=(",", ":")).encode()


def decode_outcome(value: bytes) -> LetterOutcome:
    """Decode the outcome of a dead letter; raise ``StoreCorrupt`` if it is invalid."""
    try:
        plain = json.loads(value)
        return LetterOutcome(str(plain["what"]), int(plain["at_ms"]), str(plain["note"]))
    except (ValueError, KeyError, TypeError) as error:
        raise StoreCorrupt(f"the outcome of a dead letter cannot be read: {error}") from error
