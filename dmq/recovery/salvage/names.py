"""Substitute names for topics and groups whose records are lost: their rows would be unreachable without a name."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from broker_adapter.contracts.topics import DEAD_LETTER_PREFIX
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.mapping import full_name
from dmq.recovery.reading.loss_report import LossReport
from dmq.recovery.reading.names import KnownNames, shown_id
from dmq.recovery.reading.rows import TimelineRow
from dmq.recovery.salvage.replay import Replay
from dmq.store.schema.keys import topic_of_scope
from dmq.store.schema.messages.record import (
    WAITING_HEADER_BYTES,
    EntryKind,
    QueuedMessage,
    body_payload,
    decode_history,
)
from dmq.store.writer.operations import Put


class RequiredNames:
    """Creates a record for each id without one, under the same id."""

    def __init__(self, names: KnownNames, new: Replay, lost: LossReport, now_ms: int) -> None:
        self._names = names
        self._new = new
        self._lost = lost
        self._now_ms = now_ms
        self.queues: dict[int, int] = {}  # minimum number of queues per topic, by the rows found

    def of_waiting(self, each: TimelineRow, value: bytes, body: bytes) -> None:
        """Create the records that an entry of the timeline needs; ``body`` may come from another row."""
        entry = each.entry
        if entry.kind == EntryKind.RETRY:
            origin_id = decode_history(value, WAITING_HEADER_BYTES).topic_id
            self.topic(origin_id, body_payload(body))
            self.group(entry.scope)
            if not self._names.has(entry.topic_id):
                self._made(self._names.new_lane(entry.topic_id, entry.scope, origin_id, self._now_ms), entry.topic_id)
        elif not self._names.has(entry.topic_id):
            self.topic(entry.topic_id, body_payload(body))

    def of_queued(self, topic_id: int, message: QueuedMessage) -> None:
        """Create the topic of a queued message, if missing; a failed copy does not contain the name of its group."""
        if not self._names.has(topic_id):
            self.topic(topic_id, message.payload if message.history is None else b"", is_dead=message.is_dead)

    def topic(self, topic_id: int, payload: bytes = b"", *, is_dead: bool = False) -> None:
        """Create a topic with the name in its message, unless another topic has that name."""
        if self._names.has(topic_id):
            return
        name = _topic_in(payload)
        if not name or name in self._names.topics:
            name = f"{DEAD_LETTER_PREFIX if is_dead else ''}salvaged-{topic_id}"
        queues = max(1, self.queues.get(topic_id, 1))
        self._made(self._names.new_topic(topic_id, name, queues, self._now_ms), topic_id)

    def group(self, group_id: int) -> None:
        """Create a group, if it has no record."""
        if not self._names.has(group_id):
            self._made(self._names.new_group(group_id, f"salvaged-{group_id}", self._now_ms), group_id)

    def _made(self, row: Put, name_id: int) -> None:
        self._new.add(row)
        self._lost.tell("name", id=name_id, name=self.name(name_id))

    # -- for people ---------------------------------------------------------------------------------------------------

    def name(self, name_id: int) -> str:
        """Return the name of a topic or a group, or its id as text."""
        names = self._names
        known = names.topics_by_id.get(name_id) or names.groups_by_id.get(name_id)
        return known.name if known is not None else str(name_id)

    def scope_name(self, scope: int) -> str:
        """Return the name of the topic or the group of a scope."""
        return self.name(topic_of_scope(scope))

    def shown_id(self, packed: bytes) -> str:
        """Return a message id in the form that clients use."""
        return shown_id(packed)


def _topic_in(payload: bytes) -> str:
    try:
        return full_name(wire.Message.FromString(payload).topic)
    except DecodeError:
        return ""
