"""Service mode on the real cluster: daemons that share the inner topic, and the page's examples as programs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.clients.official.client import GO, JAVA, PYTHON, Language, require
from support.effort import EFFORT, at_length
from support.models.runs.ledger import PATIENCE_S, Ledger, all_came, all_left, client, explained, in_front, readers
from support.rigs.daemon.process import Daemon
from support.rigs.rocketmq.cluster import ORDERS, cluster
from support.rigs.rocketmq.examples import run_adapter, run_go, run_java, run_python
from support.rigs.rocketmq.real_time import new_id, now_ms

from broker_adapter.contracts.message import Message
from broker_adapter.wire.delay import INNER_TOPIC, wrap
from broker_adapter.wire.mapping import encode

pytestmark = pytest.mark.cluster
MESSAGES = 1_500 * EFFORT  # DMQ_TEST_EFFORT=14: 21,000
SENDERS = 16
INNER = ("--inner-topic", INNER_TOPIC)


@pytest.fixture(scope="module", autouse=True)
def _running() -> None:
    cluster()


@at_length
def test_two_daemons_share_the_topic_while_one_and_a_broker_are_killed(tmp_path: Path) -> None:
    """Random delays; one daemon is killed for good, another one takes its directory over; then a broker is killed.

    All arrive, none early, and a message is in its topic no more often than the trails explain.
    """
    running = cluster().rocketmq
    topic, group = cluster().topic(), cluster().group()
    ledger, dies = Ledger(), running.nodes[0]
    first, second, replacement = (in_front(tmp_path / name, *INNER) for name in ("one", "two", "one"))

    async def scenario() -> None:
        async with client(*cluster().endpoints) as producer, readers(group) as theirs:
            receivers = [asyncio.ensure_future(ledger.receive(each, group, topic)) for each in theirs * 2]
            numbers = iter(range(MESSAGES))

            async def send() -> None:
                for number in numbers:
                    due_ms = now_ms() + random.choice((1, 50, 500, 2_000, 5_000))
                    message = Message(topic=topic, message_id=new_id(), body=b"%d" % number)
                    await ledger.send(producer, encode(wrap(message, due_ms)), due_ms)
                    if number == MESSAGES // 4:
                        first.kill()
                    if number == MESSAGES // 2:
                        await asyncio.to_thread(replacement.start)
                        running.kill(dies)

            await asyncio.gather(*(send() for _ in range(SENDERS)))
            running.start(dies)  # in this thread: it ends with the thread that started it
            await all_came(ledger)
            for daemon in (replacement, second):
                await all_left(daemon)
            for each in receivers:
                each.cancel()
            await asyncio.gather(*receivers, return_exceptions=True)

    try:
        first.start()
        second.start()
        asyncio.run(scenario())
        replacement.stop()
        second.stop()
        reasons = explained(replacement, second)
    finally:
        for daemon in (first, second, replacement):
            daemon.close()
    assert len(ledger.due_ms) == MESSAGES
    assert not ledger.early
    repeated = ledger.repeated()
    print(f"{MESSAGES} messages, {ledger.lateness()}; {len(repeated)} more than once, {reasons.total()} explained")
    assert {each: count for each, count in repeated.items() if count > 1 + reasons[each]} == {}


@pytest.fixture(scope="module")
def taking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon that takes messages from the inner topic."""
    with in_front(tmp_path_factory.mktemp("inner") / "data", *INNER) as daemon:
        yield daemon
        daemon.stop()


@pytest.fixture(scope="module")
def group() -> str:
    """Who reads what the examples send, one after another."""
    return cluster().group()


@pytest.mark.usefixtures("taking")
@pytest.mark.parametrize(
    ("language", "run"),
    [(PYTHON, run_python), (PYTHON, run_adapter), (JAVA, run_java), (GO, run_go)],
    ids=["python", "adapter", "java", "go"],
)
def test_the_examples_of_the_documentation_run(
    language: Language, run: Callable[[Path, str, int], None], group: str, tmp_path: Path
) -> None:
    """Each sends a message that comes to its topic, when it is due."""
    require(language)
    ledger, due_ms = Ledger(), now_ms() + 4_000

    async def scenario() -> None:
        async with readers(group) as theirs:
            receivers = [asyncio.ensure_future(ledger.receive(each, group, ORDERS)) for each in theirs]
            await asyncio.to_thread(run, tmp_path, cluster().endpoints[0], due_ms)
            async with asyncio.timeout(PATIENCE_S):
                while not ledger.came:  # noqa: ASYNC110 - the receivers count
                    await asyncio.sleep(0.05)
            for each in receivers:
                each.cancel()
            await asyncio.gather(*receivers, return_exceptions=True)

    asyncio.run(scenario())
    assert len(ledger.came) == 1
    assert now_ms() >= due_ms
