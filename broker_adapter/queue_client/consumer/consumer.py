"""Member of a consumer group: its assigned queues, its pulls from them, and its offsets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from broker_adapter.contracts.classic import Filter, HeldQueue, MemberState, Presence, ReceivedMessage, Start
from broker_adapter.contracts.errors import BrokerError, Overloaded, Refused, Rule
from broker_adapter.contracts.message_queue import MessageQueue
from broker_adapter.contracts.topics import RETRY_PREFIX, check_group, check_topic, retry_topic
from broker_adapter.queue_client import Membership
from broker_adapter.queue_client.balance import RENEW_MS, QueueLocks, Window, changes, pause
from broker_adapter.queue_client.consumer.failures import ConsumerFailures
from broker_adapter.queue_client.consumer.offsets import BrokerOffsets, FileOffsets, Offsets
from broker_adapter.queue_client.consumer.options import ConsumerOptions
from broker_adapter.queue_client.consumer.owned import OwnedQueue
from broker_adapter.queue_client.consumer.services import DeliveryService, MakeService, Work
from broker_adapter.runtime.clock import Clock, SystemClock
from broker_adapter.runtime.log import LibraryLog

_SOON_S = 1.0  # retry delay of an incomplete rebalance; RocketMQ 5.5 (min interval)
_OVERLOADED_S = 0.02  # RocketMQ 5.5 (PULL_TIME_DELAY_MILLS_WHEN_BROKER_FLOW_CONTROL)
_ROOM_LOOK_S = 1.0  # recheck interval of a full window, in case of a missed event
_ALL_TAGS = "*"
_DEFAULTS = ConsumerOptions()

_log = LibraryLog("broker_adapter.queue_client.consumer")


class Consumer:
    """Consumer of topics as a member of a group, until it is closed. Belongs to one event loop.

    Delivery is at least once: consumed messages are committed some seconds later, and a crash before the commit repeats
    them. Failed messages are retried through ``%RETRY%<group>``, which is subscribed automatically. They end in
    ``%DLQ%<group>``. ``filters`` has the subscription of each topic: ``*``, tags as ``a || b``, or a ``Filter``.
    """

    def __init__(
        self,
        membership: Membership,
        group: str,
        filters: Mapping[str, str | Filter],
        make_service: MakeService,
        options: ConsumerOptions = _DEFAULTS,
        clock: Clock | None = None,
    ) -> None:
        self.group = check_group(group)
        if not filters:
            raise ValueError(f"consumer group {group!r} has no topic: name at least one")
        self._membership = membership
        self._options = options
        self._clock = clock or SystemClock()
        self._filters = {check_topic(topic): _filter(wanted) for topic, wanted in filters.items()}
        if not options.is_broadcast:
            self._filters[retry_topic(group)] = Filter()
        self._tags = {topic: _tags(wanted) for topic, wanted in self._filters.items()}
        self._make_service = make_service
        self._owned: dict[MessageQueue, OwnedQueue] = {}
        self._locks = QueueLocks() if options.in_order and not options.is_broadcast else None
        self._offsets: Offsets = (
            FileOffsets(options.offsets_path)
            if options.offsets_path and options.is_broadcast
            else BrokerOffsets(membership.broker, group, self._clock)
        )
        self._failures = ConsumerFailures(membership, group, options.attempts)
        self._service: DeliveryService | None = None
        self._hurry = asyncio.Event()
        self._dividing = asyncio.Lock()
        self._tasks: Sequence[asyncio.Task[None]] = ()
        self._started_at_ms = self._clock.now_ms()
        self._troubles: dict[object, Exception] = {}  # by topic or queue, logged once

    @property
    def _presence(self) -> Presence:
        return Presence(self.group, dict(self._filters), self._options.is_broadcast, self._options.start)

    @property
    def queues(self) -> Sequence[MessageQueue]:
        """Currently assigned queues, sorted."""
        return sorted(self._owned)

    async def start(self) -> None:
        """Join the group, and start consuming. ``GroupTaken`` if this client already has a consumer of the group.

        An unreachable cluster is no error: the consumer keeps retrying.
        """
        await self._membership.add_consumer(self._presence, self)
        work = Work(
            group=self.group,
            options=self._options,
            offsets=self._offsets,
            failures=self._failures,
            locks=self._locks,
            now_ms=self._now_ms,
        )
        self._service = self._make_service(work)
        loops: list[Awaitable[None]] = [self._divide_again(), self._each(self._options.flush_ms, self._flush)]
        if self._locks is not None:
            loops.append(self._each(RENEW_MS, self._renew))
        self._tasks = [asyncio.ensure_future(each) for each in loops]

    async def subscribe(self, topic: str, wanted: Filter) -> None:
        """Subscribe to another topic, or change a filter. After a change, pulled but unconsumed messages are pulled
        again.
        """
        is_changed = topic in self._filters and self._filters[topic] != wanted
        self._filters[check_topic(topic)] = wanted
        self._tags[topic] = _tags(wanted)
        await self._membership.change_consumer(self._presence)
        if is_changed:
            for queue, owned in self._owned.items():
                if queue.topic == topic and (offset := owned.commit_offset) is not None:
                    owned.move(offset, self._now_ms())
        self._hurry.set()

    def trouble(self, topic: str) -> Exception | None:
        """Return the error that blocks the consumption of a topic, or ``None`` if none is known."""
        own = [queue for queue in self._owned if queue.topic == topic]
        if own and all(queue in self._troubles for queue in own):
            return self._troubles[own[0]]
        return self._troubles.get(topic)

    async def close(self) -> None:
        """Stop pulls, wait for handlers, commit, and leave the group."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for owned in self._owned.values():
            owned.is_leaving = True
            if owned.pulling is not None:
                owned.pulling.cancel()
        if self._service is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._options.close_ms / 1000):
                    await self._service.busy.over()
        await asyncio.gather(*(self._give_up(queue) for queue in list(self._owned)))
        await self._flush()
        if self._service is not None:
            self._service.close()
        await self._membership.remove_consumer(self.group)

    def members_changed(self) -> None:
        """Schedule a rebalance."""
        self._hurry.set()

    def go_on_at(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Continue at other offsets after an operator's reset; pulled messages of these queues are dropped."""
        for queue, offset in offsets.items():
            owned = self._owned.get(queue)
            if owned is not None:
                _log.warning("offset_reset", group=self.group, queue=str(queue), now=offset)
                owned.move(offset, self._now_ms())
        self._hurry.set()

    def state(self) -> MemberState:
        """Return the state of this member for operators."""
        return MemberState(self._filters, [*self._held()], self._options.in_order, self._started_at_ms)

    def _held(self) -> Iterator[HeldQueue]:
        now_ms = self._now_ms()
        since_epoch_ms = self._clock.now_ms() - now_ms
        for queue, owned in sorted(self._owned.items()):
            window = owned.window
            if window is not None and (offset := window.commit_offset) is not None:
                yield HeldQueue(
                    queue,
                    offset,
                    window.count,
                    window.span,
                    window.bytes,
                    window.pulled_at_ms + since_epoch_ms,
                    window.took_at_ms + since_epoch_ms,
                    self._locks is not None and self._locks.may_consume(queue, now_ms),
                )

    # -- rebalance --------------------------------------------------------------------------------------------------

    async def _divide_again(self) -> None:
        soon_s = _SOON_S
        while True:
            self._hurry.clear()
            try:
                is_settled = await self.divide()
            except Exception as error:  # noqa: BLE001 - strategies may come from the application
                _log.error("rebalance_failed", group=self.group, error=f"{type(error).__name__}: {error}")
                is_settled = False
            full_s = self._options.rebalance_ms / 1000
            wait_s = full_s if is_settled else min(soon_s, full_s)
            soon_s = _SOON_S if is_settled else soon_s * 2
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._hurry.wait()
                soon_s = _SOON_S

    async def divide(self) -> bool:
        """Acquire and release queues until this member has its share; return True if it has."""
        async with self._dividing:
            return all([await self._divide(topic) for topic in list(self._filters)])

    async def _divide(self, topic: str) -> bool:
        try:
            share = await self._share(topic)
        except (BrokerError, ValueError) as error:
            is_retry = topic.startswith(RETRY_PREFIX)
            self._tell(topic, "rebalance_failed", error, is_error=not is_retry)
            return False
        held = {queue: owned.pulled_at_ms for queue, owned in self._owned.items() if queue.topic == topic}
        diff = changes(held, share, self._now_ms())
        # Together: no queue accepts acknowledgements while the offset of another one is committed.
        gone = await asyncio.gather(*(self._give_up(queue, wait=True) for queue in diff.dropped))
        taken = await self._take_up([queue for queue in diff.added if queue not in self._owned])
        if diff.dropped or taken:
            shown = [f"{queue.broker}:{queue.queue_id}" for queue in self.queues if queue.topic == topic]
            _log.info("queues_assigned", group=self.group, topic=topic, own=shown)
        return all(gone) and all(queue in self._owned for queue in share)

    async def _share(self, topic: str) -> Sequence[MessageQueue]:
        readable = (await self._membership.route(topic)).readable
        if self._options.is_broadcast:
            return readable
        members = sorted(await self._membership.broker.members(self.group, topic))
        if self._membership.client_id not in members:
            await self._membership.beat()  # its broker dropped this client, so others acquire its queues
        share = self._options.strategy(self.group, self._membership.client_id, readable, members)
        self._troubles.pop(topic, None)
        return share

    async def _take_up(self, queues: Sequence[MessageQueue]) -> Sequence[MessageQueue]:
        if self._locks is not None and queues:
            question = self._locks.ask(queues, self._now_ms())
            given = await self._membership.broker.lock(self.group, queues)
            self._locks.answered(question, given)
            queues = [queue for queue in queues if queue in given]
        for queue in queues:
            owned = self._owned[queue] = OwnedQueue(queue, self._now_ms())
            owned.pulling = asyncio.ensure_future(self._pull(owned))
        return queues

    async def _give_up(self, queue: MessageQueue, *, wait: bool = False) -> bool:
        """Commit and release a queue.

        With ``wait``, keep a queue with a batch at the handler, and return False.
        """
        owned = self._owned[queue]
        owned.is_leaving = True
        if wait and owned.is_busy:
            return False
        if owned.moved_to is not None:
            self._offsets.move(queue, owned.moved_to)
        elif (offset := owned.commit_offset) is not None:
            self._offsets.note(queue, offset)
        owned.drop()
        await self._offsets.flush([queue])
        self._offsets.forget(queue)
        self._troubles.pop(queue, None)
        del self._owned[queue]
        if self._locks is not None:
            self._locks.forget(queue)
            try:
                await self._membership.broker.unlock(self.group, [queue])
            except BrokerError as error:
                _log.warning("queue_unlock_failed", queue=str(queue), error=str(error))
        return True

    async def _renew(self) -> None:
        assert self._locks is not None
        queues = list(self._owned)
        if queues:
            question = self._locks.ask(queues, self._now_ms())
            self._locks.answered(question, await self._membership.broker.lock(self.group, queues))

    # -- pulls ------------------------------------------------------------------------------------------------------

    async def _pull(self, owned: OwnedQueue) -> None:
        queue = owned.queue
        while owned.window is None:
            try:
                owned.window = Window(await self._begin(queue), self._now_ms())
            except Exception as error:  # noqa: BLE001 - the pull loop must not end
                await self._rest(owned, error)
        assert self._service is not None
        self._service.took_up(owned)
        while not owned.is_leaving:
            if await self._waited_for_room(owned):
                continue
            try:
                pulled = await self._membership.broker.pull(
                    self.group,
                    queue,
                    self._filters[queue.topic],
                    owned.window.next_offset,
                    batch_max=self._options.pull_max,
                    wait_ms=self._options.long_poll_ms,
                )
            except Exception as error:  # noqa: BLE001 - as above
                await self._rest(owned, error)
                continue
            self._troubles.pop(queue, None)
            if pulled.moved:
                _log.warning(
                    "offset_moved",
                    queue=str(queue),
                    was=owned.window.next_offset,
                    now=pulled.next_offset,
                    why="the broker has no message at the committed offset of this group",
                )
                owned.move(pulled.next_offset, self._now_ms())
                self._hurry.set()
                return
            wanted = [each for each in pulled.messages if self._is_wanted(each)]
            owned.window.put(wanted, pulled.next_offset, self._now_ms())
            if wanted:
                self._service.arrived(owned, len(wanted))
            elif not owned.window.count and (offset := owned.commit_offset) is not None:
                self._offsets.note(queue, offset)  # the filter skipped all messages

    async def _begin(self, queue: MessageQueue) -> int:
        """Return the start offset of a queue. Commit it at once if the group has no committed offset.

        Otherwise a crash before the first commit would skip the messages after a start at the end of the queue.
        """
        committed = await self._offsets.read(queue)
        if committed is not None:
            return committed
        broker, options = self._membership.broker, self._options
        if queue.topic.startswith(RETRY_PREFIX) or options.start is Start.FIRST_OFFSET:
            begin = (await broker.queue_range(queue)).begin
        elif options.start is Start.TIMESTAMP:
            begin = await broker.offset_at(queue, options.start_at_ms)
        else:
            begin = (await broker.queue_range(queue)).end
        self._offsets.note(queue, begin)
        await self._offsets.flush([queue])
        return begin

    async def _waited_for_room(self, owned: OwnedQueue) -> bool:
        window = owned.window
        assert window is not None
        bounds = self._options.bounds
        if self._options.in_order:
            bounds = bounds._replace(span_max=None)
        if pause(window.count, window.bytes, window.span, bounds) is None:
            return False
        owned.note_pull(self._now_ms())
        owned.room.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(_ROOM_LOOK_S):
                await owned.room.wait()
        return True

    async def _rest(self, owned: OwnedQueue, error: Exception) -> None:
        """Log a failed pull, once, and wait before the next one."""
        owned.note_pull(self._now_ms())
        if isinstance(error, Refused) and error.rule in {Rule.REQUEST, Rule.GROUP_UNKNOWN}:
            await self._membership.beat()  # a restarted broker has no group before its heartbeat
        self._tell(owned.queue, "pull_failed", error, is_error=True)
        await asyncio.sleep(_OVERLOADED_S if isinstance(error, Overloaded) else self._options.pause_ms / 1000)

    def _is_wanted(self, received: ReceivedMessage) -> bool:
        tags = self._tags[received.queue.topic]
        return tags is None or received.message.tag in tags or bool(received.unreadable)

    # -- in the background -----------------------------------------------------------------------------------------

    async def _flush(self) -> None:
        await self._offsets.flush()

    async def _each(self, interval_ms: int, act: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(interval_ms / 1000)
            try:
                await act()
            except Exception as error:  # noqa: BLE001 - the next interval retries
                text = str(error) if isinstance(error, BrokerError) else f"{type(error).__name__}: {error}"
                _log.warning("consumer_task_failed", group=self.group, error=text)

    def _tell(self, what: object, event: str, error: Exception, *, is_error: bool) -> None:
        before, self._troubles[what] = self._troubles.get(what), error
        if str(before) != str(error):
            log = _log.error if is_error else _log.info
            log(event, group=self.group, at=str(what), error=f"{type(error).__name__}: {error}")

    def _now_ms(self) -> int:
        return int(self._clock.monotonic_s() * 1000)


def _filter(wanted: str | Filter) -> Filter:
    return wanted if isinstance(wanted, Filter) else Filter(wanted.strip() or _ALL_TAGS)


def _tags(wanted: Filter) -> frozenset[str] | None:
    if wanted.is_sql or wanted.expression == _ALL_TAGS:
        return None
    return frozenset(tag.strip() for tag in wanted.expression.split("||") if tag.strip())
