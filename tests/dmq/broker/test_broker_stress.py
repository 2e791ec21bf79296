"""The broker with everything real: RocksDB, the scheduler's thread, the writer's thread, the host's clock, many clients
at once. Bounded in time, not in messages; ``DMQ_TEST_EFFORT`` makes it longer.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path

import pytest
from support.effort import EFFORT
from support.models.broker.trail import read_facts
from support.rigs.broker.rig import an_envelope

from broker_adapter.contracts.adapter import Subscription
from broker_adapter.contracts.errors import Refused
from broker_adapter.contracts.message import Delivery, Envelope
from broker_adapter.runtime.clock import SystemClock
from dmq.broker.broker import EmbeddedBroker
from dmq.errors import StoreError
from dmq.scheduler.scheduler import Scheduler
from dmq.store.store import Store, StoreOptions
from dmq.trail.events import EventKind, gap_event

pytestmark = pytest.mark.integration
SECONDS = 2.0 * EFFORT
GROUPS = ("workers", "auditors")
TOPICS = ("orders", "refunds")
PRODUCERS, CONSUMERS_PER_GROUP = 24, 5
INVISIBLE_MS = 250
PATIENCE_S = 30.0


class Clients:
    """Producers and consumers, and what they saw."""

    def __init__(self, broker: EmbeddedBroker, clock: SystemClock, seed: int) -> None:
        self.broker = broker
        self.clock = clock
        self.random = random.Random(seed)
        self.accepted: dict[tuple[str, str], int] = {}
        self.attempts: defaultdict[tuple[str, str, str], list[int]] = defaultdict(list)
        self.acked: Counter[tuple[str, str, str]] = Counter()
        self.early: list[Delivery] = []
        self.is_over = False

    async def produce(self, producer: int) -> None:
        """Send calls of a few messages, now and then the same call again."""
        number = 0
        until_s = self.clock.monotonic_s() + SECONDS
        while self.clock.monotonic_s() < until_s:
            topic = self.random.choice(TOPICS)
            envelopes = [
                self._envelope(topic, f"{producer}-{number + step}") for step in range(self.random.randint(1, 5))
            ]
            number += len(envelopes)
            for repeat in range(1 + (self.random.random() < 0.1)):
                receipts = await self.broker.send(envelopes)
                assert {each.repeated for each in receipts} == {repeat > 0}
            self.accepted |= {(each.topic, each.message_id): each.deliver_at_ms for each in envelopes}
            await asyncio.sleep(self.random.random() * 0.02)

    def _envelope(self, topic: str, message_id: str) -> Envelope:
        delay_ms = self.random.choice((0, self.random.randint(1, 300)))
        at_ms = self.clock.now_ms() + delay_ms if delay_ms else 0
        return an_envelope(message_id, topic=topic, deliver_at_ms=at_ms, payload=b"x" * 200)

    async def consume(self, group: str, topic: str) -> None:
        """Receive, and acknowledge most of it; give some back, hide some, forget some."""
        while not self.is_over:
            deliveries = await self.broker.receive(
                group, Subscription(topic), batch_max=16, invisible_ms=INVISIBLE_MS, wait_ms=200
            )
            now_ms = self.clock.now_ms()
            self.early += [each for each in deliveries if each.deliver_at_ms > now_ms]
            for each in deliveries:
                self.attempts[group, topic, each.message_id].append(each.delivery_attempt)
            await asyncio.gather(*(self._finish(group, topic, each) for each in deliveries))

    async def _finish(self, group: str, topic: str, delivery: Delivery) -> None:
        luck = self.random.random() if delivery.delivery_attempt < 4 else 1.0
        if luck < 0.03:
            return  # its lease ends by itself
        if luck < 0.10:
            invisible_ms = self.random.choice((0, 50))
            with suppress(Refused):  # on a slow machine it may have been handed out again
                await self.broker.change_invisible(group, topic, delivery.receipt_handle, invisible_ms)
            return
        (result,) = await self.broker.ack(group, topic, [delivery.receipt_handle])
        if result is None:
            self.acked[group, topic, delivery.message_id] += 1

    async def drained(self) -> None:
        """Return when every group has acknowledged everything."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.acked) < len(self.accepted) * len(GROUPS):  # noqa: ASYNC110 - the end of many small events
                await asyncio.sleep(0.01)


async def _play(path: Path, seed: int) -> None:
    clock = SystemClock()
    failures: list[StoreError] = []
    store = Store.open(path, clock, StoreOptions(gap_event=gap_event))
    late_ms: list[int] = []
    try:
        broker = EmbeddedBroker(store)
        scheduler = Scheduler(
            store,
            broker.placement,
            broker.checks,
            on_failure=failures.append,
            observe=lambda late, _: late_ms.extend(late),
        )
        scheduler.start()
        clients = Clients(broker, clock, seed)
        async with asyncio.TaskGroup() as tasks:
            for group in GROUPS:
                for number in range(CONSUMERS_PER_GROUP):
                    tasks.create_task(clients.consume(group, TOPICS[number % len(TOPICS)]))
            producers = [tasks.create_task(clients.produce(number)) for number in range(PRODUCERS)]
            await asyncio.wait(producers)
            await clients.drained()
            clients.is_over = True
        _check(broker, clients)
        assert not failures
        assert min(late_ms) >= 0
        scheduler.close()
        await broker.close()
    finally:
        store.close()


def _check(broker: EmbeddedBroker, clients: Clients) -> None:
    accepted = clients.accepted
    assert len(accepted) > 100
    assert not clients.early
    everywhere = {(group, *key) for group in GROUPS for key in accepted}
    assert clients.attempts.keys() == everywhere  # nothing lost, nothing that nobody sent
    assert clients.acked == dict.fromkeys(everywhere, 1)
    assert all(seen == list(range(1, len(seen) + 1)) for seen in clients.attempts.values())
    assert broker.store.pending() == {}
    assert broker.lease_count == 0
    told = Counter((fact.kind, fact.key, fact.group) for fact in read_facts(broker))
    for key, at_ms in accepted.items():
        waited = told[EventKind.SCHEDULED, key, ""]
        assert waited + told[EventKind.QUEUED, key, ""] == 1
        assert told[EventKind.DELIVERED, key, ""] == waited <= (at_ms > 0)
        assert [told[EventKind.ACKED, key, group] for group in GROUPS] == [1, 1]
    ends = (EventKind.LEASE_EXPIRED, EventKind.GIVEN_BACK)
    returned = sum(count for (kind, _, _), count in told.items() if kind in ends)
    # More, if an ack came after the end of its lease and before the next hand-out.
    assert returned >= sum(len(seen) - 1 for seen in clients.attempts.values())


def test_nothing_is_lost_early_or_twice_under_load(tmp_path: Path) -> None:
    """Many concurrent sends with delays of 0 to 300 ms, consumers of two groups that fail now and then."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    asyncio.run(_play(tmp_path, seed))
