"""A ``PopBroker`` in a few dictionaries: what the contract says and nothing more. For unit and protocol tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from broker_adapter.adapter import Subscription, TopicRoute
from broker_adapter.clock import Clock
from broker_adapter.errors import Refused, Rule
from broker_adapter.message import Delivery, Envelope, SendReceipt


@dataclass(slots=True)
class _Stored:
    envelope: Envelope
    receipt: SendReceipt
    stored_at_ms: int


@dataclass(slots=True)
class _Lease:
    visible_at_ms: int = 0
    turn: int = 0  # of hand-outs
    attempt: int = 0
    is_done: bool = False
    is_suspended: bool = False


@dataclass(slots=True)
class MemoryBroker:
    """Keeps every message of a topic in one list; queue 0, offset = position. ``fail_next`` is raised by one call."""

    clock: Clock
    queues: int = 8
    fail_next: Exception | None = None
    groups: set[str] = field(default_factory=set)
    seen: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    calls: list[tuple[object, ...]] = field(default_factory=list)
    waiting: asyncio.Event = field(default_factory=asyncio.Event)
    send_gate: asyncio.Event | None = None  # when set, sends wait for it
    on_cancel: Callable[[], None] = lambda: None  # called when a waiting receive is cancelled
    sending: asyncio.Event = field(default_factory=asyncio.Event)
    _topics: dict[str, list[_Stored]] = field(default_factory=dict)
    _leases: dict[tuple[str, str, int], _Lease] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def stored(self, topic: str) -> list[Envelope]:
        """Everything a topic holds, due or not."""
        return [stored.envelope for stored in self._topics.get(topic, [])]

    def poke(self) -> None:
        """Make waiting receives look again, after a manual clock moved."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _fail(self) -> None:
        error, self.fail_next = self.fail_next, None
        if error is not None:
            raise error

    async def route(self, topic: str) -> TopicRoute:
        self._fail()
        self._topics.setdefault(topic, [])
        return TopicRoute(topic, self.queues)

    async def ensure_group(self, group: str) -> None:
        self._fail()
        self.groups.add(group)

    async def send(self, envelopes: Sequence[Envelope]) -> Sequence[SendReceipt]:
        self._fail()
        self.sending.set()
        if self.send_gate is not None:
            await self.send_gate.wait()
        receipts = [self._store(envelope) for envelope in envelopes]
        self.poke()
        return receipts

    def _store(self, envelope: Envelope) -> SendReceipt:
        log = self._topics.setdefault(envelope.topic, [])
        for known in log:
            if known.envelope.message_id == envelope.message_id:
                return known.receipt._replace(repeated=True)
        waits = envelope.deliver_at_ms > self.clock.now_ms()
        position = -1 if waits else len(log)
        receipt = SendReceipt(envelope.message_id, -1 if waits else 0, position)
        log.append(_Stored(envelope, receipt, self.clock.now_ms()))
        return receipt

    async def receive(
        self,
        group: str,
        subscription: Subscription,
        *,
        batch_max: int,
        invisible_ms: int,
        wait_ms: int,
        renew_for: str = "",
    ) -> Sequence[Delivery]:
        self._fail()
        self.calls.append(("receive", group, subscription, batch_max, invisible_ms, wait_ms, renew_for))
        try:
            async with asyncio.timeout(wait_ms / 1000):
                while True:
                    changed = self._changed
                    if found := self._take(group, subscription, batch_max, invisible_ms):
                        return found
                    if not wait_ms:
                        return ()
                    self.waiting.set()
                    await changed.wait()
        except TimeoutError:
            return ()
        except asyncio.CancelledError:
            self.on_cancel()
            raise

    def _take(self, group: str, subscription: Subscription, batch_max: int, invisible_ms: int) -> list[Delivery]:
        if subscription.queue_id >= self.queues:
            raise Refused(Rule.NOT_FOUND, "the topic has no such queue", value=subscription.queue_id)
        now_ms, found = self.clock.now_ms(), list[Delivery]()
        for position, stored in enumerate(self._topics.get(subscription.topic, [])):
            envelope = stored.envelope
            lease = self._leases.setdefault((group, subscription.topic, position), _Lease())
            wanted = (not subscription.tags or envelope.tag in subscription.tags) and subscription.queue_id in {-1, 0}
            if lease.is_done or not wanted or max(lease.visible_at_ms, envelope.deliver_at_ms) > now_ms:
                continue
            lease.turn += 1
            lease.attempt += not lease.is_suspended
            lease.is_suspended = False
            lease.visible_at_ms = now_ms + invisible_ms
            found.append(
                Delivery(
                    envelope.topic,
                    envelope.message_id,
                    envelope.payload,
                    0,
                    position,
                    f"{group}/{subscription.topic}/{position}/{lease.turn}",
                    lease.attempt,
                    invisible_ms,
                    stored.stored_at_ms,
                    envelope.deliver_at_ms,
                )
            )
            if len(found) == batch_max:
                break
        return found

    def _lease(self, group: str, topic: str, handle: str) -> _Lease:
        position, _, turn = handle.removeprefix(f"{group}/{topic}/").partition("/")
        lease = self._leases.get((group, topic, int(position))) if position.isdigit() else None
        if lease is None or turn != str(lease.turn):
            raise Refused(Rule.RECEIPT_HANDLE, "the handle is unknown or stale", value=handle)
        return lease

    async def ack(self, group: str, topic: str, receipt_handles: Sequence[str]) -> Sequence[Exception | None]:
        self._fail()
        results: list[Exception | None] = []
        for handle in receipt_handles:
            try:
                self._lease(group, topic, handle).is_done = True
                results.append(None)
            except Refused as error:
                results.append(error)
        return results

    async def change_invisible(
        self, group: str, topic: str, receipt_handle: str, invisible_ms: int, *, suspend: bool = False
    ) -> str:
        self._fail()
        self.calls.append(("change", group, topic, receipt_handle, invisible_ms, suspend))
        lease = self._lease(group, topic, receipt_handle)
        if lease.is_done:
            raise Refused(Rule.RECEIPT_HANDLE, "the message is finished", value=receipt_handle)
        lease.is_suspended = suspend
        lease.visible_at_ms = self.clock.now_ms() + invisible_ms
        self.poke()
        return receipt_handle

    def client_seen(self, client_id: str) -> None:
        self.seen.append(client_id)

    def client_gone(self, client_id: str) -> None:
        self.gone.append(client_id)
