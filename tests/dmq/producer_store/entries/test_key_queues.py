"""Key queues of keys one call at a time, with units that are written and with units under way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.rigs.producer.spool import an_entry

from broker_adapter.runtime.clock import ManualClock
from dmq.errors import StoreCorrupt
from dmq.producer_store.entries.key_queues import Change, KeyQueues
from dmq.store.engines.memory import MemoryEngine
from dmq.store.schema.keys import Family
from dmq.store.schema.spool import KeyQueueId, encode_entry, key_queue_id, key_queue_key, parked_number, parked_range
from dmq.store.store import Store, StoreOptions
from dmq.store.writer.operations import Delete, Put

KEY_QUEUE = KeyQueueId(7, bytes(range(16)))
UIDS = b"\xff\xff\xff\xffu" + bytes((0, 0, 0, 7)) + KEY_QUEUE.digest  # and the uid
PARKED = b"\xff\xff\xff\xffm" + bytes((0, 0, 0, 7)) + KEY_QUEUE.digest  # and the number of the entry


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store(MemoryEngine(), ManualClock(), StoreOptions())
    yield made
    made.close()


def do(store: Store, key_queues: KeyQueues, change: Change, *, is_written: bool = True) -> None:
    """Submit a change, and write it or leave it under way."""
    key_queues.submitted(change)
    if is_written:
        store.commit(change.ops)
        key_queues.settled(change)


def waiting(name: str) -> bytes:
    """An entry that waits."""
    return encode_entry(replace(an_entry(len(name), key="k"), payload=name.encode()), KEY_QUEUE.type_id, 0)


def park(store: Store, key_queues: KeyQueues, value: bytes, *, is_written: bool = True) -> Change:
    """Park an entry behind the others."""
    change = key_queues.enter(KEY_QUEUE, value)
    assert change is not None
    do(store, key_queues, change, is_written=is_written)
    return change


@pytest.mark.parametrize("is_written", [True, False], ids=["written", "under way"])
def test_those_of_a_key_come_one_after_the_other(store: Store, *, is_written: bool) -> None:
    """In the order in which they were parked, to the last one; what is under way counts as what is written."""
    key_queues = KeyQueues(store)
    assert not key_queues.exists(KEY_QUEUE)
    assert key_queues.enter(KEY_QUEUE, waiting("first")) is None
    do(store, key_queues, key_queues.open(KEY_QUEUE), is_written=is_written)
    for value in (waiting("second"), waiting("third")):
        park(store, key_queues, value, is_written=is_written)
    for head in (waiting("second"), waiting("third"), None):
        assert key_queues.exists(KEY_QUEUE)
        left = key_queues.leave(KEY_QUEUE)
        assert left.head == head
        do(store, key_queues, left, is_written=is_written)
    assert not key_queues.exists(KEY_QUEUE)
    assert store.scan(Family.GROUP, b"", b"\xff" * 40, limit=9).rows == []


def test_written_rows_are_not_kept_in_memory(store: Store) -> None:
    """A key queue costs memory while a unit of it is under way, and no longer."""
    key_queues = KeyQueues(store)
    fresh = vars(KeyQueues(store))
    do(store, key_queues, key_queues.open(KEY_QUEUE))
    park(store, key_queues, waiting("second"))
    assert vars(key_queues) == fresh
    do(store, key_queues, key_queues.leave(KEY_QUEUE))
    assert vars(key_queues) == fresh


def test_a_change_that_is_written_takes_no_later_one_with_it(store: Store) -> None:
    """What is known of a key queue is its last change, until that one is written."""
    key_queues = KeyQueues(store)
    do(store, key_queues, key_queues.open(KEY_QUEUE))
    parked = park(store, key_queues, waiting("second"), is_written=False)
    do(store, key_queues, key_queues.leave(KEY_QUEUE), is_written=False)
    key_queues.settled(parked)
    (row, _) = park(store, key_queues, waiting("third"), is_written=False).parked or (b"", b"")
    assert parked_number(row) == 1


def test_a_number_that_is_used_again_is_another_entry(store: Store) -> None:
    """Numbers begin anew with every life of a key queue: that one of the first is durable forgets none of the next."""
    key_queues = KeyQueues(store)
    do(store, key_queues, key_queues.open(KEY_QUEUE), is_written=False)
    before = park(store, key_queues, waiting("before"), is_written=False)
    for _ in range(2):
        do(store, key_queues, key_queues.leave(KEY_QUEUE), is_written=False)
    do(store, key_queues, key_queues.open(KEY_QUEUE), is_written=False)
    park(store, key_queues, waiting("after"), is_written=False)
    key_queues.settled(before)
    assert key_queues.leave(KEY_QUEUE).head == waiting("after")


def test_the_rows_of_a_key_queue(store: Store) -> None:
    """Stores that were written have these bytes, and what looks for parked entries finds them all, in their order."""
    key_queues = KeyQueues(store)
    do(store, key_queues, key_queues.open(KEY_QUEUE))
    values = [waiting(name) for name in ("a", "bb", "ccc")]
    changes = [park(store, key_queues, value) for value in values]
    row = PARKED + bytes((0, 0, 0, 0, 0, 0, 0, 1))
    assert changes[1].ops == [
        Put(Family.GROUP, row, values[1]),
        Put(Family.GROUP, UIDS + (2).to_bytes(16, "big"), bytes((0, 0, 0, 0, 0, 0, 0, 1))),
        Put(Family.GROUP, key_queue_key(KEY_QUEUE), bytes((*[0] * 15, 2))),
    ]
    found = store.scan(Family.GROUP, *parked_range(KEY_QUEUE), limit=9).rows
    assert [(parked_number(key), value) for key, value in found] == list(enumerate(values))
    do(store, key_queues, key_queues.leave(KEY_QUEUE))
    assert key_queues.leave(KEY_QUEUE).ops == [
        Delete(Family.GROUP, row),
        Delete(Family.GROUP, UIDS + (2).to_bytes(16, "big")),
        Put(Family.GROUP, key_queue_key(KEY_QUEUE), bytes((*[0] * 7, 2, *[0] * 7, 3))),
    ]


def test_a_key_of_another_type_is_another_key_queue(store: Store) -> None:
    """And so is another key."""
    key_queues = KeyQueues(store)
    do(store, key_queues, key_queues.open(key_queue_id(1, "k")))
    assert key_queues.exists(key_queue_id(1, "k"))
    assert not key_queues.exists(key_queue_id(2, "k"))
    assert not key_queues.exists(key_queue_id(1, "K"))


def test_rows_that_are_missing_are_damage(store: Store) -> None:
    """A key queue is there while its first entry is, and so is what the key queue counts."""
    key_queues = KeyQueues(store)
    with pytest.raises(StoreCorrupt, match="a key queue of type 7 is missing"):
        key_queues.leave(KEY_QUEUE)
    do(store, key_queues, key_queues.open(KEY_QUEUE))
    park(store, key_queues, waiting("second"))
    store.commit([Delete(Family.GROUP, PARKED + bytes(8))])
    with pytest.raises(StoreCorrupt, match="entry 0 of a key queue of type 7 is missing"):
        key_queues.leave(KEY_QUEUE)
