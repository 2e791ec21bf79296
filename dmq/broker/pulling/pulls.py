"""Reads of queues by offset: implements ``PullBroker``. A pull leases nothing, finishes nothing and writes nothing.

Pulls return only durable messages. After a power cut another message may be stored at an offset that was never synced.
A client already past that offset would never read it. So the end of a queue is the one that the writer reported after
its sync, or one that was read and then flushed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from broker_adapter.contracts.adapter import Pulled, PulledMessage, QueueRange, Subscription, TopicRoute
from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.message import unpack_id
from broker_adapter.contracts.topics import DEAD_LETTER_PREFIX
from dmq.broker.deliveries import LOOK_BYTES_MAX, LOOK_MAX, RECEIVE_BYTES_MAX, facts_of
from dmq.broker.filters import Filters
from dmq.broker.groups import GroupQueue, PullOffsets, Settled
from dmq.broker.io import Place, begin_of, messages_from, offset_stored_at
from dmq.broker.pulling.members import MemberLocks, Members
from dmq.broker.pulling.tail_waiters import Tail, Tails
from dmq.broker.topics import BrokerPart, Names, SharedParts, Topic
from dmq.store.schema.messages.record import QueuedMessage

PASSED_OVER_MAX = 4096  # messages that one pull scans without a match
_LOOK_FIRST = 32  # messages of the first scan, if a filter may reject some


class _Queue(NamedTuple):
    """Queue of a pull. ``settled`` marks dead letters with an outcome, which are not returned."""

    place: Place
    tail: Tail
    settled: GroupQueue | None


class Pulls(BrokerPart):
    """Pull calls of clients. It belongs to the event loop."""

    def __init__(self, shared: SharedParts, *, filters: Filters, settled: Settled) -> None:
        super().__init__(shared)
        self._filters = filters
        self._settled = settled
        self.tails = Tails()
        self.offsets = PullOffsets(shared)
        self._members = Members(self._clock)
        self.locks = MemberLocks(self._clock)
        self.pulled_total = 0

    async def route(self, topic: str) -> TopicRoute:
        """As ``PullBroker.route``."""
        found = await self._catalog.topic(topic)
        return TopicRoute(found.name, found.queues)

    # -- messages -----------------------------------------------------------------------------------------------------

    async def pull(self, subscription: Subscription, queue_offset: int, *, batch_max: int, wait_ms: int) -> Pulled:
        """As ``PullBroker.pull``."""
        passes = await self._filters.of(subscription)
        until_s = self._clock.monotonic_s() + wait_ms / 1000
        queue = await self._queue(subscription.topic, subscription.queue_id)
        tail = queue.tail
        takes_all = passes is None and queue.settled is None
        at, passed_over, look = queue_offset, 0, batch_max if takes_all else max(batch_max, _LOOK_FIRST)
        if not 0 <= at <= tail.end:
            raise await self._outside(queue, at)
        while True:
            if at < tail.end:
                rows = await self._look(queue, at, look)
                verdicts: Sequence[bool] | None = None
                if passes is not None:
                    verdicts = await self._filters.verdicts(passes, [record for _, record in rows])
                    rows = rows[: len(verdicts)]
                chosen, at = _choose(self._catalog.names, queue, rows, verdicts, batch_max)
                passed_over += len(rows)
                if chosen or passed_over >= PASSED_OVER_MAX:
                    self.pulled_total += len(chosen)
                    return Pulled(chosen, at)
                look = min(2 * look, LOOK_MAX)
                continue
            left_s = until_s - self._clock.monotonic_s()
            if left_s <= 0:
                return Pulled((), at)
            await tail.wait(left_s)

    async def _look(self, queue: _Queue, at: int, look: int) -> list[tuple[int, QueuedMessage]]:
        place, end = queue.place, queue.tail.end
        rows = await self._reader.run_large(
            lambda store: messages_from(store, place, at, end, limit=look, bytes_max=LOOK_BYTES_MAX)
        )
        if not rows or rows[0][0] != at:
            raise await self._outside(queue, at)
        return rows

    async def _outside(self, queue: _Queue, offset: int) -> Refused:
        begin, end = await self._range(queue)
        return Refused(Rule.OFFSET, "the offset is outside the queue", value=offset, limit=f"{begin}..{end}")

    # -- offsets ------------------------------------------------------------------------------------------------------

    async def queue_range(self, topic: str, queue_id: int) -> QueueRange:
        """As ``PullBroker.queue_range``."""
        return await self._range(await self._queue(topic, queue_id))

    async def offset_at(self, topic: str, queue_id: int, stored_at_ms: int) -> int:
        """As ``PullBroker.offset_at``."""
        queue = await self._queue(topic, queue_id)
        begin, end = await self._range(queue)
        return await self._reader.run(lambda store: offset_stored_at(store, queue.place, begin, end, stored_at_ms))

    async def committed_offset(self, group: str, topic: str, queue_id: int) -> int | None:
        """As ``PullBroker.committed_offset``."""
        return await self.offsets.get(group, _place(self._topic(topic, queue_id), queue_id))

    async def commit_offset(self, group: str, topic: str, queue_id: int, queue_offset: int) -> None:
        """As ``PullBroker.commit_offset``."""
        queue = await self._queue(topic, queue_id)
        await self.offsets.set(group, queue.place, queue_offset, queue.tail.end)

    async def _range(self, queue: _Queue) -> QueueRange:
        """Return the readable range; the search for the begin continues at the last begin found."""
        tail, end = queue.tail, queue.tail.end
        begin = await self._reader.run(lambda store: begin_of(store, queue.place, tail.begin, end))
        tail.begin = max(tail.begin, begin)
        return QueueRange(begin, end)

    # -- clients of a group -------------------------------------------------------------------------------------------

    def member_seen(self, group: str, client_id: str) -> None:
        """As ``PullBroker.member_seen``."""
        self._members.seen(group, client_id)

    def member_gone(self, client_id: str) -> None:
        """As ``PullBroker.member_gone``."""
        self._members.gone(client_id)
        self.locks.gone(client_id)

    async def members(self, group: str) -> Sequence[str]:
        """As ``PullBroker.members``."""
        return self._members.of(group)

    async def lock(self, group: str, client_id: str, topic: str, queue_ids: Sequence[int]) -> Sequence[int]:
        """As ``PullBroker.lock``."""
        for queue_id in queue_ids:
            self._topic(topic, queue_id)
        return self.locks.lock(group, client_id, topic, queue_ids)

    async def unlock(self, group: str, client_id: str, topic: str, queue_ids: Sequence[int]) -> None:
        """As ``PullBroker.unlock``."""
        self.locks.unlock(group, client_id, topic, queue_ids)

    # -- queues -------------------------------------------------------------------------------------------------------

    def _topic(self, name: str, queue_id: int) -> Topic:
        topic = self._catalog.known_topic(name)
        if not 0 <= queue_id < topic.queues:
            raise Refused(
                Rule.REQUEST, f"{name} has no queue with this number", value=queue_id, limit=f"0..{topic.queues - 1}"
            )
        return topic

    async def _queue(self, name: str, queue_id: int) -> _Queue:
        topic = self._topic(name, queue_id)
        place = _place(topic, queue_id)
        tail = self.tails.of(place)  # from now on it is notified of new messages
        if not tail.is_known:
            end = await self._reader.end(*place)
            await self._commits.flush()  # after the flush, the end read is durable
            tail.grew(end)
            tail.is_known = True
        is_letters = name.startswith(DEAD_LETTER_PREFIX)
        return _Queue(place, tail, await self._settled.load(topic.topic_id) if is_letters else None)


def _place(topic: Topic, queue_id: int) -> Place:
    return Place(topic.topic_id, queue_id)


def _choose(
    names: Names,
    queue: _Queue,
    rows: Sequence[tuple[int, QueuedMessage]],
    verdicts: Sequence[bool] | None,
    batch_max: int,
) -> tuple[list[PulledMessage], int]:
    """Return the messages of ``rows`` to return, and the offset after the last one scanned."""
    chosen: list[PulledMessage] = []
    size = 0
    for number, (offset, record) in enumerate(rows):
        is_resolved = queue.settled is not None and queue.settled.is_finished(offset)
        if is_resolved or (verdicts is not None and not verdicts[number]):
            continue
        size += len(record.payload)
        if len(chosen) >= batch_max or (chosen and size > RECEIVE_BYTES_MAX):
            return chosen, offset
        chosen.append(
            PulledMessage(
                unpack_id(record.message_id),
                record.payload,
                queue.place.queue_id,
                offset,
                record.stored_at_ms,
                record.deliver_at_ms,
                facts_of(names, record),
            )
        )
    return chosen, rows[-1][0] + 1
