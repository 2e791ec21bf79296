"""Everything that fits ``ClassicBroker``, behind one handle: clients of it, names nobody used, and time that passes.

A maker of the table says how one is opened. Whoever adds a broker adds a maker; a test says with ``differs`` why it
cannot hold there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest
from support.rigs.broker.rig import EmbeddedRig, play
from support.rigs.rocketmq.real_time import new_id

from broker_adapter.contracts.classic import (
    ClassicBroker,
    Filter,
    MessageQueue,
    Outgoing,
    Presence,
    QueueReceipt,
    ReceivedMessage,
    TransactionCheck,
)
from broker_adapter.contracts.message import Message
from broker_adapter.contracts.topics import retry_topic
from dmq.broker.in_process_client import EmbeddedClassic

SEND_MS = 30_000  # a machine that stalls is no broker that is away
PATIENCE_S = 60.0  # for what happens by itself; nothing waits that long unless it is broken
ALL = Filter()
QUEUES = 4


class Heard:
    """What a client was told."""

    def __init__(self) -> None:
        self.changed: list[str] = []
        self.checks: list[TransactionCheck] = []
        self.told = asyncio.Event()

    def members_changed(self, group: str) -> None:
        self.changed.append(group)
        self.told.set()

    def check(self, check: TransactionCheck) -> None:
        self.checks.append(check)
        self.told.set()


class ClassicRig(Protocol):
    """A broker under test."""

    def client(self, client_id: str) -> ClassicBroker:
        """Another client of it; the rig closes it."""
        ...

    async def topic(self) -> str:
        """A topic that nobody used, with ``QUEUES`` queues."""
        ...

    def group(self) -> str:
        """A group that nobody used."""
        ...

    async def later(self, ms: int) -> None:
        """Let time pass, and what is due happen."""
        ...


class EmbeddedClassicRig:
    """Clients of the embedded broker, whose clock tests move."""

    def __init__(self, embedded: EmbeddedRig) -> None:
        self.embedded = embedded
        self.clients: list[EmbeddedClassic] = []
        self._taken = iter(range(1_000))

    def client(self, client_id: str) -> EmbeddedClassic:
        made = EmbeddedClassic(self.embedded.broker, client_id)
        self.clients.append(made)
        return made

    async def topic(self) -> str:
        return (await self.embedded.broker.catalog.topic(f"topic-{next(self._taken)}")).name

    def group(self) -> str:
        return f"group-{next(self._taken)}"

    async def later(self, ms: int) -> None:
        await self.embedded.pass_ms(ms)

    async def close(self) -> None:
        for each in self.clients:
            await each.close()


Scenario = Callable[[Any], Coroutine[object, object, None]]
Maker = Callable[[Path, Scenario], Coroutine[object, object, None]]  # opens one and runs a scenario on it


def _embedded(*, on_disk: bool) -> Maker:
    async def run(path: Path, scenario: Scenario) -> None:
        async def with_clients(embedded: EmbeddedRig) -> None:
            rig = EmbeddedClassicRig(embedded)
            try:
                await scenario(rig)
            finally:
                await rig.close()

        await play(EmbeddedRig(path, on_disk=on_disk, queues=QUEUES), with_clients)

    return run


EMBEDDED = {"rocksdb": _embedded(on_disk=True), "memory": _embedded(on_disk=False)}
_MAKERS: dict[str, Maker] = {**EMBEDDED}


def every_classic_broker(**differs: str) -> Callable[[Scenario], Callable[..., None]]:
    """Run a scenario on every classic broker; ``differs`` says of one why it cannot hold there."""
    return _on(_MAKERS, differs)


def every_embedded_classic() -> Callable[[Scenario], Callable[..., None]]:
    """Run a scenario on the embedded broker, on both engines."""
    return _on(EMBEDDED, {})


def _on(makers: dict[str, Maker], differs: dict[str, str]) -> Callable[[Scenario], Callable[..., None]]:
    def decorate(scenario: Scenario) -> Callable[..., None]:
        def test(kind: str, tmp_path: Path) -> None:
            asyncio.run(makers[kind](tmp_path, scenario))

        def marks(kind: str) -> list[pytest.MarkDecorator]:
            return [pytest.mark.xfail(strict=True, reason=differs[kind])] if kind in differs else []

        test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
        return pytest.mark.parametrize("kind", [pytest.param(kind, marks=marks(kind)) for kind in makers])(test)

    return decorate


# -- what scenarios do -------------------------------------------------------------------------------------------------


def a_message(topic: str, body: bytes = b"body", **facts: Any) -> Message:  # noqa: ANN401
    """A message with an id of its own."""
    return Message(topic=topic, message_id=new_id(), body=body, **facts)


async def queues_of(client: ClassicBroker, topic: str) -> Sequence[MessageQueue]:
    """The queues of a topic."""
    return (await client.route(topic)).readable


async def send(client: ClassicBroker, queue: MessageQueue, *bodies: bytes, **facts: Any) -> list[QueueReceipt]:  # noqa: ANN401
    """Send messages to a queue, one after the other."""
    outgoing = {name: facts.pop(name) for name in ("delay_level", "is_half", "system") if name in facts}
    receipts = []
    for body in bodies:
        sent = Outgoing(message=a_message(queue.topic, body, **facts), **outgoing)
        receipts.append(await client.send("producers", queue, [sent], timeout_ms=SEND_MS))
    return receipts


async def joined(client: ClassicBroker, group: str, *topics: str) -> Heard:
    """Have a client be a member of a group, and listen."""
    heard = Heard()
    client.attach(heard)
    await beat(client, group, *topics)
    return heard


async def beat(client: ClassicBroker, group: str, *topics: str) -> None:
    """Send a heartbeat of a consumer."""
    filters = dict.fromkeys((*topics, retry_topic(group)), ALL)
    await client.heartbeat([], [Presence(group, filters)])


async def pull_all(
    rig: ClassicRig, client: ClassicBroker, group: str, queue: MessageQueue, count: int, *, at: int = 0
) -> list[ReceivedMessage]:
    """Pull until so many came."""
    found: list[ReceivedMessage] = []
    async with asyncio.timeout(PATIENCE_S):
        while len(found) < count:
            pulled = await client.pull(group, queue, ALL, at, batch_max=32, wait_ms=0)
            found += pulled.messages
            at = pulled.next_offset
            if not pulled.messages:
                await rig.later(100)
    assert len(found) == count, found
    return found


async def pull_some(client: ClassicBroker, group: str, queue: MessageQueue, *, at: int = 0) -> list[ReceivedMessage]:
    """Pull what is there."""
    return list((await client.pull(group, queue, ALL, at, batch_max=32, wait_ms=0)).messages)
