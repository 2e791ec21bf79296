"""A daemon in front of brokers of RocketMQ 4, which know neither POP nor a proxy."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from support.clients.official import client_suite, recall_suite
from support.clients.official.client import LANGUAGES, Language, OfficialClient
from support.clients.official.client_bench import PREFIXES
from support.clients.official.scenarios import Scenarios
from support.effort import EFFORT, at_length
from support.models.runs.ledger import Ledger, all_came, all_left, client
from support.rigs.daemon.process import Daemon
from support.rigs.rocketmq.cluster import cluster_4
from support.rigs.rocketmq.real_time import INVISIBLE_MS, PATIENCE_S, a_message, new_id, now_ms

from broker_adapter.contracts.adapter import Subscription
from broker_adapter.contracts.errors import BrokerError
from broker_adapter.contracts.message import Message
from broker_adapter.contracts.topics import dead_letter_topic
from broker_adapter.leasing import LeasingBroker
from broker_adapter.remoting import RemotingBroker, RemotingOptions
from broker_adapter.rocketmq import RocketMQBroker
from broker_adapter.runtime.clock import SystemClock
from broker_adapter.wire.delay import INNER_GROUP, INNER_TOPIC, wrap
from broker_adapter.wire.mapping import decode, encode

pytestmark = pytest.mark.cluster
# DMQ_TEST_EFFORT=14: 21,000 messages
MESSAGES = 1_500 * EFFORT if EFFORT > 1 else 300
SENDERS = 16
_NAMES = count()
DAILY = {
    client_suite.test_everything_a_message_carries_arrives: set[str](),
    client_suite.test_message_group_keeps_its_order: set[str](),
    client_suite.test_nothing_comes_before_its_delivery_timestamp: set[str](),
    client_suite.test_change_of_invisible_duration: {"change", "handles"},
    client_suite.test_push_consumer_is_given_every_message: {"push"},
    recall_suite.test_a_recalled_message_does_not_come: {"recall"},
}


def in_front(data: Path, *options: str) -> Daemon:
    """A daemon in front of it, not started."""
    return Daemon(data, "--broker", "rocketmq-remoting", "--namesrv", cluster_4().names, *options)


def a_topic() -> str:
    """Make a topic that nobody used."""
    name = f"front-4-{next(_NAMES)}"
    cluster_4().make_topics({name: "NORMAL"})
    return name


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with in_front(tmp_path_factory.mktemp("front") / "data") as daemon:
        yield daemon
        daemon.stop()


async def one(broker: RocketMQBroker, group: str, topic: str, attempt: int) -> str:
    """Receive a message on an attempt; return its handle."""
    async with asyncio.timeout(PATIENCE_S * 2):
        while not (
            found := await broker.receive(
                group, Subscription(topic), batch_max=1, invisible_ms=INVISIBLE_MS, wait_ms=5_000
            )
        ):
            pass
    assert [each.delivery_attempt for each in found] == [attempt]
    return found[0].receipt_handle


def test_a_message_comes_back_and_dies_at_the_cluster(front: Daemon) -> None:
    """A delayed one, failed once by the end of its lease, then given up: it is in the cluster's dead-letter queue."""
    topic, group = a_topic(), f"group-4-{next(_NAMES)}"

    async def scenario() -> None:
        async with client(front.address) as mine:
            await mine.ensure_group(group)
            due_ms = now_ms() + 1_500
            await mine.send([a_message(topic, b"poison", deliver_at_ms=due_ms)])
            await one(mine, group, topic, 1)
            assert now_ms() >= due_ms
            handle = await one(mine, group, topic, 2)
            await mine.dead_letter(group, topic, handle, attempts=2)
            letters = dead_letter_topic(group)
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    try:
                        (letter,) = await mine.receive(
                            "readers", Subscription(letters), batch_max=1, invisible_ms=INVISIBLE_MS, wait_ms=5_000
                        )
                    except (BrokerError, ValueError):  # it takes a moment until the topic is known everywhere
                        await asyncio.sleep(0.2)
                    else:
                        assert decode(letter.payload).body == b"poison"
                        return

    asyncio.run(scenario())


def test_all_arrive_while_the_daemon_and_the_broker_are_killed(tmp_path: Path) -> None:
    """Random delays, consumed through the daemon; both are killed on the way; none is lost, none early."""
    topic, group = a_topic(), f"group-4-{next(_NAMES)}"
    running, ledger = cluster_4(), Ledger()
    (dies,) = running.nodes

    async def scenario() -> None:
        async with client(daemon.address) as mine, client(daemon.address) as theirs:
            await theirs.ensure_group(group)
            receivers = [asyncio.ensure_future(ledger.receive(theirs, group, topic)) for _ in range(4)]
            numbers = iter(range(MESSAGES))

            async def send() -> None:
                for number in numbers:
                    delay_ms = random.choice((1, 50, 500, 2_000, 5_000))
                    await ledger.send(mine, a_message(topic, b"%d" % number, deliver_at_ms=now_ms() + delay_ms))
                    if number == MESSAGES // 3:
                        daemon.kill()
                        await asyncio.to_thread(daemon.restart)
                    if number == 2 * MESSAGES // 3:
                        running.kill(dies)

            await asyncio.gather(*(send() for _ in range(SENDERS)))
            running.start(dies)
            await all_came(ledger)
            await all_left(daemon)
            for each in receivers:
                each.cancel()
            await asyncio.gather(*receivers, return_exceptions=True)

    with in_front(tmp_path / "data") as daemon:
        asyncio.run(scenario())
        daemon.stop()
    assert len(ledger.due_ms) == MESSAGES
    assert not ledger.early
    print(f"{MESSAGES} messages, {ledger.lateness()}")


@at_length
def test_the_inner_topic_while_the_daemon_is_killed(tmp_path: Path) -> None:
    """DMQ_TEST_EFFORT=14: 21,000 messages of a program that knows the cluster alone; all come, none early."""
    topic, group = a_topic(), f"group-4-{next(_NAMES)}"
    ledger = Ledger()
    cluster_4().make_topics({INNER_TOPIC: "NORMAL"})
    cluster_4().make_group(INNER_GROUP)
    options = RemotingOptions(names=(cluster_4().names,), request_timeout_ms=30_000)

    async def scenario() -> None:
        brokers = [LeasingBroker(RemotingBroker(options), SystemClock()) for _ in range(2)]
        producer, reader = brokers
        receivers = [asyncio.ensure_future(ledger.receive(reader, group, topic)) for _ in range(4)]  # type: ignore[arg-type]
        numbers = iter(range(MESSAGES))

        async def send() -> None:
            for number in numbers:
                due_ms = now_ms() + random.choice((1, 50, 500, 2_000, 5_000))
                message = Message(topic=topic, message_id=new_id(), body=b"%d" % number)
                await ledger.send(producer, encode(wrap(message, due_ms)), due_ms)  # type: ignore[arg-type]
                if number in {MESSAGES // 4, MESSAGES // 2}:
                    daemon.kill()
                    await asyncio.to_thread(daemon.restart)

        await asyncio.gather(*(send() for _ in range(SENDERS)))
        await all_came(ledger)
        await all_left(daemon)
        for each in receivers:
            each.cancel()
        await asyncio.gather(*receivers, return_exceptions=True)
        for broker in brokers:
            await broker.close()

    with in_front(tmp_path / "data", "--inner-topic", INNER_TOPIC) as daemon:
        asyncio.run(scenario())
        daemon.stop()
    assert len(ledger.due_ms) == MESSAGES
    assert not ledger.early
    print(f"{MESSAGES} messages, {ledger.lateness()}")


class _Case:
    """A test of a suite, for each language that offers what it is about."""

    def __init__(self, test: object, lacks: set[str]) -> None:
        self.test = test
        self.lacks = lacks
        self.name = getattr(test, "__name__", "").removeprefix("test_")

    def topic(self, language: Language) -> str:
        return f"{self.name}-{language.name}"

    def run(self, process: OfficialClient) -> None:
        if not process.language.lacks.isdisjoint(self.lacks):
            return
        topic = self.topic(process.language)
        for kind in client_suite.KINDS:
            name = f"{PREFIXES[kind]}-{topic}"
            process.start(name, process.language.listener if kind == "listener" else kind, topic, group=f"g-{topic}")
        self.test(process, topic)  # type: ignore[operator]


@pytest.fixture(scope="module")
def cases() -> list[_Case]:
    found = [_Case(test, lacks) for test, lacks in DAILY.items()]
    cluster_4().make_topics({each.topic(language): "NORMAL" for each in found for language in LANGUAGES})
    return found


@pytest.fixture(scope="module")
def scenarios(front: Daemon, cases: list[_Case], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scenarios]:
    with Scenarios(front.address, tmp_path_factory, [each.run for each in cases], LANGUAGES) as running:
        yield running


@at_length
@pytest.mark.parametrize("language", LANGUAGES, ids=lambda language: language.name)
@pytest.mark.parametrize("number", range(len(DAILY)), ids=[each.__name__ for each in DAILY])
def test_official_clients(scenarios: Scenarios, cases: list[_Case], language: Language, number: int) -> None:
    """What an application does all day."""
    scenarios.result(cases[number].run, language, 120.0)
