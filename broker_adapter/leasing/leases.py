"""Pulled messages of a group's member: waiting messages, leases, and their outcomes.

A failed delivery is sent back to the broker of the message. It is retried through ``%RETRY%<group>`` with one more
attempt, at any consumer of the group, or moved to ``%DLQ%<group>``. So this process keeps no durable state, and no
failure blocks its queue. Messages of a message group stay here instead, and block their successors in that group.

Leases are in memory. After a crash of this process, leased messages are redelivered, and so are acknowledged ones
after an unfinished message.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict, deque
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from broker_adapter.contracts.classic import ReceivedMessage
from broker_adapter.contracts.errors import BrokerError, BrokerUnavailable, Refused, Rule
from broker_adapter.contracts.limits import AUTO_RENEW_INVISIBLE_MS, AUTO_RENEW_MS_MAX, DELAY_LEVELS_MS
from broker_adapter.contracts.message_queue import MessageQueue
from broker_adapter.contracts.topics import RETRY_PREFIX
from broker_adapter.leasing.handles import LeaseHandle
from broker_adapter.queue_client.consumer import Busy, OwnedQueue, Work
from broker_adapter.runtime.clock import Clock
from broker_adapter.runtime.lease_timers import LeaseTimers
from broker_adapter.runtime.live_clients import LiveClients
from broker_adapter.runtime.log import LibraryLog

ATTEMPTS_MAX = 17  # deliveries, including the first: RocketMQ's default for a group
_CLIENT_GONE_MS = 1_000  # until the leases of a client that left end
_FIRST_RETRY_LEVEL = 3  # 10 s; RocketMQ 5.5
_SOON_LEVEL = 1
_UNWANTED_MS = 15 * 60_000  # a retry of a topic without receivers would fill the window: postpone it
_UNWANTED_LEVEL = 16  # by half an hour
_TOLD_MS = 60_000
_TIDY_AT_MIN = 1_024
_FINISHED_MAX = 4_096  # remembered handles, so that repeated acknowledgements succeed

_log = LibraryLog("broker_adapter.leasing")


class Wanted(NamedTuple):
    """Parameters of a receive. Empty ``tags``: all tags."""

    topic: str
    tags: frozenset[str]
    batch_max: int
    invisible_ms: int
    renew_for: str


class HeldDelivery:
    """Pulled and unfinished message: waiting, leased, or on its way back to its broker."""

    __slots__ = (
        "arrived_ms",
        "ends_ms",
        "failed",
        "handle",
        "is_leased",
        "is_leaving",
        "keeps_attempt",
        "owned",
        "received",
        "renew_for",
        "renew_until_ms",
    )

    def __init__(self, owned: OwnedQueue, received: ReceivedMessage, now_ms: int) -> None:
        self.owned = owned
        self.received = received
        self.arrived_ms = now_ms
        self.failed = received.attempts_failed
        self.handle: LeaseHandle | None = None  # of its last delivery
        self.is_leased = False
        self.is_leaving = False  # calls of clients for it are refused
        self.keeps_attempt = False  # hidden at its consumer's request: expiry is no failure
        self.ends_ms = 0
        self.renew_for = ""
        self.renew_until_ms = 0

    @property
    def is_waiting(self) -> bool:
        """True if the message may be delivered."""
        return not (self.is_leased or self.is_leaving or self.owned.is_leaving)

    @property
    def topic(self) -> str:
        """Topic from which the message is received: the original topic, also for a retry."""
        lies_in = self.owned.queue.topic
        return self.received.message.topic if lies_in.startswith(RETRY_PREFIX) else lies_in

    @property
    def order(self) -> tuple[MessageQueue, str] | None:
        """Ordering key (queue and message group); ``None`` if the message is unordered."""
        group = self.received.message.message_group
        return (self.received.queue, group) if group else None


class MemberLeases:
    """``Service`` that leases the pulled messages of one member of a group. Belongs to one event loop."""

    def __init__(self, work: Work, clock: Clock, clients: LiveClients, run: str, numbers: Iterator[int]) -> None:
        self.busy = Busy()  # always idle: shutdown does not wait for leases
        self.leased = 0
        self._for = work
        self._clock = clock
        self._clients = clients
        self._run = run
        self._numbers = numbers
        self._owned: dict[MessageQueue, OwnedQueue] = {}
        self._held: dict[MessageQueue, dict[int, HeldDelivery]] = {}
        self._waiting: defaultdict[str, deque[HeldDelivery]] = defaultdict(deque)  # by topic
        self._behind: dict[
            tuple[MessageQueue, str], deque[HeldDelivery]
        ] = {}  # messages blocked by one of their ordering key
        self._renewed: dict[str, dict[HeldDelivery, None]] = {}  # by client; some may be released by now
        self._timers = LeaseTimers[HeldDelivery](
            *(clock, clients, _is_due_at), renewed_ms=AUTO_RENEW_INVISIBLE_MS, tidy_at_min=_TIDY_AT_MIN
        )
        self._receives: defaultdict[str, dict[asyncio.Future[None], None]] = defaultdict(dict)  # pending ones, by topic
        self._asked_ms: dict[str, int] = {}  # time of the last receive of a topic
        self._finished: OrderedDict[LeaseHandle, None] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    # -- service ------------------------------------------------------------------------------------------------------

    def took_up(self, owned: OwnedQueue) -> None:
        self._forget(owned.queue)
        self._owned[owned.queue] = owned
        self._held[owned.queue] = {}

    def arrived(self, owned: OwnedQueue, count: int, /) -> None:
        assert owned.window is not None
        for received in owned.window.take(count, self._for.now_ms()):
            held = HeldDelivery(owned, received, self._clock.boot_ms())
            self._held[owned.queue][received.queue_offset] = held
            if held.order is None:
                self._wait(held)
            elif held.order in self._behind:
                self._behind[held.order].append(held)
            else:
                self._behind[held.order] = deque()
                self._wait(held)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for waiting in self._receives.values():
            for each in waiting:
                each.cancel()

    # -- receiving ----------------------------------------------------------------------------------------------------

    async def receive(self, wanted: Wanted, wait_ms: int) -> Sequence[HeldDelivery]:
        """Lease up to ``batch_max`` messages, waiting for the first one; empty if there is none."""
        self._asked_ms[wanted.topic] = self._clock.boot_ms()
        try:
            async with asyncio.timeout(wait_ms / 1000):
                while not (found := self._hand_out(wanted)):
                    await self._arrival(wanted.topic)
        except TimeoutError:
            return ()
        finally:
            self._asked_ms[wanted.topic] = self._clock.boot_ms()
        return found

    def idle_ms(self) -> int:
        """Return the milliseconds since the last receive; 0 while a message is leased or a receive is pending."""
        now_ms = self._clock.boot_ms()
        if self.leased or any(self._receives.values()):
            return 0
        return now_ms - max(self._asked_ms.values(), default=now_ms)

    async def _arrival(self, topic: str) -> None:
        arrival: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._receives[topic]
        waiting[arrival] = None
        try:
            await arrival
        except asyncio.CancelledError:
            if arrival.done() and not arrival.cancelled():
                self._tell(topic)  # this receive is cancelled: notify another one
            raise
        finally:
            waiting.pop(arrival, None)

    def _tell(self, topic: str) -> None:
        waiting = self._receives.get(topic)
        if waiting:
            arrival = next(iter(waiting))
            del waiting[arrival]
            if not arrival.done():
                arrival.set_result(None)

    def _wait(self, held: HeldDelivery, *, first: bool = False) -> None:
        """Make a message available to receivers, or bury a message that no consumer can receive."""
        if held.received.unreadable or held.failed >= ATTEMPTS_MAX:
            self._end(held, self._buried(held))
            return
        waiting = self._waiting[held.topic]
        if first:
            waiting.appendleft(held)
        else:
            waiting.append(held)
        self._tell(held.topic)

    def _hand_out(self, wanted: Wanted) -> list[HeldDelivery]:
        waiting, found = self._waiting[wanted.topic], list[HeldDelivery]()
        while waiting and len(found) < wanted.batch_max:
            held = waiting.popleft()
            if not held.is_waiting:
                continue
            if wanted.tags and held.received.message.tag not in wanted.tags:
                self._finish(held)
            else:
                self._lease(held, wanted)
                found.append(held)
        if waiting:
            self._tell(wanted.topic)
        return found

    def _lease(self, held: HeldDelivery, wanted: Wanted) -> None:
        now_ms = self._clock.boot_ms()
        held.handle = self._new_handle(held)
        self._renew_for(held, wanted.renew_for)
        held.renew_until_ms = now_ms + AUTO_RENEW_MS_MAX
        if wanted.renew_for and not self._clients.is_alive(wanted.renew_for):
            self._clients.seen(wanted.renew_for)
        self._hide(held, AUTO_RENEW_INVISIBLE_MS if wanted.renew_for else wanted.invisible_ms, keeps_attempt=False)

    def _renew_for(self, held: HeldDelivery, client_id: str) -> None:
        """Renew a lease while a client is alive; an empty id ends the renewal."""
        if held.renew_for:
            own = self._renewed[held.renew_for]
            del own[held]
            if not own:
                del self._renewed[held.renew_for]
        held.renew_for = client_id
        if client_id:
            self._renewed.setdefault(client_id, {})[held] = None

    def _new_handle(self, held: HeldDelivery) -> LeaseHandle:
        return LeaseHandle(held.received.queue, held.received.queue_offset, self._run, next(self._numbers))

    def _hide(self, held: HeldDelivery, hidden_ms: int, *, keeps_attempt: bool) -> None:
        self.leased += not held.is_leased
        held.is_leased = True
        held.keeps_attempt = keeps_attempt
        held.ends_ms = self._clock.boot_ms() + hidden_ms
        self._timers.start(held.ends_ms, held)

    def _release(self, held: HeldDelivery, *, failed: bool) -> None:
        """Make a message available again, before all others."""
        self.leased -= held.is_leased
        held.is_leased = False
        held.failed += failed
        self._wait(held, first=True)

    # -- outcomes -----------------------------------------------------------------------------------------------------

    def ack(self, handle: LeaseHandle) -> None:
        """Finish a delivery. ``Refused(RECEIPT_HANDLE)``."""
        if handle in self._finished:
            return
        self._finish(self._of(handle))
        self._finished[handle] = None
        if len(self._finished) > _FINISHED_MAX:
            self._finished.popitem(last=False)

    async def change_invisible(self, handle: LeaseHandle, invisible_ms: int, *, suspend: bool) -> None:
        """Hide a delivery for a duration from now; for a renewed one, without ``suspend``, report its failure."""
        held = self._of(handle)
        if held.renew_for and not suspend:
            await self._fail(held, invisible_ms)
        elif invisible_ms:
            self._renew_for(held, "")
            self._hide(held, invisible_ms, keeps_attempt=suspend)
        else:
            self._release(held, failed=not suspend)

    async def bury(self, handle: LeaseHandle) -> None:
        """Move a delivery to the dead letters. ``BrokerUnavailable``: nothing has changed, as far as is known."""
        await self._send_back_for_client(self._of(handle), -1)

    def client_gone(self, client_id: str) -> None:
        """Make the leases of a client that left expire in a second."""
        for held in list(self._renewed.get(client_id, ())):
            if held.is_leased:
                self._renew_for(held, "")
                self._hide(held, _CLIENT_GONE_MS, keeps_attempt=False)

    def end_due(self) -> None:
        """End expired leases, and drop messages of queues that moved to other members."""
        now_ms = self._clock.boot_ms()
        while (expired := self._timers.pop(now_ms)) is not None:
            ends_ms, held = expired
            if held.is_leaving or not _is_due_at(ends_ms, held):
                continue  # finished, delivered again, or hidden again
            if self._timers.renew(held, now_ms):
                held.keeps_attempt = False
                self._timers.start(held.ends_ms, held)
            elif held.keeps_attempt or held.order is not None:
                self._release(held, failed=not held.keeps_attempt)
            else:
                self._end(held, self._expired(held))
        for queue, owned in list(self._owned.items()):
            if owned.is_dropped:
                self._forget(queue)

    def look_at_unwanted(self) -> None:
        """Log topics without receivers, and postpone their retries without counting an attempt."""
        now_ms = self._clock.boot_ms()
        for topic, waiting in self._waiting.items():
            unasked_ms = now_ms - self._asked_ms.get(topic, 0)
            count = sum(each.is_waiting for each in waiting)
            if count and unasked_ms >= _TOLD_MS:
                why = "this member owns queues without receives: all consumers of a group need the same topics"
                _log.warning("topic_not_received", group=self._for.group, topic=topic, waiting=count, why=why)
            for held in list(waiting) if unasked_ms >= _UNWANTED_MS else ():
                is_retry = held.owned.queue.topic.startswith(RETRY_PREFIX)
                if is_retry and held.is_waiting and now_ms - held.arrived_ms >= _UNWANTED_MS:
                    self._end(held, self._put_off(held))
        self._waiting = defaultdict(deque, {topic: waiting for topic, waiting in self._waiting.items() if waiting})

    async def _fail(self, held: HeldDelivery, at_least_ms: int) -> None:
        level = min(_FIRST_RETRY_LEVEL + held.failed, len(DELAY_LEVELS_MS))
        while level < len(DELAY_LEVELS_MS) and DELAY_LEVELS_MS[level - 1] < at_least_ms:
            level += 1
        if held.order is None:
            await self._send_back_for_client(held, level)
        elif held.failed + 1 >= ATTEMPTS_MAX:
            await self._send_back_for_client(held, -1)
        else:
            held.failed += 1
            held.handle = self._new_handle(held)  # a handle unknown to clients
            self._renew_for(held, "")
            self._hide(held, max(at_least_ms, DELAY_LEVELS_MS[level - 1]), keeps_attempt=True)

    async def _send_back(self, held: HeldDelivery, delay_level: int) -> None:
        held.is_leaving = True
        try:
            is_taken = await self._for.failures.send_back(held.received, delay_level)
        except BaseException:
            held.is_leaving = False
            raise
        held.is_leaving = is_taken
        if not is_taken:
            raise BrokerUnavailable(f"no broker accepts message {held.received.message.message_id} back now")
        self._finish(held)

    async def _send_back_for_client(self, held: HeldDelivery, delay_level: int) -> None:
        """As ``_send_back``; if it fails, the message stays leased or waiting."""
        try:
            await self._send_back(held, delay_level)
        except BaseException:
            if held.is_leased:
                if held.ends_ms <= self._clock.boot_ms():  # its timer may have expired meanwhile
                    self._timers.start(held.ends_ms, held)
            elif held not in self._waiting[held.topic]:  # a receive passed over it meanwhile
                self._wait(held, first=True)
            raise

    async def _expired(self, held: HeldDelivery) -> None:
        try:
            await self._send_back(held, _SOON_LEVEL)
        except Exception as error:  # noqa: BLE001 - the message must stay available
            self._tell_failure(held, error)
            self._release(held, failed=True)

    async def _buried(self, held: HeldDelivery) -> None:
        try:
            await self._send_back(held, -1)
        except Exception as error:  # noqa: BLE001 - as above
            self._tell_failure(held, error)
            self._hide(held, AUTO_RENEW_INVISIBLE_MS, keeps_attempt=True)  # retry after this

    def _tell_failure(self, held: HeldDelivery, error: Exception) -> None:
        if not isinstance(error, BrokerError):  # already logged
            message_id = held.received.message.message_id
            _log.error("send_back_failed", message_id=message_id, error=f"{type(error).__name__}: {error}")

    async def _put_off(self, held: HeldDelivery) -> None:
        unfailed = replace(held.received, attempts_failed=held.received.attempts_failed - 1)  # ``put`` adds one
        is_taken = False
        try:
            is_taken = await self._for.failures.put(unfailed, _UNWANTED_LEVEL)
        except Exception as error:  # noqa: BLE001 - as above
            self._tell_failure(held, error)
        if is_taken:
            _log.info("retry_postponed", group=self._for.group, topic=held.topic)
            self._finish(held)
        else:
            held.is_leaving = False
            held.arrived_ms = self._clock.boot_ms()
            self._wait(held)

    def _of(self, handle: LeaseHandle) -> HeldDelivery:
        """Return the message of a handle.

        A handle of an earlier run is valid until this run delivers its message.
        """
        held = self._held.get(handle.queue, {}).get(handle.offset)
        is_named = held is not None and (held.handle == handle if handle.run == self._run else held.handle is None)
        if held is None or not is_named or held.is_leaving or held.owned.is_leaving:
            why = "it is finished, was handed out again, or its queue went to another member of the group"
            raise Refused(Rule.RECEIPT_HANDLE, why, value=str(handle))
        return held

    def _finish(self, held: HeldDelivery) -> None:
        """Finish a message: the commit offset of its queue may advance."""
        self.leased -= held.is_leased
        held.is_leased, held.is_leaving = False, True
        self._renew_for(held, "")
        owned, offset = held.owned, held.received.queue_offset
        if self._held.get(owned.queue, {}).get(offset) is not held:
            return  # the queue moved to another member meanwhile
        del self._held[owned.queue][offset]
        assert owned.window is not None
        commit_offset = owned.window.remove([offset])
        owned.room.set()
        if commit_offset is not None:
            self._for.offsets.note(owned.queue, commit_offset)
        if held.order is not None:
            behind = self._behind[held.order]
            if behind:
                self._wait(behind.popleft())
            else:
                del self._behind[held.order]

    def _forget(self, queue: MessageQueue) -> None:
        """Drop the messages of a queue that moved to another member."""
        for held in self._held.pop(queue, {}).values():
            self.leased -= held.is_leased
            held.is_leased, held.is_leaving = False, True
            self._renew_for(held, "")
        self._owned.pop(queue, None)
        self._behind = {order: behind for order, behind in self._behind.items() if order[0] != queue}
        for topic, waiting in self._waiting.items():
            self._waiting[topic] = deque(held for held in waiting if not held.is_leaving)

    def _end(self, held: HeldDelivery, ending: Coroutine[object, object, None]) -> None:
        """Start a final step of a message: from now on, calls of clients for it are refused."""
        held.is_leaving = True
        task = asyncio.ensure_future(ending)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _is_due_at(ends_ms: int, held: HeldDelivery) -> bool:
    return held.is_leased and held.ends_ms == ends_ms
