"""Conversion of wire messages to JSON values."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from google.protobuf.descriptor import FieldDescriptor
    from google.protobuf.message import Message


def to_plain(message: Message) -> dict[str, object]:
    """Return a message as JSON values: every field by its name, numbers as numbers, enums as names, bytes in base64.

    An absent optional field is None; all other fields are always present.
    """
    fields: Iterable[Any] = message.DESCRIPTOR.fields
    return {field.name: _plain_field(message, field) for field in fields}


def _plain_field(message: Message, field: FieldDescriptor) -> object:
    value: Any = getattr(message, field.name)
    if field.is_repeated:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            return dict(sorted(value.items()))
        return [_plain(item, field) for item in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _plain(value, field)


def _plain(value: Any, field: FieldDescriptor) -> object:  # noqa: ANN401 - whatever a field holds
    if field.message_type is not None:
        return to_plain(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        if known is None:
            return value  # of a newer daemon
        return known.name if not known.name.endswith("_UNSPECIFIED") else None
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value
