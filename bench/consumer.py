"""A consumer in the same process: it waits for messages, notes how late each came, and acknowledges it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from broker_adapter.contracts.adapter import Subscription
from broker_adapter.contracts.limits import AUTO_RENEW_INVISIBLE_MS, RECEIVE_BATCH_MAX
from broker_adapter.contracts.message import Delivery
from dmq.broker.broker import EmbeddedBroker

_CLIENT = "bench-consumer"
_WAIT_MS = 500  # a short long poll, so that the last ones end soon after the last message
_SECONDS_MAX = 60.0  # without a message


async def receive(broker: EmbeddedBroker, group: str, topic: str, *, wait_ms: int = _WAIT_MS) -> Sequence[Delivery]:
    """Receive as a push consumer does, whose leases the broker renews."""
    return await broker.receive(
        group,
        Subscription(topic),
        batch_max=RECEIVE_BATCH_MAX,
        invisible_ms=AUTO_RENEW_INVISIBLE_MS,
        wait_ms=wait_ms,
        renew_for=_CLIENT,
    )


async def finish(broker: EmbeddedBroker, group: str, topic: str, handles: Sequence[str]) -> None:
    """Acknowledge; a refusal is a fault of the measurement."""
    for refused in await broker.ack(group, topic, handles):
        if refused is not None:
            raise refused


class Consumer:
    """Several waiting receives for each topic of a group.

    ``due_ms`` says when a delivery was due, or ``None`` if it is not to be counted.
    """

    def __init__(
        self, broker: EmbeddedBroker, group: str, topics: Sequence[str], due_ms: Callable[[Delivery], float | None]
    ) -> None:
        self._broker = broker
        self._group = group
        self._topics = topics
        self._due_ms = due_ms
        self._left = 0
        self.last_s = 0.0
        self.late_ms: list[float] = []

    async def run(self, count: int, *, polls: int) -> None:
        """Take ``count`` messages, with ``polls`` receives waiting for each topic."""
        self._left = count
        self.last_s = time.monotonic()
        async with asyncio.TaskGroup() as polling:
            for topic in self._topics:
                for _ in range(polls):
                    polling.create_task(self._poll(topic))

    async def _poll(self, topic: str) -> None:
        while self._left > 0:
            deliveries = await receive(self._broker, self._group, topic)
            # Finer than the broker's clock: a difference of less than a millisecond is one that counts here.
            now_ms = time.time_ns() / 1e6
            if not deliveries:
                if time.monotonic() - self.last_s > _SECONDS_MAX:
                    raise RuntimeError(f"{self._left} messages did not come within {_SECONDS_MAX:.0f} s")
                continue
            self.last_s = time.monotonic()
            self._left -= len(deliveries)
            due = [self._due_ms(each) for each in deliveries]
            self.late_ms += [now_ms - at_ms for at_ms in due if at_ms is not None]
            await finish(self._broker, self._group, topic, [each.receipt_handle for each in deliveries])
            self.last_s = time.monotonic()
