"""A message queue: what a topic of a classic broker is made of, and what members of a group divide among themselves."""

from __future__ import annotations

from typing import NamedTuple


class MessageQueue(NamedTuple):
    """One queue of a topic, at one broker. They sort as RocketMQ's clients sort them: topic, broker, number."""

    topic: str
    broker: str  # its name
    queue_id: int
