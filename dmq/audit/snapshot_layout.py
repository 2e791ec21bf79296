"""What a snapshot has to know of the values that floors above write: names, progress, a spool's entries.

``dmq.audit`` lies below those who write them and cannot ask them, so the layouts of ``dmq.embedded.names``,
``dmq.embedded.group_queue`` and ``dmq.spool.records`` are told here a second time;
``tests/unit/test_snapshot_layout.py`` holds the two against each other.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from dmq.errors import StoreCorrupt
from dmq.store.engine import Engine
from dmq.store.keys import META_BOOT, META_DONE, META_FORMAT, META_OUTBOX, name_range, unpack_mark, unpack_u64
from dmq.store.ops import Family
from dmq.store.outbox import decode_state
from dmq.store.record import (
    WAITING_HEADER_BYTES,
    EntryKind,
    body_id,
    decode_history,
    decode_waiting,
    half_body_at,
    history_bytes,
)
from dmq.store.rocks import RocksEngine, RocksOptions

_NAME = struct.Struct(">BBHQ")  # version, kind, queues, created_at_ms
_LANE = struct.Struct(">II")  # group id, topic id
_SPOOLED_HEAD = struct.Struct(">IBH")  # turn, flags, length of the error
_VERSION = 1
_TOPIC, _GROUP, _OF_LANE, _REMOVED = 1, 2, 3, 4
_ROWS_PER_SCAN = 10_000

FLOOR_ROW, CHUNK_ROW, EXCEPTION_ROW = 1, 2, 3  # kinds of rows of a group's progress
CHUNK_OFFSETS = 1024
DEAD_HEAD_BYTES = 10  # version 1 | death 1 | died_at_ms 8, in front of a waiting entry
SPOOL_ROWS = b"\xff\xff\xff\xff"  # what rows of a spool begin with in the group family, in place of a group's id
PARKED, DEAD = b"m", b"d"  # the letter behind it
MANIFEST = "manifest.json"

QueueId = tuple[int, int, int]  # group id, topic id (or that of a lane), queue id: as in the rows of the group family


class Named(NamedTuple):
    """A queue as the trail names it: ``group`` is empty but for a lane, whose ``topic`` is that of its originals."""

    topic: str
    group: str
    queues: int
    is_removed: bool = False  # or about to be: its name may be that of another one by now


class NamesOf(NamedTuple):
    """All names of a store, by id."""

    places: dict[int, Named]  # topics and lanes; of a spool the types of its entries
    groups: dict[int, str]

    def topic(self, topic_id: int) -> str:
        """Return the name of a topic, of a lane that of its originals' topic; ``StoreCorrupt`` if it has none."""
        place = self.places.get(topic_id)
        if place is None:
            raise StoreCorrupt(f"topic {topic_id} has no record")
        return place.topic

    def group(self, group_id: int) -> str:
        """Return the name of a group; ``StoreCorrupt`` if it has none."""
        name = self.groups.get(group_id)
        if name is None:
            raise StoreCorrupt(f"group {group_id} has no record")
        return name


class Waiting(NamedTuple):
    """What a waiting entry says of itself. ``topic_id`` is that of the topic the message was sent to."""

    kind: int
    topic_id: int
    group_id: int  # 0: no copy of a group
    message_id: bytes  # packed
    due_ms: int
    attempt: int  # failed so far
    accepted_at_ms: int


class Cut(NamedTuple):
    """What a store is a cut of: its last event and the run of its process."""

    sequence: int
    boot: int
    done: int  # the mark below which the whole timeline is finished


def open_quiet(database: Path) -> RocksEngine:
    """Open a database that nobody changes, to read it; as ``RocksEngine`` raises."""
    return RocksEngine(database, RocksOptions(is_read_only=True))


def decode_cursors(text: str) -> dict[QueueId, int]:
    """Undo ``encode_cursors``; raises ``ValueError``."""
    return {
        (int(group_id), int(topic_id), int(queue_id)): int(cursor)
        for group_id, topic_id, queue_id, cursor in json.loads(text)
    }


def encode_cursors(cursors: Mapping[QueueId, int]) -> str:
    """Return cursors as one line of JSON."""
    return json.dumps([(*place, cursor) for place, cursor in cursors.items()])


def read_cut(engine: Engine) -> Cut:
    """Return where in its trail a store stands; ``StoreCorrupt`` if it is none."""
    names = [META_FORMAT, META_OUTBOX, META_BOOT, META_DONE]
    version, outbox, boot, done = engine.get_many(Family.META, names)
    if version is None or boot is None:
        raise StoreCorrupt("there is no store in it")
    sequence = decode_state(outbox).next_sequence - 1
    return Cut(sequence, unpack_u64(boot), unpack_mark(done) if done is not None else 0)


def read_names(engine: Engine) -> NamesOf:
    """Read every topic, group and lane; ``StoreCorrupt`` for a record that cannot be read."""
    names = NamesOf({}, {})
    start, stop = name_range()
    while True:
        found = engine.scan(Family.META, start, stop, limit=_ROWS_PER_SCAN)
        for key, value in found.rows:
            _add(names, int.from_bytes(key[1:5], "big"), value)
        if found.is_complete:
            return names
        start = found.rows[-1][0] + b"\0"


def _add(names: NamesOf, name_id: int, value: bytes) -> None:
    if len(value) < _NAME.size or value[0] != _VERSION:
        raise StoreCorrupt(f"the record of name {name_id} cannot be read")
    _, kind, queues, _ = _NAME.unpack_from(value)
    rest = value[_NAME.size :]
    if kind == _TOPIC:
        names.places[name_id] = Named(rest.decode(), "", queues)
    elif kind == _GROUP:
        names.groups[name_id] = rest.decode()
    elif kind == _OF_LANE and len(rest) == _LANE.size:  # made after its group and its topic, so its id is greater
        group_id, topic_id = _LANE.unpack(rest)
        names.places[name_id] = Named(names.topic(topic_id), names.group(group_id), queues)
    elif kind == _REMOVED and rest:
        if rest[0] == _TOPIC:
            names.places[name_id] = Named(rest[1:].decode(), "", queues, is_removed=True)
        elif rest[0] == _GROUP:
            names.groups[name_id] = rest[1:].decode()
    else:
        raise StoreCorrupt(f"the record of name {name_id} is of an unknown kind {kind}")


def read_waiting(value: bytes) -> Waiting:
    """Read the facts of a waiting entry of any kind; ``StoreCorrupt`` if it cannot be one."""
    entry = decode_waiting(value)
    at, topic_id, group_id, prefix = WAITING_HEADER_BYTES, entry.topic_id, 0, b""
    if entry.kind == EntryKind.RETRY:
        topic_id, group_id = decode_history(value, at).topic_id, entry.scope
        at += history_bytes(value, at)
    elif entry.kind in {EntryKind.TRANSACTION, EntryKind.WHOLE_HALF}:
        at = half_body_at(entry.kind)
    elif entry.kind == EntryKind.SPOOLED:
        if len(value) < at + _SPOOLED_HEAD.size:
            raise StoreCorrupt(f"a spooled entry of {len(value)} bytes has no head")
        at += _SPOOLED_HEAD.size + _SPOOLED_HEAD.unpack_from(value, at)[2]
        prefix = b"\x01"  # a uid as the trail packs it
    message_id = prefix + body_id(value, at)
    kind = EntryKind.DELAYED if entry.kind == EntryKind.DELAYED_FOR else entry.kind
    return Waiting(kind, topic_id, group_id, message_id, entry.deliver_at_ms, entry.retry_count, entry.accepted_at_ms)
