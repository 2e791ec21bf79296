"""Consumers under test on the embedded broker, whose clock tests move; and what their handlers saw."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from support.rigs.broker.rig import EmbeddedRig

from broker_adapter.contracts.classic import Filter, MessageQueue, PulledMessages, QueueReceipt, ReceivedMessage, Start
from broker_adapter.contracts.errors import BrokerUnavailable
from broker_adapter.contracts.message import Message
from broker_adapter.queue_client.balance.environments import Environments
from broker_adapter.queue_client.client import Client
from broker_adapter.queue_client.consumer import Consumer, ConsumerOptions, Outcome
from broker_adapter.queue_client.membership import Intervals
from dmq.broker.in_process_client import EmbeddedClassic

PATIENCE_S = 60.0  # for what happens by itself; nothing waits that long unless it is broken
_QUICK = Intervals(heartbeat_ms=200, route_ms=500)


class Seen:
    """What handlers got, in the order they got it, by the name of who got it."""

    def __init__(self, answer: Callable[[ReceivedMessage], Outcome] = lambda _: None) -> None:
        self.batches: list[tuple[str, tuple[ReceivedMessage, ...]]] = []
        self._answer = answer
        self._more = asyncio.Event()

    @property
    def bodies(self) -> list[bytes]:
        """The bodies of all messages."""
        return [each.message.body for _, batch in self.batches for each in batch]

    def by(self, name: str) -> Callable[[Sequence[ReceivedMessage]], Any]:
        """Return a handler that notes what it gets."""

        async def handle(batch: Sequence[ReceivedMessage]) -> Outcome:
            self.batches.append((name, tuple(batch)))
            self._more.set()
            for each in batch:
                outcome = self._answer(each)
                if outcome is not None:
                    return outcome
            return None

        return handle

    async def until(self, holds: Callable[[], bool], meanwhile: Callable[[], Any] | None = None) -> None:
        """Wait until something holds of what was seen; ``meanwhile`` is awaited again and again."""
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                self._more.clear()
                if meanwhile is not None:
                    await meanwhile()
                try:
                    async with asyncio.timeout(0.05):
                        await self._more.wait()
                except TimeoutError:
                    pass


async def eventually(holds: Callable[[], Awaitable[object]]) -> None:
    """Ask again and again until the answer is yes."""
    async with asyncio.timeout(PATIENCE_S):
        for _ in count():
            if await holds():
                return
            await asyncio.sleep(0.01)


class Faulty(EmbeddedClassic):
    """A client whose calls fail where a test says so."""

    failing: frozenset[str] = frozenset()
    hidden_members: int = 0  # so many times it is told that it is no member
    unreadable: frozenset[bytes] = frozenset()
    hanging: asyncio.Event | None = None  # what leaving waits for

    def __init__(self, *args: Any, **how: Any) -> None:  # noqa: ANN401
        super().__init__(*args, **how)
        self.moved: dict[MessageQueue, int] = {}  # where queues begin anew, told by their next pull

    def _fail(self, name: str) -> None:
        if name in self.failing:
            raise BrokerUnavailable(f"{name} fails here")

    async def send_back(self, *args: Any, **how: Any) -> None:  # noqa: ANN401
        self._fail("send_back")
        await super().send_back(*args, **how)

    async def send(self, *args: Any, **how: Any) -> QueueReceipt:  # noqa: ANN401
        self._fail("send")
        return await super().send(*args, **how)

    async def lock(self, *args: Any) -> frozenset[MessageQueue]:  # noqa: ANN401
        return frozenset() if "lock" in self.failing else await super().lock(*args)

    async def leave(self, **who: str) -> None:
        if self.hanging is not None:
            await self.hanging.wait()
        await super().leave(**who)

    async def commit_offset(self, *args: Any) -> None:  # noqa: ANN401
        self._fail("commit_offset")
        await super().commit_offset(*args)

    async def members(self, group: str, topic: str) -> Sequence[str]:
        if self.hidden_members:
            self.hidden_members -= 1
            await super().leave(consumer=group)
        return await super().members(group, topic)

    async def pull(self, *args: Any, **how: Any) -> PulledMessages:  # noqa: ANN401
        if args[1] in self.moved:
            return PulledMessages((), self.moved.pop(args[1]), moved=True)
        pulled = await super().pull(*args, **how)
        damaged = [
            replace(each, unreadable="its checksum differs") if each.message.body in self.unreadable else each
            for each in pulled.messages
        ]
        return pulled._replace(messages=damaged)


class Members:
    """Clients of one broker, and consumers of theirs. ``close`` them."""

    def __init__(self, rig: EmbeddedRig) -> None:
        self.rig = rig
        self.clients: dict[str, Client] = {}
        self.brokers: dict[str, Faulty] = {}
        self.intervals = _QUICK

    def client(self, name: str, environments: Environments | None = None) -> Client:
        """Return a client of this name."""
        if name not in self.clients:
            self.brokers[name] = Faulty(self.rig.broker, name)
            self.clients[name] = Client(self.brokers[name], self.intervals, environments, self.rig.clock)
        return self.clients[name]

    async def committed(self, group: str, topic: str) -> list[int | None]:
        """How far a group has come in the queues of a topic."""
        broker = self.brokers.setdefault("looker", Faulty(self.rig.broker, "looker"))
        return [await broker.committed_offset(group, queue) for queue in (await broker.route(topic)).readable]

    async def has_committed(self, group: str, topic: str, *offsets: int) -> bool:
        """Whether a group has come to one of these offsets in the only queue of a topic."""
        (found,) = await self.committed(group, topic)
        return found in offsets

    async def send(self, topic: str, *bodies: bytes, delay_level: int = 0, tag: str = "") -> None:
        """Send messages, one after the other."""
        if "sender" not in self.clients:
            self.sender = await self.client("sender").producer("senders")
        for body in bodies:
            await self.sender.send(Message(topic, body, tag=tag), delay_level=delay_level)

    def consumer(
        self,
        name: str,
        seen: Seen,
        group: str,
        filters: dict[str, str | Filter],
        **options: Any,  # noqa: ANN401
    ) -> Consumer:
        """Begin a consumer in a client of its own, with short intervals."""
        facts: dict[str, Any] = {
            "rebalance_ms": 200,
            "flush_ms": 50,
            "pause_ms": 20,
            "suspend_ms": 10,
            "long_poll_ms": 200,
        }
        facts |= {"start": Start.FIRST_OFFSET, "close_ms": 2_000}
        made = self.client(name).consumer(group, filters, ConsumerOptions(**{**facts, **options}))
        consumer = made(seen.by(name))
        assert isinstance(consumer, Consumer)
        return consumer

    async def kill(self, name: str) -> None:
        """End a client as a crash does: nothing is committed, nobody is told; then its silence is noticed."""
        client = self.clients.pop(name)
        for consumer in client._consumers:
            for task in (*consumer._tasks, *(each.pulling for each in consumer._owned.values())):
                if task is not None:
                    task.cancel()
            if consumer._service is not None:
                consumer._service.close()
        await client._membership.close()

    async def pass_time(self, ms: int = 1_000) -> None:
        """Let time pass, and what is due happen."""
        await self.rig.pass_ms(ms)

    async def close(self) -> None:
        """End all clients."""
        for client in self.clients.values():
            await client.close()
