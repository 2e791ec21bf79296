"""Message queue: part of a topic of a classic broker, and unit of assignment to group members."""

from __future__ import annotations

from typing import NamedTuple


class MessageQueue(NamedTuple):
    """Queue of a topic at one broker. The sort order is that of RocketMQ's clients: topic, broker, number."""

    topic: str
    broker: str  # its name
    queue_id: int
