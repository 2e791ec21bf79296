"""What parts ask the store to do: plain values, committed together or not at all.

A *unit* is a list of ops from one caller; the writer commits whole units, many units to a batch. Ops that accept a
message (``Schedule``, ``Append``) are idempotent on ``(scope, message_id)``: when it is known already, nothing is
written for them, their event is not recorded, and their receipt is the first one, marked ``repeated``.

Every op that changes state carries ``event``, the encoded audit event that goes into the same batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple


class Family(IntEnum):
    """Column families; the number is the index of its handle, the name is its name on disk in lower case."""

    META = 0
    TIMELINE = 1
    INDEX = 2
    QUEUE = 3
    GROUP = 4
    AUDIT = 5


class EntryState(IntEnum):
    """What became of an accepted message."""

    WAITING = 1
    QUEUED = 2  # accepted and in its queue at once
    DELIVERED = 3  # waited, and was handed over when due
    WITHDRAWN = 4  # waited, and was taken away before it was due; only ever in a receipt


class Schedule(NamedTuple):
    """Keep a message until it is due. The writer assigns its sequence and its timeline key.

    With ``is_new`` the id was made a moment ago, and is not looked for. No event: none is recorded.
    """

    scope: int
    message_id: bytes  # packed
    deliver_at_ms: int
    record: bytes  # dmq.store.record.encode_waiting
    event: bytes
    is_new: bool = False


class Append(NamedTuple):
    """Put a message at the end of a queue. The writer assigns its offset."""

    scope: int
    message_id: bytes  # packed
    topic_id: int
    queue_id: int
    record: bytes  # dmq.store.record.encode_queued
    event: bytes


class HandOver(NamedTuple):
    """Move a due message from the timeline to the end of a queue: index, append and event in the same batch."""

    key: bytes  # its timeline key
    scope: int
    message_id: bytes  # packed
    deliver_at_ms: int  # its true delivery time
    topic_id: int
    queue_id: int
    record: bytes  # dmq.store.record.encode_queued
    event: bytes


class Withdraw(NamedTuple):
    """Take an entry off the timeline before it is due, and do ``instead``; nothing at all if it no longer waits.

    ``key`` is the timeline key under which it was read. The check is made by the writer, so an entry is either handed
    over or withdrawn, never both. The receipt's state is ``WITHDRAWN``, or ``None`` if it no longer waits there.
    """

    key: bytes
    scope: int
    message_id: bytes  # as it was scheduled
    deliver_at_ms: int  # its true delivery time
    instead: Sequence[Append | Emit | Put] = ()


class Done(NamedTuple):
    """Everything on the timeline below ``mark`` is finished once this unit is committed."""

    mark: int


class Put(NamedTuple):
    """Set a row to an absolute value; the last one of a batch wins."""

    family: Family
    key: bytes
    value: bytes


class Delete(NamedTuple):
    """Remove a row."""

    family: Family
    key: bytes


class Emit(NamedTuple):
    """Record an audit event that belongs to the rows beside it, and to a message of a queue if it has an offset."""

    event: bytes
    queue_offset: int = -1


Op = Schedule | Append | HandOver | Withdraw | Done | Put | Delete | Emit


class Receipt(NamedTuple):
    """The answer to one op; ops that do not accept or move a message get ``NO_RECEIPT``."""

    state: EntryState | None
    sequence: int  # of the entry
    queue_id: int  # -1: not in a queue
    queue_offset: int  # -1: not in a queue
    at_ms: (
        int  # when it got into this state; for WAITING when it leaves it: its delivery time, later if it came overdue
    )
    repeated: bool


NO_RECEIPT = Receipt(None, -1, -1, -1, 0, False)


class Batch:
    """One atomic write: ranges are deleted first, then single rows, then rows are set."""

    __slots__ = ("deletes", "puts", "ranges")

    def __init__(self) -> None:
        self.ranges: list[tuple[int, bytes, bytes]] = []
        self.deletes: list[tuple[int, bytes]] = []
        self.puts: list[tuple[int, bytes, bytes]] = []
