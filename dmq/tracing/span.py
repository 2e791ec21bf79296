"""A finished span as a plain value, before OpenTelemetry sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from hashlib import blake2b
from typing import NamedTuple

_ID_BYTES = 8


class SpanKind(Enum):
    """Kind of a span: the answer to a client's call, or work that no client waits for."""

    SERVER = "server"
    INTERNAL = "internal"


class MessageSpan(NamedTuple):
    """Finished span of a message. Its links are other spans of its trace."""

    name: str
    kind: SpanKind
    trace_id: int
    span_id: int
    parent_span_id: int
    start_ms: int
    end_ms: int
    attributes: Mapping[str, str | int]
    links: tuple[int, ...] = ()
    error: str = ""  # text of a failure; empty: none


EmitSpan = Callable[[MessageSpan], None]  # safe in any thread, and never waits


def span_id_of(trace_id: int, *parts: object) -> int:
    """Return the id of a span from the facts that name it.

    A later span can then link to it, also after a restart, and no row has to store it.
    """
    text = "\0".join(map(str, parts))
    digest = blake2b(text.encode(), digest_size=_ID_BYTES, key=trace_id.to_bytes(16, "big")).digest()
    return int.from_bytes(digest, "big") or 1
