"""``dmq broker`` asks real brokers, of RocketMQ 5 and of RocketMQ 4, whose groups have members of ours."""

from __future__ import annotations

import asyncio
import json
from itertools import count
from typing import Any

import pytest
from support.clients.embedded.consumers import Seen, eventually
from support.rigs.commands.fake_admin_client import run_dmq
from support.rigs.rocketmq.cluster import cluster, cluster_4

from bench.remoting import administer
from broker_adapter import Client, ConsumerOptions, Message, Start, connect
from broker_adapter.remoting import RemotingBroker, RemotingOptions

pytestmark = pytest.mark.cluster
_NUMBER = count()
_QUICK: dict[str, Any] = {"rebalance_ms": 500, "flush_ms": 200, "start": Start.FIRST_OFFSET, "close_ms": 2_000}


@pytest.fixture(scope="module", params=["5", "4"])
def names(request: pytest.FixtureRequest) -> str:
    """The name server of each cluster of this run, one after the other."""
    return (cluster().rocketmq if request.param == "5" else cluster_4()).names


@pytest.fixture
def topic(names: str) -> str:
    """A topic of two queues at each broker."""
    made = f"broker-command-{next(_NUMBER)}"
    administer(names, lambda admin: admin.make_topic(made, queues=2))
    return made


async def asked(names: str, *arguments: str) -> Any:  # noqa: ANN401
    """What the command finds; it has a loop of its own."""
    found = await asyncio.to_thread(run_dmq, "broker", *arguments, "--namesrv", names, "-o", "json")
    assert (found.exit_code, found.stderr) == (0, "")
    return json.loads(found.stdout)


def of_topic(found: list[dict[str, Any]], topic: str) -> list[dict[str, Any]]:
    return [each for each in found if each["topic"] == topic]


def test_members_report_their_queues_and_lags_are_shown(names: str, topic: str) -> None:
    """Two share the queues, and each is said to be whose it is; when one leaves, the other has all."""
    group, seen = f"{topic}-group", Seen()

    async def member(name: str) -> Client:
        client = await connect(f"rocketmq-remoting://{names}")
        client.consumer(group, {topic: "a || b"}, ConsumerOptions(**_QUICK))(seen.by(name))
        return client

    async def owners() -> list[str]:
        found = of_topic((await asked(names, "consumers", group))["owners"], topic)
        assert all(len(each["owners"]) <= 1 for each in found), "or members were asked while queues went over"
        return [each["owners"][0] if each["owners"] else "" for each in found]

    async def run() -> None:
        await eventually(lambda: _knows(names, topic))
        one, two = await member("one"), await member("two")
        try:
            producer = await one.producer("senders")
            for number in range(5):
                await producer.send(Message(topic, b"%d" % number, tag="a"))
            await eventually(lambda: _is(owners, {one.client_id, two.client_id}))
            await seen.until(lambda: len(seen.bodies) >= 5)
            await eventually(lambda: _has_committed(names, group, topic, 5))
            known = await asked(names, "consumers", group)
            assert [each["language"] for each in known["members"]] == ["PYTHON"] * 2
            assert {"topic": topic, "expression": "a || b", "is_sql": False} in known["subscriptions"]
            assert (known["model"], known["lag"], known["is_enabled"]) == ("clustering", 0, True)
            assert group in [each["group"] for each in await asked(names, "consumers")]
            await two.close()
            await eventually(lambda: _is(owners, {one.client_id}))
        finally:
            await one.close()
            await two.close()
        assert (await asked(names, "consumers", group))["members"] == []

    asyncio.run(run())


def test_queues_without_a_commit_are_shown(names: str, topic: str) -> None:
    """RocketMQ 4 says 0 of a queue that begins there; of the others the difference is known."""
    group = f"{topic}-group"
    administer(names, lambda admin: admin.make_group(group))

    async def run() -> None:
        await eventually(lambda: _knows(names, topic))
        broker = RemotingBroker(RemotingOptions(names=(names,)))
        try:
            queue, *others = (await broker.route(topic)).readable
            await broker.commit_offset(group, queue, 1)
        finally:
            await broker.close()
        found = await asked(names, "offsets", group)
        first, *more = of_topic(found["queues"], topic)
        assert (first["committed_offset"], first["broker_offset"]) == (1, 0)
        is_4 = len(others) == 1
        assert [each["committed_offset"] for each in more] == ([0] if is_4 else [None] * len(others))

    asyncio.run(run())


def test_brokers_and_queues_are_listed(names: str, topic: str) -> None:
    """Each broker with its version; a topic with its queues; what is not there has an exit code of its own."""

    async def run() -> None:
        await eventually(lambda: _knows(names, topic))
        found = await asked(names, "routes")
        assert all(each["answers"] and each["version"] in {"5.5.0", "4.9.7"} for each in found["brokers"])
        brokers = len(found["brokers"])
        assert {"topic": topic, "brokers": brokers, "read_queues": 2 * brokers, "write_queues": 2 * brokers} in found[
            "topics"
        ]
        parts = await asked(names, "routes", topic)
        assert [(each["perm"], each["read_queues"]) for each in parts] == [("rw", 2)] * brokers
        queues = await asked(names, "queues", topic)
        assert [(each["min_offset"], each["max_offset"]) for each in queues] == [(0, 0)] * 2 * brokers

    asyncio.run(run())
    for arguments in (("queues", "nothing-there"), ("offsets", "nobody-there"), ("consumers", "nobody-there")):
        ended = run_dmq("broker", *arguments, "--namesrv", names)
        assert (ended.exit_code, ended.stderr.count("\n")) == (3, 1), ended.stderr


async def _knows(names: str, topic: str) -> bool:
    """Whether the name server heard of a topic from every broker."""
    ended = await asyncio.to_thread(run_dmq, "broker", "routes", topic, "--namesrv", names, "-o", "json")
    if ended.exit_code:
        return False
    return len(json.loads(ended.stdout)) == len((await asked(names, "routes"))["brokers"])


async def _is(owners: Any, expected: set[str]) -> bool:  # noqa: ANN401
    return set(await owners()) == expected


async def _has_committed(names: str, group: str, topic: str, number: int) -> bool:
    found = of_topic((await asked(names, "offsets", group))["queues"], topic)
    return sum(each["committed_offset"] or 0 for each in found) == number
