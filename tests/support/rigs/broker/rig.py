"""Brokers under test, each with a manual clock, behind one handle; and decorators that run a scenario on them.

A scenario is an ``async def test_...(rig)``. An exception that it leaves behind and nobody looked at fails it.
"""

from __future__ import annotations

import asyncio
import gc
import shutil
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Protocol

import pytest
from support.effort import EFFORT
from support.models.store.lag_check import assert_lags
from support.models.store.ledger_check import assert_balances
from support.models.store.properties import assert_properties
from support.rigs.broker.joined import FrontedBroker, Joined, port_of
from support.rigs.broker.memory_broker import MemoryBroker
from support.rigs.store.rows import copy_at_rest, recount_bytes

from broker_adapter.contracts.adapter import GroupSettings, Subscription
from broker_adapter.contracts.message import Delivery, Envelope, SendReceipt
from broker_adapter.runtime.clock import ManualClock
from dmq.broker.broker import EmbeddedBroker
from dmq.config.units import ALL_TOPICS, TopicPatterns
from dmq.errors import StoreError
from dmq.rocketmq_server.calls.exchange import ServedBroker
from dmq.scheduler.scheduler import Scheduler
from dmq.store.engines.engine import Batch, Engine
from dmq.store.engines.memory import MemoryEngine
from dmq.store.engines.rocks import RocksEngine
from dmq.store.schema.keys import META_IDENTITY, Family
from dmq.store.schema.topics.names import NO_QUOTAS, TopicQuotas
from dmq.store.store import Store, StoreOptions
from dmq.tracing import EmitSpan
from dmq.trail.events import gap_event
from dmq.trail.ledger import LEDGER_KINDS
from retry.policy import RetryPolicy, Table

TOPIC, GROUP = "orders", "workers"
INVISIBLE_MS = 30_000
PATIENCE_S = 10.0  # for what happens by itself; nothing waits that long unless it is broken


class End(Enum):
    """How a run ends: in order, by SIGKILL (what was written stays), by power loss (only what was synced stays)."""

    CLOSE = "close"
    KILL = "kill"
    POWER_LOSS = "power loss"


Backup = Path | MemoryEngine


class Rig(Protocol):
    """A broker, its clock, and what a test does to them."""

    clock: ManualClock

    @property
    def broker(self) -> ServedBroker:
        """The broker; another one after ``restart``."""
        ...

    @property
    def receives_waiting(self) -> int:
        """How many receives have found nothing and wait."""
        ...

    async def open(self) -> None:
        """Start it."""
        ...

    async def close(self) -> None:
        """End it."""
        ...

    async def settle(self) -> None:
        """Return when everything that is due was handed over and everything that expired came back."""
        ...

    async def pass_ms(self, ms: int) -> None:
        """Advance the clock and settle."""
        ...

    async def restart(self, end: End, *, down_ms: int = 0) -> None:
        """End the run and begin another one ``down_ms`` later."""
        ...

    async def set_group(
        self, group: str, *, max_attempts: int, delays_ms: tuple[int, ...], is_fifo: bool = False
    ) -> None:
        """Say how a group is served."""
        ...


class _Clocked:
    """The part of a rig that passes time."""

    clock: ManualClock

    async def settle(self) -> None:
        raise NotImplementedError

    async def pass_ms(self, ms: int) -> None:
        self.clock.advance(ms)
        await self.settle()


class EmbeddedRig(_Clocked):
    """The embedded broker with its scheduler, driven by hand. ``disk`` says on which engine."""

    def __init__(
        self,
        path: Path,
        *,
        on_disk: bool,
        queues: int = 4,
        group_start: Literal["earliest", "latest"] = "earliest",
        stay: TopicPatterns = ALL_TOPICS,
        options: StoreOptions | None = None,
        clock: ManualClock | None = None,
        wrap: Callable[[Engine], Engine] = lambda engine: engine,
        quotas: TopicQuotas = NO_QUOTAS,
    ) -> None:
        self.clock = clock or ManualClock()
        self.broker: EmbeddedBroker
        self.scheduler: Scheduler
        self.store: Store
        self.memory = MemoryEngine()
        self.late_ms: list[int] = []
        self._checks = 0
        self.is_whole = True  # a test that takes rows away by hand says that it is not
        self._checked: tuple[Store, int] | None = None
        self.failures: list[StoreError] = []
        self._path = path
        self._runs = self._backups = 0
        self._is_copy = False
        self._on_disk = on_disk
        self.queues = queues
        self._group_start = group_start
        self.stay = stay  # of the next run
        self._options = replace(options or StoreOptions(gap_event=gap_event), ledger_kinds=LEDGER_KINDS)
        self._wrap = wrap
        self.quotas = quotas  # of the next run
        self.emit_span: EmitSpan | None = None  # likewise

    async def open(self) -> None:
        engine: Engine = RocksEngine(self._database) if self._on_disk else self.memory
        if self._is_copy:  # without a cell nobody else says so
            self._is_copy = False
            batch = Batch()
            batch.deletes.append((Family.META, META_IDENTITY))
            engine.write(batch)
        self.store = Store(self._wrap(engine), self.clock, self._options)
        self.broker = EmbeddedBroker(
            self.store,
            queues_per_topic=self.queues,
            group_start=self._group_start,
            stay=self.stay,
            quotas=self.quotas,
            emit_span=self.emit_span,
        )
        self.broker.leases._task.cancel()  # leases end when a test says so, not when a nap in real time is over
        self.scheduler = Scheduler(
            self.store,
            self.broker.placement,
            self.broker.checks,
            on_failure=self.failures.append,
            observe=lambda late_ms, _: self.late_ms.extend(late_ms),
            spans=self.broker.spans,
        )

    async def close(self) -> None:
        await self.broker.close()
        self.scheduler.close()
        with suppress(StoreError):
            self.store.commit([])
        await asyncio.sleep(0)  # the loop is told of all that was committed
        self.check_ledger()
        with suppress(StoreError):  # of a store that a test broke, or of an engine that crashed
            self.store.close()

    def check_ledger(self, every: int = 1) -> None:
        """Whatever was done, by whomever: the ledger is what the rows say. Nothing was done without an event.

        ``every`` so many calls look; in a long run all of them do.
        """
        self._checks += 1
        if (EFFORT == 1 and self._checks % every) or self.store.ledger_head is None or not self.is_whole:
            return
        with suppress(StoreError):  # of a store that a test broke, or of an engine that crashed
            self.store.commit([])
            reached = self.store, self.store.outbox_state.next_sequence
            if reached != self._checked:
                assert_balances(self.store)
                assert_lags(self.broker, with_ages=not self.clock.was_set)
                assert self.store.pending_bytes() == recount_bytes(self.store)
                assert_properties(self.store)
                self._checked = reached

    async def settle(self) -> None:
        while self.scheduler.turn().handed_over:
            pass
        await self.store.commit_async([])  # behind it, the loop was told of everything that was handed over
        while await self.broker.leases.expire():
            pass

    async def restart(self, end: End, *, down_ms: int = 0) -> None:
        assert not (self._on_disk and end is End.POWER_LOSS), "tests cannot take the page cache away"
        if end is End.CLOSE:
            await self.close()
            self.memory = self.memory.reopened()
        elif self._on_disk:
            before = self._database
            self._runs += 1
            copy_at_rest(before, self._database)
            await self.close()
            shutil.rmtree(before)
        else:
            self.memory, crashed = self.memory.reopened() if end is End.KILL else self.memory.crashed(), self.memory
            assert crashed is not self.memory
            await self.close()
        self.clock.advance(down_ms)
        await self.open()

    def back_up(self) -> Backup:
        """Copy the store as it is, without ending the run."""
        if not self._on_disk:
            return self.memory.copied()
        self._backups += 1
        target = self._path / f"backup-{self._backups}"
        copy_at_rest(self._database, target)
        return target

    async def restore(self, backup: Backup) -> None:
        """End the run and begin another one with the copy, which is another store."""
        await self.close()
        if isinstance(backup, MemoryEngine):
            self.memory = backup
        else:
            shutil.rmtree(self._database)
            self._runs += 1
            backup.rename(self._database)
        self._is_copy = True
        await self.open()

    async def set_group(
        self, group: str, *, max_attempts: int, delays_ms: tuple[int, ...], is_fifo: bool = False
    ) -> None:
        policy = RetryPolicy(backoff=Table(delays_ms), max_attempts=max_attempts)
        await self.broker.set_group(group, policy=policy, is_fifo=is_fifo)

    @property
    def receives_waiting(self) -> int:
        """How many receives have found nothing and wait."""
        return sum(found.waiting for found in self.broker.subscriptions.all())

    @property
    def _database(self) -> Path:
        return self._path / f"run-{self._runs}"


class MemoryBrokerRig(_Clocked):
    """The double that tests of the sidecar use, so that it cannot drift from the contract."""

    def __init__(self, path: Path, *, queues: int = 4) -> None:
        self.clock = ManualClock()
        self.broker = MemoryBroker(self.clock, queues=queues)

    @property
    def receives_waiting(self) -> int:
        """How many receives have found nothing and wait."""
        return self.broker.receives_waiting

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def settle(self) -> None:
        self.broker.poke()
        await asyncio.sleep(0)

    async def restart(self, end: End, *, down_ms: int = 0) -> None:
        raise NotImplementedError

    async def set_group(
        self, group: str, *, max_attempts: int, delays_ms: tuple[int, ...], is_fifo: bool = False
    ) -> None:
        self.broker.policies[group] = GroupSettings(is_fifo, max_attempts, delays_ms)


class FrontedRig(_Clocked):
    """The embedded broker as front processes meet it: messages come and go over a stream."""

    def __init__(self, path: Path, *, queues: int = 4) -> None:
        self.embedded = EmbeddedRig(path, on_disk=False, queues=queues)
        self.clock = self.embedded.clock
        self.broker: Any  # a ``PopBroker``, some of whose methods are found by name
        self._joined: Joined

    @property
    def receives_waiting(self) -> int:
        """How many receives have found nothing and wait."""
        return self.embedded.receives_waiting

    async def open(self) -> None:
        await self.embedded.open()
        await self._join()

    async def close(self) -> None:
        await self._joined.close()
        await self.embedded.close()

    async def settle(self) -> None:
        await self._joined.quiet()
        await self.embedded.settle()
        await self._joined.quiet()

    async def restart(self, end: End, *, down_ms: int = 0) -> None:
        await self._joined.close()
        await self.embedded.restart(end, down_ms=down_ms)
        await self._join()

    async def set_group(
        self, group: str, *, max_attempts: int, delays_ms: tuple[int, ...], is_fifo: bool = False
    ) -> None:
        await self.embedded.set_group(group, max_attempts=max_attempts, delays_ms=delays_ms, is_fifo=is_fifo)

    async def _join(self) -> None:
        self._joined = await Joined(port_of(self.embedded.broker, self.clock), self.clock).open()
        self.broker = FrontedBroker(self.embedded.broker, self._joined)


def on_rocksdb(path: Path, queues: int) -> Rig:
    """The embedded broker on RocksDB."""
    return EmbeddedRig(path, on_disk=True, queues=queues)


def on_memory(path: Path, queues: int) -> Rig:
    """The embedded broker on the engine in memory."""
    return EmbeddedRig(path, on_disk=False, queues=queues)


def behind_a_front(path: Path, queues: int) -> Rig:
    """The embedded broker on the engine in memory, through a front."""
    return FrontedRig(path, queues=queues)


def the_double(path: Path, queues: int) -> Rig:
    """The double."""
    return MemoryBrokerRig(path, queues=queues)


Make = Callable[[Path, int], Rig]
Scenario = Callable[[Any], Coroutine[object, object, None]]  # takes the rig that its decorator makes


def every_broker(*, queues: int = 4) -> Callable[[Scenario], Callable[..., None]]:
    """Run a scenario on everything that claims to fit ``PopBroker``."""
    return _on((on_rocksdb, on_memory, behind_a_front, the_double), queues)


def every_durable_broker(*, queues: int = 4, fronted: bool = False) -> Callable[[Scenario], Callable[..., None]]:
    """Run a scenario on the brokers that outlive a restart; with ``fronted`` through a front as well."""
    makers = (on_rocksdb, on_memory)
    return _on((*makers, behind_a_front) if fronted else makers, queues)


def _on(makers: Sequence[Make], queues: int) -> Callable[[Scenario], Callable[..., None]]:
    def decorate(scenario: Scenario) -> Callable[..., None]:
        def test(make: Make, tmp_path: Path) -> None:
            asyncio.run(play(make(tmp_path, queues), scenario))

        test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
        return pytest.mark.parametrize("make", makers, ids=lambda make: str(make.__name__))(test)

    return decorate


async def play(rig: Rig, scenario: Scenario) -> None:
    """Run a scenario and fail on whatever went wrong beside it."""
    strays: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: strays.append(repr(context)))
    await rig.open()
    try:
        async with asyncio.timeout(PATIENCE_S * 3):
            await scenario(rig)
    finally:
        await rig.close()
    await asyncio.sleep(0)
    gc.collect(1)  # futures tell of an exception that nobody looked at when they go
    assert not strays, strays


def an_envelope(
    message_id: str = "m-1",
    *,
    topic: str = TOPIC,
    payload: bytes = b"payload",
    tag: str = "",
    message_group: str = "",
    deliver_at_ms: int = 0,
) -> Envelope:
    """A message; its payload is opaque to brokers."""
    return Envelope(topic, message_id, payload, tag, message_group, deliver_at_ms)


async def send(rig: Rig, *message_ids: str, deliver_at_ms: int = 0) -> Sequence[SendReceipt]:
    """Send messages in one call."""
    return await rig.broker.send([an_envelope(each, deliver_at_ms=deliver_at_ms) for each in message_ids])


async def receive(
    rig: Rig,
    *,
    group: str = GROUP,
    topic: str = TOPIC,
    queue_id: int = -1,
    tags: Sequence[str] = (),
    batch_max: int = 32,
    invisible_ms: int = INVISIBLE_MS,
    wait_ms: int = 0,
    renew_for: str = "",
) -> Sequence[Delivery]:
    """Receive, by default what is there."""
    return await rig.broker.receive(
        group,
        Subscription(topic, queue_id, frozenset(tags)),
        batch_max=batch_max,
        invisible_ms=invisible_ms,
        wait_ms=wait_ms,
        renew_for=renew_for,
    )


async def receive_one(rig: Rig, *, group: str = GROUP, invisible_ms: int = INVISIBLE_MS) -> Delivery:
    """Receive the one message that is there."""
    (delivery,) = await receive(rig, group=group, invisible_ms=invisible_ms)
    return delivery


async def ack(rig: Rig, *deliveries: Delivery, group: str = GROUP, topic: str = TOPIC) -> Sequence[Exception | None]:
    """Acknowledge deliveries in one call."""
    return await rig.broker.ack(group, topic, [each.receipt_handle for each in deliveries])


def leased(deliveries: Sequence[Delivery]) -> list[tuple[str, str]]:
    """What ``not_taken`` is told of deliveries."""
    return [(each.topic, each.receipt_handle) for each in deliveries]


def ids(deliveries: Sequence[Delivery]) -> list[str]:
    """The message ids of deliveries, in their order."""
    return [each.message_id for each in deliveries]


async def until(holds: Callable[[], bool]) -> None:
    """Let the loop run until something holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)
