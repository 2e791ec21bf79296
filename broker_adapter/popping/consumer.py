"""Consumer of a ``PopBroker``: receive loops, handlers, and the settlement of each delivery.

    result of a handler       settlement at the broker
    None                      acknowledged
    an error, ``Later()``     retried, not before the delay that the group's policy has for this failure
    ``Later(delay_level=n)``  the same with the delay of the level; -1: a dead letter
    ``Suspend(ms)``           in order: hidden for ``ms``, and no attempt is counted; otherwise as an error

Leases are renewed while this consumer sends heartbeats. A settlement is repeated until the broker confirms it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from broker_adapter.contracts.adapter import FailureReporter, GroupSettings, PopBroker, Subscription
from broker_adapter.contracts.classic import Filter, ReceivedMessage
from broker_adapter.contracts.errors import BrokerError, Refused
from broker_adapter.contracts.limits import AUTO_RENEW_INVISIBLE_MS, DELAY_LEVELS_MS, POLLING_MS_MAX, RECEIVE_BATCH_MAX
from broker_adapter.contracts.message import Delivery
from broker_adapter.contracts.topics import check_group, check_topic
from broker_adapter.popping.received import received_of, tags_of
from broker_adapter.queue_client.consumer import Busy, ConsumerOptions, Handler, Later, Outcome, Suspend, handled
from broker_adapter.runtime.log import LibraryLog

_BEAT_S = 10.0  # default of the official clients
_DEFAULTS = ConsumerOptions()
# Options that conflict with the broker's own assignment of messages.
_CANNOT_HOLD = ("is_broadcast", "offsets_path", "start", "start_at_ms", "retries_max")

_log = LibraryLog("broker_adapter.popping")
_Work = list[tuple[Delivery, ReceivedMessage]]


class PopConsumer:
    """Consumer of topics for a group until it is closed. Belongs to one event loop. At least once."""

    def __init__(
        self,
        broker: PopBroker,
        group: str,
        filters: Mapping[str, str | Filter],
        handler: Handler,
        options: ConsumerOptions,
        *,
        broker_name: str,
        client_id: str,
        on_close: Callable[[], None],
    ) -> None:
        self.group = check_group(group)
        if not filters:
            raise ValueError(f"consumer group {group!r} has no topic: name at least one")
        cannot = [name for name in _CANNOT_HOLD if getattr(options, name) != getattr(_DEFAULTS, name)]
        if type(options.strategy) is not type(_DEFAULTS.strategy):
            cannot.append("strategy")
        if cannot:
            raise ValueError(f"this broker distributes messages itself and does not support {', '.join(cannot)}")
        self._broker = broker
        self._broker_name = broker_name
        self._client_id = client_id
        self._wanted = [_subscription(check_topic(topic), wanted) for topic, wanted in filters.items()]
        self._handler = handler
        self._options = options
        self._on_close = on_close
        self._settings: GroupSettings
        self._room = asyncio.Semaphore(options.handlers_max)
        self._busy = Busy()
        self._closing = asyncio.Event()
        self._tasks: Sequence[asyncio.Task[None]] = ()
        self._under_way: set[asyncio.Task[None]] = set()
        self._told: dict[str, str] = {}  # last logged error of a topic, so that it is logged once

    async def start(self) -> None:
        """Start consuming. An unreachable cluster or an unknown group is no error: the consumer keeps retrying."""
        self._tasks = (asyncio.ensure_future(self._receive_all()), asyncio.ensure_future(self._beat()))

    async def close(self) -> None:
        """Stop receiving, wait for handlers, and release unfinished deliveries."""
        self._closing.set()
        receiving, *others = self._tasks or (None,)
        if receiving is not None:
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._options.close_ms / 1000):
                await self._busy.over()
        left = [*others, *self._under_way]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        self._broker.client_gone(self._client_id)
        self._on_close()

    # -- receiving ----------------------------------------------------------------------------------------------------

    async def _receive_all(self) -> None:
        await self._join()
        loops_each = max(1, self._options.handlers_max // len(self._wanted))
        async with asyncio.TaskGroup() as loops:
            for wanted in self._wanted:
                for _ in range(loops_each):
                    loops.create_task(self._receive_again(wanted))

    async def _join(self) -> None:
        topics = [each.topic for each in self._wanted]
        while True:
            try:
                await self._broker.ensure_group(self.group)
            except BrokerError as error:
                await self._rest("", error)
            else:
                break
        self._settings = self._broker.group_settings(self.group, topics)
        if self._options.in_order and not self._settings.is_fifo:
            why = "the broker does not serve the group in order: set it there, or messages may overtake each other"
            _log.warning("group_not_fifo", group=self.group, why=why)

    async def _receive_again(self, wanted: Subscription) -> None:
        while True:
            try:
                deliveries = await self._broker.receive(
                    self.group,
                    wanted,
                    batch_max=min(self._options.batch_max, RECEIVE_BATCH_MAX),
                    invisible_ms=AUTO_RENEW_INVISIBLE_MS,
                    wait_ms=min(self._options.long_poll_ms, POLLING_MS_MAX),
                    renew_for=self._client_id,
                )
            except Exception as error:  # noqa: BLE001 - the receive loop must not end
                await self._rest(wanted.topic, error)
                continue
            self._told.pop(wanted.topic, None)
            if deliveries:
                consuming = asyncio.ensure_future(self._consume(deliveries))
                self._under_way.add(consuming)
                consuming.add_done_callback(self._under_way.discard)
                try:
                    await asyncio.shield(consuming)
                except Exception as error:  # noqa: BLE001 - as above; unsettled deliveries return at expiry
                    await self._rest(wanted.topic, error)

    async def _rest(self, topic: str, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        if self._told.get(topic) != text:
            self._told[topic] = text
            _log.error("receive_failed", group=self.group, topic=topic, error=text)
        await asyncio.sleep(self._options.pause_ms / 1000)

    async def _beat(self) -> None:
        while True:
            self._broker.client_seen(self._client_id)
            await asyncio.sleep(_BEAT_S)

    # -- consuming ----------------------------------------------------------------------------------------------------

    async def _consume(self, deliveries: Sequence[Delivery]) -> None:
        with self._busy:
            received = [(each, received_of(each, self._broker_name)) for each in deliveries]
            for delivery, message in received:
                if message.unreadable:
                    _log.error("message_unreadable", message_id=delivery.message_id, why=message.unreadable)
                    await self._bury(delivery, message.unreadable)
            left = [each for each in received if not each[1].unreadable]
            while left:
                async with self._room:
                    outcome = await handled(self._handler, self.group, [message for _, message in left])
                failed = _failed(left, outcome)
                await self._acknowledge(left[: len(left) - len(failed)])
                left = await self._keep(failed, outcome) if failed else []

    async def _keep(self, failed: _Work, outcome: Outcome) -> _Work:
        """Report failures to the broker, or return the messages for a local retry after its delay."""
        error = outcome.error if isinstance(outcome, Later) else ""
        if isinstance(outcome, Later) and outcome.delay_level < 0:
            for delivery, _ in failed:
                await self._bury(delivery, error)
            return []
        is_suspended = isinstance(outcome, Suspend) and self._options.in_order
        if not (self._settings.is_fifo and self._settings.believes_clients) or self._closing.is_set():
            for delivery, message in failed:
                if not is_suspended:
                    self._report(delivery, error)
                await self._hide(delivery, self._pause_ms(outcome, message), suspend=is_suspended)
            return []
        # RocketMQ's proxies count no attempts of such a group: its clients retry while they hold the lease.
        again: _Work = []
        for delivery, message in failed:
            if not is_suspended and message.attempts_failed + 1 >= self._settings.max_attempts:
                await self._bury(delivery, error)
            else:
                more = message.attempts_failed + (not is_suspended)
                again.append((delivery, replace(message, attempts_failed=more)))
        if again:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pause_ms(outcome, failed[0][1]) / 1000):
                    await self._closing.wait()
                return await self._keep(again, Suspend())
        return again

    def _pause_ms(self, outcome: Outcome, message: ReceivedMessage) -> int:
        if isinstance(outcome, Suspend) and self._options.in_order:
            return outcome.ms
        if isinstance(outcome, Later) and outcome.delay_level > 0:
            return DELAY_LEVELS_MS[min(outcome.delay_level, len(DELAY_LEVELS_MS)) - 1]
        delays_ms = self._settings.delays_ms
        return delays_ms[min(message.attempts_failed, len(delays_ms) - 1)]

    # -- settlement ---------------------------------------------------------------------------------------------------

    async def _acknowledge(self, work: _Work) -> None:
        async def tell() -> None:
            results = await self._broker.ack(self.group, work[0][0].topic, [each.receipt_handle for each, _ in work])
            for (delivery, _), error in zip(work, results, strict=True):
                if isinstance(error, Refused):
                    _log.warning("ack_failed", message_id=delivery.message_id, error=str(error))
                elif error is not None:
                    raise error  # repeat all: repeated acknowledgements succeed

        if work:
            await self._until_heard(tell, work[0][0])

    async def _hide(self, delivery: Delivery, ms: int, *, suspend: bool) -> None:
        async def tell() -> None:
            await self._broker.change_invisible(
                self.group, delivery.topic, delivery.receipt_handle, ms, suspend=suspend
            )

        await self._until_heard(tell, delivery)

    def _report(self, delivery: Delivery, error: BaseException | str) -> None:
        if error and isinstance(self._broker, FailureReporter):
            self._broker.report_failure(self.group, delivery.receipt_handle, error)

    async def _bury(self, delivery: Delivery, error: BaseException | str) -> None:
        self._report(delivery, error)
        # a broker accepts a dead letter of a push consumer only with all attempts of the group used up
        attempts = max(delivery.delivery_attempt, self._settings.max_attempts)

        async def tell() -> None:
            await self._broker.dead_letter(self.group, delivery.topic, delivery.receipt_handle, attempts=attempts)

        await self._until_heard(tell, delivery)

    async def _until_heard(self, tell: Callable[[], Awaitable[None]], delivery: Delivery) -> None:
        while True:
            try:
                await tell()
            except BrokerError as error:
                _log.warning("settlement_failed", message_id=delivery.message_id, error=str(error))
                if isinstance(error, Refused) or self._closing.is_set():
                    return  # it is redelivered at the expiry of its lease
            else:
                return
            await asyncio.sleep(self._options.pause_ms / 1000)


def _failed(work: _Work, outcome: Outcome) -> _Work:
    if outcome is None:
        return []
    return work[max(outcome.first, 0) :] if isinstance(outcome, Later) else work


def _subscription(topic: str, wanted: str | Filter) -> Subscription:
    found = wanted if isinstance(wanted, Filter) else Filter(wanted.strip() or "*")
    return Subscription(topic, tags=tags_of(found), sql=found.expression if found.is_sql else "")
