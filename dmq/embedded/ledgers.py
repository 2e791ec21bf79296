"""Which dead letters have an outcome: of each dead-letter queue, the progress of group 0 on it."""

from __future__ import annotations

from dmq.embedded.group_queue import GroupQueue
from dmq.embedded.reader import Reader


class Ledgers:
    """The ledgers of the dead-letter queues that were looked at in this run. Belongs to the event loop."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._loaded: dict[int, GroupQueue] = {}

    async def load(self, topic_id: int) -> GroupQueue:
        """Return the ledger of a dead-letter topic."""
        known = self._loaded.get(topic_id)
        if known is not None:
            return known
        ledger = GroupQueue(0, topic_id, 0)
        ((rows, begin, _),) = await self._reader.progress([ledger])
        ledger.load(rows)
        ledger.skip_later(begin)
        return self._loaded.setdefault(topic_id, ledger)

    def get(self, topic_id: int) -> GroupQueue | None:
        """Return the ledger if it is loaded, as it is while the topic has a subscription."""
        return self._loaded.get(topic_id)

    def forget(self, topic_id: int) -> None:
        """Drop the ledger of a topic that is gone."""
        self._loaded.pop(topic_id, None)
