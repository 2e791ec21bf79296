"""A forwarder on an embedded broker, and a cluster whose answers a test chooses."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import cast

from support.models.store.outbox import read_outbox
from support.rigs.broker.rig import PATIENCE_S, TOPIC, EmbeddedRig, play

from broker_adapter.contracts.adapter import PopBroker, TopicRoute
from broker_adapter.contracts.errors import BrokerError
from broker_adapter.contracts.message import Envelope, SendReceipt, unpack_id
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.cluster.forwarder import Forwarder
from dmq.config.units import TopicPatterns
from dmq.trail.events import EventKind

Answer = Callable[[Sequence[Envelope]], Awaitable[None]]  # returns: OK; raises what the cluster says otherwise
IN_FLIGHT_MAX = 128


class ChosenCluster:
    """Stands for a cluster's faults: takes every message unless ``answer`` says something else."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []  # the ids that came together, also those that it did not take
        self.taken: list[str] = []
        self.payloads: dict[str, bytes] = {}
        self.answer: Answer = self.ok
        self.changed = asyncio.Event()

    async def route(self, topic: str) -> TopicRoute:
        return TopicRoute(topic, 4)

    async def send(self, envelopes: Sequence[Envelope]) -> Sequence[SendReceipt]:
        ids = [each.message_id for each in envelopes]
        self.calls.append(ids)
        self.changed.set()
        await self.answer(envelopes)
        self.taken += ids
        self.payloads |= {each.message_id: each.payload for each in envelopes}
        self.changed.set()
        return [SendReceipt(each, 0, len(self.taken)) for each in ids]

    async def ok(self, envelopes: Sequence[Envelope]) -> None:
        pass

    async def silent(self, envelopes: Sequence[Envelope]) -> None:
        await asyncio.Event().wait()

    def says(self, error: BrokerError, *ids: str) -> None:
        """Have it refuse calls with one of these messages, or all."""

        async def answer(envelopes: Sequence[Envelope]) -> None:
            if not ids or any(each.message_id in ids for each in envelopes):
                raise error

        self.answer = answer

    async def until(self, holds: Callable[[], object]) -> None:
        """Return once something holds that changes with what comes here."""
        async with asyncio.timeout(10):
            while not holds():
                self.changed.clear()
                await self.changed.wait()


class LanesRig(EmbeddedRig):
    """An embedded broker with a forwarder, in memory."""

    forwarder: Forwarder

    def __init__(self, path: Path, *, queues: int = 1) -> None:
        super().__init__(path, on_disk=False, queues=queues, stay=TopicPatterns())
        self.cluster = ChosenCluster()

    async def open(self) -> None:
        await super().open()
        self.forwarder = Forwarder(
            self.broker,
            cast("PopBroker", self.cluster),
            self.store.clock,
            in_flight_max=IN_FLIGHT_MAX,
        )
        await self.forwarder.start()

    async def close(self) -> None:
        await self.forwarder.close(0.1)
        await super().close()

    def told(self, kind: EventKind) -> Counter[str]:
        """How many events of a kind there are of each message."""
        found = (event for _, event in read_outbox(self.store) if event.kind is kind)
        return Counter(unpack_id(event.message_id) for event in found)

    async def keep(self, *ids: str, topic: str = TOPIC, message_group: str = "", deliver_at_ms: int = 0) -> None:
        """Have messages wait here for the cluster."""
        for each in ids:
            payload = wire.Message(body=each.encode()).SerializeToString()
            await self.broker.send([Envelope(topic, each, payload, "", message_group, deliver_at_ms)])

    async def forwarded(self, *ids: str) -> None:
        """Return once the trail says that these are at the cluster."""
        async with asyncio.timeout(PATIENCE_S):
            while not set(ids) <= self.told(EventKind.FORWARDED).keys():  # noqa: ASYNC110 - no event tells of it
                await asyncio.sleep(0.002)


def with_lanes(scenario: Callable[[LanesRig], Coroutine[object, object, None]]) -> Callable[[Path], None]:
    """Run a scenario on a rig."""

    def test(tmp_path: Path) -> None:
        asyncio.run(play(LanesRig(tmp_path), scenario))

    test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
    return test
