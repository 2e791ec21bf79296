"""Positions of notifications, rows of the meta family.

notified   offset 8            of a dead-letter queue, under its topic's id: all letters below it were reported
overdue    made_at_ms 8, body  the last notification of overdue messages; without its body once it was delivered
"""

from __future__ import annotations

from typing import NamedTuple

from dmq.errors import StoreCorrupt
from dmq.store.schema.keys import META_NOTIFIED


class OverdueNotification(NamedTuple):
    """Last notification of overdue messages; ``body`` is empty once it was delivered."""

    made_at_ms: int
    body: bytes


def notified_key(topic_id: int) -> bytes:
    """Return the meta key of the position in a dead-letter queue."""
    return META_NOTIFIED + topic_id.to_bytes(4, "big")


def encode_overdue(last: OverdueNotification) -> bytes:
    """Encode the last notification of overdue messages."""
    return last.made_at_ms.to_bytes(8, "big") + last.body


def decode_overdue(value: bytes) -> OverdueNotification:
    """Decode the last notification of overdue messages; raise ``StoreCorrupt`` if it is invalid."""
    if len(value) < 8:
        raise StoreCorrupt(f"the last notification of overdue messages has {len(value)} bytes")
    return OverdueNotification(int.from_bytes(value[:8], "big"), value[8:])
