"""One group's view of one topic: its queues, who waits for a message, and what becomes visible when."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

from dmq.embedded.group_queue import GroupQueue
from dmq.embedded.names import Group, Topic


class Subscription:
    """State of (group, topic); belongs to the event loop."""

    def __init__(self, group: Group, topic: Topic) -> None:
        self.group = group
        self.topic = topic
        self.queues = [GroupQueue(group.group_id, topic.topic_id, number) for number in range(topic.queues)]
        self.is_loaded = asyncio.Event()
        self._turn = 0
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    def choose(self, queue_id: int) -> Iterable[GroupQueue]:
        """Return the queues a receive looks at: the one asked for, or all, starting with another one each time."""
        if queue_id >= 0:
            return (self.queues[queue_id],)
        self._turn = (self._turn + 1) % len(self.queues)
        return self.queues[self._turn :] + self.queues[: self._turn]

    def has_available(self, queue_id: int = -1) -> bool:
        """Say whether a receive would find something."""
        return any(queue.has_available() for queue in (self.queues if queue_id < 0 else (self.queues[queue_id],)))

    async def wait(self, queue_id: int, timeout_s: float) -> None:
        """Return when something may have become available in ``queue_id`` (-1: any queue), or time is up."""
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = (queue_id, woken)
        self._waiters.append(waiter)
        try:
            await asyncio.wait((woken,), timeout=timeout_s)
        except asyncio.CancelledError:
            if woken.done():
                self.wake_next()  # this wake-up was meant for somebody who can use it
            raise
        finally:
            if not woken.done():
                self._waiters.remove(waiter)

    def wake(self, queue_id: int) -> bool:
        """Wake the receive that has waited longest for ``queue_id`` or for any queue; say whether there was one.

        One is enough: whoever takes something and leaves something wakes the next (``wake_next``).
        """
        for position, (wanted, woken) in enumerate(self._waiters):
            if wanted in (-1, queue_id):
                del self._waiters[position]
                woken.set_result(None)
                return True
        return False

    def wake_next(self) -> None:
        """Wake one receive that can use what is available, if there is one."""
        if self._waiters:
            any(queue.has_available() and self.wake(queue.queue_id) for queue in self.queues)

    @property
    def waiting(self) -> int:
        """How many receives wait."""
        return len(self._waiters)
