"""Messages in retry without the way there: what the broker writes on a nack, written straight into the store."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence

from bench.messages import WIRE_BYTES
from broker_adapter.contracts.message import pack_id
from dmq.broker.broker import EmbeddedBroker
from dmq.broker.groups.subscription import GroupSubscription
from dmq.store.schema.messages.index import failed_id
from dmq.store.schema.messages.record import EntryKind, History, encode_body, encode_history, encode_waiting
from dmq.store.writer.operations import Schedule
from dmq.trail.events import NO_QUEUE, EventKind, encode_event

_PER_UNIT = 1024
_UNITS_IN_FLIGHT = 4


def retry_entries(found: GroupSubscription, lane_id: int, due_ms: Sequence[int], now_ms: int) -> Iterator[Schedule]:
    """Yield one entry per delivery time: a message that failed once, as ``dmq.broker.failures.failures`` lets it
    wait.
    """
    topic_id, group_id = found.topic.topic_id, found.group_id
    for number, at_ms in enumerate(due_ms):
        message_id = pack_id(f"01{number:032X}")
        history = History(topic_id, 0, number, now_ms, now_ms, now_ms, 0)
        copy = encode_history(history) + encode_body(message_id, b"", b"", os.urandom(WIRE_BYTES))
        waiting = encode_waiting(EntryKind.RETRY, 1, lane_id, group_id, at_ms, now_ms, copy)
        event = encode_event(EventKind.NACKED, topic_id, group_id, NO_QUEUE, 1, at_ms, message_id)
        yield Schedule(group_id, failed_id(message_id, history, 1), at_ms, waiting, event)


async def fill_retries(broker: EmbeddedBroker, group: str, topic: str, due_ms: Sequence[int]) -> None:
    """Let one message per delivery time wait for ``group``, durable on return."""
    found = await broker.subscriptions.subscribe(group, topic)
    lane, ops = broker.subscriptions.lane(found)
    await broker.commits.commit(ops)
    entries = list(retry_entries(found, lane.topic_id, due_ms, broker.store.clock.now_ms()))
    units: list[asyncio.Future[object]] = []
    for first in range(0, len(entries), _PER_UNIT):
        if len(units) >= _UNITS_IN_FLIGHT:
            await units.pop(0)
        units.append(asyncio.ensure_future(broker.commits.commit(entries[first : first + _PER_UNIT])))
    await asyncio.gather(*units)
