"""Rows of the ledger: message counts by topic, and by topic and group, in the meta family.

    head       version 1 | run 8 | began_at_ms 8
    row        version 1 | of each term that is not 0: term 1, count 8 with a sign
               under topic 4 | group 4; of the topic itself under group 0

Terms below 128 are numbers of audit event kinds. The store is given only the set of counted kinds: an event begins
with its kind 1, its topic 4 and its group 4. The other terms are the ledger's own. All counts are absolute, and are
written in the batch that changes them.
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

pack_pair = _PAIR.pack  # (topic_id, group_id), as after the letter of a key
unpack_pair = _PAIR.unpack
pack_change = _CHANGE.pack  # (term, topic_id, group_id), as an event begins


class Term(IntEnum):
    """Counts in the ledger other than event kinds.

    Each is of a topic or a lane unless its comment names another subject.
    """

    STORED = 128  # messages ever appended to its queues: the sum of the queue ends
    STORED_BEFORE = 129  # messages appended before the ledger began
    PENDING_BEFORE = 130  # messages pending when the ledger began
    HALF_BEFORE = 131  # half messages pending when the ledger began
    QUEUES = 132  # of a group: number of the topic's queues that it reads
    BEFORE = 133  # of a group: messages never due to it, or received before the ledger; minus those a reset returns
    SKIPPED = 134  # of a group: removed before it finished them; of a dead-letter queue: removed without an outcome
    COPIES_BEFORE = 135  # of a group: its retries pending when the ledger began
    LANE_BEFORE = 136  # of a group: its retries visible when the ledger began
    DEAD_WAITING = 137  # of a group: dead letters made from pending retries
    SETTLED_BEFORE = 138  # of a dead-letter queue: letters with an outcome when the ledger began
    LETTERS_REDRIVEN = 139  # of a dead-letter queue
    LETTERS_PURGED = 140  # of a dead-letter queue


class LedgerHead(NamedTuple):
    """The last run of the daemon that kept the ledger, and the start of the ledger."""

    run: int
    began_at_ms: int


def ledger_key(topic_id: int, group_id: int) -> bytes:
    """Return the meta key of a ledger row; ``group_id`` 0 is the topic itself."""
    return _KEY.pack(META_LEDGER, topic_id, group_id)


def ledger_range(topic_id: int) -> tuple[bytes, bytes]:
    """Return the range of all ledger rows of a topic."""
    return ledger_key(topic_id, 0), ledger_key(topic_id + 1, 0)


def unpack_ledger_key(key: bytes) -> tuple[int, int]:
    """Return the topic id and group id in a ledger key; raise ``StoreCorrupt`` if its length is wrong."""
    if len(key) != _KEY.size:
        raise StoreCorrupt(f"a key of the ledger of {len(key)} bytes, not {_KEY.size}")
    _, topic_id, group_id = _KEY.unpack(key)
    return topic_id, group_id


def encode_ledger(counts: Mapping[int, int]) -> bytes:
    """Return the value of a ledger row from its counts by term; zero counts are left out."""
    return b"\1" + b"".join([_TERM.pack(term, count) for term, count in counts.items() if count])


def decode_ledger(value: bytes) -> dict[int, int]:
    """Decode a ledger row into its counts by term; raise ``StoreCorrupt`` if it is invalid."""
    if value[:1] != bytes((VERSION,)) or (len(value) - 1) % _TERM.size:
        raise StoreCorrupt(f"a row of the ledger of {len(value)} bytes cannot be read")
    return dict(_TERM.iter_unpack(value[1:]))


def encode_head(head: LedgerHead) -> bytes:
    """Return the value of the ledger's head row."""
    return _HEAD.pack(VERSION, *head)


def decode_head(value: bytes) -> LedgerHead:
    """Decode the ledger's head row; raise ``StoreCorrupt`` if it is invalid."""
    if len(value) != _HEAD.size or value[0] != VERSION:
        raise StoreCorrupt(f"the head of the ledger of {len(value)} bytes cannot be read")
    return LedgerHead(*_HEAD.unpack(value)[1:])
