"""Recall of a delayed message before it is due, by the handle from its send receipt."""

from __future__ import annotations

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.message import RecallReceipt, unpack_id
from dmq.broker.delayed.changes import ChangeOutcome, DelayedMessages, Meant
from dmq.broker.handles import EntryHandle, EntryHandles, HandleKind, NotAHandle, read_handle
from dmq.broker.topics import SharedParts
from dmq.config.units import format_time


def decode_recall(text: str, handles: EntryHandles | None = None) -> EntryHandle:
    """Decode a recall handle; raise ``Refused(REQUEST)`` for an invalid one, or one not issued by the store of
    ``handles``.

    Without ``handles`` the code is not checked; a caller must not act on the content alone.
    """
    try:
        return handles.decode(HandleKind.RECALL, text) if handles is not None else read_handle(HandleKind.RECALL, text)
    except NotAHandle as error:
        why = (
            "the recall handle is not one of this store, or from before a restore, or cut short"
            if text
            else "the recall handle is empty"
        )
        raise Refused(Rule.REQUEST, why, value=text) from error


class Recalls:
    """Recall of messages by handle, through ``delayed``. It belongs to the event loop."""

    def __init__(self, shared: SharedParts, handles: EntryHandles, *, delay_max_ms: int | None = None) -> None:
        """Create it; ``delay_max_ms`` is the longest delay that ``delayed`` allows."""
        self.delayed = DelayedMessages(shared, delay_max_ms=delay_max_ms)
        self._catalog = shared.catalog
        self._handles = handles

    def meant(self, topic_name: str, text: str) -> Meant:
        """Return the message of a recall handle; raise ``Refused`` if the handle is not of this topic."""
        handle = decode_recall(text, self._handles)
        self._catalog.known_topic(topic_name)
        if handle.topic != topic_name:
            why = f"the recall handle is of a message of topic {handle.topic!r}"
            raise Refused(Rule.REQUEST, why, value=topic_name)
        return Meant(handle.message_id, handle.sequence)

    async def recall(self, topic: str, text: str) -> RecallReceipt:
        """As ``PopBroker.recall``."""
        meant = self.meant(topic, text)
        ((outcome, at_ms),) = await self.delayed.cancel(topic, [meant])
        message_id = unpack_id(meant.message_id)
        match outcome:
            case ChangeOutcome.UNKNOWN:
                why = "the message is unknown: it ended longer ago than ends are remembered, or was never accepted here"
                raise Refused(Rule.NOT_FOUND, why, value=message_id)
            case ChangeOutcome.REPLACED:
                why = f"a later message under its own key took its place at {format_time(at_ms)}"
                raise Refused(Rule.NOT_FOUND, why, value=message_id)
            case ChangeOutcome.TOO_LATE:
                raise Refused(Rule.NOT_FOUND, f"the message was delivered at {format_time(at_ms)}", value=message_id)
            case _:
                return RecallReceipt(message_id, at_ms, repeated=outcome is ChangeOutcome.CANCELLED)
