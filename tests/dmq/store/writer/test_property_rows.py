"""Rows of indexed properties follow their messages within one batch as well as across batches."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.rigs.stores import all_rows

from broker_adapter.runtime.clock import ManualClock
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.store.engines.memory import MemoryEngine
from dmq.store.schema.keys import META_SETTINGS, Family, pack_queue_key
from dmq.store.schema.names import TopicSettings, encode_topic_settings
from dmq.store.schema.own_keys import own_key_row
from dmq.store.schema.properties import PROPERTY, property_id, queue_place, row_key, scope_place
from dmq.store.schema.record import EntryKind, OwnKey, encode_body, encode_queued, encode_waiting
from dmq.store.store import Store, StoreOptions
from dmq.store.writer.operations import Append, Delete, IndexProperties, Op, Put, Schedule, UnderKey

pytestmark = pytest.mark.unit
TOPIC, OTHER = 5, 6
NOW = ManualClock().now_ms()
OPTIONS = StoreOptions(durability="process")


def indexed(*names: str, topic_id: int = TOPIC) -> list[Op]:
    """Index properties of a topic, as the broker does."""
    settings = encode_topic_settings(TopicSettings(index_properties=names))
    return [Put(Family.META, META_SETTINGS + topic_id.to_bytes(4, "big"), settings), IndexProperties(topic_id, names)]


def payload(**properties: str) -> bytes:
    """A message with these user properties."""
    return wire.Message(user_properties=properties).SerializeToString()


def delayed(message_id: bytes, *, key: bytes = b"", topic_id: int = TOPIC, **properties: str) -> Schedule:
    """Schedule a message in an hour."""
    own_key = OwnKey(key, False) if key else None
    body = encode_body(message_id, b"", b"", payload(**properties), 0, own_key)
    record = encode_waiting(EntryKind.DELAYED, 0, topic_id, topic_id, NOW + 3_600_000, NOW, body)
    under = UnderKey(own_key_row(topic_id, key), False, lambda *_: b"replaced") if key else None
    return Schedule(topic_id, message_id, NOW + 3_600_000, record, b"sent", under=under)


def queued(message_id: bytes, **properties: str) -> Append:
    """Append a message to queue 0."""
    record = encode_queued(0, NOW, 0, encode_body(message_id, b"", b"", payload(**properties)))
    return Append(TOPIC, message_id, TOPIC, 0, record, b"queued")


def rows(store: Store) -> list[bytes]:
    """Keys of the rows of properties."""
    return [key for key, _ in all_rows(store, Family.PROPERTY) if key[:1] == PROPERTY]


def pending_key(value: str, sequence: int) -> bytes:
    """Key of the row of a pending message."""
    return row_key(property_id(TOPIC, "a"), value, scope_place(TOPIC), sequence)


def test_rows_of_one_unit() -> None:
    """A message sent before its topic is indexed has no row, one after it has; a removed index leaves none."""
    store = Store(MemoryEngine(), ManualClock(), OPTIONS)
    assert store._assembler._properties is None
    store.commit([delayed(b"m", a="1")])
    assert store._assembler._properties is None
    store.commit(indexed("a"))
    store.commit([delayed(b"n", a="1", b="2"), queued(b"o", a="3"), delayed(b"p", b="1")])
    assert rows(store) == sorted((pending_key("1", 2), row_key(property_id(TOPIC, "a"), "3", queue_place(TOPIC, 0), 0)))
    _commit_together(store, [[delayed(b"q", a="1")], indexed()])
    assert all_rows(store, Family.PROPERTY) == []
    store.close()


def test_a_message_replaced_in_the_same_batch_leaves_no_row() -> None:
    """Under an own key, the second send of a batch withdraws the first one."""
    store = Store(MemoryEngine(), ManualClock(), OPTIONS)
    store.commit(indexed("a"))
    _commit_together(store, [[delayed(b"m", key=b"k", a="1")], [delayed(b"n", key=b"k", a="2")]])
    assert rows(store) == [pending_key("2", 2)]
    store.close()


def test_a_deleted_range_and_a_rewritten_message_lose_their_rows() -> None:
    """Retention deletes ranges of a queue, a purge rewrites a message; after a restart as well."""
    engine = MemoryEngine()
    store = Store(engine, ManualClock(), OPTIONS)
    store.commit(indexed("a"))
    store.commit([queued(bytes((number,)), a=str(number)) for number in range(1, 5)])
    store.close()
    store = Store(engine.reopened(), ManualClock(), OPTIONS)
    first, third, end = (pack_queue_key(TOPIC, 0, offset) for offset in (0, 2, 2**40))
    store.commit([Delete(Family.QUEUE, first, third)])
    assert len(rows(store)) == 2
    store.commit([Put(Family.QUEUE, third, encode_queued(0, NOW, 0, encode_body(b"\3", b"", b"", b"")))])
    assert len(rows(store)) == 1
    store.commit([Delete(Family.QUEUE, third, end)])
    assert rows(store) == []
    store.commit([Delete(Family.QUEUE, first, pack_queue_key(TOPIC, 1, 0))])
    assert all_rows(store, Family.PROPERTY) == []
    store.close()


def test_other_topics_are_not_read() -> None:
    """A message of a topic without an index has no row, even with the property."""
    store = Store(MemoryEngine(), ManualClock(), OPTIONS)
    store.commit(indexed("a"))
    store.commit([delayed(b"m", topic_id=OTHER, a="1")])
    assert rows(store) == []
    store.close()


def _commit_together(store: Store, units: Sequence[Sequence[Op]]) -> None:
    batch, receipts, _ = store._assembler.assemble(units)
    assert all(isinstance(each, list) for each in receipts)
    store._engine.write(batch)
    store.marks.release()
