"""Rows of a producer store. It uses the daemon's store, with types for topics, and additional rows in the group family.

    waiting    waiting entry of kind SPOOLED (topic id and scope: the type's id) | head | body       timeline
    head       turn 4 | flags 1 (1: uncertain) | length of the error 2 | error
    totals     waiting 8 | waiting bytes 8 | dead 8                                                  meta

    group, under an id that no group has: 0xff 4 | letter, then
    l key queue     type id 4 | digest 16               first 8 | next 8: numbers of the parked entries [first, next)
    m parked   type id 4 | digest 16 | number 8    as waiting; its delivery time is ignored until the entries before it
                                                   are gone
    u uid      type id 4 | digest 16 | uid 16      number 8: of the parked entry with that uid; stale once it is gone
    d dead     type id 4 | uid 16                  version 1 | death 1 | died_at_ms 8 | waiting
    a taken    0 4 | cell id 8                     start 16 | mark 16 | number 8: progress of the adoption of another
                                                   directory (``dmq.producer_store.directories.adopt``)

The id of an entry in the index is ``uid | turn 4``. An entry gets a new turn each time it becomes pending again, so the
index distinguishes its turns.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import NamedTuple

from dmq.errors import StoreCorrupt
from dmq.store.schema.keys import META_SPOOL_TOTAL, timeline_key
from dmq.store.schema.messages.record import (
    WAITING_HEADER_BYTES,
    EntryKind,
    body_facts,
    body_id,
    body_payload,
    decode_waiting,
    encode_body,
    encode_waiting,
)
from dmq.store.schema.topics.group import GROUPS_END
from retry.sink import ERROR_CHARS_MAX, UID_BYTES, DeadEntry, Death, Entry

VERSION = 1  # of an entry of the dead set
SPOOL_KEY_QUEUE = b"l"
SPOOL_PARKED = b"m"
SPOOL_UID = b"u"
SPOOL_DEAD = b"d"
SPOOL_TAKEN = b"a"

_LETTERS = {SPOOL_KEY_QUEUE, SPOOL_PARKED, SPOOL_UID, SPOOL_DEAD, SPOOL_TAKEN}
_DIGEST_BYTES = 16
_HEAD = struct.Struct(">IBH")
_DEAD = struct.Struct(">BBQ")
_TOTALS = struct.Struct(">QQQ")
_TURN = struct.Struct(">I")
_UNCERTAIN = 1
DEAD_HEAD_BYTES = _DEAD.size  # in front of an entry that is in the dead set


def spool_total_key(type_id: int) -> bytes:
    """Return the meta key of the totals of a type."""
    return META_SPOOL_TOTAL + type_id.to_bytes(4, "big")


class TypeTotals(NamedTuple):
    """Totals of a producer store for one type."""

    waiting: int = 0
    waiting_bytes: int = 0
    dead: int = 0


class KeyQueueId(NamedTuple):
    """Identifier of the key queue of one key of one type."""

    type_id: int
    digest: bytes


class TakenMark(NamedTuple):
    """Progress of the adoption of another directory: entries copied here that may still exist there."""

    start: int = 0
    mark: int = 0
    number: int = 0

    def covers(self, mark: int, number: int) -> bool:
        """Return True if an entry was copied here: the entry at ``mark``, or the entry ``number`` parked behind it."""
        return self.start <= mark and (mark, number) <= (self.mark, self.number)


def spool_range(letter: bytes, type_id: int, rest: bytes = b"") -> tuple[bytes, bytes]:
    """Return the range of a type's rows of one kind. No group id collides with it."""
    start = GROUPS_END + letter + type_id.to_bytes(4, "big") + rest
    return start, start + b"\xff" * 32


def spool_rows(letter: bytes) -> tuple[bytes, bytes]:
    """Return the range of all rows of one kind."""
    return GROUPS_END + letter, GROUPS_END + bytes((letter[0] + 1,))


def is_spool_key(key: bytes) -> bool:
    """Return True if a key of the group family belongs to a producer store."""
    return key[:4] == GROUPS_END and key[4:5] in _LETTERS


def type_of(key: bytes) -> int:
    """Return the type id in a key."""
    return int.from_bytes(key[5:9], "big")


def key_queue_id(type_id: int, key: str) -> KeyQueueId:
    """Return the key queue id of a key."""
    return KeyQueueId(type_id, blake2b(key.encode(), digest_size=_DIGEST_BYTES).digest())


def key_queue_key(key_queue: KeyQueueId) -> bytes:
    """Return the row key of a key queue."""
    return spool_range(SPOOL_KEY_QUEUE, key_queue.type_id, key_queue.digest)[0]


def key_queue_of(key: bytes) -> KeyQueueId:
    """Return the key queue id in a row key of a key queue."""
    return KeyQueueId(type_of(key), key[9:])


def parked_range(key_queue: KeyQueueId) -> tuple[bytes, bytes]:
    """Return the range of a key queue's parked entries, in their order."""
    return spool_range(SPOOL_PARKED, key_queue.type_id, key_queue.digest)


def parked_key(key_queue: KeyQueueId, number: int) -> bytes:
    """Return the key of a parked entry."""
    return spool_range(SPOOL_PARKED, key_queue.type_id, key_queue.digest + number.to_bytes(8, "big"))[0]


def parked_number(key: bytes) -> int:
    """Return the number in the key of a parked entry."""
    return int.from_bytes(key[-8:], "big")


def uid_key(key_queue: KeyQueueId, uid: bytes) -> bytes:
    """Return the key of the row that maps a uid to its parked entry."""
    return spool_range(SPOOL_UID, key_queue.type_id, key_queue.digest + uid)[0]


def dead_key(type_id: int, uid: bytes) -> bytes:
    """Return the key of a dead entry."""
    return spool_range(SPOOL_DEAD, type_id, uid)[0]


def taken_key(cell_id: str) -> bytes:
    """Return the key of the adoption progress of the directory with this cell id."""
    return spool_range(SPOOL_TAKEN, 0, bytes.fromhex(cell_id))[0]


def entry_id(uid: bytes, turn: int) -> bytes:
    """Return the index id of an entry."""
    return uid + _TURN.pack(turn)


def turn_of(id_in_index: bytes) -> int:
    """Return the turn in an entry's index id; raise ``StoreCorrupt`` if its length is wrong."""
    if len(id_in_index) != UID_BYTES + _TURN.size:
        raise StoreCorrupt(f"an entry id of {len(id_in_index)} bytes")
    turn: int = _TURN.unpack_from(id_in_index, UID_BYTES)[0]
    return turn


def encode_entry(entry: Entry, type_id: int, turn: int) -> bytes:
    """Return the timeline value of a pending entry."""
    error = entry.error[:ERROR_CHARS_MAX].encode(errors="replace")
    head = _HEAD.pack(turn, _UNCERTAIN if entry.is_uncertain else 0, len(error)) + error
    body = encode_body(entry.uid, b"", entry.key.encode(), entry.payload)
    attempts = min(entry.attempts, 0xFFFF)
    kind = int(EntryKind.SPOOLED)
    return encode_waiting(kind, attempts, type_id, type_id, entry.due_at_ms, entry.created_at_ms, head + body)


def spooled_body_at(value: bytes) -> int:
    """Return the offset of the body in a pending entry's value; raise ``StoreCorrupt`` if its head is truncated."""
    at = WAITING_HEADER_BYTES + _HEAD.size
    if len(value) < at:
        raise StoreCorrupt(f"a spooled entry of {len(value)} bytes has no head")
    return at + int(_HEAD.unpack_from(value, WAITING_HEADER_BYTES)[2])


def uid_of_entry(value: bytes) -> bytes:
    """Return the uid of a pending entry's value; raise ``StoreCorrupt`` if the value is truncated."""
    return body_id(value, spooled_body_at(value))


def decode_entry(value: bytes, type_name: str) -> tuple[Entry, int]:
    """Decode a pending entry's value into the entry and its turn; raise ``StoreCorrupt`` if it is invalid."""
    waiting = decode_waiting(value)
    at = WAITING_HEADER_BYTES
    if waiting.kind != EntryKind.SPOOLED or len(value) < at + _HEAD.size:
        raise StoreCorrupt(f"a timeline value of {len(value)} bytes is no spooled entry")
    turn, flags, error_bytes = _HEAD.unpack_from(value, at)
    at += _HEAD.size
    body = value[at + error_bytes :]
    uid, key = body_facts(body)
    try:
        entry = Entry(
            type_name=type_name,
            uid=uid,
            payload=body_payload(body),
            key=key.decode(),
            created_at_ms=waiting.accepted_at_ms,
            due_at_ms=waiting.deliver_at_ms,
            attempts=waiting.retry_count,
            is_uncertain=bool(flags & _UNCERTAIN),
            error=value[at : at + error_bytes].decode(errors="replace"),
        )
    except UnicodeDecodeError as error:
        raise StoreCorrupt(f"a spooled entry of {len(value)} bytes has a key that is no text") from error
    return entry, turn


def encode_dead(value: bytes, death: Death, died_at_ms: int) -> bytes:
    """Return the value of a dead entry; ``value`` is the result of ``encode_entry``."""
    return _DEAD.pack(VERSION, death, died_at_ms) + value


def decode_dead(value: bytes, type_name: str) -> tuple[DeadEntry, int]:
    """Decode a dead entry into the entry and its turn; raise ``StoreCorrupt`` if it is invalid."""
    if len(value) < _DEAD.size or value[0] != VERSION:
        raise StoreCorrupt(f"a dead entry of {len(value)} bytes has no version {VERSION} header")
    _, death, died_at_ms = _DEAD.unpack_from(value)
    entry, turn = decode_entry(value[_DEAD.size :], type_name)
    try:
        return DeadEntry(entry=entry, death=Death(death), died_at_ms=died_at_ms), turn
    except ValueError as error:
        raise StoreCorrupt(f"a dead entry of {len(value)} bytes: {error}") from error


def encode_totals(totals: TypeTotals) -> bytes:
    """Return the value of the totals of a type."""
    return _TOTALS.pack(*totals)


def decode_totals(value: bytes | None) -> TypeTotals:
    """Decode the totals of a type; ``None`` is all zeros. Raise ``StoreCorrupt`` for another length."""
    if value is None:
        return TypeTotals()
    if len(value) != _TOTALS.size:
        raise StoreCorrupt(f"totals of {len(value)} bytes instead of {_TOTALS.size}")
    return TypeTotals(*_TOTALS.unpack(value))


def encode_taken(taken: TakenMark) -> bytes:
    """Return the value of the adoption progress row."""
    return timeline_key(taken.start) + timeline_key(taken.mark) + taken.number.to_bytes(8, "big")


def decode_taken(value: bytes | None) -> TakenMark:
    """Decode the adoption progress; ``None`` is no progress."""
    if value is None:
        return TakenMark()
    return TakenMark(*(int.from_bytes(value[at : at + 16], "big") for at in (0, 16, 32)))
