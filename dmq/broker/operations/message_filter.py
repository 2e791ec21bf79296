"""Match of a message with a filter: that of a list, or that of a bulk change."""

from __future__ import annotations

from typing import Protocol

from google.protobuf.message import DecodeError

from broker_adapter.contracts.own_keys import own_key_of
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.store.schema.messages.record import QueuedMessage


class FilterFields(Protocol):
    """Fields of a filter; ``MessageFilter`` and the request of a list have them."""

    @property
    def due_after_ms(self) -> int:
        """First delivery time; 0: any."""

    @property
    def due_before_ms(self) -> int:
        """Time after the last delivery time; 0: any."""

    @property
    def key(self) -> str:
        """Key of the message."""

    @property
    def tag(self) -> str:
        """Tag of the message."""

    @property
    def own_key(self) -> str:
        """Own key of the message."""

    @property
    def property(self) -> str:
        """User property, as NAME=VALUE."""


def is_due(chosen: FilterFields, due_ms: int) -> bool:
    """Return True if the delivery time is in the range of the filter."""
    return due_ms >= chosen.due_after_ms and (not chosen.due_before_ms or due_ms < chosen.due_before_ms)


def is_meant(chosen: FilterFields, message: QueuedMessage) -> bool:
    """Return True if the tag, the keys and the property of a message match the filter."""
    if chosen.tag and message.tag != chosen.tag:
        return False
    if not chosen.key and not chosen.own_key and not chosen.property:
        return True
    try:
        sent = wire.Message.FromString(message.payload)
    except DecodeError:
        return False
    if chosen.own_key and own_key_of(sent.user_properties) != chosen.own_key:
        return False
    name, _, value = chosen.property.partition("=")
    if chosen.property and sent.user_properties.get(name) != value:
        return False
    return not chosen.key or chosen.key in sent.system_properties.keys
