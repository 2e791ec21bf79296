"""The broker's one reading thread: the event loop never enters the engine.

Messages are read a batch of bytes at a time, and the next one once those who got the last had their turn of the loop:
so what is read and not yet counted for any client is a few batches, however many clients ask at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from broker_adapter.contracts.errors import BrokerUnavailable
from dmq.broker.io.tail_cache import Recent
from dmq.errors import StoreClosed, StoreCorrupt, StoreError
from dmq.store.engines.engine import Rows
from dmq.store.schema.group import group_queue_range
from dmq.store.schema.index import EntryState, Receipt
from dmq.store.schema.keys import Family, pack_queue_key
from dmq.store.schema.record import QueuedMessage, decode_queued
from dmq.store.store import Store

READ_BYTES_MAX = 8 * 1024 * 1024  # of messages in one batch, but for the last few of it
_GROUP_ROWS_MAX = 1_000_000
_RUN_MIN = 8  # messages one behind the other: from so many on an iterator is cheaper than to look for each
_RECENT_BYTES_MAX = 64 * 1024  # that are had from memory at once: more waits for its turn
_LARGE_READS_MAX = 2
_Read = TypeVar("_Read")


class Progress(NamedTuple):
    """What is stored of a group's progress on one queue, and where the queue begins and ends."""

    rows: list[tuple[bytes, bytes]]
    begin: int
    end: int


class QueueOfGroup(Protocol):
    """A message queue as one consumer group reads it, by numeric ids."""

    group_id: int
    topic_id: int
    queue_id: int


_Place = tuple[QueueOfGroup, int]  # and an offset
_Places = Sequence[_Place]


class _Look(NamedTuple):
    """Messages that were asked for, who waits for them, and whether the first of them will do."""

    places: _Places
    found: asyncio.Future[list[QueuedMessage]]
    is_cut: bool


class Reader:
    """Reads for one event loop. Raises ``BrokerUnavailable`` for whatever the store cannot read."""

    def __init__(self, store: Store, loop: asyncio.AbstractEventLoop) -> None:
        self.recent = Recent()
        self._looks: list[_Look] = []  # those that are being read come first
        self._is_looking = False
        self._large = asyncio.Semaphore(_LARGE_READS_MAX)
        self._reading = 0  # messages are had in the order they were asked for: none passes those that are being read
        self._store = store
        self._loop = loop
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dmq-read")

    def close(self) -> None:
        """End the thread after what it reads now."""
        self._thread.shutdown(wait=True)

    async def messages(self, places: _Places, *, is_cut: bool = False) -> list[QueuedMessage]:
        """Return the message at each ``(queue, offset)``; one that is missing is damage.

        ``is_cut``: the first ones will do, at least one, if all are more than ``READ_BYTES_MAX``.
        """
        find = self.recent.find
        values = [] if self._reading else [find(queue.topic_id, queue.queue_id, offset) for queue, offset in places]
        if values and all(values) and sum(map(len, values)) <= _RECENT_BYTES_MAX:  # type: ignore[arg-type]
            try:
                return [decode_queued(value) for value in values if value is not None]
            except StoreError as error:
                raise BrokerUnavailable(str(error)) from error
        if not places:
            return []
        found: asyncio.Future[list[QueuedMessage]] = self._loop.create_future()
        if not self._looks and not self._is_looking:
            self._loop.call_soon(self._look)
        self._looks.append(_Look(places, found, is_cut))
        self._reading += 1
        try:
            return await found
        except StoreError as error:
            raise BrokerUnavailable(str(error)) from error
        finally:
            self._reading -= 1

    def _look(self) -> None:
        """Have the thread read what was asked for meanwhile, together: each time it has to wait for its turn."""
        looks = self._looks = [look for look in self._looks if not look.found.done()]  # who went away needs nothing
        if not looks:
            return
        try:
            reading = self._loop.run_in_executor(self._thread, self._read, list(looks))
        except RuntimeError:  # the thread has ended
            self._looks = []
            for look in looks:
                look.found.set_exception(StoreClosed("the broker is closed"))
            return
        self._is_looking = True
        reading.add_done_callback(partial(self._looked, len(looks)))

    def _looked(self, asked: int, read: asyncio.Future[list[list[QueuedMessage] | StoreError]]) -> None:
        """Tell those whose messages were read, and read on for the others behind them."""
        self._is_looking = False
        error = StoreClosed("the broker is closed") if read.cancelled() else read.exception()
        found = [error] * asked if error is not None else read.result()
        looks, self._looks = self._looks[: len(found)], self._looks[len(found) :]
        if self._looks:
            self._look()
        for look, messages in zip(looks, found, strict=True):
            if look.found.done():  # whoever waited went away
                continue
            if isinstance(messages, BaseException):
                look.found.set_exception(messages)
            else:
                look.found.set_result(messages)

    def _read(self, asked: Sequence[_Look]) -> list[list[QueuedMessage] | StoreError]:
        """Return what the first of several looks find, as many as fit into a batch, at least one.

        What cannot be read fails its own look alone.
        """
        try:
            values = self._values([place for each in asked for place in each.places], READ_BYTES_MAX)
            found: list[list[QueuedMessage] | StoreError] = []
            at = 0
            for places, _, is_cut in asked:
                count = min(len(places), len(values) - at)
                if count == len(places) or (is_cut and count):
                    found.append(self._decoded(places[:count], values, at))
                elif found:
                    break
                else:
                    found.append(self._decoded(places, self._values(places)))
                at += len(places)
                if at >= len(values):
                    break
        except StoreError as error:
            return [error] if len(asked) == 1 else self._read(asked[:1])
        return found

    def _values(self, places: _Places, bytes_max: int = 2**62) -> list[bytes | None]:
        """Return the value at each place, ``None`` where there is none; only the first ones if all are too large."""
        values: list[bytes | None] = []
        singles: list[bytes] = []
        size = largest = 0
        chunk = 1  # rows that are read at once: few of those that may be large
        for (queue, first), count in _runs(places):
            key_of, end = partial(pack_queue_key, queue.topic_id, queue.queue_id), first + count
            if count >= _RUN_MIN and (size := size + self._add(values, singles)) < bytes_max:
                keys = key_of(first), key_of(end)
                rows = self._store.scan(Family.QUEUE, *keys, limit=count, bytes_max=bytes_max - size).rows
                if rows and rows[-1][0] == key_of(first + len(rows) - 1):  # none is missing before it
                    values += [value for _, value in rows]
                    size += sum(len(value) for _, value in rows)
                    first += len(rows)  # noqa: PLW2901 - what is left of the run
            for offset in range(first, end):
                singles.append(key_of(offset))
                if len(singles) >= chunk and size < bytes_max:
                    size += self._add(values, singles)
                    largest = max(largest, *(len(value or b"") for value in values[-chunk:]))
                    chunk = max(1, min(2 * chunk, _RUN_MIN, (bytes_max - size) // max(1, largest)))
            if size >= bytes_max:
                return values
        self._add(values, singles)
        return values

    def _add(self, values: list[bytes | None], keys: list[bytes]) -> int:
        """Read rows, a few, and return how large they are together."""
        if not keys:
            return 0
        found = self._store.get_many(Family.QUEUE, keys)
        values += found
        keys.clear()
        return sum(len(value) for value in found if value is not None)

    @staticmethod
    def _decoded(places: _Places, values: list[bytes | None], at: int = 0) -> list[QueuedMessage]:
        """Decode the values from ``at`` on. Each is dropped when its message has a copy of it."""
        found = []
        for number, (queue, offset) in enumerate(places, at):
            value, values[number] = values[number], None
            if value is None:
                raise StoreCorrupt(f"topic {queue.topic_id} queue {queue.queue_id} has no message {offset}")
            found.append(decode_queued(value))
        return found

    async def values(self, family: Family, wanted: Sequence[bytes]) -> list[bytes | None]:
        """Return the value of each row, ``None`` where there is none."""
        return await self._in_thread(lambda: self._store.get_many(family, wanted))

    async def rows(self, family: Family, start: bytes, stop: bytes, *, limit: int, bytes_max: int = 2**62) -> Rows:
        """Return rows of a range, in order."""
        return await self._in_thread(lambda: self._store.scan(family, start, stop, limit=limit, bytes_max=bytes_max))

    async def entry(self, scope: int, message_id: bytes) -> tuple[Receipt | None, bytes | None]:
        """Return what became of a message, also that it was withdrawn, and while it waits its timeline value.

        The value is ``None`` if it does not wait, or moved on between the two looks.
        """

        def read() -> tuple[Receipt | None, bytes | None]:
            found = self._store.find(scope, message_id, with_withdrawn=True)
            if found is None or found.state is not EntryState.WAITING:
                return found, None
            (value,) = self._store.get_many(Family.TIMELINE, [found.key])
            return found, value

        return await self._in_thread(read)

    async def end(self, topic_id: int, queue_id: int) -> int:
        """Return the offset after the last message of a queue."""
        return await self._in_thread(lambda: self._store.queue_end(topic_id, queue_id))

    async def begins(self, topic_id: int, queues: int) -> list[int]:
        """Return where each queue of a topic begins."""
        return await self.run(lambda store: [store.queue_begin(topic_id, queue_id) for queue_id in range(queues)])

    async def count(self, topic_id: int, queues: int) -> int:
        """Return how many messages lie in the queues of a topic."""
        places = [(topic_id, queue_id) for queue_id in range(queues)]
        return await self.run(
            lambda store: sum(store.queue_end(*place) - store.queue_begin(*place) for place in places)
        )

    async def run(self, read: Callable[[Store], _Read]) -> _Read:
        """Return what ``read`` does, for one that takes several looks at the store."""
        return await self._in_thread(lambda: read(self._store))

    async def run_large(self, read: Callable[[Store], _Read]) -> _Read:
        """As ``run``, for one that may return some MiB: only a few of these have been read and not been taken."""
        async with self._large:
            return await self.run(read)

    async def figures(self) -> dict[int, int]:
        """Return how many entries wait, by scope."""
        return await self._in_thread(self._store.pending)

    async def progress(self, queues: Sequence[QueueOfGroup]) -> list[Progress]:
        """Return what is stored of each queue: one short scan of the group's own rows, and one seek."""
        return await self._in_thread(lambda: [self._progress(queue) for queue in queues])

    def _progress(self, queue: QueueOfGroup) -> Progress:
        start, stop = group_queue_range(queue.group_id, queue.topic_id, queue.queue_id)
        found = self._store.scan(Family.GROUP, start, stop, limit=_GROUP_ROWS_MAX)
        if (
            not found.is_complete
        ):  # a row is a chunk of 1024 offsets, or one of at most 10 000 leases and what came back
            raise StoreCorrupt(f"group {queue.group_id} has over {_GROUP_ROWS_MAX} rows for queue {queue.queue_id}")
        place = queue.topic_id, queue.queue_id
        return Progress(found.rows, self._store.queue_begin(*place), self._store.queue_end(*place))

    async def _in_thread(self, read: Callable[[], _Read]) -> _Read:
        try:
            return await self._loop.run_in_executor(self._thread, read)
        except StoreError as error:
            raise BrokerUnavailable(str(error)) from error


def _runs(places: _Places) -> Iterator[tuple[_Place, int]]:
    """Yield runs of places one behind the other in a queue: the first place of each, and its length."""
    begin = 0
    for at, (queue, offset) in enumerate(places):
        first_queue, first = places[begin]
        if queue is not first_queue or offset != first + at - begin:
            yield places[begin], at - begin
            begin = at
    if places:
        yield places[begin], len(places) - begin
