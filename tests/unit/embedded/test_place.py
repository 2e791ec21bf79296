"""Where messages go: accepted at once or for later, and handed over when due, with nothing lost on the way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_adapter.clock import ManualClock
from broker_adapter.message import Envelope, pack_id
from broker_adapter.topics import queue_of_message_group
from dmq.audit.events import NO_QUEUE, EventKind, decode_event
from dmq.embedded.names import Names, Topic
from dmq.embedded.place import Placement
from dmq.errors import StoreCorrupt
from dmq.store.keys import pack_timeline_key
from dmq.store.memory import MemoryEngine
from dmq.store.ops import Append, Schedule
from dmq.store.record import WAITING_HEADER_BYTES, decode_queued, decode_waiting
from dmq.store.store import Store, StoreOptions

NOW_MS = 1_700_000_000_000
KEY = pack_timeline_key(NOW_MS, 77)


@pytest.fixture(scope="module")
def names() -> Iterator[Names]:
    store = Store(MemoryEngine(), ManualClock(), StoreOptions())
    made = Names(store)
    made.add_topic(Topic(5, "orders", 4, 0))
    made.add_topic(Topic(6, "refunds", 4, 0))
    yield made
    store.close()


@pytest.mark.parametrize(("deliver_at_ms", "waits"), [(0, False), (NOW_MS, False), (1, False), (NOW_MS + 1, True)])
def test_only_a_time_to_come_is_waited_for(names: Names, deliver_at_ms: int, *, waits: bool) -> None:
    """The event says which, when, and where."""
    op = Placement(names).accept(
        names.topics["orders"], Envelope("orders", "m-1", b"payload", "tag", "", deliver_at_ms), NOW_MS
    )
    event = decode_event(op.event)
    assert (op.scope, op.message_id) == (5, pack_id("m-1"))
    assert (event.topic_id, event.group_id, event.time_ms, event.message_id) == (5, 0, deliver_at_ms, pack_id("m-1"))
    if waits:
        assert isinstance(op, Schedule)
        assert (event.kind, event.queue_id, op.deliver_at_ms) == (EventKind.SCHEDULED, NO_QUEUE, deliver_at_ms)
    else:
        assert isinstance(op, Append)
        assert (event.kind, event.queue_id) == (EventKind.QUEUED, op.queue_id)


texts = st.text(max_size=60)


@given(message_id=st.text(min_size=1, max_size=60), payload=st.binary(max_size=200), tag=texts, message_group=texts)
def test_the_long_way_and_the_short_way_end_in_the_same_record(
    names: Names, message_id: str, payload: bytes, tag: str, message_group: str
) -> None:
    """A message that waited is stored as if it had been sent when it was due."""
    topic, envelope = names.topics["orders"], Envelope("orders", message_id, payload, tag, message_group)
    placement = Placement(names)
    waiting = placement.accept(topic, envelope._replace(deliver_at_ms=NOW_MS + 9), NOW_MS)
    assert isinstance(waiting, Schedule)
    (moved,) = placement.hand_over([(KEY, waiting.record)], NOW_MS + 9)
    short = placement.accept(topic, envelope, NOW_MS + 9)
    assert isinstance(short, Append)
    record = decode_queued(moved.record)
    assert record == decode_queued(short.record)._replace(deliver_at_ms=NOW_MS + 9)
    assert (record.message_id, record.tag, record.message_group, record.payload) == (
        pack_id(message_id),
        tag,
        message_group,
        payload,
    )
    assert (moved.key, moved.scope, moved.message_id, moved.deliver_at_ms) == (KEY, 5, pack_id(message_id), NOW_MS + 9)
    event = decode_event(moved.event)
    assert (event.kind, event.queue_id, event.time_ms) == (EventKind.DELIVERED, moved.queue_id, NOW_MS + 9)


@given(message_group=st.text(min_size=1, max_size=30))
def test_a_message_group_has_one_queue_for_ever(names: Names, message_group: str) -> None:
    """On both ways in."""
    placement, topic = Placement(names), names.topics["orders"]
    queues = set()
    for number in range(3):
        envelope = Envelope("orders", f"m-{number}", b"", "", message_group)
        now = placement.accept(topic, envelope, NOW_MS)
        later = placement.accept(topic, envelope._replace(deliver_at_ms=NOW_MS + 1), NOW_MS)
        assert isinstance(now, Append)
        assert isinstance(later, Schedule)
        (moved,) = placement.hand_over([(KEY, later.record)], NOW_MS + 1)
        queues |= {now.queue_id, moved.queue_id}
    assert queues == {queue_of_message_group(message_group, 4)}


def test_everything_else_takes_turns(names: Names) -> None:
    """Evenly, each topic for itself."""
    placement = Placement(names)
    chosen: dict[str, list[int]] = {"orders": [], "refunds": []}
    for number in range(16):
        for topic, queues in chosen.items():
            op = placement.accept(names.topics[topic], Envelope(topic, f"m-{number}", b""), NOW_MS)
            assert isinstance(op, Append)
            queues.append(op.queue_id)
    assert chosen["orders"] == chosen["refunds"] == [0, 1, 2, 3] * 4


def test_the_true_times_are_in_the_record(names: Names) -> None:
    """The key may be later than the delivery time; what is told to consumers and to the audit is not."""
    placement = Placement(names)
    op = placement.accept(names.topics["orders"], Envelope("orders", "m-1", b"", deliver_at_ms=NOW_MS + 5), NOW_MS)
    entry = decode_waiting(op.record)
    assert (entry.deliver_at_ms, entry.accepted_at_ms) == (NOW_MS + 5, NOW_MS)
    late_key = pack_timeline_key(NOW_MS + 500, 1)
    (moved,) = placement.hand_over([(late_key, op.record)], NOW_MS + 500)
    assert (moved.deliver_at_ms, decode_queued(moved.record).stored_at_ms) == (NOW_MS + 5, NOW_MS + 500)


def test_damage_is_said(names: Names) -> None:
    """A topic without a record, a header or a body cut short."""
    placement = Placement(names)
    op = placement.accept(Topic(99, "ghost", 4, 0), Envelope("ghost", "m-1", b"", deliver_at_ms=NOW_MS + 5), NOW_MS)
    with pytest.raises(StoreCorrupt, match="99"):
        placement.hand_over([(KEY, op.record)], NOW_MS + 5)
    whole = placement.accept(names.topics["orders"], Envelope("orders", "m-1", b"", deliver_at_ms=NOW_MS + 5), NOW_MS)
    for length in range(WAITING_HEADER_BYTES + 3 + len(pack_id("m-1"))):
        with pytest.raises(StoreCorrupt):
            placement.hand_over([(KEY, whole.record[:length])], NOW_MS + 5)
