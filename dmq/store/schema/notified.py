"""Position of notifications in a dead-letter queue: the offset below which all letters were reported.

notified   offset 8      a row of the meta family, under the id of the queue's topic
"""

from __future__ import annotations

from dmq.store.schema.keys import META_NOTIFIED


def notified_key(topic_id: int) -> bytes:
    """Return the meta key of the position in a dead-letter queue."""
    return META_NOTIFIED + topic_id.to_bytes(4, "big")
