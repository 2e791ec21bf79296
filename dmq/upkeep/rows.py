"""The rows of a daemon's store, taken apart one by one; ``StoreCorrupt`` for each that makes no sense."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import NamedTuple

from dmq.embedded.group_queue import CHUNK_OFFSETS, decode_exception
from dmq.errors import StoreCorrupt
from dmq.scheduler.moves import decode_moves
from dmq.store import keys
from dmq.store.believed import decode_clock
from dmq.store.counts import unpack_hour
from dmq.store.identity import decode_identity
from dmq.store.keys import WAITING_GENERATION, unpack_group_row, unpack_u64
from dmq.store.ops import Receipt
from dmq.store.outbox import decode_state
from dmq.store.record import (
    WAITING_HEADER_BYTES,
    EntryKind,
    WaitingEntry,
    body_facts,
    decode_history,
    decode_index,
    decode_waiting,
    failed_id,
    failed_topic_id,
    half_body_at,
    history_bytes,
)
from retry.dead_letter import decode_job

TIMELINE_KEY_BYTES, QUEUE_KEY_BYTES, GROUP_KEY_BYTES, INDEX_PREFIX_BYTES = 16, 14, 19, 8
_FIGURES = {keys.META_FORMAT: 8, keys.META_BOOT: 8, keys.META_SEQUENCE: 8, keys.META_CLOSED: 8} | {
    keys.META_DONE: 16,
    keys.META_GENERATION: 16,
}


class GroupKind(IntEnum):
    """Kinds of rows of the group family: progress (``group_queue``), outcomes (``dead_letters``), ``offsets``."""

    FLOOR = 1
    CHUNK = 2
    EXCEPTION = 3
    OUTCOME = 4
    COMMITTED = 5


class Waiting(NamedTuple):
    """A row of the timeline."""

    mark: int
    entry: WaitingEntry
    message_id: bytes  # packed
    index_id: bytes  # under which the index knows it
    body_at: int  # where in the value its body begins

    @property
    def kind(self) -> str:
        """The name of its kind, in lower case."""
        return EntryKind(self.entry.kind).name.lower()


class Indexed(NamedTuple):
    """A row of the index."""

    generation: int
    scope: int
    index_id: bytes
    receipt: Receipt

    @property
    def is_waiting(self) -> bool:
        """Whether it is of an entry of the timeline."""
        return self.generation == WAITING_GENERATION

    @property
    def failed_topic_id(self) -> int:
        """Of a copy that a group failed: the topic of its original."""
        return failed_topic_id(self.index_id)


class Progress(NamedTuple):
    """A row of the group family."""

    group_id: int  # 0: of nobody, about a dead-letter queue or a queue that is pulled from
    topic_id: int
    queue_id: int
    kind: GroupKind
    number: int
    value: bytes

    @property
    def end(self) -> int:
        """The offset behind the last one that it tells of: the queue ends no earlier."""
        match self.kind:
            case GroupKind.FLOOR | GroupKind.COMMITTED:
                return unpack_u64(self.value)
            case GroupKind.CHUNK:
                bits = int.from_bytes(self.value, "little").bit_length()
                return self.number * CHUNK_OFFSETS + bits if bits else 0
            case _:
                return self.number + 1

    @property
    def place(self) -> tuple[int, int]:
        """Topic and queue whose offsets it tells of; outcomes lie beside the only queue of their topic."""
        return self.topic_id, 0 if self.kind is GroupKind.OUTCOME else self.queue_id


def read_waiting(key: bytes, value: bytes) -> Waiting:
    """Take a row of the timeline apart."""
    entry = decode_waiting(value)
    if len(key) != TIMELINE_KEY_BYTES or entry.kind not in set(EntryKind) - {EntryKind.SPOOLED}:
        raise StoreCorrupt(f"an entry of kind {entry.kind} under a key of {len(key)} bytes")
    mark, at = int.from_bytes(key, "big"), WAITING_HEADER_BYTES
    if entry.kind == EntryKind.RETRY:
        history = decode_history(value, at)
        at += history_bytes(value, at)
        message_id, _ = body_facts(value[at:])
        return Waiting(mark, entry, message_id, failed_id(message_id, history, entry.retry_count), at)
    if entry.kind in {EntryKind.TRANSACTION, EntryKind.WHOLE_HALF}:
        at = half_body_at(entry.kind)
    message_id, _ = body_facts(value[at:])
    return Waiting(mark, entry, message_id, message_id, at)


def read_index(key: bytes, value: bytes) -> Indexed:
    """Take a row of the index apart."""
    if len(key) <= INDEX_PREFIX_BYTES:
        raise StoreCorrupt(f"an index key of {len(key)} bytes")
    generation, scope = int.from_bytes(key[:4], "big"), int.from_bytes(key[4:8], "big")
    return Indexed(generation, scope, key[INDEX_PREFIX_BYTES:], decode_index(value))


def read_begin(key: bytes, value: bytes) -> tuple[tuple[int, int], int]:
    """Return a queue and where it begins, from a row of the meta family."""
    return (int.from_bytes(key[1:5], "big"), int.from_bytes(key[5:7], "big")), unpack_u64(value)


def read_progress(key: bytes, value: bytes) -> Progress:
    """Take a row of the group family apart."""
    if len(key) != GROUP_KEY_BYTES:
        raise StoreCorrupt(f"a group key of {len(key)} bytes")
    group_id, topic_id, queue_id = (int.from_bytes(key[at:to], "big") for at, to in ((0, 4), (4, 8), (8, 10)))
    number_of_kind, number = unpack_group_row(key)
    try:
        kind = GroupKind(number_of_kind)
        match kind:
            case GroupKind.FLOOR | GroupKind.COMMITTED:
                unpack_u64(value)
            case GroupKind.CHUNK if len(value) != CHUNK_OFFSETS // 8:
                raise ValueError(f"a bitmap of {len(value)} bytes")
            case GroupKind.EXCEPTION:
                decode_exception(value)
            case GroupKind.OUTCOME:
                plain = json.loads(value)
                str(plain["what"]), int(plain["at_ms"]), str(plain["note"])
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise StoreCorrupt(f"a group row of kind {number_of_kind} cannot be read: {error}") from error
    return Progress(group_id, topic_id, queue_id, kind, number, value)


def epoch_of(row: Progress) -> int:
    """Return the epoch of the last hand-out that an exception tells of."""
    epoch: int = struct.unpack_from(">Q", row.value, 10)[0]
    return epoch


# How rows of the meta family are read, and what kind they are, by the first byte of their key.
_META_ROWS: Mapping[bytes, tuple[Callable[[bytes], object], str]] = {
    keys.META_IDENTITY: (decode_identity, "identity"),
    keys.META_CLOCK: (decode_clock, "figure"),
    keys.META_MOVES: (decode_moves, "figure"),
    keys.META_HOUR: (unpack_hour, "count"),
    b"O": (decode_state, "figure"),
    b"t": (unpack_u64, "count"),
    b"b": (unpack_u64, "begin"),
    b"j": (decode_job, "job"),
    b"e": (unpack_u64, "reset"),
    b"k": (lambda value: json.loads(value[1:]), "procedure"),
}


def read_figure(key: bytes, value: bytes) -> str:
    """Look at a row of the meta family that is no name, nor belongs to one; return what kind it is.

    What is of no known kind is some later version's, and is let be.
    """
    try:
        if key in _FIGURES:
            if len(value) != _FIGURES[key]:
                raise ValueError(f"{len(value)} bytes instead of {_FIGURES[key]}")
            return "figure"
        known = _META_ROWS.get(key[:1])
        if known is not None:
            decode, kind = known
            decode(value)
            return kind
    except ValueError as error:
        raise StoreCorrupt(f"a figure cannot be read: {error}") from error
    return "other"
