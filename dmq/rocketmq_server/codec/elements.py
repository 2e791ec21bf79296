"""Element count of a request, taken from its bytes before they are parsed.

An empty message in a list has two bytes on the wire and a hundred times as many after parsing. Each field counts as one
element at any depth. So does each message in a list, each entry of a map, and each byte of a list of numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from broker_adapter.contracts.errors import Refused, Rule

# Requests up to these sizes cannot have enough elements to matter, and are not counted.
PLAIN_BYTES: Final = 64 * 1024
PACKED_BYTES: Final = 4 * 1024
# Allowance for compressed requests: elements in any case, and elements per compressed byte. A send of small,
# identical messages has about one per byte.
_PACKED_FREE: Final = 4096
_PACKED_PER_BYTE: Final = 8
ELEMENTS_MAX: Final = 16 * 1024
SEND_ELEMENTS_MAX: Final = 128 * 1024  # 1,024 messages with 128 each

_VARINT, _EIGHT, _SIZED, _FOUR = 0, 1, 2, 5
_VARINT_BYTES_MAX: Final = 10


class Shape:
    """The fields, by number, that contain other messages, or lists of numbers (``None``)."""

    __slots__ = ("fields",)

    def __init__(self) -> None:
        self.fields: dict[int, Shape | None] = {}


def shape_of(request_class: type[Message]) -> Shape:
    """Return the nested fields of a request class, for ``check_elements``."""
    return _shape(request_class.DESCRIPTOR, {})


def _shape(descriptor: Any, known: dict[str, Shape]) -> Shape:  # noqa: ANN401 - there are two classes of it
    found = known.get(descriptor.full_name)
    if found is None:
        found = known[descriptor.full_name] = Shape()
        for field in descriptor.fields:
            if field.message_type is not None:
                found.fields[field.number] = _shape(field.message_type, known)
            elif field.is_repeated and field.type not in {FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES}:
                found.fields[field.number] = None
    return found


def check_elements(
    body: bytes, shape: Shape, packed_bytes: int, elements_max: int, list_max: int = ELEMENTS_MAX
) -> None:
    """Refuse a request with too many elements, or with more than ``list_max`` top-level messages.

    ``packed_bytes`` is the compressed size, or 0 if the request was not compressed.
    """
    if len(body) <= PLAIN_BYTES and not packed_bytes:
        return
    if packed_bytes:
        elements_max = min(elements_max, _PACKED_FREE + _PACKED_PER_BYTE * packed_bytes)
    if count_elements(body, shape, elements_max, list_max) > elements_max:
        why = f"more fields, entries and messages than so large a request may have ({len(body)} bytes)"
        raise Refused(Rule.REQUEST, why, limit=elements_max)


def count_elements(  # noqa: C901, PLR0912 - one loop over bytes, and no call for most of them
    body: bytes, shape: Shape, stop_at: int, list_max: int = ELEMENTS_MAX
) -> int:
    """Return the number of elements of a request. Counting stops above ``stop_at`` and where the bytes are malformed.

    More than ``list_max`` top-level messages count as too many.
    """
    at, end, count, listed = 0, len(body), 0, 0
    fields: Mapping[int, Shape | None] = shape.fields
    around: list[tuple[int, Any]] = []
    try:
        while count <= stop_at:
            if at >= end:
                if at > end or not around:
                    break
                end, fields = around.pop()
                continue
            count += 1
            tag = body[at]
            at += 1
            if tag >= 0x80:
                tag, at = _varint(body, at - 1)
            kind = tag & 7
            if kind == _SIZED:
                size = body[at]
                at += 1
                if size >= 0x80:
                    size, at = _varint(body, at - 1)
                number = tag >> 3
                if number not in fields:
                    at += size
                elif (inner := fields[number]) is None:
                    at += size
                    count += size
                else:
                    if not around:
                        listed += 1
                        if listed > list_max:
                            return stop_at + 1
                    around.append((end, fields))
                    end, fields = at + size, inner.fields
                    if end > around[-1][0]:
                        break
            elif kind == _VARINT:
                _, at = _varint(body, at)
            elif kind == _EIGHT:
                at += 8
            elif kind == _FOUR:
                at += 4
    except (IndexError, ValueError):
        pass  # the parser reports the error
    return count


def _varint(body: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 7 * _VARINT_BYTES_MAX, 7):
        byte = body[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number of more than ten bytes")
