"""Values of the index, which has a row for each known message id, and the index ids of retry copies.

index      state 1 | sequence 8 | at_ms 8               waiting: at_ms is the time of the key; for a withdrawn,
                                                     committed or replaced entry, the time of that change
           state 1 | sequence 8 | at_ms 8 | queue_id 2 | offset 8   finished
           state 1 | sequence 8 | at_ms 8 | message id              absorbed: sequence and id of the pending message

failed id  message id | epoch 8 | topic id 4 | queue id 2 | offset 8 | attempt 2
           of a retry copy; the highest bit of the topic id marks that the epoch is present
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from dmq.errors import StoreCorrupt
from dmq.store.schema.keys import pack_timeline_key, timeline_mark
from dmq.store.schema.messages.record import (
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
COPY_SUFFIX_MAX = _EPOCH.size + _FAILED_ID.size  # bytes after the message id in a copy's index id
_INDEX_WAITING = struct.Struct(">BQQ")
_INDEX_FINISHED = struct.Struct(">BQQHQ")
_OF_EPOCH = 0x8000_0000  # in the topic id of a failed id; ids of topics are far smaller


class EntryState(IntEnum):
    """State of an accepted message."""

    WAITING = 1
    QUEUED = 2  # accepted and in its queue at once
    DELIVERED = 3  # was pending, and was handed over when due
    WITHDRAWN = 4  # was withdrawn before it was due; kept only for entries that are remembered
    COMMITTED = 5  # a committed half message; the resulting message has its own receipt
    REPLACED = 6  # was pending until another message with its own key was accepted (format 5)
    ABSORBED = 7  # never stored: another message was pending under its own key and was kept (format 5)


_WAITING_STATE, _WITHDRAWN_STATE = int(EntryState.WAITING), int(EntryState.WITHDRAWN)
_SHORT_STATES = frozenset((_WAITING_STATE, _WITHDRAWN_STATE, int(EntryState.COMMITTED), int(EntryState.REPLACED)))
_ABSORBED = int(EntryState.ABSORBED)
# States kept so that a repeated send gets the first answer. Without these rows its id would be unknown.
REMEMBERED = frozenset((EntryState.WITHDRAWN, EntryState.REPLACED, EntryState.ABSORBED))


class Receipt(NamedTuple):
    """Answer to one op. Ops that neither accept nor move a message get ``NO_RECEIPT``."""

    state: EntryState | None
    sequence: int  # of the entry
    queue_id: int  # -1: not in a queue
    queue_offset: int  # -1: not in a queue
    at_ms: int  # time of the change to this state; if WAITING its delivery time, or later if it was accepted overdue
    repeated: bool
    instead: bytes = b""  # if ABSORBED: packed id of the pending message; ``sequence`` is that message's

    @property
    def mark(self) -> int:
        """Timeline key of a waiting entry, as a number."""
        return timeline_mark(self.at_ms, self.sequence)

    @property
    def key(self) -> bytes:
        """Timeline key of a waiting entry."""
        return pack_timeline_key(self.at_ms, self.sequence)


def failed_id(message_id: bytes, history: History, attempt: int) -> bytes:
    """Return the index id of the retry copy made when ``attempt`` failed.

    A group may fail two messages with the same id: of two topics, or sent again much later. Each may fail many times. A
    copy is identified by its original and its attempt. A group that is reset or recreated counts attempts from 1 again.
    Therefore the id also has the epoch of the failed hand-out, which is never reused.
    """
    if not history.epoch:
        return message_id + _FAILED_ID.pack(history.topic_id, history.queue_id, history.queue_offset, attempt)
    place = _FAILED_ID.pack(history.topic_id | _OF_EPOCH, history.queue_id, history.queue_offset, attempt)
    return message_id + _EPOCH.pack(history.epoch) + place


def failed_topic_id(index_id: bytes) -> int:
    """Return the topic id of the original message from a retry copy's index id."""
    return int.from_bytes(index_id[-_FAILED_ID.size :][:4], "big") & ~_OF_EPOCH


class CopyPlace(NamedTuple):
    """Origin of a retry copy: the place of the original, the epoch (0: unknown) and the failed attempt."""

    topic_id: int
    queue_id: int
    queue_offset: int
    epoch: int
    attempt: int


def copy_place(index_id: bytes) -> CopyPlace:
    """Return the origin that ``failed_id`` appended to the message id."""
    of_epoch, queue_id, queue_offset, attempt = _FAILED_ID.unpack(index_id[-_FAILED_ID.size :])
    epoch = 0
    if of_epoch & _OF_EPOCH:
        (epoch,) = _EPOCH.unpack(index_id[-_FAILED_ID.size - _EPOCH.size : -_FAILED_ID.size])
    return CopyPlace(of_epoch & ~_OF_EPOCH, queue_id, queue_offset, epoch, attempt)


def failed_message_id(index_id: bytes) -> bytes:
    """Return the message id from a retry copy's index id; return the input unchanged if it is too short."""
    has_epoch = len(index_id) >= _FAILED_ID.size and index_id[-_FAILED_ID.size] >= _OF_EPOCH >> 24
    size = _FAILED_ID.size + (_EPOCH.size if has_epoch else 0)
    return index_id[:-size] if len(index_id) > size else index_id


def ids_of(entry: WaitingEntry, value: bytes) -> tuple[bytes, bytes, int]:
    """Return a daemon entry's message id, its index id, and the offset of its body in its value."""
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
    """Return the initial history of a message redriven into a group's lane: no queue position and no failures."""
    return History(topic_id, 0, 0, now_ms, 0, 0, 0)


def redriven_id(message_id: bytes, topic_id: int) -> bytes:
    """Return the index id of a message redriven into a group's lane. Each redrive generates a new message id."""
    return failed_id(message_id, redriven_history(topic_id, 0), 0)


def encode_index_waiting(sequence: int, key_time_ms: int) -> bytes:
    """Return the index value of a waiting entry."""
    return _INDEX_WAITING.pack(_WAITING_STATE, sequence, key_time_ms)


def encode_index_withdrawn(sequence: int, at_ms: int, state: int = _WITHDRAWN_STATE) -> bytes:
    """Return the index value of a withdrawn entry that is remembered as ``state``."""
    return _INDEX_WAITING.pack(state, sequence, at_ms)


def encode_index_absorbed(sequence: int, at_ms: int, instead: bytes) -> bytes:
    """Return the index value of a message absorbed by the pending message with the id ``instead``."""
    return _INDEX_WAITING.pack(_ABSORBED, sequence, at_ms) + instead


def encode_index_finished(state: int, sequence: int, at_ms: int, queue_id: int, queue_offset: int) -> bytes:
    """Return the index value of a finished entry; ``state`` is the number of an ``EntryState``."""
    return _INDEX_FINISHED.pack(state, sequence, at_ms, queue_id, queue_offset)


def decode_index(value: bytes) -> Receipt:
    """Decode an index value into the receipt of a repeated send; raise ``StoreCorrupt`` if it is invalid."""
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
