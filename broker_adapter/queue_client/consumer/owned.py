"""A queue that is a consumer's own for now: its window, and who waits for what of it."""

from __future__ import annotations

import asyncio
from collections import Counter

from broker_adapter.contracts.classic import ReceivedMessage
from broker_adapter.contracts.message_queue import MessageQueue
from broker_adapter.queue_client.balance.rebalance import IDLE_MS_MAX
from broker_adapter.queue_client.balance.window import Window


class OwnedQueue:
    """From the moment a consumer takes a queue up to when it gives it up. Belongs to one event loop."""

    def __init__(self, queue: MessageQueue, now_ms: int) -> None:
        self.queue = queue
        self.taken_at_ms = now_ms
        self.window: Window[ReceivedMessage] | None = None  # once it is known where to begin
        self.pulling: asyncio.Task[None] | None = None
        self.consuming: asyncio.Task[None] | None = None  # in order: the only task that hands out
        self.room = asyncio.Event()  # something was consumed
        self.arrived = asyncio.Event()  # something was pulled, or may be consumed again
        self.is_leaving = False  # no batch of it begins any more
        self.moved_to: int | None = None  # where its group goes on instead: the broker or an operator says so
        self.is_busy = False  # in order: a batch is with the handler
        self.failures: Counter[int] = Counter()  # in order: tries that failed here, by offset

    @property
    def pulled_at_ms(self) -> int:
        """When it was pulled from last, or put off, or taken up."""
        return self.taken_at_ms if self.window is None else self.window.pulled_at_ms

    @property
    def is_dropped(self) -> bool:
        """Whether it is somebody else's."""
        return self.window is not None and self.window.is_dropped

    @property
    def commit_offset(self) -> int | None:
        """Where its group goes on; ``None`` before that is known, and once it is somebody else's."""
        return None if self.window is None else self.window.commit_offset

    def note_pull(self, now_ms: int) -> None:
        """Note that its pulls are well, though none was made now."""
        if self.window is None:
            self.taken_at_ms = now_ms
        else:
            self.window.pulled_at_ms = now_ms

    def move(self, offset: int, now_ms: int) -> None:
        """Have it given up and taken up anew at another offset, also a lower one: what it holds counts no more."""
        self.moved_to = offset
        self.is_leaving = True
        self.taken_at_ms = now_ms - IDLE_MS_MAX - 1
        if self.window is not None:
            self.window.pulled_at_ms = self.taken_at_ms

    def drop(self) -> None:
        """Give it up: what its handlers say from now on counts no more."""
        self.is_leaving = True
        for task in (self.pulling, self.consuming):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        if self.window is not None:
            self.window.drop()
