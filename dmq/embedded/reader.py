"""The broker's one reading thread: the event loop never enters the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import NamedTuple, TypeVar

from broker_adapter.errors import BrokerUnavailable
from dmq.embedded.group_queue import GroupQueue
from dmq.embedded.recent import Recent
from dmq.errors import StoreClosed, StoreCorrupt, StoreError
from dmq.store.engine import Rows
from dmq.store.schema.group import group_queue_range
from dmq.store.schema.index import EntryState, Receipt
from dmq.store.schema.keys import Family, pack_queue_key
from dmq.store.schema.record import QueuedMessage, decode_queued
from dmq.store.store import Store

_GROUP_ROWS_MAX = 1_000_000
_RUN_MIN = 8  # messages one behind the other: from so many on an iterator is cheaper than to look for each
_Read = TypeVar("_Read")


class Progress(NamedTuple):
    """What is stored of a group's progress on one queue, and where the queue begins and ends."""

    rows: list[tuple[bytes, bytes]]
    begin: int
    end: int


_Place = tuple[GroupQueue, int]  # and an offset
_Places = Sequence[_Place]


class _Look(NamedTuple):
    """Messages that were asked for, and who waits for them."""

    places: _Places
    found: asyncio.Future[list[QueuedMessage]]


class Reader:
    """Reads for one event loop. Raises ``BrokerUnavailable`` for whatever the store cannot read."""

    def __init__(self, store: Store, loop: asyncio.AbstractEventLoop) -> None:
        self.recent = Recent()
        self._looks: list[_Look] = []  # of this turn of the loop
        self._reading = 0  # messages are had in the order they were asked for: none passes those that are being read
        self._store = store
        self._loop = loop
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dmq-read")

    def close(self) -> None:
        """End the thread after what it reads now."""
        self._thread.shutdown(wait=True)

    async def messages(self, places: _Places) -> list[QueuedMessage]:
        """Return the message at each ``(queue, offset)``; one that is missing is damage."""
        find = self.recent.find
        values = [] if self._reading else [find(queue.topic_id, queue.queue_id, offset) for queue, offset in places]
        if values and all(values):
            try:
                return [decode_queued(value) for value in values if value is not None]
            except StoreError as error:
                raise BrokerUnavailable(str(error)) from error
        found: asyncio.Future[list[QueuedMessage]] = self._loop.create_future()
        if not self._looks:
            self._loop.call_soon(self._look)
        self._looks.append(_Look(places, found))
        self._reading += 1
        try:
            return await found
        except StoreError as error:
            raise BrokerUnavailable(str(error)) from error
        finally:
            self._reading -= 1

    def _look(self) -> None:
        """Have the thread read what was asked for in this turn, together: each time it has to wait for its turn."""
        looks, self._looks = self._looks, []
        try:
            reading = self._loop.run_in_executor(self._thread, self._read, [look.places for look in looks])
        except RuntimeError:  # the thread has ended
            for look in looks:
                if not look.found.done():
                    look.found.set_exception(StoreClosed("the broker is closed"))
            return
        reading.add_done_callback(lambda read: _tell(looks, read))

    def _read(self, asked: Sequence[_Places]) -> list[list[QueuedMessage] | StoreError]:
        """Return what there is at each of several lists of places; what cannot be read fails its own list alone."""
        try:
            values = iter(self._values([place for each in asked for place in each]))
            return [self._decoded(each, list(islice(values, len(each)))) for each in asked]
        except StoreError as error:
            if len(asked) == 1:
                return [error]
            return [found for each in asked for found in self._read([each])]

    def _values(self, places: _Places) -> list[bytes | None]:
        """Return the value at each place, ``None`` where there is none."""
        values: list[bytes | None] = []
        singles: list[tuple[int, bytes]] = []  # where in ``values``, and under which key
        for at, (queue, first), count in _runs(places):
            topic_id, queue_id = queue.topic_id, queue.queue_id
            if count >= _RUN_MIN:
                ends = pack_queue_key(topic_id, queue_id, first), pack_queue_key(topic_id, queue_id, first + count)
                rows = self._store.scan(Family.QUEUE, *ends, limit=count).rows
                if len(rows) == count:
                    values += [value for _, value in rows]
                    continue
            singles += [(at + n, pack_queue_key(topic_id, queue_id, first + n)) for n in range(count)]
            values += [None] * count
        if singles:
            found = self._store.get_many(Family.QUEUE, [key for _, key in singles])
            for (at, _), value in zip(singles, found, strict=True):
                values[at] = value
        return values

    @staticmethod
    def _decoded(places: _Places, values: Sequence[bytes | None]) -> list[QueuedMessage]:
        found = []
        for (queue, offset), value in zip(places, values, strict=True):
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

    async def figures(self) -> dict[int, int]:
        """Return how many entries wait, by scope."""
        return await self._in_thread(self._store.pending)

    async def progress(self, queues: Sequence[GroupQueue]) -> list[Progress]:
        """Return what is stored of each queue: one short scan of the group's own rows, and one seek."""
        return await self._in_thread(lambda: [self._progress(queue) for queue in queues])

    def _progress(self, queue: GroupQueue) -> Progress:
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


def _runs(places: _Places) -> Iterator[tuple[int, _Place, int]]:
    """Yield runs of places one behind the other in a queue: where the run begins, its first place, its length."""
    begin = 0
    for at, (queue, offset) in enumerate(places):
        first_queue, first = places[begin]
        if queue is not first_queue or offset != first + at - begin:
            yield begin, places[begin], at - begin
            begin = at
    if places:
        yield begin, places[begin], len(places) - begin


def _tell(looks: Sequence[_Look], read: asyncio.Future[list[list[QueuedMessage] | StoreError]]) -> None:
    if read.cancelled():
        for look in looks:
            look.found.cancel()
        return
    error = read.exception()
    found = [error] * len(looks) if error is not None else read.result()
    for look, messages in zip(looks, found, strict=True):
        if look.found.done():  # whoever waited went away
            continue
        if isinstance(messages, BaseException):
            look.found.set_exception(messages)
        else:
            look.found.set_result(messages)
