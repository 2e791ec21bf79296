"""Names for what was saved of topics and groups whose records are lost: without one nobody could get at it."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from broker_adapter.contracts.topics import DEAD_LETTER_PREFIX
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.mapping import full_name
from dmq.recovery.reading.loss_report import Lost
from dmq.recovery.reading.names import KnownNames, shown_id
from dmq.recovery.reading.new_store import NewStore
from dmq.recovery.reading.rows import Waiting
from dmq.store.schema.keys import Family, topic_of_scope
from dmq.store.schema.record import WAITING_HEADER_BYTES, EntryKind, QueuedMessage, body_payload, decode_history
from dmq.store.writer.operations import Put


class Needed:
    """Makes a record for each id that is met and has none, under the same id."""

    def __init__(self, names: KnownNames, new: NewStore, lost: Lost, now_ms: int) -> None:
        self._names = names
        self._new = new
        self._lost = lost
        self._now_ms = now_ms
        self.queues: dict[int, int] = {}  # how many a topic must have, by what was found in them

    def of_waiting(self, each: Waiting, value: bytes, body: bytes) -> None:
        """Make what an entry of the timeline needs; ``body`` may be that of another row."""
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
        """Make what a message of a queue needs: of a copy that a group failed nothing says which group that was."""
        if not self._names.has(topic_id):
            self.topic(topic_id, message.payload if message.history is None else b"", is_dead=message.is_dead)

    def topic(self, topic_id: int, payload: bytes = b"", *, is_dead: bool = False) -> None:
        """Make a topic, under the name that its message tells, if nobody else has it."""
        if self._names.has(topic_id):
            return
        name = _topic_in(payload)
        if not name or name in self._names.topics:
            name = f"{DEAD_LETTER_PREFIX if is_dead else ''}salvaged-{topic_id}"
        queues = max(1, self.queues.get(topic_id, 1))
        self._made(self._names.new_topic(topic_id, name, queues, self._now_ms), topic_id)

    def group(self, group_id: int) -> None:
        """Make a group."""
        if not self._names.has(group_id):
            self._made(self._names.new_group(group_id, f"salvaged-{group_id}", self._now_ms), group_id)

    def _made(self, row: Put, name_id: int) -> None:
        self._new.put(Family.META, row.key, row.value)
        self._lost.tell("name", id=name_id, name=self.name(name_id))

    # -- for people ---------------------------------------------------------------------------------------------------

    def name(self, name_id: int) -> str:
        """Return the name of a topic or a group, or its number."""
        names = self._names
        known = names.topics_by_id.get(name_id) or names.groups_by_id.get(name_id)
        return known.name if known is not None else str(name_id)

    def scope_name(self, scope: int) -> str:
        """Return the name of the topic or the group that an entry waits for."""
        return self.name(topic_of_scope(scope))

    def shown_id(self, packed: bytes) -> str:
        """Return a message id as clients know it."""
        return shown_id(packed)


def _topic_in(payload: bytes) -> str:
    try:
        return full_name(wire.Message.FromString(payload).topic)
    except DecodeError:
        return ""
