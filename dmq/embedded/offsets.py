"""Where groups that pull continue: one durable row for each (group, topic, queue), whatever pop knows of the group.

    group family, of group 0, which no group has:    kind 5 | number: the group id    offset 8

All groups of a queue lie side by side, apart from pop's progress: a group that pulls is no subscriber, gets no retries,
and does not begin anywhere by pulling.
"""

from __future__ import annotations

from broker_adapter.errors import Refused, Rule
from dmq.audit.events import offset_set_event
from dmq.embedded.queue_log import Place
from dmq.embedded.registry import Registry
from dmq.store.keys import pack_group_key, pack_u64, unpack_u64
from dmq.store.ops import Emit, Family, Put

PULLED = 0  # the group under which the rows lie
_KIND = 5


class Offsets:
    """Keeps committed offsets. Nothing of them is in memory."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def get(self, group_name: str, place: Place) -> int | None:
        """Return where a group continues, ``None`` if it never said."""
        group = self._registry.names.groups.get(group_name)
        if group is None:
            return None
        (value,) = await self._registry.reader.values(
            Family.GROUP, [committed_key(place.topic_id, place.queue_id, group.group_id)]
        )
        return unpack_u64(value) if value is not None else None

    async def set(self, group_name: str, place: Place, offset: int, end: int) -> None:
        """Keep where a group continues, durable on return. ``end`` is that of the queue."""
        if not 0 <= offset <= end:
            raise Refused(Rule.OFFSET, "the offset is outside of the queue", value=offset, limit=f"0..{end}")
        group = await self._registry.group(group_name)
        event = offset_set_event(place.topic_id, group.group_id, place.queue_id, offset)
        self._registry.heard(place, offset)
        row = Put(Family.GROUP, committed_key(place.topic_id, place.queue_id, group.group_id), pack_u64(offset))
        await self._registry.committed(self._registry.submit([row, Emit(event, offset)]))


def committed_range(topic_id: int, queue_id: int) -> tuple[bytes, bytes]:
    """Return the range of the rows of all groups on a queue."""
    return committed_key(topic_id, queue_id, 0), committed_key(topic_id, queue_id, 2**64 - 1)


def committed_key(topic_id: int, queue_id: int, group_id: int) -> bytes:
    """Return the key of the row of a group on a queue."""
    return pack_group_key(PULLED, topic_id, queue_id, _KIND, group_id)
