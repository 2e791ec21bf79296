"""A daemon in front of a real cluster, both killed on the way: all arrive, none early, each copy has a reason."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from support.broker_rigs import INVISIBLE_MS, REQUEST_MS, a_message, now_ms
from support.cluster import cluster
from support.daemon import Daemon
from support.effort import EFFORT
from support.trail_read import read_trail

from broker_adapter.adapter import Subscription
from broker_adapter.clock import SystemClock
from broker_adapter.errors import BrokerError, BrokerUnavailable
from broker_adapter.message import Envelope, unpack_id
from broker_adapter.rocketmq import ClusterOptions, RocketMQBroker
from dmq.admin.client import AdminClient

pytestmark = pytest.mark.timeout(900)  # the first one has Maven bring the cluster, and starts it
MESSAGES = 1_500 * EFFORT  # DMQ_TEST_EFFORT=14 for 21,000
SENDERS = 16
PATIENCE_S = 180.0


@pytest.fixture(scope="module", autouse=True)
def _running() -> None:
    cluster()


@asynccontextmanager
async def client(*addresses: str) -> AsyncIterator[RocketMQBroker]:
    """A client of a daemon or of the cluster."""
    options = ClusterOptions(endpoints=addresses, request_timeout_ms=REQUEST_MS, sends_max=1)
    broker = RocketMQBroker(options, SystemClock())
    try:
        yield broker
    finally:
        await broker.close()


@asynccontextmanager
async def readers(group: str) -> AsyncIterator[list[RocketMQBroker]]:
    """A client of each broker of the cluster: nobody waits at one for what lies at the other."""
    async with AsyncExitStack() as stack:
        found = [await stack.enter_async_context(client(each)) for each in cluster().endpoints]
        for each in found:
            await each.ensure_group(group)
        yield found


def in_front(data: Path) -> Daemon:
    """A daemon in front of the cluster, not started."""
    return Daemon(data, "--broker", "rocketmq", "--endpoints", ";".join(cluster().endpoints))


class Ledger:
    """What was accepted, and what came."""

    def __init__(self) -> None:
        self.due_ms: dict[str, int] = {}
        self.came: Counter[str] = Counter()
        self.copies: dict[str, set[tuple[str, int, int]]] = {}  # where in the cluster each was for the first time
        self.early: list[tuple[str, int]] = []

    async def send(self, broker: RocketMQBroker, envelope: Envelope) -> None:
        """Send until it is accepted, under one id."""
        while True:
            try:
                await broker.send([envelope])
            except BrokerUnavailable:
                await asyncio.sleep(0.05)
            else:
                self.due_ms[envelope.message_id] = envelope.deliver_at_ms
                return

    async def receive(self, broker: RocketMQBroker, group: str, topic: str) -> None:
        """Receive and acknowledge, until cancelled."""
        while True:
            try:
                found = await broker.receive(
                    group, Subscription(topic), batch_max=32, invisible_ms=INVISIBLE_MS * 3, wait_ms=5_000
                )
                at_ms = now_ms()
                for each in found:
                    self.came[each.message_id] += 1
                    if each.delivery_attempt == 1:
                        # not its queue's number, which a client that knows no route cannot tell
                        place = (each.receipt_handle.split()[0], each.queue_offset, each.stored_at_ms)
                        self.copies.setdefault(each.message_id, set()).add(place)
                    due_ms = self.due_ms.get(each.message_id, 0)
                    if at_ms < due_ms:
                        self.early.append((each.message_id, due_ms - at_ms))
                await broker.ack(group, topic, [each.receipt_handle for each in found])
            except BrokerError:
                await asyncio.sleep(0.1)

    def missing(self) -> int:
        """How many have not come."""
        return sum(each not in self.came for each in self.due_ms)


async def all_came(ledger: Ledger) -> None:
    """Return once all that was accepted has come."""
    async with asyncio.timeout(PATIENCE_S):
        while ledger.missing():  # noqa: ASYNC110 - the receivers count
            await asyncio.sleep(0.1)


async def all_left(daemon: Daemon) -> None:
    """Return once nothing of what is due is left in the daemon."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with AdminClient(daemon.address) as admin:
                if not admin.status().cluster.waiting:
                    return
            await asyncio.sleep(0.1)


def in_doubt(daemon: Daemon) -> Counter[str]:
    """Which messages the trail of a daemon that ended says may be there again, and how often."""
    trail = daemon.data / "trail"
    (cell,) = [path.stem for path in (trail / "cells").glob("*.json")]
    return Counter(
        unpack_id(each["message_id"]) for each in read_trail(trail, cell) if each["kind"] == "FORWARD_IN_DOUBT"
    )


def test_all_arrive_while_both_are_killed(tmp_path: Path) -> None:
    """Random delays; the daemon is killed, then a broker with its proxy; a message comes no more often than explained.

    That a consumer sees one again because a killed broker lost its acknowledgement is the cluster's affair: copies are
    counted, by their places in the cluster.
    """
    running = cluster().rocketmq
    topic, group = cluster().topic(), cluster().group()
    ledger, dies = Ledger(), running.nodes[0]

    async def scenario() -> None:
        async with client(front.address) as mine, readers(group) as theirs:
            receivers = [asyncio.ensure_future(ledger.receive(each, group, topic)) for each in theirs * 2]
            numbers = iter(range(MESSAGES))

            async def send() -> None:
                for number in numbers:
                    delay_ms = random.choice((1, 50, 500, 2_000, 5_000))
                    await ledger.send(mine, a_message(topic, b"%d" % number, deliver_at_ms=now_ms() + delay_ms))
                    if number == MESSAGES // 3:
                        front.kill()
                        await asyncio.to_thread(front.restart)
                    if number == 2 * MESSAGES // 3:
                        running.kill(dies)

            await asyncio.gather(*(send() for _ in range(SENDERS)))
            running.start(dies)
            await all_came(ledger)
            await all_left(front)
            for each in receivers:
                each.cancel()
            await asyncio.gather(*receivers, return_exceptions=True)

    with in_front(tmp_path / "data") as front:
        asyncio.run(scenario())
        front.stop()
        explained = in_doubt(front)
    assert len(ledger.due_ms) == MESSAGES
    assert not ledger.early
    repeated = {each: len(places) for each, places in ledger.copies.items() if len(places) > 1}
    print(f"{MESSAGES} messages, {len(repeated)} there more than once, {sum(explained.values())} were in doubt")
    assert {each: count for each, count in repeated.items() if count > 1 + explained[each]} == {}


def test_the_cluster_is_away_under_load(tmp_path: Path) -> None:
    """All sends are accepted, and all come when it is back, in the order of their message groups."""
    running = cluster().rocketmq
    topic, group = cluster().topic("FIFO"), cluster().group(is_fifo=True)
    order: dict[str, list[str]] = {}
    ledger = Ledger()
    came: dict[str, list[str]] = {}
    rounds = 60 * EFFORT

    async def receive(broker: RocketMQBroker) -> None:
        while True:
            try:
                for each in await broker.receive(
                    group, Subscription(topic), batch_max=32, invisible_ms=INVISIBLE_MS * 6, wait_ms=5_000
                ):
                    await broker.ack(group, topic, [each.receipt_handle])
                    ledger.came[each.message_id] += 1
                    known = came.setdefault(each.message_group, [])
                    if each.message_id not in known:
                        known.append(each.message_id)
            except BrokerError:
                await asyncio.sleep(0.1)

    async def scenario() -> None:
        async with client(front.address) as mine, readers(group) as theirs:

            async def send(message_group: str) -> None:
                for number in range(rounds):
                    message = a_message(topic, b"%d" % number, message_group=message_group)
                    began_s = time.monotonic()
                    await ledger.send(mine, message)
                    order.setdefault(message_group, []).append(message.message_id)
                    await asyncio.sleep(max(0.0, 0.02 - (time.monotonic() - began_s)))

            sending = [asyncio.ensure_future(send(f"g{number}")) for number in range(10)]
            await asyncio.sleep(0.3)
            for node in running.nodes:
                running.kill(node)
            await asyncio.gather(*sending)
            for node in running.nodes:
                running.start(node)
            receivers = [asyncio.ensure_future(receive(each)) for each in theirs]
            await all_left(front)
            await all_came(ledger)
            for each in receivers:
                each.cancel()
            await asyncio.gather(*receivers, return_exceptions=True)

    with in_front(tmp_path / "data") as front:
        asyncio.run(scenario())
        front.stop()
    assert {name: came[name] for name in order} == order
