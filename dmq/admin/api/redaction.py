"""Masks of message contents in the answers of ``AdminService``, by the rules of the setting ``redact``.

Each answer passes here, so a mask applies to each interface and to each RPC. If it is not certain that the masked
fields of a body are all found, the whole body is hidden.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Final

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from dmq.acl.rules import matches
from dmq.admin import admin_v1 as wire
from dmq.config.redaction import RedactionRule

MASK: Final = "***"
MASKED_BYTES_MAX: Final = 256 * 1024  # of a body with masked fields: json does not release the interpreter

_Path = tuple[str, ...]


class Redaction:
    """Masks of the contents in answers."""

    def __init__(self, rules: Sequence[RedactionRule]) -> None:
        self._rules = rules

    async def mask(self, request: Message, response: Message) -> None:
        """Mask all contents of a response, in another thread."""
        if self._rules and _has_contents(response.DESCRIPTOR):
            await asyncio.to_thread(self._mask_all, request, response)

    def _mask_all(self, request: Message, response: Message) -> None:
        for topic, content in _contents(response, getattr(request, "topic", "")):
            self.mask_content(topic, content)

    def mask_content(self, topic: str, content: wire.Content) -> None:
        """Mask the content of a message of a topic.

        A retry or dead-letter queue has messages of any topic, so all rules apply in it.
        """
        is_of_any = not topic or topic.startswith("%")
        paths = [rule.path for rule in self._rules if is_of_any or matches(rule.pattern, topic)]
        if not paths:
            return
        named = {path[0] for path in paths if len(path) == 1}
        for name in [each for each in content.properties if each.casefold() in named]:
            content.properties[name] = MASK
            content.masking = wire.Content.FIELDS
        if not content.HasField("body"):
            return
        body = _masked_body(content, paths) if () not in paths else None
        if body is None:
            content.ClearField("body")
            content.masking = wire.Content.BODY
        elif body != content.body:
            content.body = body
            content.masking = wire.Content.FIELDS


def _masked_body(content: wire.Content, paths: Sequence[_Path]) -> bytes | None:
    """Return the body with masked fields, unchanged if it has none of them; None if it must be hidden.

    It must be hidden if it is compressed, too large, not a JSON object or array in UTF-8, or has a repeated name.
    """
    if content.body_encoding not in {"", "IDENTITY"} or len(content.body) > MASKED_BYTES_MAX:
        return None
    try:
        found = json.loads(content.body.decode(), object_pairs_hook=_unique, parse_constant=_refuse)
        if not isinstance(found, dict | list):
            return None
        is_masked = _mask_fields(found, paths, max(map(len, paths)), ())
        return json.dumps(found, ensure_ascii=False).encode() if is_masked else content.body
    except (ValueError, RecursionError):
        return None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):  # parsers differ in which of them they use
        raise ValueError("a name is repeated")
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _mask_fields(value: Any, paths: Sequence[_Path], depth: int, above: _Path) -> bool:  # noqa: ANN401 - of JSON
    """Mask the fields at the end of one of the paths. Return True if there are any."""
    if isinstance(value, list):
        masked = [_mask_fields(each, paths, depth, above) for each in value]  # all of them
        return any(masked)
    if not isinstance(value, dict):
        return False
    is_masked = False
    for name, each in value.items():
        here = (*above, name.casefold())[-depth:]
        if any(here[-len(path) :] == path for path in paths):
            value[name] = MASK
            is_masked = True
        else:
            is_masked |= _mask_fields(each, paths, depth, here)
    return is_masked


def _contents(message: Message, topic: str) -> Iterator[tuple[str, wire.Content]]:
    """Yield the contents in a message with their topics."""
    topic = getattr(message, "origin_topic", "") or getattr(message, "topic", "") or topic
    for field, value in message.ListFields():
        kind = field.message_type
        if kind is None or not _has_contents(kind):
            continue
        for each in value if field.is_repeated else (value,):
            if isinstance(each, wire.Content):
                yield topic, each
            else:
                yield from _contents(each, topic)


@cache
def _has_contents(kind: Descriptor) -> bool:
    """Return True if a message of the kind is or has a ``Content``. No message of the service contains itself."""
    inner = (field.message_type for field in kind.fields if field.message_type is not None)
    return kind.full_name == wire.Content.DESCRIPTOR.full_name or any(map(_has_contents, inner))
