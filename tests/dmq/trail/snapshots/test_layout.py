"""What snapshots know of others' layouts is what those write; and the rules that need no store."""

from __future__ import annotations

import pytest

from broker_adapter.runtime.clock import ManualClock, Moment
from dmq.broker.failures.outcomes import copy_of
from dmq.broker.groups.group_queue import DeliveryLease, GroupQueue
from dmq.broker.topics.registry import Names
from dmq.errors import StoreCorrupt
from dmq.producer_store.entries.key_queues import KeyQueues
from dmq.store.engines.engine import Batch
from dmq.store.engines.memory import MemoryEngine
from dmq.store.schema.keys import Family, pack_queue_key, pack_timeline_key, timeline_mark
from dmq.store.schema.messages.record import (
    EntryKind,
    History,
    QueuedMessage,
    encode_body,
    encode_queued,
    encode_waiting,
)
from dmq.store.schema.spool import DEAD_HEAD_BYTES, dead_key, encode_dead, encode_entry, key_queue_id
from dmq.store.store import Store, StoreOptions
from dmq.store.writer.operations import Delete, Op, Put
from dmq.trail.cells import gaps_between
from dmq.trail.snapshots.layout import (
    Named,
    NamesOf,
    Waiting,
    decode_cursors,
    encode_cursors,
    read_names,
    read_waiting,
)
from dmq.trail.snapshots.rows import entries, progress, queues
from dmq.trail.snapshots.taking import not_kept
from retry.sink import Death, Entry

DAY_MS = 86_400_000
HISTORY = History(1, 3, 17, 10, 20, 30, 0)


def an_engine(*ops: Op) -> MemoryEngine:
    """An engine with what the ops put."""
    engine, batch = MemoryEngine(), Batch()
    for op in ops:
        if isinstance(op, Put):
            batch.puts.append((op.family, op.key, op.value))
        elif isinstance(op, Delete):
            batch.deletes.append((op.family, op.key))
    engine.write(batch)
    return engine


def named_engine(*ops: Op) -> MemoryEngine:
    """Topic 1 ``orders``, group 2 ``workers``, lane 3 of the two, and what the ops put."""
    store = Store(MemoryEngine(), ManualClock(), StoreOptions())
    try:
        names = Names(store)
        topic, of_topic = names.plan_topic("orders", 4, 1)
        names.add_topic(topic)
        group, of_group = names.plan_group("workers", 2)
        names.add_group(group)
        _, of_lane = names.lane(group, topic.topic_id, 3)
    finally:
        store.close()
    return an_engine(*of_topic, *of_group, *of_lane, *ops)


def test_names_are_read_as_they_are_written() -> None:
    """Topics, groups and lanes; a lane has the name of its originals' topic, and its group."""
    names = read_names(named_engine())
    assert names.places == {1: Named("orders", "", 4), 3: Named("orders", "workers", 1)}
    assert names.groups == {2: "workers"}
    with pytest.raises(StoreCorrupt, match="topic 9 has no record"):
        names.topic(9)
    with pytest.raises(StoreCorrupt, match="group 9 has no record"):
        names.group(9)


def test_a_delayed_message_and_a_groups_copy_are_read() -> None:
    """Whose it is, when it is due, how often it failed; a copy under the topic it was sent to."""
    body = encode_body(b"\x01id", b"tag", b"group", b"payload")
    delayed = encode_waiting(EntryKind.DELAYED, 0, 1, 1, 5_000, 4_000, body)
    assert read_waiting(delayed) == Waiting(EntryKind.DELAYED, 1, 0, b"\x01id", 5_000, 0, 4_000)
    record = QueuedMessage(0, 1, 0, b"\x01id", "tag", "", b"payload", None)
    copy = encode_waiting(EntryKind.RETRY, 2, 3, 2, 6_000, 4_500, copy_of(record, HISTORY))
    assert read_waiting(copy) == Waiting(EntryKind.RETRY, 1, 2, b"\x01id", 6_000, 2, 4_500)
    for cut in (delayed[:29], copy[:60], copy[:69]):
        with pytest.raises(StoreCorrupt):
            read_waiting(cut)


def test_a_spools_entries_are_read() -> None:
    """On the timeline, parked behind another one, and dead."""
    entry = Entry(
        type_name="orders", uid=b"u" * 16, payload=b"p", key="k", created_at_ms=7, due_at_ms=9, attempts=2, error="no"
    )
    value = encode_entry(entry, 1, 4)
    expected = Waiting(EntryKind.SPOOLED, 1, 0, b"\x01" + b"u" * 16, 9, 2, 7)
    assert read_waiting(value) == expected
    assert read_waiting(encode_dead(value, Death.EXHAUSTED, 8)[DEAD_HEAD_BYTES:]) == expected
    store = Store(MemoryEngine(), ManualClock(), StoreOptions())
    try:
        key_queues, key_queue = KeyQueues(store), key_queue_id(1, "k")
        first = key_queues.open(key_queue)
        key_queues.submitted(first)
        parked = key_queues.enter(key_queue, value)
    finally:
        store.close()
    assert parked is not None
    dead = Put(Family.GROUP, dead_key(1, entry.uid), encode_dead(value, Death.EXHAUSTED, 8))
    timeline = Put(Family.TIMELINE, pack_timeline_key(9, 5), value)
    engine = named_engine(*first.ops, *parked.ops, dead, timeline)
    found = [row for batch in entries(engine, read_names(engine), done=0) for row in batch.to_pylist()]
    assert [(row["kind"], row["entry"]) for row in found] == [("SPOOLED", 5), ("PARKED", None), ("DEAD", None)]
    assert {(row["topic"], row["group"], row["due_ms"], row["attempt"]) for row in found} == {("orders", None, 9, 2)}
    assert not [row for batch in progress(engine, read_names(engine), {}) for row in batch.to_pylist()]
    assert not [row for batch in queues(engine, read_names(engine), is_spool=True) for row in batch.to_pylist()]


def test_an_entry_below_the_mark_is_stranded() -> None:
    """The mark itself is not: all *below* it is finished."""
    value = encode_waiting(EntryKind.DELAYED, 0, 1, 1, 5, 4, encode_body(b"\0m", b"", b"", b""))
    engine = named_engine(*(Put(Family.TIMELINE, pack_timeline_key(5, number), value) for number in (1, 2, 3)))
    found = [
        row for batch in entries(engine, read_names(engine), done=timeline_mark(5, 2)) for row in batch.to_pylist()
    ]
    assert [(row["entry"], row["is_stranded"]) for row in found] == [(1, True), (2, False), (3, False)]


def test_progress_is_read_as_it_is_written() -> None:
    """Floor, finished offsets above it, what is hidden and not what came back, over several chunks; a lane as -1."""
    queue, lane = GroupQueue(2, 1, 3), GroupQueue(2, 3, 0)
    ops: list[Op] = [*queue.start_at(0), *lane.start_at(0)]
    finished = {*range(1_030), 1_032, 1_040, 2_047, 2_048, 5_000}
    for offset in sorted(finished):
        ops += queue.finish((offset,))
    queue.lease(1_033, DeliveryLease(1, 1, 50))
    ops += queue.hide(1_033, queue.leases[1_033], Moment(98, 98), 1, message_group="g")
    queue.lease(1_034, DeliveryLease(1, 1, 50))
    ops += queue.plan_return(1_034, queue.leases[1_034], 60)[1]
    ops += lane.finish((1,))
    engine = named_engine(*ops)
    rows = [row for batch in progress(engine, read_names(engine), {(2, 3, 0): 2}) for row in batch.to_pylist()]
    above = [1_032, 1_040, 2_047, 2_048, 5_000]
    of_queue = {"queue_id": 3, "floor": 1_030, "done": above, "hidden": [1_033], "cursor": None}
    of_lane = {"queue_id": -1, "floor": 0, "done": [1], "hidden": [], "cursor": 2}
    assert rows == [{"group": "workers", "topic": "orders", **each} for each in (of_queue, of_lane)]


def test_queues_show_their_contents() -> None:
    """Every queue of a topic, empty ones too, and the lanes; what retention removed is not there."""
    value = encode_queued(0, 1, 0, encode_body(b"\0m", b"", b"", b""))
    rows = [Put(Family.QUEUE, pack_queue_key(1, 2, offset), value) for offset in (7, 8, 9)]
    engine = named_engine(*rows, Put(Family.QUEUE, pack_queue_key(3, 0, 0), value))
    found = [
        tuple(row.values()) for batch in queues(engine, read_names(engine), is_spool=False) for row in batch.to_pylist()
    ]
    empty = [("orders", None, number, 0, 0) for number in (0, 1)]
    assert found == [*empty, ("orders", None, 2, 7, 10), ("orders", None, 3, 0, 0), ("orders", "workers", -1, 0, 1)]


def test_queues_come_in_parts() -> None:
    """Between two of them a snapshot can be given up: all in one go, the last one outlived the time a stop has."""
    names = NamesOf({number: Named(f"topic-{number}", "", 100) for number in range(1, 11)}, {})
    parts = [batch.to_pylist() for batch in queues(named_engine(), names, is_spool=False)]
    assert max(map(len, parts)) < 300
    expected = [(f"topic-{number}", queue_id) for number in range(1, 11) for queue_id in range(100)]
    assert [(row["topic"], row["queue_id"]) for part in parts for row in part] == expected


def test_damage_is_loud() -> None:
    """A name, a bitmap and a topic that cannot be read, or are not there."""
    with pytest.raises(StoreCorrupt, match="unknown kind 9"):
        read_names(an_engine(Put(Family.META, b"n\0\0\0\1", b"\x01\x09" + bytes(10))))
    for row in (
        Put(Family.GROUP, bytes((0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 2)) + bytes(8), b"short"),
        Put(Family.GROUP, bytes((0, 0, 0, 2, 0, 0, 0, 9, 0, 0, 1)) + bytes(8), bytes(8)),
    ):
        engine = named_engine(row)
        with pytest.raises(StoreCorrupt):
            list(progress(engine, read_names(engine), {}))


def test_cursors_survive_the_way_to_the_other_process() -> None:
    """One line of JSON."""
    cursors = {(1, 2, 3): 4, (2**32 - 1, 1, 0): 2**53}
    assert "\n" not in encode_cursors(cursors)
    assert decode_cursors(encode_cursors(cursors)) == cursors


def test_the_newest_snapshots_are_kept_and_older_ones_by_day() -> None:
    """The last one of each day beyond the newest, and none from before the oldest day."""
    taken = {number: number * DAY_MS // 4 for number in range(1, 41)}  # four a day, the last of day 0 is number 3
    removed = not_kept(taken, newest=8, days=5)
    kept = sorted(taken.keys() - set(removed))
    assert kept == [23, 27, 31, *range(33, 41)]
    assert not not_kept(taken, newest=40, days=1)
    assert not not_kept({}, newest=1, days=1)


def test_gaps_are_the_ranges_between() -> None:
    """Also in front, behind what retention removed; spans that overlap leave none."""
    assert gaps_between(set(), after=0) == []
    assert gaps_between({(1, 5), (6, 9)}, after=0) == []
    assert gaps_between({(3, 5), (4, 9), (12, 12)}, after=0) == [(1, 2), (10, 11)]
    assert gaps_between({(11, 12)}, after=10) == []
