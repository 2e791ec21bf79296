"""What the store holds, as a model speaks of it: the audit outbox as facts, queues as message groups in their order."""

from __future__ import annotations

from support.models.broker.model import Fact, Key
from support.models.store.outbox import read_outbox

from broker_adapter.contracts.message import unpack_id
from broker_adapter.contracts.topics import dead_letter_topic
from dmq.broker.broker import EmbeddedBroker
from dmq.store.schema.accounting.outbox import NOT_APPLICABLE, OutboxRecord
from dmq.store.schema.keys import Family, pack_queue_key
from dmq.store.schema.messages.record import decode_queued
from dmq.trail.events import LANE, NO_QUEUE, AuditEvent, EventKind

_OF_MESSAGES = {EventKind.SCHEDULED, EventKind.QUEUED, EventKind.DELIVERED, EventKind.RECALLED}
_OF_MESSAGES |= {EventKind.RESCHEDULED}
_OF_NAMES = {EventKind.TOPIC_CREATED, EventKind.GROUP_CREATED, EventKind.GROUP_CHANGED, EventKind.SUBSCRIBED}
_OF_NAMES |= {
    EventKind.TOPIC_CHANGED,
    EventKind.CLOCK_CHANGED,
    EventKind.CLOCK_ACCEPTED,
    EventKind.OPERATED,
}  # of no message either
_DEATHS = {EventKind.DEAD_EXHAUSTED, EventKind.DEAD_FORWARDED, EventKind.DEAD_SENT_BACK}
_TIMED = {EventKind.INVISIBLE_CHANGED, EventKind.POSTPONED, EventKind.NACKED, EventKind.RETRIED} | _DEATHS
_Place = tuple[int, int, int, int]  # topic, group if it is a lane, queue, offset


class _Reader:
    """Remembers which message lies where."""

    def __init__(self, broker: EmbeddedBroker) -> None:
        self._topics = {topic.topic_id: topic.name for topic in broker.names.topics.values()}
        self._ids = {topic.name: topic.topic_id for topic in broker.names.topics.values()}
        self._groups = {group.group_id: group.name for group in broker.names.groups.values()}
        self._at: dict[_Place, Key] = {}

    def fact(self, record: OutboxRecord, event: AuditEvent) -> Fact:
        """Return what an event says."""
        kind, offset = event.kind, record.queue_offset
        if kind in _OF_MESSAGES:
            key = (self._topics[event.topic_id], unpack_id(event.message_id))
            if kind in {EventKind.SCHEDULED, EventKind.RESCHEDULED, EventKind.RECALLED}:
                assert (event.queue_id, offset) == (NO_QUEUE, NOT_APPLICABLE)
            else:
                self._put((event.topic_id, 0, event.queue_id, offset), key)
            return Fact(kind, key, at_ms=event.time_ms)
        group = self._groups[event.group_id]
        time_ms = event.time_ms if kind in _TIMED else 0
        if kind in _DEATHS or kind is EventKind.RETRIED or offset == NOT_APPLICABLE:
            assert offset != NOT_APPLICABLE or kind is EventKind.NACKED, f"{kind.name} names no place"
            key = (self._topics[event.topic_id], unpack_id(event.message_id))
            if kind is EventKind.RETRIED:
                self._put((event.topic_id, event.group_id, LANE, offset), key)
            elif kind in _DEATHS:  # the offset is that in the dead-letter queue
                letters = dead_letter_topic(group)
                self._put((self._ids[letters], 0, 0, offset), (letters, key[1]))
            return Fact(kind, key, group, event.attempt, time_ms)
        key = self._at[event.topic_id, event.group_id if event.queue_id == LANE else 0, event.queue_id, offset]
        assert not event.message_id or unpack_id(event.message_id) == key[1]
        return Fact(kind, key, group, event.attempt, time_ms)

    def _put(self, place: _Place, key: Key) -> None:
        assert place not in self._at, f"two messages at {place}"
        self._at[place] = key


def read_facts(broker: EmbeddedBroker) -> list[Fact]:
    """Return every fact of the outbox, in its order; fails on a gap, or an event that belongs to no message."""
    reader = _Reader(broker)
    facts: list[Fact] = []
    for sequence, (record, event) in enumerate(read_outbox(broker.store), start=1):
        assert record.sequence == sequence
        if event.kind not in _OF_NAMES:
            facts.append(reader.fact(record, event))
    return facts


def read_lines(broker: EmbeddedBroker, topic: str) -> dict[str, list[Key]]:
    """Return the messages of each message group of a topic as they lie in its queues."""
    known = broker.names.topics[topic]
    start, stop = pack_queue_key(known.topic_id, 0, 0), pack_queue_key(known.topic_id, known.queues, 0)
    lines: dict[str, list[Key]] = {}
    for _, value in broker.store.scan(Family.QUEUE, start, stop, limit=10_000).rows:
        message = decode_queued(value)
        if message.message_group:
            lines.setdefault(message.message_group, []).append((topic, unpack_id(message.message_id)))
    return lines
