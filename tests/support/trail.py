"""The audit outbox, read back as the facts a model speaks of."""

from __future__ import annotations

from support.broker_model import Fact, Key

from broker_adapter.message import unpack_id
from dmq.audit.events import EventKind
from dmq.audit.outbox import read_outbox
from dmq.embedded.broker import EmbeddedBroker
from dmq.store.outbox import NOT_APPLICABLE

_OF_MESSAGES = {EventKind.SCHEDULED, EventKind.QUEUED, EventKind.DELIVERED}
_OF_NAMES = {EventKind.TOPIC_CREATED, EventKind.GROUP_CREATED}


def read_facts(broker: EmbeddedBroker) -> list[Fact]:
    """Return every fact of the outbox, in its order; fails on a gap, or an event that belongs to no message."""
    topics = {topic.topic_id: topic.name for topic in broker.names.topics.values()}
    groups = {group.group_id: group.name for group in broker.names.groups.values()}
    at: dict[tuple[int, int, int], Key] = {}
    facts: list[Fact] = []
    sequence = 0
    for record, event in read_outbox(broker.store):
        assert record.sequence == sequence + 1
        sequence = record.sequence
        if event.kind in _OF_NAMES:
            continue
        place = (event.topic_id, event.queue_id, record.queue_offset)
        if event.kind in _OF_MESSAGES:
            key = (topics[event.topic_id], unpack_id(event.message_id))
            if event.kind is not EventKind.SCHEDULED:
                assert place not in at
                at[place] = key
            else:
                assert record.queue_offset == NOT_APPLICABLE
            facts.append(Fact(event.kind, key, at_ms=event.time_ms))
            continue
        key = at[place]
        assert not event.message_id or unpack_id(event.message_id) == key[1]
        time_ms = event.time_ms if event.kind is EventKind.INVISIBLE_CHANGED else 0
        facts.append(Fact(event.kind, key, groups[event.group_id], event.attempt, time_ms))
    return facts
