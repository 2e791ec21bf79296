"""Rows of the ledger: what became of the messages of a topic, and of those it has for a group; of the meta family.

    head       version 1 | run 8 | began_at_ms 8
    row        version 1 | of each term that is not 0: term 1, count 8 with a sign
               under topic 4 | group 4; of the topic itself under group 0

Terms below 128 are numbers of kinds of audit events, of which the store only knows which are counted: an event begins
with its kind 1, its topic 4 and its group 4. The others are the ledger's own. All counts are absolute, and ride in the
batch that changes them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple

from dmq.errors import StoreCorrupt
from dmq.store.schema.keys import META_LEDGER

VERSION = 1
HEAD_BYTES = 9  # of an event: kind, topic and group
_HEAD = struct.Struct(">BQQ")
_TERM = struct.Struct(">Bq")
_KEY = struct.Struct(">cII")
_PAIR = struct.Struct(">II")
_CHANGE = struct.Struct(">BII")

pack_pair = _PAIR.pack  # (topic_id, group_id), as a key has them behind its letter
unpack_pair = _PAIR.unpack
pack_change = _CHANGE.pack  # (term, topic_id, group_id), as an event begins


class Term(IntEnum):
    """What is counted beside kinds of events. Of a topic unless it says otherwise; of a lane as of a topic."""

    STORED = 128  # messages put into its queues, ever: the sum of their ends
    STORED_BEFORE = 129  # of those, how many were there when the ledger began
    PENDING_BEFORE = 130  # that waited when the ledger began
    HALF_BEFORE = 131  # half messages that waited then
    QUEUES = 132  # of a group: how many of the topic's queues it reads
    BEFORE = 133  # of a group: messages it never gets, or got before the ledger began; less what a reset gives it again
    SKIPPED = 134  # of a group: removed before it had finished them; of a dead-letter queue: without an outcome
    COPIES_BEFORE = 135  # of a group: its retries that waited when the ledger began
    LANE_BEFORE = 136  # of a group: its retries that were visible then
    DEAD_WAITING = 137  # of a group: dead letters made of retries that waited
    SETTLED_BEFORE = 138  # of a dead-letter queue: letters that had an outcome when the ledger began
    LETTERS_REDRIVEN = 139  # of a dead-letter queue
    LETTERS_PURGED = 140  # of a dead-letter queue


class LedgerHead(NamedTuple):
    """Which run of the daemon kept the ledger last, and when it began."""

    run: int
    began_at_ms: int


def ledger_key(topic_id: int, group_id: int) -> bytes:
    """Return the meta key of a row."""
    return _KEY.pack(META_LEDGER, topic_id, group_id)


def ledger_range(topic_id: int) -> tuple[bytes, bytes]:
    """Return the range of all rows of a topic."""
    return ledger_key(topic_id, 0), ledger_key(topic_id + 1, 0)


def unpack_ledger_key(key: bytes) -> tuple[int, int]:
    """Return topic and group; ``StoreCorrupt`` if the key cannot be one."""
    if len(key) != _KEY.size:
        raise StoreCorrupt(f"a key of the ledger of {len(key)} bytes, not {_KEY.size}")
    _, topic_id, group_id = _KEY.unpack(key)
    return topic_id, group_id


def encode_ledger(counts: Mapping[int, int]) -> bytes:
    """Encode the counts of a row by term."""
    return b"\1" + b"".join([_TERM.pack(term, count) for term, count in counts.items() if count])


def decode_ledger(value: bytes) -> dict[int, int]:
    """Undo ``encode_ledger``; ``StoreCorrupt`` for what cannot be read."""
    if value[:1] != bytes((VERSION,)) or (len(value) - 1) % _TERM.size:
        raise StoreCorrupt(f"a row of the ledger of {len(value)} bytes cannot be read")
    return dict(_TERM.iter_unpack(value[1:]))


def encode_head(head: LedgerHead) -> bytes:
    """Encode the head."""
    return _HEAD.pack(VERSION, *head)


def decode_head(value: bytes) -> LedgerHead:
    """Undo ``encode_head``; ``StoreCorrupt`` for what cannot be read."""
    if len(value) != _HEAD.size or value[0] != VERSION:
        raise StoreCorrupt(f"the head of the ledger of {len(value)} bytes cannot be read")
    return LedgerHead(*_HEAD.unpack(value)[1:])
