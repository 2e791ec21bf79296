"""Messages of a diverged tail: those that a replaced primary accepted, and that the replication log does not have.

A standby keeps such a store as ``diverged-<epoch>-<batch>`` in its directory. The log continues with a later epoch
after the last common batch. Each batch that accepts messages writes the store's sequence. So every message with a
higher sequence than that of the last common batch is in the tail alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dmq.broker.topics import Names
from dmq.errors import StoreCorrupt
from dmq.recovery.reading.names import shown_id
from dmq.recovery.reading.rows import read_index
from dmq.replication.following import read_segment
from dmq.replication.objects import ObjectStore
from dmq.replication.segment import Segment
from dmq.store.engines.engine import scan_pages
from dmq.store.engines.rocks import RocksEngine, RocksOptions
from dmq.store.schema.cell.position import Position, decode_position
from dmq.store.schema.keys import META_POSITION, META_SEQUENCE, Family, half_scope, unpack_u64
from dmq.store.schema.messages.index import EntryState

_PAGE_ROWS = 1_000
_END = b"\xff" * 48  # after every index key


class DivergedMessage(NamedTuple):
    """Message of a diverged tail. ``state`` is its state in that store, for example "waiting" or "queued"."""

    topic: str
    message_id: str
    state: str


class DivergedTail(NamedTuple):
    """Store with a diverged tail: its last batch, the last one that the log has too, and the messages in between."""

    path: str
    epoch: int
    batch: int
    common_batch: int
    messages: tuple[DivergedMessage, ...]


def diverged_tails(objects: ObjectStore, data: Path) -> list[DivergedTail]:
    """Return the diverged tails in a directory, oldest first.

    Messages are found for as long as the store remembers their ids. Raise ``StoreCorrupt`` if a store cannot be read,
    or if the segments before its tail were pruned.
    """
    found = [_tail(objects, each) for each in data.glob("diverged-*-*") if each.is_dir()]
    return sorted(found, key=lambda each: (each.epoch, each.batch))


def _tail(objects: ObjectStore, path: Path) -> DivergedTail:
    engine = RocksEngine(path, RocksOptions(is_read_only=True))
    try:
        (row,) = engine.get_many(Family.META, [META_POSITION])
        if row is None:
            raise StoreCorrupt(f"{path} has no position in a replication log")
        position = decode_position(row)
        common_batch, sequence = _last_common(objects, position, path)
        messages = tuple(sorted(set(_accepted_after(engine, sequence))))
        return DivergedTail(str(path), position.epoch, position.batch, common_batch, messages)
    finally:
        engine.close()


def _last_common(objects: ObjectStore, position: Position, path: Path) -> tuple[int, int]:
    """Return the last batch of the log that the store has as well, and the sequence of the store after it."""
    number = max(position.number, 1)
    while number > 1 and _segment(objects, number, path).head.epoch > position.epoch:
        number -= 1
    while (segment := _segment(objects, number, path)).head.epoch <= position.epoch:
        number += 1
    common_batch = segment.head.first_batch - 1
    while number > 1:
        number -= 1
        for batch in reversed(_segment(objects, number, path).batches):
            for family, key, value in batch.puts:
                if key == META_SEQUENCE and family == Family.META:
                    return common_batch, unpack_u64(value)
    return common_batch, 0


def _segment(objects: ObjectStore, number: int, path: Path) -> Segment:
    segment = read_segment(objects, number)
    if segment is None:
        raise StoreCorrupt(f"the tail of {path} is unknown: segment {number} is not in the log, or was pruned")
    return segment


def _accepted_after(engine: RocksEngine, sequence: int) -> Iterator[DivergedMessage]:
    names = Names(engine)
    topics = {topic.topic_id: topic.name for topic in names.topics.values()}
    scopes = {each: name for topic_id, name in topics.items() for each in (topic_id, half_scope(topic_id))}
    for page in scan_pages(engine, Family.INDEX, b"", _END, limit=_PAGE_ROWS):
        for key, value in page:
            row = read_index(key, value)
            receipt = row.receipt
            if row.scope in scopes and receipt.sequence > sequence and receipt.state is not EntryState.ABSORBED:
                state = receipt.state.name.lower() if receipt.state is not None else ""
                yield DivergedMessage(scopes[row.scope], shown_id(row.index_id), state)
