"""What a consumer has pulled of one queue and not consumed yet, and the offset that its group may commit.

RocketMQ's clients call it the process queue. A committed offset says that everything below it is consumed. Messages are
consumed in any order, so it is the smallest offset that is not, whatever was finished behind it; once nothing is left,
it is where the next pull begins. So a crash repeats what was finished behind the first unfinished message, and loses
nothing.
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
    """A message in its place."""

    @property
    def queue_offset(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...


M = TypeVar("M", bound=Queued)


class Window(Generic[M]):
    """The window of one consumer on one queue, from the offset it began at. Belongs to one event loop.

    A message *waits* until it is *taken* by whoever consumes it, and leaves the window once it is removed. Concurrent
    consumption removes single messages; orderly consumption takes a batch, and commits or rolls back what is taken.
    """

    def __init__(self, next_offset: int, now_ms: int) -> None:
        self.next_offset = next_offset  # where to pull next
        self.pulled_at_ms = now_ms  # the last pull, also one that was put off; or the beginning
        self.took_at_ms = now_ms  # a message was taken last; or the beginning
        self.is_dropped = False  # it belongs to somebody else now
        self.bytes = 0
        self._messages: OrderedDict[int, M] = OrderedDict()  # by offset, ascending: they come in order
        self._waiting: list[int] = []  # a heap; may hold what was removed
        self._taken_at_ms: dict[int, int] = {}

    @property
    def count(self) -> int:
        """How many messages are not consumed, taken or waiting; ``bytes`` is their size."""
        return len(self._messages)

    @property
    def span(self) -> int:
        """How far the last message lies behind the first one that is not consumed, in offsets."""
        return next(reversed(self._messages)) - next(iter(self._messages)) if self._messages else 0

    @property
    def commit_offset(self) -> int | None:
        """The offset that may be committed now; never lower than before. ``None`` once the queue is dropped."""
        if self.is_dropped:
            return None
        return next(iter(self._messages), self.next_offset)

    def put(self, messages: Iterable[M], next_offset: int, now_ms: int) -> None:
        """Add what a pull returned: messages in order, and where to go on behind what its filter passed over.

        What lies before ``self.next_offset`` came before, and is passed over.
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
        """Take up to ``batch_max`` messages that wait, the first ones; none of a queue that is dropped."""
        batch: list[M] = []
        while self._waiting and len(batch) < batch_max and not self.is_dropped:
            offset = heappop(self._waiting)
            if offset in self._messages:
                self._taken_at_ms[offset] = self.took_at_ms = now_ms
                batch.append(self._messages[offset])
        return batch

    def remove(self, offsets: Iterable[int]) -> int | None:
        """Remove messages that are consumed, or came to an end otherwise; return ``commit_offset``.

        Those that are not there are passed over.
        """
        for offset in offsets:
            message = self._messages.pop(offset, None)
            if message is not None:
                self.bytes -= message.size_bytes
                self._taken_at_ms.pop(offset, None)
        return self.commit_offset

    def commit(self) -> int | None:
        """Remove everything that is taken; return ``commit_offset``."""
        return self.remove(tuple(self._taken_at_ms))

    def rollback(self, offsets: Collection[int] | None = None) -> None:
        """Let what is taken wait again, all of it or these: it is the first to be taken next, in order."""
        for offset in tuple(self._taken_at_ms) if offsets is None else offsets:
            if self._taken_at_ms.pop(offset, None) is not None:
                self._waiting.append(offset)
        heapify(self._waiting)

    def expired(self, now_ms: int, *, consume_ms_max: int = CONSUME_MS_MAX) -> Sequence[M]:
        """Return the first messages, 16 at most, that were taken longer ago than ``consume_ms_max`` and are still here.

        Whoever consumes them is stuck. They are sent back, to come again elsewhere, and removed, so that the offset
        goes on. Of concurrent consumption only: orderly consumption waits.
        """
        late = sorted(offset for offset, at_ms in self._taken_at_ms.items() if now_ms - at_ms > consume_ms_max)
        return [self._messages[offset] for offset in late[:EXPIRED_MAX]]

    def drop(self) -> None:
        """Give the queue up: from now on nothing of it is taken, and nothing is committed."""
        self.is_dropped = True


class Pause(Enum):
    """Why a queue is not pulled from for a moment."""

    COUNT = "too many messages are not consumed yet"
    BYTES = "the messages that are not consumed yet are too large together"
    SPAN = "a message that is not consumed yet lies too far behind"


class WindowBounds(NamedTuple):
    """How much a window may hold before its queue is not pulled from. RocketMQ 5.5 defaults.

    ``span_max`` is for concurrent consumption; ``None`` for orderly, where nothing is overtaken.
    """

    count_max: int = 1000
    bytes_max: int = 100 * 1024 * 1024
    span_max: int | None = 2000


def pause(count: int, size_bytes: int, span: int, bounds: WindowBounds) -> Pause | None:
    """Say why a queue with such a window is not to be pulled from now, ``None`` if it is."""
    if count > bounds.count_max:
        return Pause.COUNT
    if size_bytes > bounds.bytes_max:
        return Pause.BYTES
    if bounds.span_max is not None and span > bounds.span_max:
        return Pause.SPAN
    return None
