"""RPC of ``AdminService`` about the audit events of one message that the trail does not have yet."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from broker_adapter.contracts.message import pack_id
from broker_adapter.contracts.topics import check_topic
from dmq.admin import admin_v1 as wire
from dmq.admin.requests import validate
from dmq.broker import EmbeddedBroker
from dmq.store import Store
from dmq.trail.names import TrailNames
from dmq.trail.outbox_rows import Row, read_rows

EVENTS_MAX: Final = 200_000  # that one call looks at: some 11 MB of the outbox
_EVENTS_PER_STEP: Final = 4_096


class EventCalls:
    """RPC of audit events. A call reads a bounded number of rows, a few at a time."""

    def __init__(self, store: Store, broker: EmbeddedBroker) -> None:
        self._store = store
        self._broker = broker
        self._names = TrailNames(store)

    async def list_message_events(self, request: wire.ListMessageEventsRequest) -> wire.ListMessageEventsResponse:
        """List the events of a message that are in the outbox."""
        topic, message_id = check_topic(request.topic), pack_id(validate.check_message_id(request.message_id))
        state = self._store.outbox_state
        start, end = max(state.first_sequence, state.next_sequence - EVENTS_MAX), state.next_sequence
        is_whole, rows = start <= state.first_sequence, list[Row]()
        while start < end:
            at = start
            step = await self._broker.reader.run(
                lambda store: read_rows(store, at, end, events_max=_EVENTS_PER_STEP, breathe=lambda: None)  # noqa: B023
            )
            rows += [row for row in step if message_id in row.value]
            start = step[-1].end if step else end
        events = await asyncio.to_thread(self._events, rows, topic, message_id) if rows else ()
        return wire.ListMessageEventsResponse(events=events, is_whole=is_whole)

    def _events(self, rows: Sequence[Row], topic: str, message_id: bytes) -> Sequence[wire.MessageEvent]:
        from dmq.trail.columns import to_columns  # imports pyarrow

        return [
            wire.MessageEvent(
                sequence=each["sequence"],
                kind=each["kind"],
                at_ms=each["at_ms"],
                group=each["group"] or "",
                attempt=each["attempt"],
                due_at_ms=each["due_ms"] or 0,
                error=each["error"] or "",
                client=each["client"] or "",
            )
            for each in to_columns(rows, self._names.name).to_pylist()
            if each["message_id"] == message_id and each["topic"] == topic
        ]
