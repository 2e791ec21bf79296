"""Transfer of messages from an inner topic of the cluster: stored here, then acknowledged there.

A message is acknowledged once it is durable here. After a crash in between it is fetched again and recognized by its
id. An unreadable message is put into the dead-letter queue of the group, with the reason, and blocks no other message.
While the store has no room no message is acknowledged: it is redelivered when its invisible duration expires.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from enum import IntEnum
from typing import NamedTuple

import structlog

from broker_adapter.contracts.adapter import PopBroker, Subscription
from broker_adapter.contracts.errors import BrokerError, Refused, Rule
from broker_adapter.contracts.limits import DELIVER_AT_MS_MAX
from broker_adapter.contracts.message import Delivery, Envelope, pack_id
from broker_adapter.contracts.schedules import makes_schedule
from broker_adapter.contracts.topics import dead_letter_topic
from broker_adapter.runtime.clock import Clock
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.delay import unwrap
from broker_adapter.wire.mapping import to_envelope
from dmq.broker import EmbeddedBroker
from dmq.broker.topics import Topic
from dmq.errors import StoreError
from dmq.trail.events import NO_QUEUE, EventKind, encode_event
from retry.dead_letter import UNREADABLE

log = structlog.get_logger("dmq.cluster")

_RECEIVERS = 4
_BATCH = 32
_INVISIBLE_MS = 30_000  # after it others get messages that a crashed daemon fetched but did not store
_WAIT_MS = 20_000
_PAUSES_S = (1.0, 2.0, 5.0, 10.0, 30.0)
_WHY_CHARS_MAX = 300
_U64 = 2**64 - 1


class Fate(IntEnum):
    """The outcome of a message of the inner topic."""

    ACCEPTED = 1
    KNOWN = 2  # its id is pending or remembered here: not stored again
    DUE_BEFORE = 3  # skipped because of due_after_ms
    UNREADABLE = 4  # in the dead-letter queue of the group


class TakenMessage(NamedTuple):
    """A processed message. Only an unreadable one has ``why``, and it has no due time."""

    fate: Fate
    due_ms: int = 0
    why: str = ""


class InnerTopic:
    """The consumer of the inner topic. The event loop owns it; call ``start`` and ``close`` once each."""

    def __init__(
        self,
        cluster: PopBroker,
        local: EmbeddedBroker,
        clock: Clock,
        *,
        topic: str,
        group: str,
        levels_ms: Sequence[int],
        delay_max_ms: int | None,
    ) -> None:
        self.topic = topic
        self.fetched_total = 0
        self.unreadable_total = 0
        self.error = ""  # the current error; empty while it receives
        self._cluster = cluster
        self._local = local
        self._clock = clock
        self._group = group
        self._levels_ms = levels_ms
        self._delay_max_ms = delay_max_ms
        self._tasks: list[asyncio.Task[None]] = []
        self._back = asyncio.Event()

    def start(self) -> None:
        """Start to receive messages."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._run(), name="dmq-inner") for _ in range(_RECEIVERS)]

    def try_now(self) -> None:
        """Retry without waiting: a part of the cluster is reachable again."""
        self._back.set()
        self._back.clear()

    async def close(self) -> None:
        """Stop. Received messages that are not stored yet are redelivered."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self) -> None:
        failures = 0
        while True:
            try:
                await self._turn()
            except Exception as error:  # no error may end the loop
                if not isinstance(error, BrokerError | StoreError):
                    log.exception("inner_topic_failed", topic=self.topic)
                elif not self.error:
                    log.warning("inner_topic_stopped", topic=self.topic, why=str(error))
                self.error = str(error) if isinstance(error, BrokerError) else f"{type(error).__name__}: {error}"
                with suppress(TimeoutError):
                    async with asyncio.timeout(_PAUSES_S[min(failures, len(_PAUSES_S) - 1)]):
                        await self._back.wait()
                failures += 1
                continue
            failures = 0
            if self.error:
                self.error = ""
                log.info("inner_topic_resumed", topic=self.topic)

    async def _turn(self) -> None:
        await self._cluster.ensure_group(self._group)
        found = await self._cluster.receive(
            self._group, Subscription(self.topic), batch_max=_BATCH, invisible_ms=_INVISIBLE_MS, wait_ms=_WAIT_MS
        )
        kept = await asyncio.gather(*(self._keep(each) for each in found), return_exceptions=True)
        handles = [each.receipt_handle for each, error in zip(found, kept, strict=True) if error is None]
        if handles:
            await self._cluster.ack(self._group, self.topic, handles)  # after an error it is fetched again
        for error in kept:
            if isinstance(error, BaseException):
                raise error

    async def _keep(self, delivery: Delivery) -> None:
        """Return once the message is durable here, or is in the dead-letter queue."""
        if (await self.take(delivery)).fate is Fate.UNREADABLE:
            self.unreadable_total += 1
        else:
            self.fetched_total += 1

    async def take(self, delivery: Delivery, *, due_after_ms: int = 0) -> TakenMessage:
        """Store a message of the inner topic, unless it was due before ``due_after_ms``; return the outcome.

        The message is durable on return, also an unreadable one, which is in the dead-letter queue. Raises the store's
        errors.
        """
        try:
            envelope = self.envelope_of(delivery)
            due_ms = envelope.deliver_at_ms or delivery.stored_at_ms
            if due_ms < due_after_ms:
                return TakenMessage(Fate.DUE_BEFORE, due_ms)
            (receipt,) = await self._local.send([envelope], lambda topic, _: _fetched(topic, delivery))
        except Refused as refused:
            await self._bury(delivery, refused)
            return TakenMessage(Fate.UNREADABLE, why=str(refused))
        is_known = receipt.repeated or receipt.recalled_at_ms
        return TakenMessage(Fate.KNOWN if is_known else Fate.ACCEPTED, due_ms)

    def envelope_of(self, delivery: Delivery) -> Envelope:
        """Return the envelope to store. A delay starts when the cluster stored the message, regardless of the time of
        the fetch.

        Raises ``Refused`` for an unreadable message.
        """
        wrapped = unwrap(delivery.payload, self.topic)
        if makes_schedule(wrapped.message.user_properties):
            raise Refused(Rule.PROPERTY_KEY, "a schedule requires a direct send to this daemon, not the inner topic")
        stored_at_ms = delivery.stored_at_ms or self._clock.now_ms()
        due_ms = wrapped.deliver_at_ms
        if wrapped.delay_level:
            due_ms = stored_at_ms + self._levels_ms[min(wrapped.delay_level, len(self._levels_ms)) - 1]
        elif wrapped.delay_ms:
            due_ms = stored_at_ms + wrapped.delay_ms
        ahead_ms = due_ms - self._clock.now_ms()
        if due_ms > DELIVER_AT_MS_MAX or (self._delay_max_ms is not None and ahead_ms > self._delay_max_ms):
            limit = f"{self._delay_max_ms} ms" if self._delay_max_ms is not None else "the year 9999"
            raise Refused(Rule.DELIVERY_TIME, f"it is due {ahead_ms} ms ahead", value=due_ms, limit=limit)
        wrapped.message.system_properties.message_id = delivery.message_id
        return to_envelope(wrapped.message, deliver_at_ms=due_ms or None, topic=wrapped.topic)

    async def _bury(self, delivery: Delivery, refused: Refused) -> None:
        letters = dead_letter_topic(self._group)
        log.warning("inner_message_unreadable", message_id=delivery.message_id, why=str(refused), letters=letters)
        await self._local.ensure_group(self._group)
        message = wire.Message.FromString(delivery.payload)
        message.user_properties[UNREADABLE] = str(refused)[:_WHY_CHARS_MAX]
        letter = Envelope(letters, delivery.message_id, message.SerializeToString())
        await self._local.send([letter], lambda topic, _: _fetched(topic, delivery))


def _fetched(topic: Topic, delivery: Delivery) -> bytes:
    return encode_event(
        EventKind.FETCHED,
        topic.topic_id,
        0,
        NO_QUEUE,
        delivery.delivery_attempt,
        delivery.queue_offset & _U64,
        pack_id(delivery.message_id),
    )
