"""Queue and message id of an index row."""

from __future__ import annotations

from broker_adapter.contracts.topics import DEAD_LETTER_PREFIX
from dmq.recovery.reading.names import KnownNames, shown_id
from dmq.recovery.reading.offset_map import Place
from dmq.recovery.reading.rows import Indexed
from dmq.store.schema.messages.index import EntryState, failed_message_id

_QUEUED = frozenset({EntryState.QUEUED, EntryState.DELIVERED})


def place_of(row: Indexed, names: KnownNames) -> Place | None:
    """Return the queue of a finished entry's message; ``None`` if it is unknown or was removed."""
    if row.is_waiting or row.receipt.state not in _QUEUED:
        return None
    if row.scope in names.groups_by_id:
        lane = names.lanes.get((row.scope, row.failed_topic_id))
        return (lane.topic_id, 0) if lane is not None else None
    return (row.scope, row.receipt.queue_id) if names.is_live(row.scope) else None


def shown_id_of(scope: int, index_id: bytes, names: KnownNames) -> str:
    """Return the message id in the key of an index row, in the form that clients use."""
    topic = names.topics_by_id.get(scope)
    is_copy = scope in names.groups_by_id or (topic is not None and topic.name.startswith(DEAD_LETTER_PREFIX))
    return shown_id(failed_message_id(index_id) if is_copy else index_id)
