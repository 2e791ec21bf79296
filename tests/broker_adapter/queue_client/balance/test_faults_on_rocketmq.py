"""A broker that is stopped: sends with fault avoidance leave it alone for the time of the table, then come back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from support.clients.embedded.consumers import PATIENCE_S
from support.effort import at_length
from support.rigs.rocketmq.cluster import BROKERS, cluster

from bench.rocketmq import stopped
from broker_adapter import Client, Message, ProducerOptions
from broker_adapter.contracts.classic import Outgoing, QueueReceipt
from broker_adapter.contracts.message_queue import MessageQueue
from broker_adapter.queue_client.producer import Producer
from broker_adapter.remoting import RemotingBroker, RemotingOptions
from broker_adapter.runtime.clock import ManualClock

pytestmark = pytest.mark.cluster
WELL, STOPPED = BROKERS
_ENOUGH = 16  # sends; in turn over eight queues
_SHORT_MS, _LONG_MS = 500, 60_000  # of an attempt: a machine that stalls is no broker that is stopped


class Attempts(RemotingBroker):
    """Notes at which broker each attempt was made, answered or not; the one that is stopped is not waited for long."""

    def __init__(self, *args: Any, **how: Any) -> None:  # noqa: ANN401
        super().__init__(*args, **how)
        self.asked: list[str] = []
        self.is_stopped = False

    async def send(
        self, group: str, queue: MessageQueue, messages: Sequence[Outgoing], *, timeout_ms: int, one_way: bool = False
    ) -> QueueReceipt:
        self.asked.append(queue.broker)
        timeout_ms = _SHORT_MS if self.is_stopped and queue.broker == STOPPED else _LONG_MS
        return await super().send(group, queue, messages, timeout_ms=timeout_ms, one_way=one_way)


class Sender:
    """A producer whose table of faults has a clock of its own, at brokers that live in real time."""

    def __init__(self, names: str, topic: str, *, as_4: bool) -> None:
        self.broker = Attempts(RemotingOptions(names=(names,)))
        self.clock = ManualClock()
        self.client = Client(self.broker, clock=self.clock)
        self._topic = topic
        self._options = ProducerOptions(fault_avoidance=True, as_4=as_4)
        self._producer: Producer | None = None

    async def send(self) -> str:
        """Send; return where it was stored."""
        self._producer = self._producer or await self.client.producer("senders", options=self._options)
        return (await self._producer.send(Message(self._topic, b"x"))).queue.broker

    async def until(self, holds: Callable[[], bool]) -> set[str]:
        """Send until something holds; return where these were stored."""
        stored = set()
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                stored.add(await self.send())
        return stored

    async def asked(self) -> set[str]:
        """Send often; return which brokers were asked for it, the one that does not answer too."""
        self.broker.asked.clear()
        for _ in range(_ENOUGH):
            await self.send()
        return set(self.broker.asked)


@pytest.mark.parametrize(
    ("as_4", "pause_ms"),
    [pytest.param(False, 10_000, id="tables-5"), pytest.param(True, 600_000, id="tables-4", marks=at_length)],
)
def test_a_stopped_broker_is_left_alone_for_the_time_of_the_table(as_4: bool, pause_ms: int) -> None:
    """Once one send has found it out; tried again by one send after that time, and used again once it answers."""
    running = cluster()
    (process,) = [node.process for node in running.rocketmq.nodes if node.name == STOPPED]
    assert process is not None

    async def scenario() -> None:
        sender = Sender(running.rocketmq.names, running.topic(), as_4=as_4)
        asked = sender.broker.asked
        async with sender.client:
            assert await sender.asked() == {WELL, STOPPED}
            with stopped(process):
                sender.broker.is_stopped = True
                for _ in range(2):
                    asked.clear()
                    assert await sender.until(lambda: STOPPED in asked) == {WELL}
                    assert asked.count(STOPPED) == 1
                    assert await sender.asked() == {WELL}
                    sender.clock.advance(pause_ms - 1)
                    assert await sender.asked() == {WELL}
                    sender.clock.advance(1)
            sender.broker.is_stopped = False
            stored = {WELL}
            async with asyncio.timeout(PATIENCE_S):
                while stored == {WELL}:
                    sender.clock.advance(pause_ms)
                    stored.add(await sender.send())
            assert await sender.asked() == {WELL, STOPPED}

    asyncio.run(scenario())
