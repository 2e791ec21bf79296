"""What lists the messages of a topic for operators, as the admin service sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from dmq.admin import admin_v1 as wire

WAITING, READY = 1, 2  # as ``MessageState`` of ``rockdmq.admin.v1`` has them


class Wanted(NamedTuple):
    """Which messages are meant, and in what order. 0 and empty: any."""

    state: int = 0
    due_after_ms: int = 0
    due_before_ms: int = 0
    key: str = ""
    tag: str = ""
    newest_first: bool = False


class ListedMessage(NamedTuple):
    """A message where it is; in no queue: -1. ``content`` is ``None`` if it cannot be read."""

    state: int
    message_id: str
    deliver_at_ms: int
    stored_at_ms: int
    queue_id: int
    queue_offset: int
    content: wire.Content | None


class MessagePage(NamedTuple):
    """Some messages; go on with ``next_token``, empty at the end. A page may be short, or empty, before it."""

    messages: Sequence[ListedMessage]
    next_token: str = ""


class ListingSource(Protocol):
    """What lists the messages of a topic."""

    async def messages(self, topic: str, wanted: Wanted, *, token: str, limit: int) -> MessagePage:
        """Return up to ``limit`` messages from ``token`` on; looks at a bounded number of rows."""
        ...


assert (wire.WAITING, wire.QUEUED) == (WAITING, READY)
