"""Queue assigned to a consumer: its window, its tasks, and its events."""

from __future__ import annotations

import asyncio
from collections import Counter

from broker_adapter.contracts.classic import ReceivedMessage
from broker_adapter.contracts.message_queue import MessageQueue
from broker_adapter.queue_client.balance import IDLE_MS_MAX, Window


class OwnedQueue:
    """Assignment of a queue, from its acquisition to its release. Belongs to one event loop."""

    def __init__(self, queue: MessageQueue, now_ms: int) -> None:
        self.queue = queue
        self.taken_at_ms = now_ms
        self.window: Window[ReceivedMessage] | None = None  # set once the start offset is known
        self.pulling: asyncio.Task[None] | None = None
        self.consuming: asyncio.Task[None] | None = None  # in order: the only delivery task
        self.room = asyncio.Event()  # set when messages were consumed
        self.arrived = asyncio.Event()  # set when messages were pulled, or may be retried
        self.is_leaving = False  # no further batches start
        self.moved_to: int | None = None  # new offset after a reset by the broker or an operator
        self.is_busy = False  # in order: a batch is with the handler
        self.failures: Counter[int] = Counter()  # in order: failed attempts of this assignment, by offset

    @property
    def pulled_at_ms(self) -> int:
        """Time of the last pull, including postponed ones, or of the acquisition."""
        return self.taken_at_ms if self.window is None else self.window.pulled_at_ms

    @property
    def is_dropped(self) -> bool:
        """True if the queue is released."""
        return self.window is not None and self.window.is_dropped

    @property
    def commit_offset(self) -> int | None:
        """Offset at which the group continues; ``None`` before it is known, and after the release."""
        return None if self.window is None else self.window.commit_offset

    def note_pull(self, now_ms: int) -> None:
        """Record that the pull loop is alive without a pull."""
        if self.window is None:
            self.taken_at_ms = now_ms
        else:
            self.window.pulled_at_ms = now_ms

    def move(self, offset: int, now_ms: int) -> None:
        """Schedule a release and reacquisition at another offset, also a lower one; pulled messages are dropped."""
        self.moved_to = offset
        self.is_leaving = True
        self.taken_at_ms = now_ms - IDLE_MS_MAX - 1
        if self.window is not None:
            self.window.pulled_at_ms = self.taken_at_ms

    def drop(self) -> None:
        """Release the queue: later results of its handlers are ignored."""
        self.is_leaving = True
        for task in (self.pulling, self.consuming):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        if self.window is not None:
            self.window.drop()
