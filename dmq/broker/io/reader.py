"""The broker's single read thread: the event loop never calls the storage engine.

Messages are read in batches limited by bytes. The next batch starts only after the receivers of the last one had their
turn on the loop. So the data read and not yet charged to a client is limited to a few batches, regardless of the number
of concurrent requests.
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
from dmq.store import Store
from dmq.store.engines.engine import Rows
from dmq.store.schema.keys import Family, pack_queue_key
from dmq.store.schema.messages.index import EntryState, Receipt
from dmq.store.schema.messages.record import QueuedMessage, decode_queued
from dmq.store.schema.topics.group import group_queue_range

READ_BYTES_MAX = 8 * 1024 * 1024  # per batch of messages; the last few may exceed it
_GROUP_ROWS_MAX = 1_000_000
_RUN_MIN = 8  # consecutive messages from which an iterator is cheaper than point reads
_RECENT_BYTES_MAX = 64 * 1024  # returned from memory at once; a larger request waits for its turn
_LARGE_READS_MAX = 2
_Read = TypeVar("_Read")


class StoredProgress(NamedTuple):
    """Stored rows of a group's progress on one queue, and the begin and end of the queue."""

    rows: list[tuple[bytes, bytes]]
    begin: int
    end: int


class QueueOfGroup(Protocol):
    """Message queue as one consumer group reads it, by numeric ids."""

    group_id: int
    topic_id: int
    queue_id: int


_Place = tuple[QueueOfGroup, int]  # queue and offset
_Places = Sequence[_Place]


class _Look(NamedTuple):
    """Request for messages, its waiting caller, and whether a prefix of the messages is enough."""

    places: _Places
    found: asyncio.Future[list[QueuedMessage]]
    is_cut: bool


class Reader:
    """Reads for one event loop. It raises ``BrokerUnavailable`` for every read error of the store."""

    def __init__(self, store: Store, loop: asyncio.AbstractEventLoop) -> None:
        self.recent = Recent()
        self._looks: list[_Look] = []  # requests, those under read first
        self._is_looking = False
        self._large = asyncio.Semaphore(_LARGE_READS_MAX)
        self._reading = 0  # open requests; while there are any, none is answered from memory, to keep the order
        self._store = store
        self._loop = loop
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dmq-read")

    def close(self) -> None:
        """Stop the thread after its current read."""
        self._thread.shutdown(wait=True)

    async def messages(self, places: _Places, *, is_cut: bool = False) -> list[QueuedMessage]:
        """Return the message at each ``(queue, offset)``; a missing one is damage.

        ``is_cut``: return only the first messages, at least one, if all together exceed ``READ_BYTES_MAX``.
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
        """Start one read for all open requests, because each turn of the thread has a waiting time."""
        looks = self._looks = [look for look in self._looks if not look.found.done()]  # drop cancelled requests
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
        """Answer the requests that were read, and start the read of the remaining ones."""
        self._is_looking = False
        error = StoreClosed("the broker is closed") if read.cancelled() else read.exception()
        found = [error] * asked if error is not None else read.result()
        looks, self._looks = self._looks[: len(found)], self._looks[len(found) :]
        if self._looks:
            self._look()
        for look, messages in zip(looks, found, strict=True):
            if look.found.done():  # the caller was cancelled
                continue
            if isinstance(messages, BaseException):
                look.found.set_exception(messages)
            else:
                look.found.set_result(messages)

    def _read(self, asked: Sequence[_Look]) -> list[list[QueuedMessage] | StoreError]:
        """Return the messages of the first requests, as many as fit into a batch, at least one.

        An unreadable message fails only its own request.
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
        """Return the value at each place, None if missing; only the first values if all exceed ``bytes_max``."""
        values: list[bytes | None] = []
        singles: list[bytes] = []
        size = largest = 0
        chunk = 1  # rows per point read: few at first, because they may be large
        for (queue, first), count in _runs(places):
            key_of, end = partial(pack_queue_key, queue.topic_id, queue.queue_id), first + count
            if count >= _RUN_MIN and (size := size + self._add(values, singles)) < bytes_max:
                keys = key_of(first), key_of(end)
                rows = self._store.scan(Family.QUEUE, *keys, limit=count, bytes_max=bytes_max - size).rows
                if rows and rows[-1][0] == key_of(first + len(rows) - 1):  # none is missing before the last one
                    values += [value for _, value in rows]
                    size += sum(len(value) for _, value in rows)
                    first += len(rows)  # noqa: PLW2901 - the rest of the run
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
        """Append the values of a few rows, and return their total size in bytes."""
        if not keys:
            return 0
        found = self._store.get_many(Family.QUEUE, keys)
        values += found
        keys.clear()
        return sum(len(value) for value in found if value is not None)

    @staticmethod
    def _decoded(places: _Places, values: list[bytes | None], at: int = 0) -> list[QueuedMessage]:
        """Decode the values from ``at`` on. Each value is dropped once its message holds a copy."""
        found = []
        for number, (queue, offset) in enumerate(places, at):
            value, values[number] = values[number], None
            if value is None:
                raise StoreCorrupt(f"topic {queue.topic_id} queue {queue.queue_id} has no message {offset}")
            found.append(decode_queued(value))
        return found

    async def values(self, family: Family, wanted: Sequence[bytes]) -> list[bytes | None]:
        """Return the value of each row, None where there is none."""
        return await self._in_thread(lambda: self._store.get_many(family, wanted))

    async def rows(self, family: Family, start: bytes, stop: bytes, *, limit: int, bytes_max: int = 2**62) -> Rows:
        """Return rows of a range, in order."""
        return await self._in_thread(lambda: self._store.scan(family, start, stop, limit=limit, bytes_max=bytes_max))

    async def entry(self, scope: int, message_id: bytes) -> tuple[Receipt | None, bytes | None]:
        """Return the state of a message, withdrawn ones included, and its timeline value while it is pending.

        The value is ``None`` if the message is not pending, or moved between the two reads.
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
        """Return the begin of each queue of a topic."""
        return await self.run(lambda store: [store.queue_begin(topic_id, queue_id) for queue_id in range(queues)])

    async def count(self, topic_id: int, queues: int) -> int:
        """Return the number of messages stored in the queues of a topic."""
        places = [(topic_id, queue_id) for queue_id in range(queues)]
        return await self.run(
            lambda store: sum(store.queue_end(*place) - store.queue_begin(*place) for place in places)
        )

    async def run(self, read: Callable[[Store], _Read]) -> _Read:
        """Return the result of ``read``, for several store accesses in one turn of the thread."""
        return await self._in_thread(lambda: read(self._store))

    async def run_large(self, read: Callable[[Store], _Read]) -> _Read:
        """As ``run``, for results of some MiB: at most ``_LARGE_READS_MAX`` run at a time."""
        async with self._large:
            return await self.run(read)

    async def figures(self) -> dict[int, int]:
        """Return the number of pending entries by scope."""
        return await self._in_thread(self._store.pending)

    async def progress(self, queues: Sequence[QueueOfGroup]) -> list[StoredProgress]:
        """Return the stored progress of each queue, by one short scan of the group's own rows and one seek."""
        return await self._in_thread(lambda: [self._progress(queue) for queue in queues])

    def _progress(self, queue: QueueOfGroup) -> StoredProgress:
        start, stop = group_queue_range(queue.group_id, queue.topic_id, queue.queue_id)
        found = self._store.scan(Family.GROUP, start, stop, limit=_GROUP_ROWS_MAX)
        if (
            not found.is_complete
        ):  # a row is a chunk of 1024 offsets, one of at most 10 000 leases, or a returned message
            raise StoreCorrupt(f"group {queue.group_id} has over {_GROUP_ROWS_MAX} rows for queue {queue.queue_id}")
        place = queue.topic_id, queue.queue_id
        return StoredProgress(found.rows, self._store.queue_begin(*place), self._store.queue_end(*place))

    async def _in_thread(self, read: Callable[[], _Read]) -> _Read:
        try:
            return await self._loop.run_in_executor(self._thread, read)
        except StoreError as error:
            raise BrokerUnavailable(str(error)) from error


def _runs(places: _Places) -> Iterator[tuple[_Place, int]]:
    """Yield runs of consecutive places in a queue: the first place of each run, and its length."""
    begin = 0
    for at, (queue, offset) in enumerate(places):
        first_queue, first = places[begin]
        if queue is not first_queue or offset != first + at - begin:
            yield places[begin], at - begin
            begin = at
    if places:
        yield places[begin], len(places) - begin
