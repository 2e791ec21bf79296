"""Topics and groups: durable, with ids that are never used for something else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from broker_adapter.contracts.errors import Overloaded
from broker_adapter.runtime.clock import ManualClock
from dmq.broker.topics import registry as names_module
from dmq.broker.topics.registry import Names
from dmq.errors import StoreCorrupt
from dmq.store.engines.memory import MemoryEngine
from dmq.store.schema.keys import Family, name_key
from dmq.store.store import Store, StoreOptions
from dmq.store.writer.operations import Emit, Put
from dmq.trail.events import EventKind, decode_event


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store(MemoryEngine(), ManualClock(), StoreOptions())
    yield made
    made.close()


def make(store: Store, names: Names, *, topics: tuple[str, ...] = (), groups: tuple[str, ...] = ()) -> None:
    """Create, durably."""
    for name in topics:
        topic, ops = names.plan_topic(name, 8, 123)
        store.commit(ops)
        names.add_topic(topic)
    for name in groups:
        group, ops = names.plan_group(name, 456)
        store.commit(ops)
        names.add_group(group)


def test_names_are_read_back_as_they_were(store: Store) -> None:
    """All facts, any characters a name may have."""
    names = Names(store)
    make(store, names, topics=("orders", "%RETRY%g-1"), groups=("workers",))
    make(store, names, topics=("later",))
    again = Names(store)
    assert again.topics == names.topics
    assert again.groups == names.groups
    assert again.topics_by_id == names.topics_by_id
    topic = again.topics["orders"]
    assert (topic.name, topic.queues, topic.created_at_ms) == ("orders", 8, 123)
    assert again.groups["workers"].created_at_ms == 456


def test_an_id_belongs_to_one_name(store: Store) -> None:
    """Topics and groups share them, and the next run goes on behind the last one."""
    make(store, Names(store), topics=("a", "b"), groups=("a", "b"))
    again = Names(store)
    make(store, again, topics=("c",), groups=("c",))
    ids = [each.topic_id for each in again.topics.values()] + [each.group_id for each in again.groups.values()]
    assert sorted(ids) == [1, 2, 3, 4, 5, 6]


def test_a_plan_changes_nothing_until_it_is_added(store: Store) -> None:
    """A refused commit leaves no name behind."""
    names = Names(store)
    names.plan_topic("orders", 8, 0)
    names.plan_group("workers", 0)
    assert not names.topics
    assert not names.groups


def test_a_plan_holds_the_record_and_its_event(store: Store) -> None:
    """One unit, so one batch."""
    names = Names(store)
    for (made, ops), kind in (
        (names.plan_topic("orders", 8, 0), EventKind.TOPIC_CREATED),
        (names.plan_group("workers", 0), EventKind.GROUP_CREATED),
    ):
        put, emit = ops
        assert isinstance(put, Put)
        assert isinstance(emit, Emit)
        assert (put.family, put.key) == (Family.META, name_key(made[0]))
        event = decode_event(emit.event)
        assert event.kind is kind
        assert made[0] in {event.topic_id, event.group_id}


def test_their_number_is_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are all in memory; what is there goes on."""
    monkeypatch.setattr(names_module, "TOPICS_MAX", 2)
    monkeypatch.setattr(names_module, "GROUPS_MAX", 1)
    names = Names(store)
    make(store, names, topics=("a", "b"), groups=("a",))
    with pytest.raises(Overloaded):
        names.plan_topic("c", 8, 0)
    with pytest.raises(Overloaded):
        names.plan_group("c", 0)


@pytest.mark.parametrize("value", [b"", b"\x01\x01", b"\x02" + bytes(20), b"\x01\x09" + bytes(20)])
def test_a_damaged_record_is_reported(store: Store, value: bytes) -> None:
    """It never looks like a topic that does not exist."""
    store.commit([Put(Family.META, name_key(3), value)])
    with pytest.raises(StoreCorrupt):
        Names(store)
