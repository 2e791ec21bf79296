"""Rows of indexed properties, in the batch that stores, moves or removes their message.

Each change of the timeline or of a queue goes through the writer, which calls this module for it. So the rows equal the
stored messages, whichever operation changed them. A store without indexed properties has no ``PropertyRows``.

Damaged rows do not prevent opening: all rows are removed, and ``IndexMessages`` adds those of the messages again.
"""

from __future__ import annotations

from collections.abc import Collection, MutableMapping, Sequence

from broker_adapter.runtime.log import LibraryLog
from dmq.errors import StoreCorrupt
from dmq.store.engines.engine import Batch, Engine, scan_pages
from dmq.store.schema import keys
from dmq.store.schema.keys import Family, unpack_queue_key
from dmq.store.schema.messages.index import decode_index
from dmq.store.schema.messages.properties import (
    BUILT,
    DAMAGED,
    FAMILY_RANGE,
    NEVER,
    PROPERTY,
    START,
    built_key,
    present,
    properties_of_queued,
    properties_of_waiting,
    property_id,
    property_range,
    queue_place,
    row_key,
    scope_place,
    split_built,
    split_start,
    start_key,
    topic_of_queued,
    topic_of_waiting,
)
from dmq.store.schema.messages.record import EntryKind
from dmq.store.schema.topics.names import decode_topic_settings, has_index_properties
from dmq.store.writer.operations import IndexBuilt, IndexMessages

log = LibraryLog("dmq.store")
_PROPERTY = Family.PROPERTY
_ROWS_MAX = 10_000_000
_ROWS_PER_READ, _BYTES_PER_READ = 256, 4 * 1024 * 1024
_TRANSACTION = int(EntryKind.TRANSACTION)

Rows = MutableMapping[tuple[Family, bytes], bytes | None]  # single rows of the current batch; None: deleted
_Values = Sequence[tuple[bytes, str]]  # ``property_id`` and value


class PropertyRows:
    """Rows of all indexed properties of a store. Only the writer's thread uses it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._rows: Rows = {}
        self._topics: dict[int, tuple[tuple[str, bytes], ...]] = {}  # names with their ``property_id``
        self._starts: dict[tuple[bytes, bytes], int] = {}  # by place and ``property_id``
        self._places: set[bytes] = set()  # scopes and queues that may have rows
        self._last: tuple[bytes, _Values] = (b"", ())  # a hand-over asks twice for the values of a message
        self._is_cleared = False  # by this run, in the engine; the next batch has it as well, for other copies

    @classmethod
    def load(cls, engine: Engine) -> PropertyRows | None:
        """Read the indexed properties of a store; return ``None`` if there are none."""
        found = cls(engine)
        for key, value in engine.scan(Family.META, *keys.meta_range(keys.META_SETTINGS), limit=_ROWS_MAX).rows:
            if has_index_properties(value):
                try:
                    names = decode_topic_settings(value).index_properties
                except ValueError:  # the registry of names reports it
                    continue
                topic_id = keys.meta_id(key)
                found._topics[topic_id] = tuple((name, property_id(topic_id, name)) for name in names)
        if not found._topics:
            return None
        try:
            found._load_rows()
        except StoreCorrupt as error:
            log.warning("property_index_damaged", error=str(error), why="it is built again from the messages")
            engine.clear(_PROPERTY)
            found._starts.clear()
            found._places.clear()
            found._is_cleared = True
        return found

    def _load_rows(self) -> None:
        """Load the starts; raise ``StoreCorrupt`` if one of them, or a row that is not of a message, is damaged."""
        for key, _ in self._engine.scan(_PROPERTY, FAMILY_RANGE[0], PROPERTY, limit=_ROWS_MAX).rows:
            if key == DAMAGED:
                raise StoreCorrupt("a search met a damaged row")
            if key[:1] != BUILT:
                raise StoreCorrupt(f"a row under an unknown key of {len(key)} bytes")
            split_built(key)
        for key, value in self._engine.scan(_PROPERTY, START, FAMILY_RANGE[1], limit=_ROWS_MAX).rows:
            place, of = split_start(key)
            self._starts[place, of] = keys.unpack_u64(value)
            self._places.add(place)

    def begin(self, rows: Rows, batch: Batch) -> None:
        """Begin a batch with these single rows."""
        self._rows = rows
        self._last = (b"", ())
        if self._is_cleared:
            batch.ranges.append((_PROPERTY, *FAMILY_RANGE))
            self._is_cleared = False

    # -- names --------------------------------------------------------------------------------------------------------

    def index(self, topic_id: int, names: Collection[str], batch: Batch) -> None:
        """Index these properties of a topic from now on; delete the rows of its other ones."""
        for name, of in self._topics.pop(topic_id, ()):
            if name not in names:
                self._drop(property_range(topic_id, name), of, batch)
        self._places = {place for place, _ in self._starts}
        self._last = (b"", ())
        if names:
            self._topics[topic_id] = tuple((name, property_id(topic_id, name)) for name in names)

    def _drop(self, rows: tuple[bytes, bytes], of: bytes, batch: Batch) -> None:
        start, stop = rows
        batch.ranges.append((_PROPERTY, start, stop))
        for family, key in [each for each in self._rows if each[0] is _PROPERTY and start <= each[1] < stop]:
            del self._rows[family, key]
        self._rows[_PROPERTY, built_key(of)] = None
        for place, other in [each for each in self._starts if each[1] == of]:
            self._forget(place, other)

    def _forget_place(self, place: bytes) -> None:
        if place in self._places:
            self._places.discard(place)
            for each, of in [each for each in self._starts if each[0] == place]:
                self._forget(each, of)

    def _forget(self, place: bytes, of: bytes) -> None:
        del self._starts[place, of]
        self._rows[_PROPERTY, start_key(place, of)] = None

    def built(self, op: IndexBuilt) -> None:
        """Note that all messages with these properties have their rows."""
        for name, of in self._topics.get(op.topic_id, ()):
            if name in op.names:
                self._rows[_PROPERTY, built_key(of)] = b""

    # -- messages -----------------------------------------------------------------------------------------------------

    def stored(self, op: IndexMessages) -> None:
        """Add the rows of stored messages. Call it before all other ops of the batch, which may move these messages."""
        records = self._engine.get_many(op.family, list(op.keys))
        for key, record in zip(op.keys, records, strict=True):
            if record is None:
                continue
            if op.family is Family.QUEUE:
                topic_id, queue_id, offset = unpack_queue_key(key)
                values = self._queued_values(topic_id, record)
                self._add(values, queue_place(topic_id, queue_id), offset, b"", since=NEVER)
                continue
            receipt, scope = decode_index(record), keys.index_place(key)[1]
            both = [receipt.key, keys.half_body_key(receipt.sequence)]
            waiting, half_body = self._engine.get_many(Family.TIMELINE, both)
            if waiting is not None and (indexed := self._topics.get(topic_of_waiting(waiting))) is not None:
                values = present(indexed, properties_of_waiting(waiting, half_body))
                index_id = key[keys.INDEX_PREFIX_BYTES :]
                self._add(values, scope_place(scope), receipt.sequence, index_id, since=NEVER)

    def waits(self, scope: int, sequence: int, index_id: bytes, record: bytes, half_body: bytes) -> None:
        """Add the rows of a message that is put on the timeline."""
        indexed = self._topics.get(topic_of_waiting(record))
        if indexed is not None:
            values = present(indexed, properties_of_waiting(record, half_body))
            self._add(values, scope_place(scope), sequence, index_id, since=sequence)

    def queued(self, topic_id: int, queue_id: int, offset: int, record: bytes) -> None:
        """Add the rows of a message that is appended to a queue."""
        if values := self._queued_values(topic_id, record):
            self._add(values, queue_place(topic_id, queue_id), offset, b"", since=offset)

    def handed_over(self, scope: int, sequence: int, topic_id: int, record: bytes) -> None:
        """Delete the rows of a pending message that was appended to a queue of ``topic_id``."""
        if (place := scope_place(scope)) in self._places:
            self._delete(self._queued_values(topic_id, record), place, sequence)

    def withdrawn(self, scope: int, key: bytes) -> None:
        """Delete the rows of a pending message that is removed. Call it before its timeline row is deleted."""
        if (place := scope_place(scope)) not in self._places:
            return
        sequence = int.from_bytes(key[8:], "big")
        record = self._read(Family.TIMELINE, key)
        if record is not None and (indexed := self._topics.get(topic_of_waiting(record))) is not None:
            is_split = record[1] == _TRANSACTION
            half_body = self._read(Family.TIMELINE, keys.half_body_key(sequence)) if is_split else None
            self._delete(present(indexed, properties_of_waiting(record, half_body)), place, sequence)

    def replaced(self, key: bytes, record: bytes) -> None:
        """Replace the rows of a message in a queue. Call it before its new row is set."""
        topic_id, queue_id, offset = unpack_queue_key(key)
        before = self._read(Family.QUEUE, key)
        if before is not None:
            self._delete(self._queued_values(topic_id, before), queue_place(topic_id, queue_id), offset)
        self.queued(topic_id, queue_id, offset, record)

    def range_deleted(self, family: Family, start: bytes, stop: bytes) -> None:
        """Delete the rows of the messages in a deleted range of a queue; forget a queue or scope that has ended."""
        if family is Family.QUEUE:
            self._removed(start, stop)
        elif family is _PROPERTY:
            self._forget_place(start[1:])

    def _removed(self, start: bytes, stop: bytes) -> None:
        topic_id, queue_id, _ = unpack_queue_key(start)
        if (place := queue_place(topic_id, queue_id)) not in self._places:
            return
        read = _ROWS_PER_READ, _BYTES_PER_READ
        for rows in scan_pages(self._engine, Family.QUEUE, start, stop, limit=read[0], bytes_max=read[1]):
            for key, record in rows:
                self._delete(self._queued_values(topic_id, record), place, keys.queue_offset_of(key))
        if stop[:6] != start[:6]:
            self._forget_place(place)

    def _queued_values(self, topic_id: int, record: bytes) -> _Values:
        last, values = self._last
        if last is record:
            return values
        indexed = self._topics.get(topic_of_queued(topic_id, record))
        values = present(indexed, properties_of_queued(record)) if indexed is not None else ()
        self._last = (record, values)
        return values

    def _add(self, values: _Values, place: bytes, number: int, index_id: bytes, *, since: int) -> None:
        """Add rows of one message. From ``since`` on, all messages of the place have their rows."""
        for of, value in values:
            start = self._starts.get((place, of))
            if start is None or since < start:  # lower: after a build, and in a salvage, which has entries in any order
                self._starts[place, of] = since
                self._places.add(place)
                self._rows[_PROPERTY, start_key(place, of)] = keys.pack_u64(since)
            self._rows[_PROPERTY, row_key(of, value, place, number)] = index_id

    def _delete(self, values: _Values, place: bytes, number: int) -> None:
        for of, value in values:
            self._rows[_PROPERTY, row_key(of, value, place, number)] = None

    def _read(self, family: Family, key: bytes) -> bytes | None:
        known = (family, key)
        return self._rows[known] if known in self._rows else self._engine.get_many(family, [key])[0]
