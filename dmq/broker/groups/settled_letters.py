"""Settled dead letters: letters with an outcome, stored as the progress of group 0 on each dead-letter queue."""

from __future__ import annotations

from dmq.broker.groups.group_queue import GroupQueue
from dmq.broker.io import Reader


class Settled:
    """Settled letters of the dead-letter queues read in this run. It belongs to the event loop."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._loaded: dict[int, GroupQueue] = {}

    async def load(self, topic_id: int) -> GroupQueue:
        """Return the progress that marks the settled letters of a dead-letter topic."""
        known = self._loaded.get(topic_id)
        if known is not None:
            return known
        settled = GroupQueue(0, topic_id, 0)
        ((rows, begin, _),) = await self._reader.progress([settled])
        settled.load(rows)
        settled.skip_later(begin)
        return self._loaded.setdefault(topic_id, settled)

    def get(self, topic_id: int) -> GroupQueue | None:
        """As ``load``, or None if it is not loaded. It is loaded while the topic has a subscription."""
        return self._loaded.get(topic_id)

    def forget(self, topic_id: int) -> None:
        """Drop the cached progress of a removed topic."""
        self._loaded.pop(topic_id, None)
