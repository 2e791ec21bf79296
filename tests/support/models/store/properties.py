"""The rows of indexed properties that a store should have, by a scan of all of its messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from support.rigs.store.rows import all_rows

from dmq.broker.topics import Names
from dmq.recovery.reading.rows import read_waiting
from dmq.store.schema import keys
from dmq.store.schema.keys import Family
from dmq.store.schema.messages.properties import (
    BUILT,
    PROPERTY,
    START,
    property_id,
    queue_place,
    row_key,
    scope_place,
    split_built,
    start_key,
    topic_of_queued,
    topic_of_waiting,
    user_properties,
)
from dmq.store.schema.messages.record import EntryKind, body_payload, decode_half_body, decode_queued
from dmq.store.store import Store


def assert_properties(store: Store, indexed: Mapping[int, Sequence[str]] | None = None) -> None:
    """From its start in each scope and queue, a property has exactly the rows of the messages that have it.

    A built one has the rows of all messages; one that is being built may have some before its start.

    ``indexed`` are the properties by topic id; ``None``: by the settings of the topics.
    """
    rows = dict(all_rows(store, Family.PROPERTY))
    starts = {key: keys.unpack_u64(value) for key, value in rows.items() if key[:1] == START}
    found = {key: value for key, value in rows.items() if key[:1] == PROPERTY}
    built = {split_built(key) for key in rows if key[:1] == BUILT}
    expected: dict[bytes, bytes] = {}
    allowed: dict[bytes, bytes] = {}
    if indexed is None:
        indexed = {topic.topic_id: topic.index_properties for topic in Names(store).topics.values()}

    def note(topic_id: int, payload: bytes, place: bytes, number: int, index_id: bytes) -> None:
        for name in indexed.get(topic_id, ()):
            of, properties = property_id(topic_id, name), user_properties(payload)
            if name in properties:
                is_expected = of in built or number >= starts.get(start_key(place, of), 2**64)
                (expected if is_expected else allowed)[row_key(of, properties[name], place, number)] = index_id

    timeline = dict(all_rows(store, Family.TIMELINE))
    for key, value in timeline.items():
        if keys.is_half_body_key(key):
            continue
        waiting = read_waiting(key, value)
        sequence, kind, body = keys.sequence_of(waiting.mark), waiting.entry.kind, value[waiting.body_at :]
        if kind == EntryKind.TRANSACTION:
            body = decode_half_body(timeline[keys.half_body_key(sequence)])
        if kind != EntryKind.RECURRING:
            place = scope_place(waiting.entry.scope)
            note(topic_of_waiting(value), body_payload(body), place, sequence, waiting.index_id)
    for key, value in all_rows(store, Family.QUEUE):
        topic_id, queue_id, offset = keys.unpack_queue_key(key)
        payload = decode_queued(value).payload
        note(topic_of_queued(topic_id, value), payload, queue_place(topic_id, queue_id), offset, b"")
    assert found.items() >= expected.items()
    assert found.items() <= (expected | allowed).items()
    known = {property_id(topic_id, name) for topic_id, names in indexed.items() for name in names}
    assert {key[-12:] for key in starts} | built <= known
