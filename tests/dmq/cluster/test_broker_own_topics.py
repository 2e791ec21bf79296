"""In front of a cluster some topics are this broker's own; and what happens to topics that move from one to the other.

A second daemon of ours stands for the cluster.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.rigs.daemon.process import Daemon, run_command
from support.rigs.rocketmq.front import client, front_of, kinds, play, receive, until
from support.rigs.rocketmq.real_time import INVISIBLE_MS, a_message, now_ms

from broker_adapter.contracts.adapter import Subscription
from broker_adapter.rocketmq import RocketMQBroker
from broker_adapter.wire.mapping import decode
from dmq.admin.client import AdminClient

pytestmark = pytest.mark.integration
OWN = ("--embedded-topics", "own;mine*")


async def bodies(broker: RocketMQBroker, topic: str, count: int, group: str = "readers") -> list[bytes]:
    """Receive and acknowledge so many, and return what they say, sorted."""
    return sorted(decode(each.payload).body for each in await receive(broker, topic, count, group))


async def nothing_left(broker: RocketMQBroker, topic: str, group: str = "readers") -> bool:
    """Whether a receive finds nothing."""
    return not await broker.receive(group, Subscription(topic), batch_max=32, invisible_ms=INVISIBLE_MS, wait_ms=100)


def test_a_topic_of_its_own_never_meets_the_cluster(data: Path, tmp_path: Path) -> None:
    """Sends, delays, retries and dead letters of it are here; those of others go through; one receive reads letters."""

    async def scenario() -> None:
        async with client(front) as mine, client(cluster) as theirs:
            await theirs.ensure_group("readers")
            await mine.send([a_message("own", b"now")])
            await mine.send([a_message("mine-too", b"later", deliver_at_ms=now_ms() + 300)])
            await mine.send([a_message("orders", b"theirs")])
            assert await bodies(mine, "own", 1) == [b"now"]
            assert await bodies(mine, "mine-too", 1) == [b"later"]
            assert await bodies(theirs, "orders", 1) == [b"theirs"]
            await mine.send([a_message("own", b"dies")])
            (dies,) = await mine.receive(
                "readers", Subscription("own"), batch_max=1, invisible_ms=INVISIBLE_MS, wait_ms=5_000
            )
            await mine.dead_letter("readers", "own", dies.receipt_handle, attempts=1)
            assert await bodies(mine, "%DLQ%readers", 1, "watchers") == [b"dies"]
        found = await until(front, lambda said: not said.waiting)
        assert found.forwarded == 0

    with Daemon(tmp_path / "cluster") as cluster, front_of(cluster, data, *OWN) as front:
        play(scenario())
        ran = run_command("topic", "ls", "--address", cluster.address)
        assert "orders" in ran.stdout
        assert "own" not in ran.stdout
        assert "mine-too" not in ran.stdout


def test_a_topic_that_moves_to_the_broker_and_back(data: Path, tmp_path: Path) -> None:
    """What the cluster has is not handed out here, what is finished here is not forwarded; all else arrives."""

    finished: list[bytes] = []

    async def first() -> None:  # the cluster's
        async with client(front) as mine, client(cluster) as theirs:
            await theirs.ensure_group("readers")
            for number in range(5):
                await mine.send([a_message("own", b"1%d" % number, deliver_at_ms=now_ms() + 100)])
            await until(front, lambda said: said.forwarded == 5 and not said.waiting)
            await mine.send([a_message("own", b"later", deliver_at_ms=now_ms() + 3_600_000)])
            cluster.kill()
            for number in range(5):
                await mine.send([a_message("own", b"2%d" % number)])
            await until(front, lambda said: said.waiting == 5)

    async def second() -> None:  # this broker's
        async with client(front) as mine, client(cluster) as theirs:
            assert await bodies(theirs, "own", 5) == [b"1%d" % number for number in range(5)]
            assert await bodies(mine, "own", 5) == [b"2%d" % number for number in range(5)]
            for number in range(10):
                await mine.send([a_message("own", b"3%d" % number)])
            some = await mine.receive(
                "readers", Subscription("own"), batch_max=4, invisible_ms=INVISIBLE_MS, wait_ms=5_000
            )
            finished.extend(decode(each.payload).body for each in some)
            assert await mine.ack("readers", "own", [each.receipt_handle for each in some]) == [None] * 4
            assert await nothing_left(theirs, "own")

    async def third() -> None:  # the cluster's again
        async with client(front) as mine, client(cluster) as theirs:
            await until(front, lambda said: said.forwarded == 6)
            left = await bodies(theirs, "own", 6)
            assert sorted([*left, *finished]) == [b"3%d" % number for number in range(10)]
            assert await nothing_left(theirs, "own")
            assert await nothing_left(mine, "own")

    with Daemon(tmp_path / "cluster") as cluster:
        with front_of(cluster, data) as front:
            play(first())
            front.kill()  # so that what it holds is settled by the next run
            cluster.restart()
        with front_of(cluster, data, *OWN) as front:
            play(second())
            front.stop()
        with front_of(cluster, data) as front:
            play(third())
            front.stop()
            found = kinds(front)
    assert found["FILTERED"] > 0  # of what was passed over
    checked = run_command("store", "check", str(data))
    assert checked.returncode == 0, checked.stdout


def test_a_broker_of_its_own_in_between(data: Path, tmp_path: Path) -> None:
    """A run without a cluster hands out what was not forwarded, and what it finished is not forwarded later."""

    async def first() -> None:
        async with client(front) as mine:
            await mine.send([a_message("orders", b"1", deliver_at_ms=now_ms() + 100)])
            await until(front, lambda said: said.forwarded == 1)

    async def second() -> None:
        async with client(alone) as mine:
            await mine.send([a_message("orders", b"2")])
            assert await bodies(mine, "orders", 1) == [b"2"]
            assert await nothing_left(mine, "orders")
            await mine.send([a_message("orders", b"3")])

    async def third() -> None:
        async with client(cluster) as theirs:
            await theirs.ensure_group("readers")
            await until(front, lambda said: said.forwarded == 1)
            assert await bodies(theirs, "orders", 2) == [b"1", b"3"]
            assert await nothing_left(theirs, "orders")

    with Daemon(tmp_path / "cluster") as cluster:
        with front_of(cluster, data) as front:
            play(first())
            front.stop()
        with Daemon(data) as alone:
            play(second())
            alone.stop()
        with front_of(cluster, data) as front:
            play(third())


def test_a_topic_that_was_never_the_clusters_becomes_it(data: Path, tmp_path: Path) -> None:
    """What its groups finished stays here, and what one failed comes to it from here; the rest is forwarded."""

    async def first() -> None:
        async with client(front) as mine:
            for number in range(8):
                await mine.send([a_message("own", b"%d" % number)])
            await bodies(mine, "own", 8)
            await mine.send([a_message("own", b"fails")])
            (fails,) = await mine.receive(
                "readers", Subscription("own"), batch_max=1, invisible_ms=60_000, wait_ms=5_000, renew_for="push"
            )
            await mine.change_invisible("readers", "own", fails.receipt_handle, 10)
            await mine.send([a_message("own", b"8")])

    async def second() -> None:
        async with client(cluster) as theirs:
            await theirs.ensure_group("readers")
            await until(front, lambda said: said.forwarded == 1)
            assert await bodies(theirs, "own", 1) == [b"8"]
        async with client(front) as mine:
            with AdminClient(front.address) as admin:
                (waits,) = (await asyncio.to_thread(admin.retries, "readers")).retries
                await asyncio.to_thread(admin.run_retries_now, "readers", [waits.entry])
            assert await bodies(mine, "own", 1) == [b"fails"]

    with Daemon(tmp_path / "cluster") as cluster:
        with front_of(cluster, data, *OWN) as front:
            play(first())
            front.stop()
        with front_of(cluster, data) as front:
            play(second())
