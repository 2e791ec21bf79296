"""A daemon that takes messages from an inner topic of the cluster; a second daemon of ours stands for the cluster."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from support.rigs.daemon.process import Daemon, run_command
from support.rigs.rocketmq.front import client, front_of, kinds, play, receive, status, until
from support.rigs.rocketmq.real_time import new_id, now_ms

from broker_adapter.contracts.message import Envelope, Message
from broker_adapter.rocketmq import RocketMQBroker
from broker_adapter.wire.delay import INNER_TOPIC, wrap
from broker_adapter.wire.mapping import decode, encode

pytestmark = pytest.mark.integration
INNER = ("--inner-topic", INNER_TOPIC)


def wrapped(topic: str, body: bytes, due_ms: int, **facts: object) -> Envelope:
    """A message as ``wrap`` makes it."""
    message = Message(topic=topic, message_id=new_id(), body=body, **facts)  # type: ignore[arg-type]
    return encode(wrap(message, due_ms))


async def set_up(theirs: RocketMQBroker) -> None:
    """Have the topic and the groups before anybody needs them."""
    await theirs.ensure_group("readers")
    await theirs.route(INNER_TOPIC)


def test_messages_are_taken_kept_and_sent_on(data: Path, tmp_path: Path) -> None:
    """At their time, to their topic, under their id; one that cannot be read is a dead letter and blocks nothing."""

    async def scenario() -> None:
        async with client(cluster) as theirs:
            await set_up(theirs)
            due_ms = now_ms() + 1_000
            later, at_once = wrapped("orders", b"later", due_ms), wrapped("orders", b"now", 0, tag="t")
            unreadable = encode(Message(topic=INNER_TOPIC, message_id=new_id(), body=b"who knows"))
            json_body = b'{"topic": "orders", "text": "json", "delay_level": 1}'
            in_json = encode(Message(topic=INNER_TOPIC, message_id=new_id(), body=json_body))
            for each in (later, unreadable, at_once, in_json):
                await theirs.send([each])
            found = {decode(each.payload).body: each for each in await receive(theirs, "orders", 3)}
            assert found.keys() == {b"later", b"now", b"json"}
            assert found[b"later"].message_id == later.message_id
            assert now_ms() >= due_ms
            assert decode(found[b"now"].payload).tag == "t"
            assert not decode(found[b"now"].payload).properties
        told = await until(front, lambda found: found.inner.fetched == 3 and found.inner.unreadable == 1)
        assert not told.inner.error
        ran = await asyncio.to_thread(run_command, "dead", "ls", "dmq_inner_group", "--address", front.address)
        assert unreadable.message_id[-10:] in ran.stdout.replace("\n", ""), ran.stdout + ran.stderr

    with Daemon(tmp_path / "cluster") as cluster, front_of(cluster, data, *INNER) as front:
        play(scenario())
        front.stop()
        assert kinds(front)["FETCHED"] == 4


def test_two_share_the_topic_and_one_is_killed(data: Path, tmp_path: Path) -> None:
    """Each message is sent on, by one of them; what the killed one held is on its disk, and goes when it is back."""
    ids: set[str] = set()

    async def scenario() -> None:
        async with client(cluster) as theirs:
            await set_up(theirs)
            for number in range(300):
                message = wrapped("orders", b"%d" % number, now_ms() + 1_500)
                ids.add(message.message_id)
                await theirs.send([message])
                if number == 150:
                    one.kill()
            one.restart()
            found: Counter[str] = Counter()
            while set(found) != ids:
                found.update(each.message_id for each in await receive(theirs, "orders", 1))
            for each in (one, two):
                assert (await asyncio.to_thread(status, each)).waiting == 0

    with Daemon(tmp_path / "cluster") as cluster:
        one, two = front_of(cluster, data, *INNER), front_of(cluster, tmp_path / "two", *INNER)
        with one, two:
            play(scenario())


def test_the_cluster_goes_and_comes_back(data: Path, tmp_path: Path) -> None:
    """The status says why nothing is taken; afterwards it goes on by itself."""

    async def scenario() -> None:
        async with client(cluster) as theirs:
            await set_up(theirs)
        cluster.kill()
        await until(front, lambda found: found.inner.error)
        cluster.restart()
        async with client(cluster) as theirs:
            await theirs.send([wrapped("orders", b"again", 0)])
            (found,) = await receive(theirs, "orders", 1)
            assert decode(found.payload).body == b"again"
        await until(front, lambda found: not found.inner.error)

    cluster = Daemon(tmp_path / "cluster")
    with cluster, front_of(cluster, data, *INNER) as front:
        play(scenario())
