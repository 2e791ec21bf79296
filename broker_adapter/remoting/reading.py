"""Reading of a topic from a time on: the messages of all its queues, merged by store time."""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from broker_adapter.remoting.client import Queue, RemotingClient
from broker_adapter.remoting.protocol.stored import StoredMessage, UnreadableMessage


class Removed(NamedTuple):
    """Queue whose first messages retention deleted, possibly including messages after the requested time.

    ``first_stored_at_ms`` is the store time of the first message that remains; 0 if none remains.
    """

    queue: Queue
    before_offset: int
    first_stored_at_ms: int


@dataclass(slots=True)
class _Cursor:
    """Read position in one queue, bounded by its end offset at the start."""

    queue: Queue
    at: int
    end: int
    found: list[StoredMessage | UnreadableMessage] = field(default_factory=list)  # in reverse order


class Reading:
    """One pass over a topic. Messages stored after its start are not read. Belongs to one event loop."""

    def __init__(self, client: RemotingClient, topic: str, since_ms: int, until_ms: int = 0) -> None:
        """Select messages stored at or after ``since_ms`` and before ``until_ms`` (0: no bound), by the brokers'
        clocks.
        """
        self.removed: Sequence[Removed] = ()
        self.total = 0  # upper bound of messages to read, set by ``begin``
        self.missing = 0  # offsets without a message: deleted by retention meanwhile
        self._client = client
        self._topic = topic
        self._since_ms, self._until_ms = since_ms, until_ms
        self._cursors: list[_Cursor] | None = None

    async def begin(self) -> int:
        """Find the first and last offsets, and return the maximum number of messages between them."""
        self._cursors = await self._begin()
        self.total = sum(each.end - each.at + len(each.found) for each in self._cursors)
        return self.total

    async def messages(self) -> AsyncIterator[StoredMessage | UnreadableMessage]:
        """Yield the messages. Raises the errors of the client; messages yielded before an error are valid."""
        if self._cursors is None:
            await self.begin()
        cursors = self._cursors or []
        waiting: list[tuple[int, int]] = []  # store time of the next message, queue number
        for number, cursor in enumerate(cursors):
            await self._push(waiting, number, cursor)
        while waiting:
            _, number = heapq.heappop(waiting)
            yield cursors[number].found.pop()
            await self._push(waiting, number, cursors[number])

    async def _begin(self) -> list[_Cursor]:
        cursors, removed = [], []
        for queue in await self._client.queues(self._topic):
            begin, end = await self._client.queue_range(queue)
            at = max(begin, await self._client.offset_at(queue, self._since_ms)) if end > begin else end
            cursor = _Cursor(queue, at, end)
            if at == begin and begin:
                await self._fill(cursor)
                first_ms = cursor.found[-1].stored_at_ms if cursor.found else 0
                if first_ms > self._since_ms or not first_ms:
                    removed.append(Removed(queue, begin, first_ms))
            cursors.append(cursor)
        self.removed = removed
        return cursors

    async def _push(self, waiting: list[tuple[int, int]], number: int, cursor: _Cursor) -> None:
        await self._fill(cursor)
        if cursor.found:
            stored_at_ms = cursor.found[-1].stored_at_ms
            if self._until_ms and stored_at_ms >= self._until_ms:
                cursor.found, cursor.at = [], cursor.end
            else:
                heapq.heappush(waiting, (stored_at_ms, number))

    async def _fill(self, cursor: _Cursor) -> None:
        while not cursor.found and cursor.at < cursor.end:
            pulled = await self._client.pull(cursor.queue, cursor.at)
            self.missing += pulled.next_offset - cursor.at - len(pulled.messages)
            cursor.found = [each for each in reversed(pulled.messages) if each.queue_offset < cursor.end]
            cursor.at = pulled.next_offset
