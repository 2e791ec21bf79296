"""Committed offsets of pull consumers: one durable row for each (group, topic, queue), independent of pop progress.

A group that only pulls has no subscription, gets no retries, and has no start position.
"""

from __future__ import annotations

from broker_adapter.contracts.errors import Refused, Rule
from dmq.broker.io import Place
from dmq.broker.topics import BrokerPart, SharedParts, check_not_forwarder
from dmq.store.schema.keys import Family, pack_u64, unpack_u64
from dmq.store.schema.topics.group import committed_key
from dmq.store.writer.operations import Emit, Put
from dmq.trail.events import offset_set_event

NOBODY = 2**64  # above all valid offsets


class PullOffsets(BrokerPart):
    """Store of committed offsets. Memory holds only the lowest offset set while retention examines a queue."""

    def __init__(
        self,
        shared: SharedParts,
    ) -> None:
        super().__init__(shared)
        self._lowest: dict[Place, int] = {}  # lowest offset set on each queue since ``look``

    async def get(self, group_name: str, place: Place) -> int | None:
        """Return the committed offset of a group, or None if it has committed none."""
        group = self._catalog.names.groups.get(group_name)
        if group is None:
            return None
        (value,) = await self._reader.values(
            Family.GROUP, [committed_key(place.topic_id, place.queue_id, group.group_id)]
        )
        return unpack_u64(value) if value is not None else None

    async def set(self, group_name: str, place: Place, offset: int, end: int) -> None:
        """Commit an offset of a group, durable on return. ``end`` is the end of the queue."""
        if not 0 <= offset <= end:
            raise Refused(Rule.OFFSET, "the offset is outside of the queue", value=offset, limit=f"0..{end}")
        check_not_forwarder(group_name)
        group = await self._catalog.group(group_name)
        event = offset_set_event(place.topic_id, group.group_id, place.queue_id, offset)
        if place in self._lowest:
            self._lowest[place] = min(self._lowest[place], offset)
        row = Put(Family.GROUP, committed_key(place.topic_id, place.queue_id, group.group_id), pack_u64(offset))
        await self._commits.commit([row, Emit(event, offset)])

    def look(self, place: Place) -> None:
        """Start recording the lowest offset that any group sets on a queue."""
        self._lowest[place] = NOBODY

    def looked(self, place: Place) -> int:
        """Stop recording and return the lowest offset set since ``look``, or ``NOBODY`` if none was set."""
        return self._lowest.pop(place)
