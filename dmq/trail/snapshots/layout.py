"""Inputs of a snapshot, read from a database that no process changes: its cut in the trail, names, pending entries."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from dmq.errors import StoreCorrupt
from dmq.store.engines.engine import Engine, scan_pages
from dmq.store.engines.rocks import RocksEngine, RocksOptions
from dmq.store.schema import keys
from dmq.store.schema.accounting.outbox import decode_state
from dmq.store.schema.keys import Family
from dmq.store.schema.messages.index import ids_of
from dmq.store.schema.messages.record import WAITING_HEADER_BYTES, EntryKind, body_id, decode_history, decode_waiting
from dmq.store.schema.spool import spooled_body_at
from dmq.store.schema.topics.names import NameKind, decode_name

_ROWS_PER_SCAN = 10_000
MANIFEST = "manifest.json"

QueueId = tuple[int, int, int]  # group id, topic id (or that of a lane), queue id: as in the rows of the group family


class Named(NamedTuple):
    """A topic or a lane as named in the trail.

    A lane has a ``group``, and its ``topic`` is that of its original messages.
    """

    topic: str
    group: str
    queues: int
    is_removed: bool = False  # or under removal: another topic may have its name by now


class NamesOf(NamedTuple):
    """All names of a store, by id."""

    places: dict[int, Named]  # topics and lanes; in a producer store the types of its entries
    groups: dict[int, str]

    def topic(self, topic_id: int) -> str:
        """Return the name of a topic, or of a lane's original topic; raise ``StoreCorrupt`` if it has no record."""
        place = self.places.get(topic_id)
        if place is None:
            raise StoreCorrupt(f"topic {topic_id} has no record")
        return place.topic

    def group(self, group_id: int) -> str:
        """Return the name of a group; raise ``StoreCorrupt`` if it has no record."""
        name = self.groups.get(group_id)
        if name is None:
            raise StoreCorrupt(f"group {group_id} has no record")
        return name


class Waiting(NamedTuple):
    """Facts of a waiting entry. ``topic_id`` is that of the topic to which the message was sent."""

    kind: int
    topic_id: int
    group_id: int  # 0: not a retry copy
    message_id: bytes  # packed
    due_ms: int
    attempt: int  # number of failed attempts
    accepted_at_ms: int


class Cut(NamedTuple):
    """Point in the trail at which a store was cut: its last event and the run of its process."""

    sequence: int
    boot: int
    done: int  # mark below which the timeline is finished


def open_quiet(database: Path) -> RocksEngine:
    """Open a database that no process changes, read-only. Raises the same errors as ``RocksEngine``."""
    return RocksEngine(database, RocksOptions(is_read_only=True))


def decode_cursors(text: str) -> dict[QueueId, int]:
    """Decode the result of ``encode_cursors``; raise ``ValueError`` if it is invalid."""
    return {
        (int(group_id), int(topic_id), int(queue_id)): int(cursor)
        for group_id, topic_id, queue_id, cursor in json.loads(text)
    }


def encode_cursors(cursors: Mapping[QueueId, int]) -> str:
    """Return cursors as one line of JSON."""
    return json.dumps([(*place, cursor) for place, cursor in cursors.items()])


def read_cut(engine: Engine) -> Cut:
    """Return the cut of a store; raise ``StoreCorrupt`` if the database has no store."""
    names = [keys.META_FORMAT, keys.META_OUTBOX, keys.META_BOOT, keys.META_DONE]
    version, outbox, boot, done = engine.get_many(Family.META, names)
    if version is None or boot is None:
        raise StoreCorrupt("there is no store in it")
    sequence = decode_state(outbox).next_sequence - 1
    return Cut(sequence, keys.unpack_u64(boot), keys.unpack_mark(done) if done is not None else 0)


def read_names(engine: Engine) -> NamesOf:
    """Read every topic, group and lane; raise ``StoreCorrupt`` for an invalid record."""
    names = NamesOf({}, {})
    for page in scan_pages(engine, Family.META, *keys.meta_range(keys.META_NAME), limit=_ROWS_PER_SCAN):
        for key, value in page:
            _add(names, keys.meta_id(key), value)
    return names


def _add(names: NamesOf, name_id: int, value: bytes) -> None:
    kind, queues, _, name, group_id, topic_id, is_removed = decode_name(name_id, value)
    if kind is NameKind.TOPIC:
        names.places[name_id] = Named(name, "", queues, is_removed)
    elif kind is NameKind.GROUP:
        names.groups[name_id] = name
    elif not is_removed:  # a lane is created after its group and topic, so its id is greater
        names.places[name_id] = Named(names.topic(topic_id), names.group(group_id), queues)


def read_waiting(value: bytes) -> Waiting:
    """Read the facts of a waiting entry of any kind; raise ``StoreCorrupt`` if it is invalid."""
    entry = decode_waiting(value)
    topic_id, group_id = entry.topic_id, 0
    if entry.kind == EntryKind.SPOOLED:
        message_id = b"\x01" + body_id(value, spooled_body_at(value))  # a uid as the trail packs it
    else:
        message_id, _, _ = ids_of(entry, value)
    if entry.kind == EntryKind.RETRY:
        topic_id, group_id = decode_history(value, WAITING_HEADER_BYTES).topic_id, entry.scope
    kind = EntryKind.DELAYED if entry.kind == EntryKind.DELAYED_FOR else entry.kind
    return Waiting(kind, topic_id, group_id, message_id, entry.deliver_at_ms, entry.attempts, entry.accepted_at_ms)
