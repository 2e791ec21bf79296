"""Subscription: the state of one group on one topic, with its queues, its retry lane and its waiting receives."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakValueDictionary

from dmq.broker.groups.group_queue import GroupQueue
from dmq.broker.groups.message_groups import MessageOrder, Remembered
from dmq.broker.topics import Topic
from dmq.store.schema.messages.record import QueuedMessage
from dmq.store.writer.operations import Emit, Op
from dmq.trail.events import LANE, EventKind, encode_event


class QueueEnd:
    """End of one queue, shared by all groups that read it."""

    __slots__ = ("__weakref__", "is_recent_read", "offset", "recheck_at")

    def __init__(self) -> None:
        self.offset = 0  # after the last durable message
        self.is_recent_read = False  # a group reads near the end
        self.recheck_at = 0  # offset at which ``is_recent_read`` is determined again


class Readers:
    """State shared by all subscriptions, so that the cost of a new message does not depend on the number of groups."""

    def __init__(self) -> None:
        self._ends: WeakValueDictionary[tuple[int, int], QueueEnd] = WeakValueDictionary()
        self._waiting: dict[int, dict[GroupSubscription, None]] = {}  # subscriptions with waiting receives, by topic

    def end_of(self, topic_id: int, queue_id: int) -> QueueEnd:
        """Return the shared end of a queue for one more reader."""
        end = self._ends.get((topic_id, queue_id))
        if end is None:
            end = self._ends[topic_id, queue_id] = QueueEnd()
        return end

    def known_end(self, place: tuple[int, int]) -> QueueEnd | None:
        """Return the shared end of a queue, or None if it has no readers."""
        return self._ends.get(place)

    def waiting(self, topic_id: int) -> list[GroupSubscription]:
        """Return the subscriptions to a topic that have waiting receives."""
        return list(self._waiting.get(topic_id, ()))

    def waits(self, found: GroupSubscription) -> None:
        """Record that a subscription has a waiting receive."""
        self._waiting.setdefault(found.topic.topic_id, {})[found] = None

    def waits_no_more(self, found: GroupSubscription) -> None:
        """Record that a subscription has no waiting receive."""
        waiting = self._waiting.get(found.topic.topic_id, {})
        waiting.pop(found, None)
        if not waiting:
            self._waiting.pop(found.topic.topic_id, None)


class SubscribedQueue(GroupQueue):
    """Progress of a group on one queue of its subscription."""

    def __init__(self, subscription: GroupSubscription, topic_id: int, queue_id: int) -> None:
        self._shared_end = subscription.readers.end_of(topic_id, queue_id)
        super().__init__(subscription.group_id, topic_id, queue_id)
        self.subscription = subscription
        self.order = MessageOrder(subscription.remembered)
        # Due times of messages read in this run: the starts of the last two scans, and the latest.
        self.looks_from_ms = (0, 0)
        self.due_ms = 0
        self.is_head_read = False  # whether ``due_ms`` approximates the due time of the next message

    def look_at_again(self) -> None:
        """Make the next message determine again whether a group reads near the end: this one may."""
        self._shared_end.recheck_at = 0

    @property
    def end(self) -> int:
        """Offset after the last message: the end read when the group was loaded, or after later appends if higher."""
        own, shared = self._own_end, self._shared_end.offset
        return shared if shared > own else own  # noqa: FURB136 - of every receive

    @end.setter
    def end(self, offset: int) -> None:
        self._own_end = offset


class GroupSubscription:
    """State of (group, topic). It belongs to the event loop.

    ``lane`` is the retry lane, where failed messages of this topic become visible to the group again; None until the
    first retry. Receives of queue 0 also read the lane, because clients of a FIFO group request one queue each. If the
    group may not read the topic's queues (``Names.reads``), the subscription has only the lane.
    """

    def __init__(
        self,
        group_id: int,
        topic: Topic,
        *,
        has_queues: bool = True,
        remembered: Remembered | None = None,
        readers: Readers | None = None,
    ) -> None:
        """Create an unloaded subscription; all subscriptions share ``remembered`` and ``readers``."""
        self.remembered = remembered or Remembered()
        self.readers = readers or Readers()
        self.group_id = group_id
        self.topic = topic
        self.has_queues = has_queues
        self.queues: list[SubscribedQueue] = []
        self._take_in(topic.queues)
        self.lane: SubscribedQueue | None = None
        self.is_loaded = asyncio.Event()
        self.is_retired = (
            False  # its topic or group was removed, or its progress reset: see ``Subscriptions.successor``
        )
        self.reset_epoch = 0  # epoch of the last delivery before the group was reset
        self._turn = 0
        self._stalled: set[SubscribedQueue] = set()  # queues with only returned messages in their last scan
        self._waits = 0  # number of the last wait
        # By requested queue (-1: any), in order of arrival: wait number to the future that wakes the receive.
        self._waiters: dict[int, dict[int, asyncio.Future[bool]]] = {}

    @property
    def all_queues(self) -> list[SubscribedQueue]:
        """The topic's queues, and the lane."""
        return self.queues if self.lane is None else [*self.queues, self.lane]

    @property
    def in_hand(self) -> int:
        """Number of messages that are leased and not finished."""
        return sum(len(queue.leases) for queue in self.all_queues)

    def attach(self, lane_id: int) -> SubscribedQueue:
        """Attach the retry lane.

        Of a message group with messages in the lane and in a queue, only one of the two delivers at a time.
        """
        self.lane = lane = SubscribedQueue(self, lane_id, 0)
        self._keep_apart(lane)
        return lane

    def _keep_apart(self, lane: SubscribedQueue) -> None:
        lane.beside = self.queues
        for queue in self.queues:
            queue.beside = (lane,)

    def queue_at(self, topic_id: int, queue_id: int) -> SubscribedQueue | None:
        """Return the queue of a receipt handle or an append, or None if the subscription does not have it."""
        if self.lane is not None and topic_id == self.lane.topic_id:
            return self.lane
        return self.queues[queue_id] if topic_id == self.topic.topic_id and queue_id < len(self.queues) else None

    def number_of(self, queue: GroupQueue) -> int:
        """Return the queue number used in audit events."""
        return LANE if queue is self.lane else queue.queue_id

    def event(self, kind: EventKind, queue: GroupQueue, attempt: int, time_ms: int, message_id: bytes) -> bytes:
        """Encode an audit event of the group for a message of one of its queues."""
        number = self.number_of(queue)
        return encode_event(kind, self.topic.topic_id, self.group_id, number, attempt, time_ms, message_id)

    def passed_over(self, queue: GroupQueue, offsets: Sequence[int], records: Sequence[QueuedMessage]) -> list[Op]:
        """Return the ops that finish messages without a delivery to the group."""
        ops: list[Op] = []
        for offset, record in zip(offsets, records, strict=True):
            ops.append(Emit(self.event(EventKind.FILTERED, queue, 0, offset, record.message_id), offset))
        return [*ops, *queue.finish(offsets)]

    def release_after(self, done: asyncio.Future[Any], places: Iterable[tuple[SubscribedQueue, int]]) -> None:
        """Release finished offsets once ``done`` is durable, and wake a receive that can use released messages.

        If ``done`` fails, nothing is released.
        """

        def settle(written: asyncio.Future[Any]) -> None:
            if written.cancelled() or written.exception() is not None:
                return
            for queue, offset in places:
                queue.release(offset)
            self.wake_next()  # the lease limit, or a message group, may have blocked messages

        done.add_done_callback(settle)

    def choose(self, available: Sequence[SubscribedQueue], limit: int) -> Sequence[tuple[SubscribedQueue, int]]:
        """Return the number of messages that a receive reads from each available queue.

        The queue with the largest lag, by the due times of the messages read, comes first; the others get equal shares.
        A queue gets no share if its last two scans began later than that due time. So at most two batches of younger
        messages from each other queue precede a message.
        """
        if len(available) < 2:
            return [(each, limit) for each in available]
        self._turn += 1
        share, turn = max(1, limit // len(available)), self._turn % len(available)
        queues = [*available[turn:], *available[:turn]]
        if self._stalled:
            queues = [each for each in queues if each not in self._stalled] or queues
            if len(queues) == len(available):
                self._stalled.clear()
        queues.sort(key=_due_ms)
        first = queues[0]
        others = [each for each in queues[1:] if each.looks_from_ms[0] <= first.due_ms][: (limit - 1) // share]
        return [(first, limit - share * len(others)), *((each, share) for each in others)]

    @staticmethod
    def without_head(available: Sequence[SubscribedQueue], limit: int) -> Sequence[SubscribedQueue]:
        """Return the queues to read one message from before a receive can choose between queues."""
        if len(available) < 2 or all(each.is_head_read for each in available):
            return ()
        if sum(each.available_max for each in available) <= limit:
            return ()
        return [each for each in available if not each.is_head_read]

    def was_read(self, queue: SubscribedQueue, first: QueuedMessage, last: QueuedMessage) -> None:
        """Record the first and the last message that a scan read from a queue."""
        first_ms, last_ms = due_of(first), due_of(last)
        queue.is_head_read = queue.cursor < queue.end
        if last_ms > queue.due_ms:
            queue.looks_from_ms = queue.looks_from_ms[1], max(first_ms, queue.due_ms)
            queue.due_ms = last_ms
            self._stalled.clear()
        else:  # repeated immediate redeliveries must not keep a receive from the other queues
            self._stalled.add(queue)

    def available(self, queue_id: int = -1) -> Sequence[SubscribedQueue]:
        """Return the queues with a message for a receive of ``queue_id`` (-1: any queue).

        If ``queue_id`` is 0, the lane comes before the queue.
        """
        queues = self.all_queues if queue_id < 0 else self._wanted(queue_id)
        return [queue for queue in queues if queue.has_available()]

    def has_available(self, queue_id: int = -1) -> bool:
        """Return True if a receive of ``queue_id`` would find a message."""
        queues = self.all_queues if queue_id < 0 else self._wanted(queue_id)
        return any(queue.has_available() for queue in queues)

    def _wanted(self, queue_id: int) -> list[SubscribedQueue]:
        if queue_id == 0 and self.lane is not None:
            return [self.lane, self.queues[0]]
        return [self.queues[queue_id]]

    async def wait(self, queue_id: int, timeout_s: float) -> None:
        """Return when a message may be available in ``queue_id`` (-1: any queue), or after ``timeout_s`` seconds."""
        if self.is_retired:
            return
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[bool] = loop.create_future()  # True: by an arrival
        self._waits += 1
        number = self._waits
        self._waiters.setdefault(queue_id, {})[number] = woken
        self.readers.waits(self)
        up = loop.call_later(timeout_s, _time_is_up, woken)
        is_taken = False
        try:
            is_taken = await woken
        except asyncio.CancelledError:
            is_taken = not woken.cancelled() and woken.result()
            if is_taken:
                self.wake_next()  # pass the wake-up on to a receive that can use it
            raise
        finally:
            up.cancel()
            if not is_taken:
                self._forget(queue_id, number)

    def wake(self, queue_id: int) -> bool:
        """Wake the receive that has waited longest for ``queue_id`` or for any queue; return False if there is none.

        The lane has number 0, because receives of queue 0 read it. One wake-up is enough: a receive that leaves
        messages wakes the next one (``wake_next``).
        """
        first = min(filter(None, (self._first(-1), self._first(queue_id))), default=None)
        if first is None:
            return False
        number, wanted = first
        woken = self._waiters[wanted][number]
        self._forget(wanted, number)
        woken.set_result(True)
        return True

    def _first(self, wanted: int) -> tuple[int, int] | None:
        """Return the number of the longest-waiting receive for ``wanted``, with ``wanted`` itself; None if there is
        none.
        """
        while waiting := self._waiters.get(wanted):
            number = next(iter(waiting))
            if not waiting[number].done():
                return number, wanted
            self._forget(wanted, number)  # timed out or cancelled
        return None

    def _forget(self, wanted: int, number: int) -> None:
        waiting = self._waiters.get(wanted, {})
        waiting.pop(number, None)
        if not waiting:
            self._waiters.pop(wanted, None)
            if not self._waiters:
                self.readers.waits_no_more(self)

    def grow(self, topic: Topic) -> None:
        """Apply a changed topic: new settings and added queues."""
        self.topic = topic
        self._take_in(topic.queues)
        if self.lane is not None:
            self._keep_apart(self.lane)

    def _take_in(self, queues: int) -> None:
        if self.has_queues:
            self.queues += [SubscribedQueue(self, self.topic.topic_id, n) for n in range(len(self.queues), queues)]

    def retire(self) -> None:
        """Stop deliveries and void all leases; waiting receives wake up and end."""
        self.is_retired = True
        for queue in self.all_queues:
            queue.leases.clear()
        for waiting in self._waiters.values():
            for woken in waiting.values():
                _time_is_up(woken)

    def wake_next(self) -> None:
        """Wake one waiting receive that can use an available message, if there is one."""
        if self._waiters:
            any(queue.has_available() and self.wake(queue.queue_id) for queue in self.all_queues)

    @property
    def waiting(self) -> int:
        """Number of waiting receives."""
        return sum(map(len, self._waiters.values()))


def _time_is_up(woken: asyncio.Future[bool]) -> None:
    if not woken.done():
        woken.set_result(False)


def _due_ms(queue: SubscribedQueue) -> int:
    return queue.due_ms


def due_of(record: QueuedMessage) -> int:
    """Return the due time of a message: its delivery time, or its store time if it has none."""
    return record.deliver_at_ms or record.stored_at_ms
