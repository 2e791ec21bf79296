"""The forwarding of one topic's messages to the cluster.

Messages that are read together are sent together: those without a message group in one call, those of a group one after
another. A message is marked as forwarded after the cluster's OK. A message without an answer is sent again under its
id. Each time the trail records it, because the cluster may have all copies.

    answer of the cluster                                   result
    OK                                                      marked as forwarded, and finished here
    no answer, an internal error, too many requests         sent again, in the same order, as its gate allows
    a refusal of the message                                a dead letter of the forwarder, with the code
    any other refusal: no such topic, no permission, ...    sent again as well: an operator can fix the cause
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import random
from typing import Any

import structlog

from broker_adapter.contracts.adapter import PopBroker
from broker_adapter.contracts.errors import BrokerError, BrokerUnavailable, Overloaded, Refused
from broker_adapter.contracts.message import Delivery, Envelope, MessageType, SendReceipt
from broker_adapter.runtime.clock import Clock
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.broker.deliveries import ForwardedMessage
from dmq.broker.io import Place
from dmq.cluster.forward_bounds import Bounds
from dmq.cluster.gate import ForwardGate
from dmq.cluster.in_doubt import InDoubtMessages
from dmq.cluster.outgoing import Forwards
from dmq.cluster.reach import ClusterReach
from dmq.errors import StoreError

log = structlog.get_logger("dmq.cluster")

HELD_BYTES_MAX = 64 * 1024 * 1024  # of all lanes; above it a lane reads only if it holds no message, and then one
TOGETHER_MAX = 32  # messages in one call
TOGETHER_BYTES_MAX = 512 * 1024  # far below the limit of a cluster
IDLE_MS = 60_000  # after it a lane without messages ends; the next message restarts it
_PAUSES_S = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)  # retries of one message that fails while others succeed
_JITTER = 0.25  # part of a pause, so that topics do not retry at the same time
_LOGGED_MAX = 20  # failing topics logged at a time; dmq status counts all
_STORE_PAUSE_S = 1.0


@dataclass(slots=True)
class ForwardTotals:
    """Counters of all lanes since the start of the process."""

    forwarded: int = 0
    refused: int = 0
    in_doubt: int = 0
    held_bytes: int = 0  # read and not finished
    failing: int = 0  # topics with a current failure
    observe: Callable[[Sequence[int]], None] = field(default=lambda _: None)  # lateness of delayed messages, in ms


class TopicForwarder:
    """The lane of one topic. The event loop owns it. ``grown`` starts it."""

    def __init__(
        self,
        topic: str,
        forwards: Forwards,
        cluster: PopBroker,
        clock: Clock,
        totals: ForwardTotals,
        *,
        reach: ClusterReach,
        in_flight_max: int,
        suspects: InDoubtMessages,
        bounds: Bounds,
    ) -> None:
        self.topic = topic
        self.suspects = suspects  # messages that earlier runs may have sent
        self.gate = ForwardGate(clock)
        self._bounds = bounds
        self._raising = asyncio.Lock()
        self.in_flight = 0
        self._forwards = forwards
        self._cluster = cluster
        self._clock = clock
        self._totals = totals
        self._reach = reach
        self._in_flight_max = in_flight_max
        self._room = asyncio.Event()
        self._is_failing = self._is_logged = False
        self._is_grown = self._was_read = self._is_closing = False
        self._running: asyncio.Task[None] | None = None
        self._sending: set[asyncio.Task[None]] = set()
        self._marking: set[asyncio.Task[None]] = set()
        self._is_unsure = False  # the cluster may have messages that the trail does not record

    @property
    def is_busy(self) -> bool:
        """True if messages of the topic are here that the cluster does not have, or may not have."""
        return self.in_flight > 0 or not self._was_read or self._forwards.has_more(self.topic)

    @property
    def waiting(self) -> int:
        """The number of messages here that the cluster does not have, as far as is known."""
        return self._forwards.waiting(self.topic)

    @property
    def is_settled(self) -> bool:
        """True if the trail records every message that the cluster may have."""
        return not self._is_unsure and not self.suspects.are_left(self._forwards.floors(self.topic))

    def grown(self) -> None:
        """Start or resume the lane: there are messages to send."""
        self._is_grown = True
        if self._running is None or self._running.done():
            self._running = asyncio.get_running_loop().create_task(self._run(), name=f"dmq-lane {self.topic}")
            self._running.add_done_callback(self._ended)

    async def close(self, grace_s: float) -> None:
        """Stop reading and sending, and wait up to ``grace_s`` for answers."""
        self._is_closing = True
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        is_answered = self.gate.is_open and self._reach.is_there
        for tasks, timeout_s in ((self._sending, grace_s if is_answered else 0), (self._marking, grace_s)):
            if tasks:
                _, left = await asyncio.wait(tasks, timeout=timeout_s)
                for task in left:
                    task.cancel()
                await asyncio.gather(*left, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            self._is_grown = False
            while not (room := self._room_now()):
                self._room.clear()
                await self._room.wait()
            try:
                found = await self._forwards.receive(self.topic, batch_max=room, wait_ms=IDLE_MS)
            except Refused as refused:  # the topic was removed
                if self._is_grown:  # and created again
                    continue
                log.info("lane_ended", topic=self.topic, why=str(refused))
                return
            except (BrokerError, StoreError) as error:
                log.error("lane_read_failed", topic=self.topic, error=str(error))  # noqa: TRY400
                await asyncio.sleep(_STORE_PAUSE_S)
                continue
            self._was_read = True
            if not found and not self._is_grown and not self._forwards.has_more(self.topic):
                return
            await self._tell_suspects(found)
            for load in _loads(found):
                self.in_flight += len(load)
                self._totals.held_bytes += _size(load)
                self._send_on(self._carry_in_order(load) if load[0].message_group else self._carry(load))

    def _room_now(self) -> int:
        """Return the number of messages that may be read now.

        Reading is useless while the cluster refuses messages, or while all lanes together hold many bytes. But a lane
        without messages may always read, so that lanes do not block each other.
        """
        is_full = self._totals.held_bytes >= HELD_BYTES_MAX
        if self.in_flight and (is_full or not self.gate.is_open or not self._reach.is_there):
            return 0
        return 1 if is_full else max(0, min(self._in_flight_max - self.in_flight, TOGETHER_MAX))

    def _send_on(self, work: Coroutine[Any, Any, None]) -> None:
        self._begin(work, self._sending)

    def _begin(self, work: Coroutine[Any, Any, None], among: set[asyncio.Task[None]]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        among.add(task)
        task.add_done_callback(among.discard)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            exc_info = None if isinstance(error, BrokerError | StoreError) else error  # the store is closing
            log.error("lane_failed", topic=self.topic, error=str(error), exc_info=exc_info)

    async def _tell_suspects(self, found: Sequence[Delivery]) -> None:
        take, place_of = self.suspects.take, self._forwards.place_of
        told = [
            each for each in found if take(place_of(each), each.queue_offset, each.message_group, each.deliver_at_ms)
        ]
        if told:
            await self._doubted(told, 1)

    # -- sending ------------------------------------------------------------------------------------------------------

    async def _carry_in_order(self, load: Sequence[Delivery]) -> None:
        """Send messages of one message group, each after the previous one is forwarded or given up."""
        for each in load:
            await self._carry([each])

    async def _carry(self, load: Sequence[Delivery]) -> None:
        """Send messages in one call, and repeat it until their outcome is known."""
        times = failures = 0
        while True:
            await self._reachable()
            if self._is_closing:  # later messages of its message group must not be sent either
                raise asyncio.CancelledError
            is_probe = await self.gate.enter(len(load))
            load = self._still_here(load)
            if not load:
                self.gate.void(is_probe=is_probe)
                return None
            if is_probe and len(load) > 1:  # one is enough for a probe; each one without an answer writes an event
                self._send_on(self._carry(load[1:]))
                load = load[:1]
            try:
                envelopes = await self._envelopes(load)
                if len(load) > 1 and envelopes[0].deliver_at_ms:  # a cluster accepts delayed messages one at a time
                    self.gate.void(is_probe=is_probe)
                    return await self._split(load)
                await self._raise_bounds(load)
                times += 1
                receipts = await self._send(load, envelopes, times)
            except Refused as refused:
                if refused.is_of_the_message:
                    self._open()
                    return await (self._split(load) if len(load) > 1 else self._give_up(load[0], refused))
                self._failed(load, refused, is_probe=is_probe)
            except BrokerError as error:
                self._failed(load, error, is_probe=is_probe)
            except BaseException:
                self.gate.void(is_probe=is_probe)
                raise
            else:
                self._open()
                self._begin(self._mark(load, receipts, times), self._marking)
                return None
            if self.gate.is_open:
                pause_s = _PAUSES_S[min(failures, len(_PAUSES_S) - 1)]
                await asyncio.sleep(pause_s * (1 - _JITTER * random()))
            failures += 1

    def _still_here(self, load: Sequence[Delivery]) -> Sequence[Delivery]:
        """Return the deliveries that were not removed with their topic meanwhile."""
        held = self._forwards.held(self.topic, load)
        if len(held) < len(load):
            self._release([each for each in load if each not in held])
            if not held:
                self.gate.error = ""  # the error is obsolete without messages
                self._fails_no_more()
        return held

    async def _reachable(self) -> None:
        if not (self._reach.is_there and self.gate.is_open):
            self._lower_bounds()
        await self._reach.wait()

    def _lower_bounds(self) -> None:
        """Store the progress of sending, so that pending messages are not in doubt after a crash."""
        lower = self._bounds.lowered({place: self.suspects.end(place) for place in self._forwards.places(self.topic)})
        if lower:
            with suppress(BrokerError):  # the store is busy or closing
                _ = self._forwards.bound(lower)  # not awaited: until it is durable, more messages are in doubt
                self._bounds.were_lowered(lower)

    async def _raise_bounds(self, load: Sequence[Delivery]) -> None:
        """Return once no durable bound marks these messages as unsent."""
        messages: list[tuple[Place, int]] = [(self._forwards.place_of(each), each.queue_offset) for each in load]
        self._bounds.begin(messages)
        if not self._bounds.exceeded(messages):
            return
        async with self._raising:
            while places := self._bounds.exceeded(messages):
                version = self._bounds.version
                higher = self._bounds.raised(places, is_sending=self.gate.is_open)
                await self._forwards.durable(self._forwards.bound(higher))
                self._bounds.were_raised(higher, version)

    async def _split(self, load: Sequence[Delivery]) -> None:
        await asyncio.gather(*(self._carry([each]) for each in load))

    async def _send(self, load: Sequence[Delivery], envelopes: Sequence[Envelope], times: int) -> Sequence[SendReceipt]:
        try:
            return await self._cluster.send(envelopes)
        except BrokerUnavailable:
            await self._doubted(load, times)
            raise
        except asyncio.CancelledError:  # at the end of the run, without time to await durability
            with suppress(BrokerError):
                self._doubt(load, times)
            raise

    async def _envelopes(self, load: Sequence[Delivery]) -> list[Envelope]:
        """Return the envelopes to send: a delayed message gets a type that its topic accepts, and is due at once."""
        types = (await self._cluster.route(self.topic)).types
        return [_envelope(self.topic, each, types) for each in load]

    def _failed(self, load: Sequence[Delivery], error: BrokerError, *, is_probe: bool) -> None:
        self.gate.failed([each.message_id for each in load], str(error), is_probe=is_probe)
        if self._is_failing:
            return
        self._is_failing = True
        self._totals.failing += 1
        self._is_logged = self._totals.failing <= _LOGGED_MAX
        if self._is_logged:
            log.warning("forwarding_failed", topic=self.topic, why=str(error))
        elif self._totals.failing == _LOGGED_MAX + 1:
            log.warning("forwarding_failed_for_many", topics=self._totals.failing, why=str(error))

    def _open(self) -> None:
        self.gate.succeeded()
        self._room.set()
        self._fails_no_more()

    def _fails_no_more(self) -> None:
        if not self._is_failing:
            return
        self._is_failing = False
        self._totals.failing -= 1
        if self._is_logged:
            log.info("forwarding_resumed", topic=self.topic)

    async def _doubted(self, load: Sequence[Delivery], times: int) -> None:
        """Return once the trail records that the cluster may have these. They are sent again only after that."""
        done = self._doubt(load, times)
        if done is not None:
            await self._forwards.durable(done)

    def _doubt(self, load: Sequence[Delivery], times: int) -> asyncio.Future[Any] | None:
        self._totals.in_doubt += len(load)
        try:
            return self._forwards.in_doubt(self.topic, load, times)
        except BrokerError:
            self._is_unsure = True
            raise

    # -- afterwards ---------------------------------------------------------------------------------------------------

    async def _mark(self, load: Sequence[Delivery], receipts: Sequence[SendReceipt], times: int) -> None:
        now_ms = self._clock.now_ms()
        # At least 0: the clock may have been stepped back since the message was due.
        self._totals.observe([max(0, now_ms - each.deliver_at_ms) for each in load if each.deliver_at_ms])
        sent = [
            ForwardedMessage(each.receipt_handle, times, receipt.queue_offset)
            for each, receipt in zip(load, receipts, strict=True)
        ]
        try:
            await self._settle(load, lambda: self._forwards.forwarded(self.topic, sent))
        except BaseException:  # on a full disk, at the end of the run
            self._is_unsure = True
            raise
        self._totals.forwarded += len(load)

    async def _give_up(self, delivery: Delivery, refused: Refused) -> None:
        log.warning("forward_refused", topic=self.topic, message_id=delivery.message_id, why=str(refused))
        code = refused.code or wire.BAD_REQUEST
        await self._settle([delivery], lambda: self._forwards.refused(self.topic, delivery, code, str(refused)))
        self._totals.refused += 1

    async def _settle(self, load: Sequence[Delivery], write: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Write the outcome; wait while the disk is full, because that must not cause another send."""
        while True:
            try:
                await write()
            except Overloaded:
                await asyncio.sleep(_STORE_PAUSE_S)
            else:
                break
        self._release(load)

    def _release(self, load: Sequence[Delivery]) -> None:
        self.in_flight -= len(load)
        self._totals.held_bytes -= _size(load)
        self._room.set()


def forwarded_type(types: Sequence[MessageType], *, is_grouped: bool) -> MessageType | None:
    """Return the message type used to forward delayed messages to a topic, or None if it cannot accept them."""
    plain = MessageType.FIFO if is_grouped else MessageType.NORMAL
    if plain in types:
        return plain
    return MessageType.DELAY if MessageType.DELAY in types else None


def _loads(found: Sequence[Delivery]) -> Iterator[list[Delivery]]:
    """Divide deliveries into loads, which are sent in one call or, for a message group, one after another."""
    groups: dict[str, list[Delivery]] = {}
    together: list[Delivery] = []
    size = 0
    for each in found:
        if each.message_group:
            groups.setdefault(each.message_group, []).append(each)
            continue
        if together and size + len(each.payload) > TOGETHER_BYTES_MAX:
            yield together
            together, size = [], 0
        together.append(each)
        size += len(each.payload)
    if together:
        yield together
    yield from groups.values()


def _size(load: Sequence[Delivery]) -> int:
    return sum(len(each.payload) for each in load)


def _envelope(topic: str, delivery: Delivery, types: Sequence[MessageType]) -> Envelope:
    is_grouped = bool(delivery.message_group)
    is_delay = delivery.deliver_at_ms and forwarded_type(types, is_grouped=is_grouped) is MessageType.DELAY
    due_ms = delivery.deliver_at_ms if is_delay else 0  # already past, so the cluster adds no delay
    return Envelope(topic, delivery.message_id, delivery.payload, "", delivery.message_group, due_ms)
