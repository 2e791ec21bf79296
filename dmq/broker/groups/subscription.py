"""One group's view of one topic: its queues, its retries, who waits for a message."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakValueDictionary

from dmq.broker.groups.group_queue import GroupQueue
from dmq.broker.groups.message_groups import MessageOrder, Remembered
from dmq.broker.topics.registry import Topic
from dmq.store.schema.record import QueuedMessage
from dmq.store.writer.operations import Emit, Op
from dmq.trail.events import LANE, EventKind, encode_event


class QueueEnd:
    """The end of one queue, which all groups that read the queue share."""

    __slots__ = ("__weakref__", "is_recent_read", "offset", "recheck_at")

    def __init__(self) -> None:
        self.offset = 0  # after the last message that is durable
        self.is_recent_read = False  # a group is near the end
        self.recheck_at = 0  # from this offset on it is to be found out again


class Readers:
    """State that subscriptions share, so that a new message costs the same whatever the number of groups."""

    def __init__(self) -> None:
        self._ends: WeakValueDictionary[tuple[int, int], QueueEnd] = WeakValueDictionary()
        self._waiting: dict[int, dict[Subscription, None]] = {}  # with a receive that waits, by topic

    def end_of(self, topic_id: int, queue_id: int) -> QueueEnd:
        """Return the end of a queue for one more reader."""
        end = self._ends.get((topic_id, queue_id))
        if end is None:
            end = self._ends[topic_id, queue_id] = QueueEnd()
        return end

    def known_end(self, place: tuple[int, int]) -> QueueEnd | None:
        """Return the end of a queue that has readers."""
        return self._ends.get(place)

    def waiting(self, topic_id: int) -> list[Subscription]:
        """Return the subscriptions to a topic that have a receive that waits."""
        return list(self._waiting.get(topic_id, ()))

    def waits(self, found: Subscription) -> None:
        """Note that a subscription has a receive that waits."""
        self._waiting.setdefault(found.topic.topic_id, {})[found] = None

    def waits_no_more(self, found: Subscription) -> None:
        """Note that a subscription has none."""
        waiting = self._waiting.get(found.topic.topic_id, {})
        waiting.pop(found, None)
        if not waiting:
            self._waiting.pop(found.topic.topic_id, None)


class SubscribedQueue(GroupQueue):
    """A group's progress on a queue of its subscription."""

    def __init__(self, subscription: Subscription, topic_id: int, queue_id: int) -> None:
        self._shared_end = subscription.readers.end_of(topic_id, queue_id)
        super().__init__(subscription.group_id, topic_id, queue_id)
        self.subscription = subscription
        self.order = MessageOrder(subscription.remembered)
        # Due times of the messages that this run read: where the last two looks began, and the latest.
        self.looks_from_ms = (0, 0)
        self.due_ms = 0
        self.is_head_read = False  # whether ``due_ms`` is next to the due time of the message that comes next

    def look_at_again(self) -> None:
        """Have it found out with the next message whether a group is near the end: this one may be."""
        self._shared_end.recheck_at = 0

    @property
    def end(self) -> int:
        """The offset after the last message: as it was read when the group began here, or as appended since."""
        own, shared = self._own_end, self._shared_end.offset
        return shared if shared > own else own  # noqa: FURB136 - of every receive

    @end.setter
    def end(self, offset: int) -> None:
        self._own_end = offset


class Subscription:
    """State of (group, topic); belongs to the event loop.

    ``lane`` is where what the group failed of this topic becomes visible again, once there is such a thing. Receives of
    queue 0 look there too: clients of a FIFO group ask for one queue each. Of a topic whose queues are not the group's
    to read (``Names.reads``) it has the lane alone.
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
        """``remembered`` counts what all subscriptions remember; ``readers`` is shared by all of them."""
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
            False  # its topic or group was removed, or its progress set anew: see ``Subscriptions.successor``
        )
        self.reset_epoch = 0  # of the last hand-out before it was set back or forth
        self._turn = 0
        self._stalled: set[SubscribedQueue] = set()  # whose last look had nothing but messages that came back
        self._waits = 0  # so far
        # By the queue that they wait for (-1: any), in their order: when each came, and what wakes it.
        self._waiters: dict[int, dict[int, asyncio.Future[bool]]] = {}

    @property
    def all_queues(self) -> list[SubscribedQueue]:
        """The topic's queues, and the lane."""
        return self.queues if self.lane is None else [*self.queues, self.lane]

    @property
    def in_hand(self) -> int:
        """How many messages are handed out and not finished."""
        return sum(len(queue.leases) for queue in self.all_queues)

    def attach(self, lane_id: int) -> SubscribedQueue:
        """Take in the lane. Of a message group that lies there and in a queue, one message goes out at a time."""
        self.lane = lane = SubscribedQueue(self, lane_id, 0)
        self._keep_apart(lane)
        return lane

    def _keep_apart(self, lane: SubscribedQueue) -> None:
        lane.beside = self.queues
        for queue in self.queues:
            queue.beside = (lane,)

    def queue_at(self, topic_id: int, queue_id: int) -> SubscribedQueue | None:
        """Return the queue of a handle or of a message that arrived."""
        if self.lane is not None and topic_id == self.lane.topic_id:
            return self.lane
        return self.queues[queue_id] if topic_id == self.topic.topic_id and queue_id < len(self.queues) else None

    def number_of(self, queue: GroupQueue) -> int:
        """Return the queue's number as audit events name it."""
        return LANE if queue is self.lane else queue.queue_id

    def event(self, kind: EventKind, queue: GroupQueue, attempt: int, time_ms: int, message_id: bytes) -> bytes:
        """Encode what the group did with a message of one of its queues."""
        number = self.number_of(queue)
        return encode_event(kind, self.topic.topic_id, self.group_id, number, attempt, time_ms, message_id)

    def passed_over(self, queue: GroupQueue, offsets: Sequence[int], records: Sequence[QueuedMessage]) -> list[Op]:
        """Return the ops that finish messages that the group is not to get."""
        ops: list[Op] = []
        for offset, record in zip(offsets, records, strict=True):
            ops.append(Emit(self.event(EventKind.FILTERED, queue, 0, offset, record.message_id), offset))
        return [*ops, *queue.finish(offsets)]

    def release_after(self, done: asyncio.Future[Any], places: Iterable[tuple[SubscribedQueue, int]]) -> None:
        """Let go of finished offsets once that is durable, and wake who can use what that sets free; never, if not."""

        def settle(written: asyncio.Future[Any]) -> None:
            if written.cancelled() or written.exception() is not None:
                return
            for queue, offset in places:
                queue.release(offset)
            self.wake_next()  # the bound of leases, or a message group, may have kept messages back

        done.add_done_callback(settle)

    def choose(self, available: Sequence[SubscribedQueue], limit: int) -> Sequence[tuple[SubscribedQueue, int]]:
        """Return from which of the available queues a receive takes how many messages.

        The queue that is furthest behind, by the due times of the messages that were read, comes first, and the others
        have equal shares. A queue whose last two looks began later than that has none. So at most two batches of
        younger messages of each other queue come before a message.
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
        """Return the queues whose next message has to be read before a receive can choose between the queues."""
        if len(available) < 2 or all(each.is_head_read for each in available):
            return ()
        if sum(each.available_max for each in available) <= limit:
            return ()
        return [each for each in available if not each.is_head_read]

    def was_read(self, queue: SubscribedQueue, first: QueuedMessage, last: QueuedMessage) -> None:
        """Note the first and the last message that a look read in a queue."""
        first_ms, last_ms = due_of(first), due_of(last)
        queue.is_head_read = queue.cursor < queue.end
        if last_ms > queue.due_ms:
            queue.looks_from_ms = queue.looks_from_ms[1], max(first_ms, queue.due_ms)
            queue.due_ms = last_ms
            self._stalled.clear()
        else:  # what comes back at once, again and again, must not keep a receive from the other queues
            self._stalled.add(queue)

    def available(self, queue_id: int = -1) -> Sequence[SubscribedQueue]:
        """Return the queues that have a message for a receive; the lane comes first where both lie in one."""
        queues = self.all_queues if queue_id < 0 else self._wanted(queue_id)
        return [queue for queue in queues if queue.has_available()]

    def has_available(self, queue_id: int = -1) -> bool:
        """Say whether a receive would find something."""
        queues = self.all_queues if queue_id < 0 else self._wanted(queue_id)
        return any(queue.has_available() for queue in queues)

    def _wanted(self, queue_id: int) -> list[SubscribedQueue]:
        if queue_id == 0 and self.lane is not None:
            return [self.lane, self.queues[0]]
        return [self.queues[queue_id]]

    async def wait(self, queue_id: int, timeout_s: float) -> None:
        """Return when something may have become available in ``queue_id`` (-1: any queue), or time is up."""
        if self.is_retired:
            return
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[bool] = loop.create_future()  # whether by an arrival
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
                self.wake_next()  # this wake-up was meant for somebody who can use it
            raise
        finally:
            up.cancel()
            if not is_taken:
                self._forget(queue_id, number)

    def wake(self, queue_id: int) -> bool:
        """Wake the receive that has waited longest for ``queue_id`` or for any queue; say whether there was one.

        The lane's number is 0, as that of the queue whose receives look there. One is enough: whoever takes something
        and leaves something wakes the next (``wake_next``).
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
        """Return who waits longest for ``wanted``: when it came, and ``wanted``."""
        while waiting := self._waiters.get(wanted):
            number = next(iter(waiting))
            if not waiting[number].done():
                return number, wanted
            self._forget(wanted, number)  # its time is up, or it was called off
        return None

    def _forget(self, wanted: int, number: int) -> None:
        waiting = self._waiters.get(wanted, {})
        waiting.pop(number, None)
        if not waiting:
            self._waiters.pop(wanted, None)
            if not self._waiters:
                self.readers.waits_no_more(self)

    def grow(self, topic: Topic) -> None:
        """Take in the queues that were added to the topic, and whatever else of it was changed."""
        self.topic = topic
        self._take_in(topic.queues)
        if self.lane is not None:
            self._keep_apart(self.lane)

    def _take_in(self, queues: int) -> None:
        if self.has_queues:
            self.queues += [SubscribedQueue(self, self.topic.topic_id, n) for n in range(len(self.queues), queues)]

    def retire(self) -> None:
        """Stop handing out and void all leases; receives that wait are woken, and end."""
        self.is_retired = True
        for queue in self.all_queues:
            queue.leases.clear()
        for waiting in self._waiters.values():
            for woken in waiting.values():
                _time_is_up(woken)

    def wake_next(self) -> None:
        """Wake one receive that can use what is available, if there is one."""
        if self._waiters:
            any(queue.has_available() and self.wake(queue.queue_id) for queue in self.all_queues)

    @property
    def waiting(self) -> int:
        """How many receives wait."""
        return sum(map(len, self._waiters.values()))


def _time_is_up(woken: asyncio.Future[bool]) -> None:
    if not woken.done():
        woken.set_result(False)


def _due_ms(queue: SubscribedQueue) -> int:
    return queue.due_ms


def due_of(record: QueuedMessage) -> int:
    """Return when a message was due: its delivery time, or when it reached its queue."""
    return record.deliver_at_ms or record.stored_at_ms
