"""Values of the index, which has a row for each message id that is known, and the ids of copies that a group failed.

index      state 1 | sequence 8 | at_ms 8               waits: at_ms is the key's time; or withdrawn, committed,
                                                     replaced then
           state 1 | sequence 8 | at_ms 8 | queue_id 2 | offset 8   finished
           state 1 | sequence 8 | at_ms 8 | message id              absorbed: both are of the message that waited

failed id  message id | epoch 8 | topic id 4 | queue id 2 | offset 8 | attempt 2
           of a copy; the highest bit of the topic id says that there is an epoch in front of it
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from dmq.errors import StoreCorrupt
from dmq.store.schema.keys import pack_timeline_key, timeline_mark
from dmq.store.schema.record import (
    HALF_KINDS,
    WAITING_HEADER_BYTES,
    EntryKind,
    History,
    WaitingEntry,
    body_facts,
    decode_history,
    half_body_at,
    history_bytes,
)

_FAILED_ID = struct.Struct(">IHQH")
_EPOCH = struct.Struct(">Q")
COPY_SUFFIX_MAX = _EPOCH.size + _FAILED_ID.size  # bytes in the id of a copy behind the message id
_INDEX_WAITING = struct.Struct(">BQQ")
_INDEX_FINISHED = struct.Struct(">BQQHQ")
_OF_EPOCH = 0x8000_0000  # in the topic id of a failed id; ids of topics are far smaller


class EntryState(IntEnum):
    """What became of an accepted message."""

    WAITING = 1
    QUEUED = 2  # accepted and in its queue at once
    DELIVERED = 3  # waited, and was handed over when due
    WITHDRAWN = 4  # waited, and was taken away before it was due; kept only of those that are to be remembered
    COMMITTED = 5  # a half message whose transaction was committed; a receipt of its own has the message it became
    REPLACED = 6  # waited, until another message with its own key was accepted (format 5)
    ABSORBED = 7  # never waited: another message did under its own key, and was to stay (format 5)


_WAITING_STATE, _WITHDRAWN_STATE = int(EntryState.WAITING), int(EntryState.WITHDRAWN)
_SHORT_STATES = frozenset((_WAITING_STATE, _WITHDRAWN_STATE, int(EntryState.COMMITTED), int(EntryState.REPLACED)))
_ABSORBED = int(EntryState.ABSORBED)
# What is kept so that a repeated send is answered as the first was; else nothing is known of it.
REMEMBERED = frozenset((EntryState.WITHDRAWN, EntryState.REPLACED, EntryState.ABSORBED))


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
    instead: bytes = b""  # of what was ABSORBED: the id of the message that waited, whose ``sequence`` it is, packed

    @property
    def mark(self) -> int:
        """The number of the timeline key of an entry that waits."""
        return timeline_mark(self.at_ms, self.sequence)

    @property
    def key(self) -> bytes:
        """The timeline key of an entry that waits."""
        return pack_timeline_key(self.at_ms, self.sequence)


def failed_id(message_id: bytes, history: History, attempt: int) -> bytes:
    """Return the id in the index of the copy made when ``attempt`` failed.

    A group may fail two messages with one id (of two topics, or sent again long after), and each of them many times: a
    copy is the only one of its original and its attempt. Since a group that is reset, or made anew, counts attempts
    from 1 again, it is the epoch of the failed hand-out, which no other one ever has, that tells two of them apart.
    """
    if not history.epoch:
        return message_id + _FAILED_ID.pack(history.topic_id, history.queue_id, history.queue_offset, attempt)
    place = _FAILED_ID.pack(history.topic_id | _OF_EPOCH, history.queue_id, history.queue_offset, attempt)
    return message_id + _EPOCH.pack(history.epoch) + place


def failed_topic_id(index_id: bytes) -> int:
    """Return the topic of the original from what ``failed_id`` made."""
    return int.from_bytes(index_id[-_FAILED_ID.size :][:4], "big") & ~_OF_EPOCH


class CopyPlace(NamedTuple):
    """Of which hand-out a copy is: where the original lay, the epoch (0: not said), and the attempt that failed."""

    topic_id: int
    queue_id: int
    queue_offset: int
    epoch: int
    attempt: int


def copy_place(index_id: bytes) -> CopyPlace:
    """Return what ``failed_id`` put behind the message id."""
    of_epoch, queue_id, queue_offset, attempt = _FAILED_ID.unpack(index_id[-_FAILED_ID.size :])
    epoch = 0
    if of_epoch & _OF_EPOCH:
        (epoch,) = _EPOCH.unpack(index_id[-_FAILED_ID.size - _EPOCH.size : -_FAILED_ID.size])
    return CopyPlace(of_epoch & ~_OF_EPOCH, queue_id, queue_offset, epoch, attempt)


def failed_message_id(index_id: bytes) -> bytes:
    """Return the message id from what ``failed_id`` made; all of it if it cannot be one."""
    has_epoch = len(index_id) >= _FAILED_ID.size and index_id[-_FAILED_ID.size] >= _OF_EPOCH >> 24
    size = _FAILED_ID.size + (_EPOCH.size if has_epoch else 0)
    return index_id[:-size] if len(index_id) > size else index_id


def ids_of(entry: WaitingEntry, value: bytes) -> tuple[bytes, bytes, int]:
    """Return a daemon's entry's message id, its id in the index, and where in its value its body begins."""
    at = WAITING_HEADER_BYTES
    if entry.kind == EntryKind.RETRY:
        history = decode_history(value, at)
        at += history_bytes(value, at)
        message_id = body_facts(value[at:])[0]
        return message_id, failed_id(message_id, history, entry.retry_count), at
    if entry.kind in HALF_KINDS:
        at = half_body_at(entry.kind)
    message_id = body_facts(value[at:])[0]
    return message_id, message_id, at


def redriven_history(topic_id: int, now_ms: int) -> History:
    """Return the history of a redriven message in a group's lane: it was in no queue, and nobody failed it yet."""
    return History(topic_id, 0, 0, now_ms, 0, 0, 0)


def redriven_id(message_id: bytes, topic_id: int) -> bytes:
    """Return the id in the index of a redriven message in a group's lane; message ids of redrives are new."""
    return failed_id(message_id, redriven_history(topic_id, 0), 0)


def encode_index_waiting(sequence: int, key_time_ms: int) -> bytes:
    """Encode the index value of a waiting entry."""
    return _INDEX_WAITING.pack(_WAITING_STATE, sequence, key_time_ms)


def encode_index_withdrawn(sequence: int, at_ms: int, state: int = _WITHDRAWN_STATE) -> bytes:
    """Encode the index value of an entry that was withdrawn and is to be remembered, as ``state``."""
    return _INDEX_WAITING.pack(state, sequence, at_ms)


def encode_index_absorbed(sequence: int, at_ms: int, instead: bytes) -> bytes:
    """Encode the index value of a message that was not stored, since the one with the id ``instead`` waited."""
    return _INDEX_WAITING.pack(_ABSORBED, sequence, at_ms) + instead


def encode_index_finished(state: int, sequence: int, at_ms: int, queue_id: int, queue_offset: int) -> bytes:
    """Encode the index value of a finished entry; ``state`` is the number of an ``EntryState``."""
    return _INDEX_FINISHED.pack(state, sequence, at_ms, queue_id, queue_offset)


def decode_index(value: bytes) -> Receipt:
    """Read an index value as the receipt of a repeated send; ``StoreCorrupt`` if it cannot be one."""
    if len(value) == _INDEX_WAITING.size and value[0] in _SHORT_STATES:
        state, sequence, at_ms = _INDEX_WAITING.unpack(value)
        return Receipt(EntryState(state), sequence, -1, -1, at_ms, True)
    if len(value) == _INDEX_FINISHED.size and value[0] in {EntryState.QUEUED, EntryState.DELIVERED}:
        state, sequence, at_ms, queue_id, queue_offset = _INDEX_FINISHED.unpack(value)
        return Receipt(EntryState(state), sequence, queue_id, queue_offset, at_ms, True)
    if len(value) > _INDEX_WAITING.size and value[0] == _ABSORBED:
        _, sequence, at_ms = _INDEX_WAITING.unpack_from(value)
        return Receipt(EntryState.ABSORBED, sequence, -1, -1, at_ms, True, value[_INDEX_WAITING.size :])
    raise StoreCorrupt(f"an index value of {len(value)} bytes that begins with {value[:1].hex() or 'nothing'}")
