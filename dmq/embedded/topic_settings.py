"""What an operator says about a topic, and the row that keeps it. What is added later is left out of older rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

from broker_adapter.message import MessageType

_VERSION = 1


class TopicSettings(NamedTuple):
    """``message_type`` is the only one the topic takes; ``None``: it takes them all."""

    message_type: MessageType | None = None


MIXED = TopicSettings()


def encode_settings(settings: TopicSettings) -> bytes:
    """Return the value of the settings' row: a version, and JSON in which what is not said is left out."""
    plain = {"type": settings.message_type.name} if settings.message_type is not None else {}
    return bytes((_VERSION,)) + json.dumps(plain).encode()


def decode_settings(value: bytes) -> TopicSettings:
    """Undo ``encode_settings``; raises ``ValueError`` for what cannot be read."""
    if value[:1] != bytes((_VERSION,)):
        raise ValueError("unknown version")
    plain = json.loads(value[1:])
    if not isinstance(plain, Mapping) or plain.get("type", "NORMAL") not in MessageType.__members__:
        raise ValueError("no such message type")
    return TopicSettings(MessageType[plain["type"]] if "type" in plain else None)
