"""Check of the rows of indexed properties against the stored messages, in both directions.

An index that is not built yet may lack the rows of messages before its starts, which is no finding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice

from dmq.errors import StoreCorrupt
from dmq.recovery.reading.look import Look
from dmq.recovery.reading.names import KnownNames, shown_id
from dmq.recovery.reading.rows import TimelineRow, mark_of
from dmq.store.schema import keys
from dmq.store.schema.keys import Family
from dmq.store.schema.messages.index import failed_message_id
from dmq.store.schema.messages.properties import (
    BUILT,
    DAMAGED,
    START,
    PendingPlace,
    PropertyRow,
    decode_property,
    present,
    properties_of_queued,
    properties_of_waiting,
    property_id,
    queue_place,
    row_key,
    scope_place,
    split_built,
    split_start,
    topic_of_queued,
    topic_of_waiting,
    value_digest,
)
from dmq.store.schema.messages.record import EntryKind

_MESSAGES_PER_READ = 16  # each may have 4 MiB

Find = Callable[[str, str], None]
_Rows = Sequence[tuple[bytes, bytes]]


class PropertyCheck:
    """Rows of indexed properties of one store. ``find`` is called with the kind and the text of each finding."""

    def __init__(self, look: Look, names: KnownNames, find: Find) -> None:
        self._look = look
        self._find = find
        self._indexed = {
            topic.topic_id: [(name, property_id(topic.topic_id, name)) for name in topic.index_properties]
            for topic in names.topics.values()
            if topic.index_properties
        }
        self._names = {of: name for indexed in self._indexed.values() for name, of in indexed}
        self._starts: dict[tuple[bytes, bytes], int] = {}
        for key, value in look.rows(Family.PROPERTY, START, bytes((START[0] + 1,))):
            with suppress(StoreCorrupt):  # reported by the scan of the family
                self._starts[split_start(key)] = keys.unpack_u64(value)
        self._built: set[bytes] = set()
        for key, _ in look.rows(Family.PROPERTY, BUILT, bytes((BUILT[0] + 1,))):
            with suppress(StoreCorrupt):
                self._built.add(split_built(key))

    def waiting(self, entries: Sequence[TimelineRow], values: dict[bytes, bytes]) -> None:
        """Check that pending messages have their rows; ``values`` are the timeline rows by key."""
        expected: dict[bytes, tuple[bytes, str]] = {}
        for each in entries:
            value, sequence = values[keys.timeline_key(each.mark)], keys.sequence_of(each.mark)
            if (indexed := self._indexed.get(topic_of_waiting(value))) is not None:
                place, shown = scope_place(each.entry.scope), f"pending message {shown_id(each.message_id)}"
                found = present(indexed, self._properties(each, value))
                expected |= dict.fromkeys(self._keys(found, place, sequence), (each.index_id, shown))
        self._compare(expected)

    def queued(self, rows: _Rows) -> None:
        """Check that messages in queues have their rows."""
        expected: dict[bytes, tuple[bytes, str]] = {}
        for key, value in rows:
            topic_id, queue_id, offset = keys.unpack_queue_key(key)
            if (indexed := self._indexed.get(topic_of_queued(topic_id, value))) is not None:
                shown = f"the message at offset {offset} of topic {topic_id} queue {queue_id}"
                found = present(indexed, properties_of_queued(value))
                expected |= dict.fromkeys(self._keys(found, queue_place(topic_id, queue_id), offset), (b"", shown))
        self._compare(expected)

    def rows(self, rows: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes, StoreCorrupt]]:
        """Check that each row leads to a message with that value; yield the rows that cannot be decoded."""
        source = iter(rows)
        while page := list(islice(source, _MESSAGES_PER_READ)):
            found: list[PropertyRow] = []
            for key, value in page:
                try:
                    if key == DAMAGED:
                        self._find(
                            "property", "a search met a damaged row; the next start of the daemon builds the index"
                        )
                    elif key[:1] == BUILT:
                        self._known(split_built(key), "built row")
                    elif key[:1] == START:
                        self._known(split_start(key)[1], "start")
                        keys.unpack_u64(value)
                    else:
                        found.append(decode_property(key, value))
                except StoreCorrupt as error:
                    yield key, value, error
            self._lead_to_messages(found)

    def _known(self, of: bytes, row: str) -> None:
        if of not in self._names:
            self._find("property", f"there is the {row} of a property of {_topic(of)} that is not indexed")

    def _keys(self, found: Iterable[tuple[bytes, str]], place: bytes, number: int) -> Iterator[bytes]:
        for of, value in found:
            start = self._starts.get((place, of))
            if of in self._built or (start is not None and number >= start):
                yield row_key(of, value, place, number)

    def _compare(self, expected: dict[bytes, tuple[bytes, str]]) -> None:
        values = self._look.get_many(Family.PROPERTY, list(expected)) if expected else []
        for (wanted, shown), value in zip(expected.values(), values, strict=True):
            if value != wanted:
                self._find("property", f"{shown} is not found by its indexed property")

    def _properties(self, each: TimelineRow, value: bytes) -> dict[str, str]:
        half_body = None
        if each.entry.kind == EntryKind.TRANSACTION:
            body_key = keys.half_body_key(keys.sequence_of(each.mark))
            (half_body,) = self._look.get_many(Family.TIMELINE, [body_key])
        return dict(properties_of_waiting(value, half_body))

    def _lead_to_messages(self, rows: Sequence[PropertyRow]) -> None:
        waiting = [(row, row.place) for row in rows if isinstance(row.place, PendingPlace)]
        wanted = [keys.pack_index_prefix(0, place.scope) + row.index_id for row, place in waiting]
        marks = [mark_of(value) for value in self._look.get_many(Family.INDEX, wanted)] if wanted else []
        for (row, place), mark in zip(waiting, marks, strict=True):
            value = half_body = None
            if mark >= 0 and keys.sequence_of(mark) == place.sequence:
                both = [keys.timeline_key(mark), keys.half_body_key(place.sequence)]
                value, half_body = self._look.get_many(Family.TIMELINE, both)
            name = f"pending message {shown_id(failed_message_id(row.index_id))}"
            if value is None or topic_of_waiting(value) != row.topic_id:
                self._find("property", f"a property of {_topic(_of(row))} leads to {name}, which is not there")
            else:
                self._same(row, name, dict(properties_of_waiting(value, half_body)))
        placed = [(row, row.place) for row in rows if not isinstance(row.place, PendingPlace)]
        values = self._look.get_many(Family.QUEUE, [keys.pack_queue_key(*place) for _, place in placed])
        for (row, where), value in zip(placed, values, strict=True):
            name = f"offset {where.queue_offset} of topic {where.topic_id} queue {where.queue_id}"
            if value is None or topic_of_queued(where.topic_id, value) != row.topic_id:
                self._find("property", f"a property of {_topic(_of(row))} leads to {name}, where it has no message")
            else:
                self._same(row, name, dict(properties_of_queued(value)))

    def _same(self, row: PropertyRow, shown: str, properties: dict[str, str]) -> None:
        name = self._names.get(_of(row))
        if name is None:
            self._find("property", f"{shown} has the row of a property of {_topic(_of(row))} that is not indexed")
        elif name not in properties or value_digest(properties[name]) != row.value_digest:
            self._find("property", f"the property {name!r} leads to {shown}, which has another value of it")


def _of(row: PropertyRow) -> bytes:
    return row.topic_id.to_bytes(4, "big") + row.name_digest


def _topic(of: bytes) -> str:
    return f"topic {int.from_bytes(of[:4], 'big')}"
