"""Window of pulled and unconsumed messages of one queue, and the offset that its group may commit.

RocketMQ's clients call it the process queue. A committed offset means that all messages below it are consumed.
Messages are consumed in any order, so the offset is the smallest unconsumed one, regardless of finished messages after
it. In an empty window it is the offset of the next pull. So a crash repeats messages finished after the first
unfinished one, and loses none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from enum import Enum
from heapq import heapify, heappop, heappush
from typing import Generic, NamedTuple, Protocol, TypeVar

CONSUME_MS_MAX = 15 * 60_000  # RocketMQ 5.5 default (consumeTimeout)
EXPIRED_MAX = 16  # of one sweep; RocketMQ 5.5


class Queued(Protocol):
    """Message with its offset and size."""

    @property
    def queue_offset(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...


M = TypeVar("M", bound=Queued)


class Window(Generic[M]):
    """Window of one consumer on one queue, from its start offset on. Belongs to one event loop.

    A message is *waiting* until a consumer *takes* it, and leaves the window when it is removed. Concurrent consumption
    removes single messages. Ordered consumption takes a batch, and commits or rolls back the taken messages.
    """

    def __init__(self, next_offset: int, now_ms: int) -> None:
        self.next_offset = next_offset  # offset of the next pull
        self.pulled_at_ms = now_ms  # last pull, including postponed ones; or the start
        self.took_at_ms = now_ms  # time of the last taken message; or the start
        self.is_dropped = False  # released to another member
        self.bytes = 0
        self._messages: OrderedDict[int, M] = OrderedDict()  # by offset, ascending: pulls return them in order
        self._waiting: list[int] = []  # a heap; may contain removed offsets
        self._taken_at_ms: dict[int, int] = {}

    @property
    def count(self) -> int:
        """Number of unconsumed messages, taken or waiting; ``bytes`` is their size."""
        return len(self._messages)

    @property
    def span(self) -> int:
        """Distance from the first unconsumed message to the last one, in offsets."""
        return next(reversed(self._messages)) - next(iter(self._messages)) if self._messages else 0

    @property
    def commit_offset(self) -> int | None:
        """Offset that may be committed now; never decreases. ``None`` after the queue is dropped."""
        if self.is_dropped:
            return None
        return next(iter(self._messages), self.next_offset)

    def put(self, messages: Iterable[M], next_offset: int, now_ms: int) -> None:
        """Add the result of a pull: messages in order, and the next offset after messages that the filter skipped.

        Messages before ``self.next_offset`` are duplicates and are ignored.
        """
        self.pulled_at_ms = now_ms
        for message in messages:
            offset = message.queue_offset
            if offset >= self.next_offset:
                self._messages[offset] = message
                self.bytes += message.size_bytes
                heappush(self._waiting, offset)
                self.next_offset = offset + 1
        self.next_offset = max(self.next_offset, next_offset)

    def take(self, batch_max: int, now_ms: int) -> Sequence[M]:
        """Take up to ``batch_max`` waiting messages, lowest offsets first; none from a dropped queue."""
        batch: list[M] = []
        while self._waiting and len(batch) < batch_max and not self.is_dropped:
            offset = heappop(self._waiting)
            if offset in self._messages:
                self._taken_at_ms[offset] = self.took_at_ms = now_ms
                batch.append(self._messages[offset])
        return batch

    def remove(self, offsets: Iterable[int]) -> int | None:
        """Remove consumed or otherwise finished messages; return ``commit_offset``.

        Unknown offsets are ignored.
        """
        for offset in offsets:
            message = self._messages.pop(offset, None)
            if message is not None:
                self.bytes -= message.size_bytes
                self._taken_at_ms.pop(offset, None)
        return self.commit_offset

    def commit(self) -> int | None:
        """Remove all taken messages; return ``commit_offset``."""
        return self.remove(tuple(self._taken_at_ms))

    def rollback(self, offsets: Collection[int] | None = None) -> None:
        """Return taken messages to the waiting ones, all or the given offsets; they are taken first again, in order."""
        for offset in tuple(self._taken_at_ms) if offsets is None else offsets:
            if self._taken_at_ms.pop(offset, None) is not None:
                self._waiting.append(offset)
        heapify(self._waiting)

    def expired(self, now_ms: int, *, consume_ms_max: int = CONSUME_MS_MAX) -> Sequence[M]:
        """Return the first messages, at most 16, that were taken more than ``consume_ms_max`` ago and are not removed.

        Their handlers are stuck. The caller sends them back for a retry elsewhere and removes them, so that the commit
        offset advances. For concurrent consumption only: ordered consumption waits.
        """
        late = sorted(offset for offset, at_ms in self._taken_at_ms.items() if now_ms - at_ms > consume_ms_max)
        return [self._messages[offset] for offset in late[:EXPIRED_MAX]]

    def drop(self) -> None:
        """Drop the queue: from now on no message is taken, and no offset is committed."""
        self.is_dropped = True


class WindowPause(Enum):
    """Reason to postpone the pulls of a queue."""

    COUNT = "too many messages are not consumed yet"
    BYTES = "the messages that are not consumed yet are too large together"
    SPAN = "a message that is not consumed yet lies too far behind"


class WindowBounds(NamedTuple):
    """Limits of a window above which its queue is not pulled. RocketMQ 5.5 defaults.

    ``span_max`` is for concurrent consumption; ``None`` for ordered consumption, where messages cannot overtake.
    """

    count_max: int = 1000
    bytes_max: int = 100 * 1024 * 1024
    span_max: int | None = 2000


def pause(count: int, size_bytes: int, span: int, bounds: WindowBounds) -> WindowPause | None:
    """Return the reason to postpone the pull of a queue with such a window, or ``None``."""
    if count > bounds.count_max:
        return WindowPause.COUNT
    if size_bytes > bounds.bytes_max:
        return WindowPause.BYTES
    if bounds.span_max is not None and span > bounds.span_max:
        return WindowPause.SPAN
    return None
