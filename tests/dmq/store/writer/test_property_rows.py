"""Rows of indexed properties follow their messages within one batch as well as across batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import EFFORT
from support.models.store.properties import assert_properties
from support.rigs.store.rows import all_rows

from broker_adapter.runtime.clock import ManualClock
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.store.engines.memory import MemoryEngine
from dmq.store.schema.keys import META_SETTINGS, WAITING_GENERATION, Family, pack_queue_key
from dmq.store.schema.messages.index import Receipt, failed_id
from dmq.store.schema.messages.own_keys import own_key_row, row_of
from dmq.store.schema.messages.properties import PROPERTY, property_id, queue_place, row_key, scope_place
from dmq.store.schema.messages.record import (
    WAITING_HEADER_BYTES,
    EntryKind,
    OwnKey,
    decode_waiting,
    encode_body,
    encode_history,
    encode_queued,
    encode_waiting,
    split_own_key,
    waiting_bytes,
)
from dmq.store.schema.messages.record import History as FailureHistory
from dmq.store.schema.topics.names import TopicSettings, encode_topic_settings
from dmq.store.store import Store, StoreOptions
from dmq.store.writer.operations import (
    Append,
    Delete,
    HandOver,
    IndexBuilt,
    IndexMessages,
    IndexProperties,
    Op,
    Put,
    Reschedule,
    Schedule,
    UnderKey,
    Withdraw,
)

pytestmark = pytest.mark.unit
TOPIC, OTHER, GROUP, LANE = 5, 6, 7, 8
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


def test_a_message_that_is_withdrawn_in_the_batch_of_its_build_has_no_row() -> None:
    """The build comes first, whatever the order of the units, and one that is moved in the batch keeps its row."""
    store = Store(MemoryEngine(), ManualClock(), OPTIONS)
    (gone,), (moved,) = (store.commit([delayed(each, a="1")]) for each in (b"m", b"n"))
    store.commit(indexed("a"))
    found = [key for key, _ in all_rows(store, Family.INDEX)]
    end = Withdraw(gone.key, TOPIC, b"m", NOW + 3_600_000, waiting_bytes(delayed(b"m", a="1").record))
    later = delayed(b"n", a="1").record
    move = Reschedule(moved.key, TOPIC, b"n", NOW + 3_600_000, NOW + 1, later, b"", by_reader=False)
    _commit_together(store, [[end], [move], [IndexMessages(Family.INDEX, found)]])
    assert rows(store) == [pending_key("1", 2)]
    store.close()


class History:
    """A store whose messages move in every way, and whose topics gain and lose indexes."""

    def __init__(self) -> None:
        self.engine = MemoryEngine()
        self.store = Store(self.engine, ManualClock(), OPTIONS)
        self.pending: list[tuple[Receipt, Schedule]] = []
        self.names: dict[int, Sequence[str]] = {TOPIC: (), OTHER: ()}
        self.sent = self.begin = 0

    def index(self, topic_id: int, names: Sequence[str]) -> None:
        """Set the indexed properties of a topic."""
        self.store.commit(indexed(*names, topic_id=topic_id))
        self.names[topic_id] = names

    def send(self, topic_id: int, key: bytes, value: str) -> None:
        """Schedule a message, in place of the pending one with its own key."""
        self.sent += 1
        op = delayed(b"m%d" % self.sent, key=key, topic_id=topic_id, a=value, b="x")
        (receipt,) = self.store.commit([op])
        replaced = own_key_row(topic_id, key) if key else None
        self.pending = [each for each in self.pending if replaced is None or row_of(each[1].record) != replaced]
        self.pending.append((receipt, op))

    def append(self, value: str) -> None:
        """Send a message to a queue."""
        self.sent += 1
        self.store.commit([queued(b"m%d" % self.sent, a=value)])

    def fail(self, value: str) -> None:
        """Store a retry copy of a message of the topic, in the scope of a group."""
        self.sent += 1
        message_id, history = b"m%d" % self.sent, FailureHistory(TOPIC, 0, self.sent, NOW, NOW, NOW, 0)
        body = encode_history(history) + encode_body(message_id, b"", b"", payload(a=value))
        record = encode_waiting(EntryKind.RETRY, 1, LANE, GROUP, NOW + 1_000, NOW, body)
        op = Schedule(GROUP, failed_id(message_id, history, 1), NOW + 1_000, record, b"failed")
        self.pending.append((self.store.commit([op])[0], op))

    def end(self, pick: int, how: str) -> None:
        """Hand a pending message over, cancel it, or change its time."""
        if not self.pending:
            return
        receipt, op = self.pending.pop(pick % len(self.pending))
        entry, own_key = decode_waiting(op.record), row_of(op.record)
        is_retry = entry.kind == EntryKind.RETRY
        rest = op.record[WAITING_HEADER_BYTES:] if is_retry else split_own_key(op.record[WAITING_HEADER_BYTES:])[1]
        record = encode_queued(0, NOW, op.deliver_at_ms, rest, has_history=is_retry)
        place = receipt.key, op.scope, op.message_id, op.deliver_at_ms
        size = waiting_bytes(op.record)
        match how:
            case "hand over":
                event = b"delivered"
                self.store.commit([HandOver(*place, entry.topic_id, 0, record, event, size, own_key=own_key)])
            case "cancel":
                self.store.commit([Withdraw(*place, size, own_key=own_key)])
            case "move":
                append = Append(op.scope, op.message_id, LANE, 0, record, b"moved")
                self.store.commit([Withdraw(*place, size, (append,), own_key=own_key)])
            case _:
                later_ms = op.deliver_at_ms + 1
                moved = encode_waiting(*entry._replace(deliver_at_ms=later_ms), op.record[WAITING_HEADER_BYTES:])
                change = Reschedule(*place, later_ms, moved, b"", by_reader=False, own_key=own_key)
                (told,) = self.store.commit([change])
                self.pending.append((told, op._replace(deliver_at_ms=later_ms, record=moved)))

    def trim(self, count: int) -> None:
        """Remove messages from the front of a queue."""
        start, self.begin = self.begin, self.begin + count
        self.store.commit([Delete(Family.QUEUE, pack_queue_key(TOPIC, 0, start), pack_queue_key(TOPIC, 0, self.begin))])

    def build(self, topic_id: int, is_whole: bool) -> None:
        """Add the rows of earlier messages: of all, or of every other one."""
        for family, start in ((Family.INDEX, WAITING_GENERATION.to_bytes(4, "big")), (Family.QUEUE, b"")):
            found = [key for key, _ in all_rows(self.store, family) if key.startswith(start)]
            self.store.commit([IndexMessages(family, found if is_whole else found[::2])])
        if is_whole:
            self.store.commit([IndexBuilt(topic_id, self.names[topic_id])])

    def kill(self) -> None:
        """End the run and open what was written."""
        self.store.close()
        self.engine = self.engine.reopened()
        self.store = Store(self.engine, ManualClock(), OPTIONS)


_values = st.sampled_from(("1", "2"))
_steps = st.one_of(
    st.tuples(st.just("index"), st.sampled_from((TOPIC, TOPIC, OTHER)), st.sampled_from(((), ("a",), ("a", "b")))),
    st.tuples(st.just("send"), st.sampled_from((TOPIC, OTHER)), st.sampled_from((b"", b"", b"k")), _values),
    st.tuples(st.just("append"), _values),
    st.tuples(st.just("fail"), _values),
    st.tuples(st.just("end"), st.integers(0, 9), st.sampled_from(("hand over", "cancel", "move", "reschedule"))),
    st.tuples(st.just("trim"), st.integers(1, 2)),
    st.tuples(st.just("build"), st.sampled_from((TOPIC, OTHER)), st.booleans()),
    st.tuples(st.just("kill")),
)


@settings(max_examples=100 * EFFORT)
@given(names=st.sampled_from(((), ("a",))), steps=st.lists(_steps, min_size=5, max_size=30))
def test_the_rows_equal_a_scan_after_each_step(names: Sequence[str], steps: list[tuple[Any, ...]]) -> None:
    """Messages of two topics and of a group's retries move in random ways; indexes come and go; runs are killed."""
    history = History()
    history.index(TOPIC, names)
    for name, *arguments in steps:
        getattr(history, name)(*arguments)
        assert_properties(history.store, history.names)
    history.store.close()


def _commit_together(store: Store, units: Sequence[Sequence[Op]]) -> None:
    batch, receipts, _ = store._assembler.assemble(units)
    assert all(isinstance(each, list) for each in receipts)
    store._engine.write(batch)
    store.marks.release()
