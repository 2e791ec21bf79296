"""Brokers under test in real time: the embedded one here, behind a sidecar, behind fronts, and a real Apache RocketMQ.

``support.rigs.broker.rig`` has the embedded broker with a clock that tests move, for all its promises. These
rigs are for the promises of all brokers; a test states a difference with ``differs``.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.effort import at_length
from support.rigs.daemon.process import Daemon
from support.rigs.rocketmq.cluster import cluster, cluster_4

from bench.rocketmq import RocketMQ
from broker_adapter.contracts.adapter import PopBroker, Subscription
from broker_adapter.contracts.classic import ClassicBroker
from broker_adapter.contracts.message import Delivery, Envelope, Message
from broker_adapter.contracts.message_id import new_message_id
from broker_adapter.contracts.transactions import Check, TransactionalBroker
from broker_adapter.leasing import LeasingBroker, LeasingOptions
from broker_adapter.remoting import RemotingBroker, RemotingOptions
from broker_adapter.rocketmq import ClusterOptions, RocketMQBroker
from broker_adapter.runtime.clock import SystemClock
from broker_adapter.wire.mapping import encode
from dmq.broker.broker import EmbeddedBroker
from dmq.broker.in_process_client import EmbeddedClassic
from dmq.errors import StoreError
from dmq.scheduler.scheduler import Scheduler
from dmq.store.engines.rocks import RocksEngine
from dmq.store.store import Store, StoreOptions
from dmq.trail.events import gap_event

INVISIBLE_MS = 10_000  # the least that RocketMQ takes
REQUEST_MS = 30_000  # a machine that stalls is no broker that is away
_GROUPS = itertools.count()
_TOPICS_4 = 30
PATIENCE_S = 60.0  # for what happens by itself; nothing waits that long unless it is broken


class Rig:
    """A broker, and names in it that nobody used yet."""

    def __init__(
        self,
        broker: PopBroker,
        transactions: TransactionalBroker,
        topic: Callable[[str], str],
        group: Callable[[], str],
    ) -> None:
        self.broker = broker
        self.transactions = transactions
        self.topic = topic
        self.group = group

    async def send(self, topic: str, *bodies: bytes, **facts: Any) -> Sequence[Envelope]:  # noqa: ANN401
        """Send messages, one call each; return what was sent."""
        sent = [a_message(topic, body, **facts) for body in bodies]
        for each in sent:
            await self.broker.send([each])
        return sent

    async def receive(self, group: str, topic: str, count: int = 1, **facts: Any) -> list[Delivery]:  # noqa: ANN401
        """Receive until ``count`` messages came."""
        found: list[Delivery] = []
        subscription = Subscription(topic, **facts)
        until_s = time.monotonic() + PATIENCE_S
        while len(found) < count and time.monotonic() < until_s:
            found += await self.broker.receive(
                group, subscription, batch_max=32, invisible_ms=INVISIBLE_MS, wait_ms=1_000
            )
        assert len(found) == count, found
        return found

    async def receive_some(self, group: str, topic: str) -> list[Delivery]:
        """Receive once."""
        subscription = Subscription(topic)
        return list(
            await self.broker.receive(group, subscription, batch_max=32, invisible_ms=INVISIBLE_MS, wait_ms=1_000)
        )

    async def nothing_comes(self, group: str, topic: str, within_s: float) -> None:
        """Receive for a while; whatever comes is wrong."""
        until_s = time.monotonic() + within_s
        while time.monotonic() < until_s:
            found = await self.broker.receive(
                group, Subscription(topic), batch_max=32, invisible_ms=INVISIBLE_MS, wait_ms=500
            )
            assert not found, found


class Decider:
    """A producer that is asked."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[Check] = asyncio.Queue()

    def is_live(self, topic: str) -> bool:
        """Always there."""
        return True

    async def check(self, check: Check) -> bool:
        """Note the question."""
        self.asked.put_nowait(check)
        return True


def a_message(topic: str, body: bytes = b"body", **facts: Any) -> Envelope:  # noqa: ANN401
    """Return a message as a client sends it."""
    message_id = facts.pop("message_id", "") or new_id()
    return encode(Message(topic=topic, message_id=message_id, body=body, **facts))


def new_id() -> str:
    """Return a message id."""
    return new_message_id(now_ms(), os.getpid(), os.urandom(10))


def now_ms() -> int:
    """Return the time."""
    return SystemClock().now_ms()


@asynccontextmanager
async def embedded(path: Path) -> AsyncIterator[Rig]:
    """The embedded broker in this process."""
    store = Store(RocksEngine(path / "store"), SystemClock(), StoreOptions(gap_event=gap_event))
    broker, failures = EmbeddedBroker(store), list[StoreError]()
    scheduler = Scheduler(store, broker.placement, broker.checks, on_failure=failures.append)
    scheduler.start()
    try:
        yield Rig(broker, broker.transactions, *_names())
    finally:
        await broker.close()
        scheduler.close()
        store.close()
    assert not failures


@asynccontextmanager
async def through_the_sidecar(path: Path) -> AsyncIterator[Rig]:
    """The embedded broker in a daemon of one process, spoken to as if it were a cluster."""
    async with _daemon(path, processes=1) as rig:
        yield rig


@asynccontextmanager
async def through_fronts(path: Path) -> AsyncIterator[Rig]:
    """The same with two fronts."""
    async with _daemon(path, processes=2) as rig:
        yield rig


@asynccontextmanager
async def _daemon(path: Path, *, processes: int) -> AsyncIterator[Rig]:
    with Daemon(path / "data", env={**os.environ, "DMQ_PROCESSES": str(processes)}) as daemon:
        broker = RocketMQBroker(
            ClusterOptions(endpoints=(daemon.address,), request_timeout_ms=REQUEST_MS), SystemClock()
        )
        try:
            yield Rig(broker, broker, *_names())
        finally:
            await broker.close()
            daemon.stop()


@asynccontextmanager
async def rocketmq(path: Path) -> AsyncIterator[Rig]:
    """Apache RocketMQ, two brokers."""
    found = cluster()
    broker = RocketMQBroker(ClusterOptions(endpoints=found.endpoints, request_timeout_ms=REQUEST_MS), SystemClock())
    try:
        yield Rig(broker, broker, found.topic, found.group)
    finally:
        await broker.close()


@asynccontextmanager
async def leased_here(path: Path) -> AsyncIterator[Rig]:
    """Leases over the embedded broker's queues, as over those of a classic cluster."""
    async with embedded(path) as rig:
        assert isinstance(rig.broker, EmbeddedBroker)
        async with _leasing(EmbeddedClassic(rig.broker, "leasing")) as broker:
            yield Rig(broker, broker, *_names())


@asynccontextmanager
async def leased(running: RocketMQ, topic: Callable[[str], str]) -> AsyncIterator[Rig]:
    """Leases over the queues of Apache RocketMQ, by the classic protocol."""
    options = RemotingOptions(names=tuple(running.names.split(";")), request_timeout_ms=REQUEST_MS)
    async with _leasing(RemotingBroker(options)) as broker:
        yield Rig(broker, broker, topic, lambda: f"leased-{next(_GROUPS)}")


@asynccontextmanager
async def leased_5(path: Path) -> AsyncIterator[Rig]:
    """Leases over RocketMQ 5.5."""
    found = cluster()
    async with leased(found.rocketmq, found.topic) as rig:
        yield rig


@asynccontextmanager
async def leased_4(path: Path) -> AsyncIterator[Rig]:
    """Leases over RocketMQ 4.9."""
    running, names = cluster_4(), [f"leased-topic-{number}" for number in range(_TOPICS_4)]
    await asyncio.to_thread(running.make_topics, dict.fromkeys(names, "NORMAL"))
    unused = iter(names)
    async with leased(running, lambda _: next(unused)) as rig:
        yield rig


@asynccontextmanager
async def _leasing(classic: ClassicBroker) -> AsyncIterator[LeasingBroker]:
    broker = LeasingBroker(classic, SystemClock(), LeasingOptions(timeout_ms=REQUEST_MS))
    try:
        yield broker
    finally:
        await broker.close()


def _names() -> tuple[Callable[[str], str], Callable[[], str]]:
    taken = iter(range(1_000))
    return (lambda kind: f"{kind.lower()}-{next(taken)}"), (lambda: f"group-{next(taken)}")


Scenario = Callable[[Rig], Coroutine[object, object, None]]
_MAKERS = {
    "embedded": embedded,
    "sidecar": through_the_sidecar,
    "fronts": through_fronts,
    "rocketmq": rocketmq,
    "leased_here": leased_here,
    "leased_5": leased_5,
    "leased_4": leased_4,
}
_CLUSTERS = {"rocketmq": cluster, "leased_5": cluster, "leased_4": cluster_4}


def every_broker(*, spins_rocketmq: bool = False, **differs: str) -> Callable[[Scenario], Callable[..., None]]:
    """Run a scenario on every broker; ``differs`` says of a broker why it cannot hold there.

    A broker of RocketMQ 5.5.0 that ended a transaction keeps a core busy for as long as it lives, so what
    ``spins_rocketmq`` is left to long runs, and so are leases over real clusters: they run over the embedded broker.
    """

    def decorate(scenario: Scenario) -> Callable[..., None]:
        def test(kind: str, at_once: AllAtOnce) -> None:
            at_once.result(kind, scenario)

        def marks(kind: str) -> list[pytest.MarkDecorator]:
            found = [pytest.mark.xfail(strict=True, reason=differs[kind])] if kind in differs else []
            is_long = kind in {"leased_4", "leased_5"} or (spins_rocketmq and kind in _CLUSTERS)
            return [*found, at_length] if is_long else found

        test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
        test.scenario = scenario  # type: ignore[attr-defined]
        return pytest.mark.parametrize("kind", [pytest.param(kind, marks=marks(kind)) for kind in _MAKERS])(test)

    return decorate


class AllAtOnce:
    """What came of the scenarios of a run. Most of them wait, so all that are asked of one broker take place at once.

    They begin when the first one is asked for. Each has a topic and groups of its own.
    """

    def __init__(self, folder: Callable[[str], Path], items: Iterable[pytest.Item]) -> None:
        self._folder = folder
        self._came: dict[str, dict[Scenario, Future[None]]] = {}
        self._pool = ThreadPoolExecutor(max_workers=len(_MAKERS))
        self._played: list[Future[None]] = []
        self._wanted: dict[str, list[Scenario]] = {}
        for item in items:
            scenario = getattr(getattr(item, "function", None), "scenario", None)
            if scenario is not None and isinstance(item, pytest.Function) and not _is_skipped(item):
                self._wanted.setdefault(str(item.callspec.params["kind"]), []).append(scenario)

    def result(self, kind: str, scenario: Scenario) -> None:
        """Return once a scenario has taken place on a broker; raises what it raised."""
        if kind not in self._came:
            if kind in _CLUSTERS:
                _CLUSTERS[kind]()
            self._came[kind] = {each: Future() for each in self._wanted[kind]}
            self._played.append(self._pool.submit(self._play, kind, self._folder(kind)))
        self._came[kind][scenario].result()

    def close(self) -> None:
        """Wait until all brokers have ended; raises what one of them raised at that."""
        self._pool.shutdown()
        for each in self._played:
            each.result()

    def _play(self, kind: str, folder: Path) -> None:
        came = self._came[kind]

        async def one(rig: Rig, scenario: Scenario) -> None:
            try:
                await scenario(rig)
            except BaseException as error:  # noqa: BLE001 - the test raises it
                came[scenario].set_exception(error)
            else:
                came[scenario].set_result(None)

        async def play() -> None:
            async with _MAKERS[kind](folder) as rig:
                await asyncio.gather(*(one(rig, scenario) for scenario in came))

        try:
            asyncio.run(play())
        except BaseException as error:
            for each in came.values():
                if not each.done():
                    each.set_exception(error)
            raise


def _is_skipped(item: pytest.Item) -> bool:
    return any(mark.args[0] for mark in item.iter_markers("skipif"))
