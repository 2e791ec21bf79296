"""What an operator says about a topic, and the row that keeps it. What is added later is left out of older rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Literal, NamedTuple

from broker_adapter.errors import Refused, Rule
from broker_adapter.message import MessageType
from dmq.units import DURATION_MS_MAX

_VERSION = 1
KEEP_TIME_MS_LEAST = 1_000
BACK = -1


class Keep(NamedTuple):
    """How long a topic keeps what is in its queues; of a topic, ``None`` is what the configuration says.

    A message is removed once it is older than ``time_ms``, or the topic larger than ``size_bytes``; 0 is no bound.
    With ``unread`` it stays for all that while a group that is known there has not read it.
    """

    time_ms: int | None = None
    size_bytes: int | None = None
    unread: bool | None = None

    def over(self, other: Keep) -> Keep:
        """Return what counts where this is said, and else ``other``."""
        return Keep(
            self.time_ms if self.time_ms is not None else other.time_ms,
            self.size_bytes if self.size_bytes is not None else other.size_bytes,
            self.unread if self.unread is not None else other.unread,
        )

    @property
    def bounds(self) -> bool:
        """Whether anything is ever removed."""
        return bool(self.time_ms or self.size_bytes)


class KeepChange(NamedTuple):
    """What is to be changed of a ``Keep``: ``None`` stays, ``BACK`` and "default" are as configured again."""

    time_ms: int | None = None
    size_bytes: int | None = None
    unread: Literal["yes", "no", "default"] | None = None

    def applied_to(self, keep: Keep) -> Keep:
        """Return ``keep`` with the changes; ``Refused(REQUEST)`` for what cannot be."""
        if not (self.time_ms in {None, 0, BACK} or KEEP_TIME_MS_LEAST <= (self.time_ms or 0) <= DURATION_MS_MAX):
            limit = f"{KEEP_TIME_MS_LEAST} to {DURATION_MS_MAX} ms"
            raise Refused(Rule.REQUEST, "the keep time is out of range", value=self.time_ms, limit=limit)
        if self.size_bytes is not None and not BACK <= self.size_bytes < 2**63:
            raise Refused(Rule.REQUEST, "the number of bytes to keep is out of range", value=self.size_bytes)
        return Keep(
            _bound(self.time_ms, keep.time_ms),
            _bound(self.size_bytes, keep.size_bytes),
            keep.unread if self.unread is None else {"yes": True, "no": False, "default": None}[self.unread],
        )


def _bound(change: int | None, before: int | None) -> int | None:
    return before if change is None else None if change == BACK else change


AS_CONFIGURED = Keep()
KEEP_STAYS = KeepChange()
KEEP_ALL = Keep(0, 0, unread=True)  # what a dead-letter queue does unless it is told
KEEP_DEFAULT = Keep(72 * 3_600_000, 0, unread=True)


class TopicSettings(NamedTuple):
    """``message_type`` is the only one the topic takes; ``None``: it takes them all."""

    message_type: MessageType | None = None
    keep: Keep = AS_CONFIGURED


MIXED = TopicSettings()
_KEEP_KEYS = ("keep_time_ms", "keep_bytes", "keep_unread")


def encode_settings(settings: TopicSettings) -> bytes:
    """Return the value of the settings' row: a version, and JSON in which what is not said is left out."""
    plain: dict[str, object] = {"type": settings.message_type.name} if settings.message_type is not None else {}
    plain |= {key: value for key, value in zip(_KEEP_KEYS, settings.keep, strict=True) if value is not None}
    return bytes((_VERSION,)) + json.dumps(plain).encode()


def decode_settings(value: bytes) -> TopicSettings:
    """Undo ``encode_settings``; raises ``ValueError`` for what cannot be read."""
    if value[:1] != bytes((_VERSION,)):
        raise ValueError("unknown version")
    plain = json.loads(value[1:])
    if not isinstance(plain, Mapping) or plain.get("type", "NORMAL") not in MessageType.__members__:
        raise ValueError("no such message type")
    keep = Keep(*(plain.get(key) for key in _KEEP_KEYS))
    if type(keep.unread) not in {bool, type(None)} or not all(_is_bound(each) for each in keep[:2]):
        raise ValueError("no such retention")
    return TopicSettings(MessageType[plain["type"]] if "type" in plain else None, keep)


def _is_bound(value: object) -> bool:
    return value is None or (type(value) is int and value >= 0)
