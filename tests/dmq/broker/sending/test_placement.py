"""Where messages go: accepted at once or for later, and handed over when due, with nothing lost on the way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_adapter.contracts.message import Envelope, pack_id
from broker_adapter.contracts.topics import queue_of_message_group
from broker_adapter.runtime.clock import ManualClock
from dmq.broker.sending.placement import Placement, message_group_of
from dmq.broker.topics.registry import Names, Topic
from dmq.errors import StoreCorrupt
from dmq.store.engines.memory import MemoryEngine
from dmq.store.schema.keys import pack_timeline_key
from dmq.store.schema.messages.index import failed_id
from dmq.store.schema.messages.record import (
    WAITING_HEADER_BYTES,
    EntryKind,
    History,
    QueuedMessage,
    decode_queued,
    decode_waiting,
    encode_body,
    encode_history,
    encode_waiting,
)
from dmq.store.store import Store, StoreOptions
from dmq.store.writer.operations import Append, Schedule
from dmq.trail import events
from dmq.trail.events import NO_QUEUE, EventKind, decode_event

NOW_MS = 1_700_000_000_000
KEY = pack_timeline_key(NOW_MS, 77)
GROUP, LANE = 8, 9


@pytest.fixture(scope="module")
def names() -> Iterator[Names]:
    store = Store(MemoryEngine(), ManualClock(), StoreOptions())
    made = Names(store)
    made.add_topic(Topic(5, "orders", 4, 0))
    made.add_topic(Topic(6, "refunds", 4, 0))
    made.topics_by_id[LANE] = Topic(LANE, "%RETRY%workers", 1, 0)
    yield made
    store.close()


def retry_of(
    message_id: str, history: History, *, tag: str = "", message_group: str = "", payload: bytes = b"payload"
) -> bytes:
    """What follows on the head of a copy that a group failed."""
    body = encode_body(pack_id(message_id), tag.encode(), message_group.encode(), payload)
    return encode_history(history) + body


@pytest.mark.parametrize(
    ("deliver_at_ms", "message_group", "waits"),
    [
        (0, "", False),
        (NOW_MS, "", False),
        (1, "", False),
        (NOW_MS + 1, "", True),
        (0, "g", False),
        (1, "g", True),
        (NOW_MS, "g", True),
        (NOW_MS + 1, "g", True),
    ],
)
def test_future_and_delayed_messages_of_a_message_group_wait(
    names: Names, deliver_at_ms: int, message_group: str, *, waits: bool
) -> None:
    """The latter even if its time has come: one that was due before it may still be waiting. The event says which."""
    op = Placement(names).accept(
        names.topics["orders"], Envelope("orders", "m-1", b"payload", "tag", message_group, deliver_at_ms), NOW_MS
    )
    event = decode_event(op.event)
    assert (op.scope, op.message_id) == (5, pack_id("m-1"))
    assert (event.topic_id, event.group_id, event.time_ms, event.message_id) == (5, 0, deliver_at_ms, pack_id("m-1"))
    if waits:
        assert isinstance(op, Schedule)
        assert (event.kind, event.queue_id, op.deliver_at_ms) == (EventKind.SCHEDULED, NO_QUEUE, deliver_at_ms)
        assert message_group_of(op.record) == message_group.encode()
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


histories = st.builds(
    History, st.just(5), st.integers(0, 3), *[st.integers(0, 2**64 - 1)] * 4, st.just(0), st.integers(0, 2**64 - 1)
)


@given(
    history=histories,
    attempt=st.integers(1, 2**16 - 2),
    message_id=st.text(min_size=1, max_size=60),
    payload=st.binary(max_size=200),
    tag=texts,
    message_group=texts,
)
def test_a_retry_becomes_visible_in_its_lane(
    names: Names, history: History, attempt: int, message_id: str, payload: bytes, tag: str, message_group: str
) -> None:
    """With everything that was known of it, under its own id in the index; the event is about the original."""
    copy = retry_of(message_id, history, tag=tag, message_group=message_group, payload=payload)
    value = encode_waiting(EntryKind.RETRY, attempt, LANE, GROUP, NOW_MS, NOW_MS - 9, copy)
    (moved,) = Placement(names).hand_over([(KEY, value)], NOW_MS + 3)
    packed = pack_id(message_id)
    assert decode_queued(moved.record) == QueuedMessage(
        attempt, NOW_MS + 3, 0, packed, tag, message_group, payload, history
    )
    assert moved[:6] == (KEY, GROUP, failed_id(packed, history, attempt), NOW_MS, LANE, 0)
    assert decode_event(moved.event) == (EventKind.RETRIED, 5, GROUP, events.LANE, attempt + 1, NOW_MS, packed)


def test_retries_and_messages_are_handed_over_in_one_go(names: Names) -> None:
    """In the order of the rows; a retry takes no turn of the topic's queues, whatever message group it had."""
    placement = Placement(names)
    rows: list[tuple[bytes, bytes]] = []
    for number in range(4):
        delayed = placement.accept(
            names.topics["orders"], Envelope("orders", f"m-{number}", b"", deliver_at_ms=NOW_MS + 5), NOW_MS
        )
        copy = retry_of(f"m-{number}", History(5, 0, number, 1, 2, 3, 0), message_group="g")
        retry = encode_waiting(EntryKind.RETRY, 1, LANE, GROUP, NOW_MS, NOW_MS, copy)
        assert message_group_of(retry) == b"", "those that are retried in order never leave their queue"
        rows += [(KEY, delayed.record), (KEY, retry)]
    moved = placement.hand_over(rows, NOW_MS + 9)
    assert [(each.topic_id, each.queue_id) for each in moved] == [
        place for number in range(4) for place in ((5, number), (LANE, 0))
    ]


def test_damage_is_reported(names: Names) -> None:
    """A topic or a lane without a record; a header, a history or a body cut short."""
    placement = Placement(names)
    op = placement.accept(Topic(99, "ghost", 4, 0), Envelope("ghost", "m-1", b"", deliver_at_ms=NOW_MS + 5), NOW_MS)
    with pytest.raises(StoreCorrupt, match="99"):
        placement.hand_over([(KEY, op.record)], NOW_MS + 5)
    whole = placement.accept(names.topics["orders"], Envelope("orders", "m-1", b"", deliver_at_ms=NOW_MS + 5), NOW_MS)
    for length in range(WAITING_HEADER_BYTES + 3 + len(pack_id("m-1"))):
        with pytest.raises(StoreCorrupt):
            placement.hand_over([(KEY, whole.record[:length])], NOW_MS + 5)
    copy = retry_of("m-1", History(5, 0, 1, 1, 2, 3, 0))
    with pytest.raises(StoreCorrupt, match="98"):
        placement.hand_over([(KEY, encode_waiting(EntryKind.RETRY, 1, 98, GROUP, NOW_MS, NOW_MS, copy))], NOW_MS)
    retry = encode_waiting(EntryKind.RETRY, 1, LANE, GROUP, NOW_MS, NOW_MS, copy)
    for length in range(len(retry) - len(b"payload")):
        with pytest.raises(StoreCorrupt):
            placement.hand_over([(KEY, retry[:length])], NOW_MS)
    for length in range(WAITING_HEADER_BYTES):
        with pytest.raises(StoreCorrupt):
            message_group_of(retry[:length])
