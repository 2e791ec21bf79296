"""Which dead letters have an outcome: of each dead-letter queue, the progress of group 0 on it."""

from __future__ import annotations

from dmq.broker.groups.group_queue import GroupQueue
from dmq.broker.io.reader import Reader


class Settled:
    """Which letters are settled, of dead-letter queues that were looked at in this run. Belongs to the event loop."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._loaded: dict[int, GroupQueue] = {}

    async def load(self, topic_id: int) -> GroupQueue:
        """Return which letters of a dead-letter topic have an outcome."""
        known = self._loaded.get(topic_id)
        if known is not None:
            return known
        settled = GroupQueue(0, topic_id, 0)
        ((rows, begin, _),) = await self._reader.progress([settled])
        settled.load(rows)
        settled.skip_later(begin)
        return self._loaded.setdefault(topic_id, settled)

    def get(self, topic_id: int) -> GroupQueue | None:
        """As ``load``, if it is loaded already, as it is while the topic has a subscription."""
        return self._loaded.get(topic_id)

    def forget(self, topic_id: int) -> None:
        """Drop what is known of a topic that is gone."""
        self._loaded.pop(topic_id, None)
