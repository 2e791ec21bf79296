"""A daemon in front of a real cluster, both killed on the way: all arrive, none early, each copy has a reason."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from support.clients.official.client import PYTHON, OfficialClient, require
from support.effort import EFFORT
from support.models.runs.ledger import Ledger, all_came, all_left, client, explained, in_front, readers
from support.rigs.rocketmq.cluster import cluster
from support.rigs.rocketmq.real_time import INVISIBLE_MS, a_message, now_ms

from bench.rocketmq import RocketMQ
from broker_adapter.contracts.adapter import Subscription
from broker_adapter.contracts.errors import BrokerError
from broker_adapter.rocketmq import RocketMQBroker

pytestmark = pytest.mark.cluster
# DMQ_TEST_EFFORT=14: 21,000 messages, and a minute without the cluster
MESSAGES = 1_500 * EFFORT if EFFORT > 1 else 300
SENDERS = 16
RATE, AWAY_S = 500, (4.3 * EFFORT if EFFORT > 1 else 2.0)


@pytest.fixture(scope="module", autouse=True)
def _running() -> None:
    cluster()


@contextmanager
def _away(running: RocketMQ) -> Iterator[None]:
    """Stop the brokers, which take connections and answer nothing; in a long run kill them, whose starts take long."""
    with ExitStack() as back:
        if EFFORT == 1:
            back.enter_context(running.asleep(*running.nodes))
        else:
            for node in running.nodes:
                running.kill(node)
                back.callback(running.start, node)
        yield


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
        reasons = explained(front)
    assert len(ledger.due_ms) == MESSAGES
    assert not ledger.early
    repeated = ledger.repeated()
    print(f"{MESSAGES} messages, {ledger.lateness()}; {len(repeated)} more than once, {reasons.total()} explained")
    assert {each: count for each, count in repeated.items() if count > 1 + reasons[each]} == {}


def test_two_daemons_in_front_of_one_cluster(tmp_path: Path) -> None:
    """The official Python client has both addresses: no send fails while one daemon is killed. Delayed messages of both
    come, and none is in the cluster more often than explained.
    """
    require(PYTHON)
    topic, group, ledger = cluster().topic(), cluster().group(), Ledger()

    async def scenario() -> None:
        async with client(first.address) as one, client(second.address) as other, readers(group) as theirs:
            receivers = [asyncio.ensure_future(ledger.receive(each, group, topic)) for each in theirs]
            for number in range(40):
                message = a_message(topic, b"%d" % number, deliver_at_ms=now_ms() + 2_000)
                await ledger.send(one if number % 2 else other, message)
            await asyncio.to_thread(send_while_one_is_killed)
            await all_came(ledger)
            for daemon in (first, second):
                await all_left(daemon)
            for each in receivers:
                each.cancel()
            await asyncio.gather(*receivers, return_exceptions=True)

    def send_while_one_is_killed() -> None:
        with OfficialClient(PYTHON, tmp_path, f"{first.address};{second.address}") as process:
            process.start("producer", "producer", topic)
            for number in range(60):
                ledger.due_ms[process.send("producer", topic, body=f"{number}")] = 0
                if number == 20:
                    first.kill()
                if number == 40:
                    first.restart()

    with in_front(tmp_path / "one") as first, in_front(tmp_path / "two") as second:
        asyncio.run(scenario())
        for daemon in (first, second):
            daemon.stop()
        reasons = explained(first, second)
        assert first.event("serving")["cell"] != second.event("serving")["cell"]
    assert len(ledger.due_ms) == 100
    assert not ledger.early
    assert {each: count for each, count in ledger.repeated().items() if count > 1 + reasons[each]} == {}


def test_the_cluster_is_away_under_load(tmp_path: Path) -> None:
    """All sends are accepted, and all come when it is back, in the order of their message groups."""
    running = cluster().rocketmq
    topic, group = cluster().topic("FIFO"), cluster().group(is_fifo=True)
    order: dict[str, list[str]] = {}
    ledger = Ledger()
    came: dict[str, dict[str, None]] = {}  # of each message group, in order
    groups = 10
    rounds = round(RATE * AWAY_S / groups)

    async def receive(broker: RocketMQBroker) -> None:
        while True:
            try:
                for each in await broker.receive(
                    group, Subscription(topic), batch_max=32, invisible_ms=INVISIBLE_MS * 6, wait_ms=5_000
                ):
                    await broker.ack(group, topic, [each.receipt_handle])
                    ledger.came[each.message_id] += 1
                    came.setdefault(each.message_group, {})[each.message_id] = None
            except BrokerError:
                await asyncio.sleep(0.1)

    async def scenario() -> None:
        async with client(front.address) as mine, readers(group) as theirs:

            async def send(message_group: str) -> None:
                for number in range(rounds):
                    message = a_message(topic, b"%d" % number, message_group=message_group)
                    await ledger.send(mine, message)
                    order.setdefault(message_group, []).append(message.message_id)
                    await asyncio.sleep(max(0.0, began_s + (number + 1) * groups / RATE - time.monotonic()))

            began_s = time.monotonic()
            sending = [asyncio.ensure_future(send(f"g{number}")) for number in range(groups)]
            await asyncio.sleep(0.3)
            with _away(running):
                await asyncio.gather(*sending)
                print(f"{len(ledger.due_ms)} messages accepted in {time.monotonic() - began_s:.1f} s, the cluster away")
            receivers = [asyncio.ensure_future(receive(each)) for each in theirs]
            await all_left(front)
            await all_came(ledger)
            for each in receivers:
                each.cancel()
            await asyncio.gather(*receivers, return_exceptions=True)

    with in_front(tmp_path / "data") as front:
        asyncio.run(scenario())
        front.stop()
    assert {name: list(came[name]) for name in order} == order
