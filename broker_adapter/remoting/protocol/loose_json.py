"""JSON as RocketMQ writes it: keys may be numbers or objects without quotes around them. Pure."""

from __future__ import annotations

import json
import re
from typing import Any

from broker_adapter.remoting.protocol.frames import FrameBroken

_BARE_NUMBERS = re.compile(rb"([{,])\s*(\d+)\s*:")
_BARE_OBJECTS = re.compile(rb"([{,])\s*(\{[^{}]*\})\s*:")
_SHOWN_CHARS = 80


def decode_object(body: bytes, what: str) -> dict[str, Any]:
    """Return the object in ``body``; a key that is an object becomes its JSON text. ``FrameBroken`` if it is not an
    object.
    """
    try:
        try:
            found = json.loads(body)
        except ValueError:
            repaired = _BARE_OBJECTS.sub(lambda match: match[1] + _quoted(match[2]) + b":", body)
            found = json.loads(_BARE_NUMBERS.sub(rb'\1"\2":', repaired))
    except (ValueError, RecursionError) as error:
        raise unreadable(what, error) from None
    if not isinstance(found, dict):
        raise unreadable(what, "it is not a JSON object")
    return found


def unreadable(what: str, why: object) -> FrameBroken:
    """Return the error for an answer that cannot be decoded."""
    kind = f"{type(why).__name__}: " if isinstance(why, Exception) else ""
    return FrameBroken(f"{what} cannot be read: {kind}{str(why)[:_SHOWN_CHARS]}")


def _quoted(text: bytes) -> bytes:
    return json.dumps(text.decode()).encode()
