"""Taking a delayed message back before it is due, by the handle that its send was answered with.

The writer decides between the recall and the hand-over; here is only found out what to ask it for, and what the answer
means.
"""

from __future__ import annotations

from broker_adapter.errors import BrokerUnavailable, Refused, Rule
from broker_adapter.message import RecallReceipt, unpack_id
from dmq.audit.events import NO_QUEUE, EventKind, encode_event
from dmq.embedded.catalog import Catalog
from dmq.embedded.commits import Commits
from dmq.embedded.entry_handle import EntryHandle, EntryHandles, HandleKind, NotAHandle, read_handle
from dmq.embedded.reader import Reader
from dmq.store.ops import Withdraw
from dmq.store.schema.index import EntryState, Receipt
from dmq.store.schema.record import DELAYED_KINDS, decode_waiting
from dmq.units import format_time

_TRIES_MAX = 16  # an entry that moves on between two looks at it is looked for again


def decode_recall(text: str, handles: EntryHandles | None = None) -> EntryHandle:
    """Read a recall handle; ``Refused(REQUEST)`` for anything that is none, or none of the store whose ``handles`` are.

    Without them who wrote it is not asked: that is for who only wants to know what it says.
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
    """Recalls messages. Belongs to the event loop."""

    def __init__(self, catalog: Catalog, commits: Commits, reader: Reader, handles: EntryHandles) -> None:
        self._catalog = catalog
        self._commits = commits
        self._reader = reader
        self._handles = handles
        self.recalled_total = 0

    async def recall(self, topic_name: str, text: str) -> RecallReceipt:
        """As ``PopBroker.recall``."""
        handle = decode_recall(text, self._handles)
        topic = self._catalog.known_topic(topic_name)
        if handle.topic != topic_name:
            why = f"the recall handle is of a message of topic {handle.topic!r}"
            raise Refused(Rule.REQUEST, why, value=topic_name)
        is_durable = False  # what was read last
        for _ in range(_TRIES_MAX):
            found, value = await self._reader.entry(topic.topic_id, handle.message_id)
            if found is not None and found.sequence != handle.sequence:
                found = None  # of a later message with the same id: the one of the handle is forgotten
            if found is not None and found.state is EntryState.WAITING:
                if value is None:
                    continue
                receipt = await self._withdraw(topic.topic_id, handle.message_id, found, value)
                if receipt is not None:
                    self.recalled_total += 1
                    return receipt
            elif is_durable:
                return _answer(handle, found)
            # What was read may not be durable yet; nor is it final: the entry may have been on its way from one row to
            # another. Behind this unit it is both.
            await self._commits.flush()
            is_durable = True
        raise BrokerUnavailable("the message moves all the time")

    async def _withdraw(self, scope: int, message_id: bytes, found: Receipt, value: bytes) -> RecallReceipt | None:
        """Take the entry away; ``None`` if it no longer waits there."""
        entry = decode_waiting(value)
        assert entry.kind in DELAYED_KINDS, "the scope of a topic has no other entries"
        due_ms = entry.deliver_at_ms
        event = encode_event(EventKind.RECALLED, entry.topic_id, 0, NO_QUEUE, 0, due_ms, message_id)
        key = found.key
        op = Withdraw(key, scope, message_id, due_ms, event=event, is_remembered=True)
        (told,) = await self._commits.commit([op])
        return RecallReceipt(unpack_id(message_id), told.at_ms) if told.state is EntryState.WITHDRAWN else None


def _answer(handle: EntryHandle, found: Receipt | None) -> RecallReceipt:
    message_id = unpack_id(handle.message_id)
    if found is None:
        why = "the message is unknown: it ended longer ago than ends are remembered, or was never accepted here"
        raise Refused(Rule.NOT_FOUND, why, value=message_id)
    if found.state is EntryState.WITHDRAWN:
        return RecallReceipt(message_id, found.at_ms, repeated=True)
    raise Refused(Rule.NOT_FOUND, f"the message was delivered at {format_time(found.at_ms)}", value=message_id)
