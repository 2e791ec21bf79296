"""Values of a spool: a waiting entry is one of the timeline (``dmq.store.record``), with a head of its own.

    waiting    waiting entry of kind SPOOLED (topic id and scope: the type's id) | head | body
    head       turn 4 | flags 1 (1: uncertain) | length of the error 2 | error
    parked     as waiting; its delivery time means nothing before those in front of it are gone
    dead       version 1 | death 1 | died_at_ms 8 | waiting
    totals     waiting 8 | waiting bytes 8 | dead 8

The id of an entry in the index is ``uid | turn 4``: each time an entry waits again it is another turn, so the index
never takes the new one for the old.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from dmq.errors import StoreCorrupt
from dmq.store.record import (
    WAITING_HEADER_BYTES,
    EntryKind,
    body_facts,
    body_payload,
    decode_waiting,
    encode_body,
    encode_waiting,
)
from retry.sink import ERROR_CHARS_MAX, UID_BYTES, DeadEntry, Death, Entry

_HEAD = struct.Struct(">IBH")
_DEAD = struct.Struct(">BBQ")
_TOTALS = struct.Struct(">QQQ")
_TURN = struct.Struct(">I")
_VERSION = 1
_UNCERTAIN = 1


class Totals(NamedTuple):
    """What a spool holds of one type."""

    waiting: int = 0
    waiting_bytes: int = 0
    dead: int = 0


def entry_id(uid: bytes, turn: int) -> bytes:
    """Return the id of an entry in the index."""
    return uid + _TURN.pack(turn)


def turn_of(id_in_index: bytes) -> int:
    """Return the turn in an entry's id; ``StoreCorrupt`` if it is none."""
    if len(id_in_index) != UID_BYTES + _TURN.size:
        raise StoreCorrupt(f"an entry id of {len(id_in_index)} bytes")
    turn: int = _TURN.unpack_from(id_in_index, UID_BYTES)[0]
    return turn


def encode_entry(entry: Entry, type_id: int, turn: int) -> bytes:
    """Encode an entry that waits."""
    error = entry.error[:ERROR_CHARS_MAX].encode(errors="replace")
    head = _HEAD.pack(turn, _UNCERTAIN if entry.is_uncertain else 0, len(error)) + error
    body = encode_body(entry.uid, b"", entry.key.encode(), entry.payload)
    attempts = min(entry.attempts, 0xFFFF)
    kind = int(EntryKind.SPOOLED)
    return encode_waiting(kind, attempts, type_id, type_id, entry.due_at_ms, entry.created_at_ms, head + body)


def decode_entry(value: bytes, type_name: str) -> tuple[Entry, int]:
    """Undo ``encode_entry``: the entry and its turn; ``StoreCorrupt`` if it cannot be one."""
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
    """Encode an entry of the dead set; ``value`` is what ``encode_entry`` made of it."""
    return _DEAD.pack(_VERSION, death, died_at_ms) + value


def decode_dead(value: bytes, type_name: str) -> tuple[DeadEntry, int]:
    """Undo ``encode_dead``, with the turn; ``StoreCorrupt`` if it cannot be one."""
    if len(value) < _DEAD.size or value[0] != _VERSION:
        raise StoreCorrupt(f"a dead entry of {len(value)} bytes has no version {_VERSION} header")
    _, death, died_at_ms = _DEAD.unpack_from(value)
    entry, turn = decode_entry(value[_DEAD.size :], type_name)
    try:
        return DeadEntry(entry=entry, death=Death(death), died_at_ms=died_at_ms), turn
    except ValueError as error:
        raise StoreCorrupt(f"a dead entry of {len(value)} bytes: {error}") from error


def encode_totals(totals: Totals) -> bytes:
    """Encode the totals of a type."""
    return _TOTALS.pack(*totals)


def decode_totals(value: bytes | None) -> Totals:
    """Undo ``encode_totals``; nothing is nothing."""
    if value is None:
        return Totals()
    if len(value) != _TOTALS.size:
        raise StoreCorrupt(f"totals of {len(value)} bytes instead of {_TOTALS.size}")
    return Totals(*_TOTALS.unpack(value))
