"""Delivery of pulled messages to handlers: concurrent batches, or ordered batches of each queue."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

from broker_adapter.contracts.classic import ReceivedMessage
from broker_adapter.contracts.topics import RETRY_PREFIX
from broker_adapter.queue_client.balance import QueueLocks
from broker_adapter.queue_client.consumer.failures import ConsumerFailures
from broker_adapter.queue_client.consumer.offsets import Offsets
from broker_adapter.queue_client.consumer.options import ConsumerOptions
from broker_adapter.queue_client.consumer.outcome import Handler, Later, Outcome, Suspend
from broker_adapter.queue_client.consumer.owned import OwnedQueue
from broker_adapter.runtime.cancellation import is_cancelled_here
from broker_adapter.runtime.log import LibraryLog

_STUCK_LEVEL = 3  # delay level (10 s) of a message with a stuck handler; RocketMQ 5.5
_SUSPEND_MS = (10, 30_000)  # RocketMQ 5.5
_LOCK_LOOK_S = 0.1  # check interval of a queue without a lock; RocketMQ 5.5 (tryLockLaterAndReconsume)

_log = LibraryLog("broker_adapter.queue_client.consumer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Dependencies of a service on its consumer."""

    group: str
    options: ConsumerOptions
    offsets: Offsets
    failures: ConsumerFailures
    locks: QueueLocks | None  # in order; ``None`` for broadcasting: each client reads all queues
    now_ms: Callable[[], int]


class Busy:
    """Count of running handlers."""

    def __init__(self) -> None:
        self._count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __enter__(self) -> None:
        self._count += 1
        self._idle.clear()

    def __exit__(self, *_: object) -> None:
        self._count -= 1
        if not self._count:
            self._idle.set()

    async def over(self) -> None:
        """Wait until no handler is running."""
        await self._idle.wait()


class DeliveryService(Protocol):
    """Delivers the messages of assigned queues to handlers."""

    busy: Busy

    def took_up(self, owned: OwnedQueue) -> None:
        """Add a queue with a known start offset."""
        ...

    def arrived(self, owned: OwnedQueue, count: int, /) -> None:
        """Schedule ``count`` pulled messages for delivery."""
        ...

    def close(self) -> None:
        """Stop all deliveries."""
        ...


MakeService: TypeAlias = Callable[[Work], DeliveryService]


def by_handler(handler: Handler) -> MakeService:
    """Return a factory of services that call a handler with each batch."""
    return lambda work: InOrder(handler, work) if work.options.in_order else Concurrent(handler, work)


async def handled(handler: Handler, group: str, batch: Sequence[ReceivedMessage]) -> Outcome:
    """Call a handler and return its result; an exception counts as a failure of the whole batch."""
    try:
        if inspect.iscoroutinefunction(handler):
            outcome = await handler(batch)
        else:
            outcome = await asyncio.to_thread(handler, batch)
            if inspect.isawaitable(outcome):
                outcome = await outcome
    except (Exception, asyncio.CancelledError) as error:  # raised by the application's handler
        if isinstance(error, asyncio.CancelledError) and is_cancelled_here():
            raise
        first = batch[0]
        _log.warning(
            "handler_failed",
            group=group,
            topic=first.message.topic,
            message_id=first.message.message_id,
            attempts_failed=first.attempts_failed,
            error=f"{type(error).__name__}: {error}",
        )
        return Later(error=error)
    if outcome is not None and not isinstance(outcome, Later | Suspend):
        _log.error("handler_result_invalid", group=group, answer=repr(outcome)[:80], allowed="None, Later, Suspend")
        return Later()
    return outcome


def _tell_fault(group: str, owned: OwnedQueue, error: Exception) -> None:
    _log.error("settlement_failed", group=group, queue=str(owned.queue), error=f"{type(error).__name__}: {error}")


class Concurrent:
    """Service for up to ``handlers_max`` concurrent batches of all queues. Failed messages are sent back at once."""

    def __init__(self, handler: Handler, work: Work) -> None:
        self.busy = Busy()
        self._handler = handler
        self._for = work
        self._options = work.options
        self._ready: asyncio.Queue[OwnedQueue] = asyncio.Queue()
        self._tasks = {asyncio.ensure_future(self._work()) for _ in range(work.options.handlers_max)}
        if not work.options.is_broadcast:
            self._tasks.add(asyncio.ensure_future(self._sweep()))
        self._owned: set[OwnedQueue] = set()
        self._later: set[asyncio.Task[None]] = set()

    def took_up(self, owned: OwnedQueue) -> None:
        self._owned = {each for each in self._owned if not each.is_dropped} | {owned}

    def arrived(self, owned: OwnedQueue, count: int, /) -> None:
        for _ in range(-(-count // self._options.batch_max)):
            self._ready.put_nowait(owned)

    def close(self) -> None:
        for task in self._tasks | self._later:
            task.cancel()

    async def _work(self) -> None:
        while True:
            owned = await self._ready.get()
            if owned.is_leaving or owned.window is None:
                continue
            batch = owned.window.take(self._options.batch_max, self._for.now_ms())
            if batch:
                try:
                    await self._consume(owned, batch)
                except Exception as error:  # noqa: BLE001 - the worker continues; the sweep returns this batch
                    _tell_fault(self._for.group, owned, error)

    async def _consume(self, owned: OwnedQueue, batch: Sequence[ReceivedMessage]) -> None:
        with self.busy:
            readable = [each for each in batch if not each.unreadable]
            outcome = await handled(self._handler, self._for.group, readable) if readable else None
            failed = [each for each in batch if each.unreadable]
            later = outcome if isinstance(outcome, Later) else Later()
            if outcome is not None:
                failed += readable[max(later.first, 0) :]
            if not owned.is_dropped:  # otherwise its new owner receives the batch again
                await self._finish(owned, batch, failed, later)

    async def _finish(
        self, owned: OwnedQueue, batch: Sequence[ReceivedMessage], failed: Sequence[ReceivedMessage], later: Later
    ) -> None:
        kept = set()
        for received in failed:
            if self._options.is_broadcast:
                _log.error(
                    "message_given_up",
                    group=self._for.group,
                    message_id=received.message.message_id,
                    why=received.unreadable or "its handler failed, and broadcasting tries nothing again",
                )
            elif not await self._send_back(received, later):
                kept.add(received.queue_offset)
                again = replace(received, attempts_failed=received.attempts_failed + 1)
                task = asyncio.ensure_future(self._again(owned, again))
                self._later.add(task)
                task.add_done_callback(self._later.discard)
        self._remove(owned, [each.queue_offset for each in batch if each.queue_offset not in kept])

    async def _send_back(self, received: ReceivedMessage, later: Later) -> bool:
        if received.unreadable:
            return await self._for.failures.send_back(received, -1, received.unreadable)
        return await self._for.failures.send_back(received, later.delay_level, later.error)

    async def _again(self, owned: OwnedQueue, received: ReceivedMessage) -> None:
        await asyncio.sleep(self._options.send_back_again_ms / 1000)
        if not owned.is_leaving:
            await self._consume(owned, [received])

    def _remove(self, owned: OwnedQueue, offsets: Sequence[int]) -> None:
        assert owned.window is not None
        offset = owned.window.remove(offsets)
        owned.room.set()
        if offset is not None:
            self._for.offsets.note(owned.queue, offset)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._options.consume_ms_max / 15 / 1000)
            for owned in list(self._owned):
                try:
                    await self._sweep_up(owned)
                except Exception as error:  # noqa: BLE001 - the next sweep retries
                    _tell_fault(self._for.group, owned, error)

    async def _sweep_up(self, owned: OwnedQueue) -> None:
        if owned.window is None or owned.is_leaving:
            return
        for received in owned.window.expired(self._for.now_ms(), consume_ms_max=self._options.consume_ms_max):
            _log.warning("handler_timed_out", group=self._for.group, message_id=received.message.message_id)
            if await self._for.failures.send_back(received, _STUCK_LEVEL) and not owned.is_dropped:
                self._remove(owned, [received.queue_offset])


class InOrder:
    """Service for one batch of a queue at a time, while its lock is valid. Failed messages are retried in place."""

    def __init__(self, handler: Handler, work: Work) -> None:
        self.busy = Busy()
        self._handler = handler
        self._for = work
        self._options = work.options
        self._locks = work.locks
        self._room = asyncio.Semaphore(work.options.handlers_max)
        self._tasks: set[asyncio.Task[None]] = set()

    def took_up(self, owned: OwnedQueue) -> None:
        owned.consuming = asyncio.ensure_future(self._work(owned))
        self._tasks.add(owned.consuming)
        owned.consuming.add_done_callback(self._tasks.discard)

    def arrived(self, owned: OwnedQueue, _count: int, /) -> None:
        owned.arrived.set()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _work(self, owned: OwnedQueue) -> None:
        assert owned.window is not None
        while not owned.is_dropped:
            await owned.arrived.wait()
            async with self._room:
                if owned.is_leaving:
                    return
                if self._locks is not None and not self._locks.may_consume(owned.queue, self._for.now_ms()):
                    batch: Sequence[ReceivedMessage] = ()
                    pause_s = _LOCK_LOOK_S
                else:
                    batch = owned.window.take(self._options.batch_max, self._for.now_ms())
                    pause_s = 0.0
                    if not batch:
                        owned.arrived.clear()
                        continue
                    owned.is_busy = True
                    try:
                        with self.busy:
                            pause_s = await self._consume(owned, batch)
                    except Exception as error:  # noqa: BLE001 - the loop must not end: the batch is retried
                        _tell_fault(self._for.group, owned, error)
                        owned.window.rollback()
                        pause_s = self._options.suspend_ms / 1000
                    finally:
                        owned.is_busy = False
            if pause_s:
                await asyncio.sleep(pause_s)

    async def _consume(self, owned: OwnedQueue, batch: Sequence[ReceivedMessage]) -> float:
        """Return the pause of the queue before its next batch, in seconds."""
        shown = [
            replace(each, attempts_failed=each.attempts_failed + owned.failures[each.queue_offset])
            for each in batch
            if not each.unreadable
        ]
        outcome = await handled(self._handler, self._for.group, shown) if shown else None
        if owned.is_dropped:
            return 0.0
        consumed = [each.queue_offset for each in batch if each.unreadable and await self._bury(each)]
        unread = any(each.unreadable and each.queue_offset not in consumed for each in batch)
        pause_ms = 0
        if outcome is None:
            consumed += [each.queue_offset for each in shown]
        elif isinstance(outcome, Suspend):
            pause_ms = outcome.ms
        else:
            pause_ms = self._options.suspend_ms
            first = max(outcome.first, 0)
            consumed += [each.queue_offset for each in shown[:first]]
            for each in shown[first:]:
                exhausted = outcome.delay_level < 0 or each.attempts_failed >= self._options.attempts
                if exhausted and await self._give_up(each, outcome):
                    consumed.append(each.queue_offset)
                else:
                    owned.failures[each.queue_offset] += 1
        self._finish(owned, consumed)
        if unread:
            pause_ms = max(pause_ms, self._options.suspend_ms)
        left = len(consumed) < len(batch)
        return min(max(pause_ms, _SUSPEND_MS[0]), _SUSPEND_MS[1]) / 1000 if left else 0.0

    def _finish(self, owned: OwnedQueue, consumed: Sequence[int]) -> None:
        assert owned.window is not None
        for offset in consumed:
            owned.failures.pop(offset, None)
        offset_now = owned.window.remove(consumed)
        owned.window.rollback()
        owned.room.set()
        if offset_now is not None:
            self._for.offsets.note(owned.queue, offset_now)

    async def _bury(self, received: ReceivedMessage) -> bool:
        if self._options.is_broadcast:
            _log.error("message_given_up", message_id=received.message.message_id, why=received.unreadable)
            return True
        return await self._for.failures.send_back(received, -1, received.unreadable)

    async def _give_up(self, received: ReceivedMessage, later: Later) -> bool:
        if self._options.is_broadcast:
            _log.error("message_given_up", message_id=received.message.message_id, why="it failed too often")
            return True
        if received.queue.topic.startswith(RETRY_PREFIX) or later.delay_level < 0:
            return await self._for.failures.send_back(received, later.delay_level, later.error)
        return await self._for.failures.put(received, error=later.error)
