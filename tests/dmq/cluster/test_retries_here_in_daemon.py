"""In front of a cluster with ``retries = here``: what a group fails is kept here, by its policy, and lost by no kill.

A second daemon of ours stands for the cluster.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path

import pytest
from support.rigs.daemon.process import Daemon, run_command
from support.rigs.rocketmq.front import client, front_of, kinds, play
from support.rigs.rocketmq.real_time import PATIENCE_S, a_message

from broker_adapter.contracts.adapter import Subscription
from broker_adapter.contracts.errors import BrokerUnavailable, Refused
from broker_adapter.contracts.message import Delivery
from broker_adapter.rocketmq import RocketMQBroker
from broker_adapter.wire.mapping import decode
from dmq.admin import admin_v1
from dmq.admin.client import AdminClient
from dmq.admin.requests.mapping import wire_policy
from retry.policy import Fixed, RetryPolicy

pytestmark = pytest.mark.integration
PUSH = "push-consumer"
QUICK = RetryPolicy(backoff=Fixed(100), max_attempts=3)


async def command(daemon: Daemon, *words: str) -> str:
    """Run a command that must go well."""
    ran = await asyncio.to_thread(run_command, *words, "--address", daemon.address)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


async def settle(daemon: Daemon, retries: str, policy: RetryPolicy | None = None) -> None:
    """Say where what the group fails is kept, and by which policy."""

    def order() -> None:
        with AdminClient(daemon.address) as admin:
            admin.set_group("readers", policy=wire_policy(policy) if policy else None, retries=retries)

    await asyncio.to_thread(order)


async def group_of(daemon: Daemon, name: str = "readers") -> admin_v1.Group:
    """What a daemon says of a group."""

    def ask() -> admin_v1.Group:
        with AdminClient(daemon.address) as admin:
            return admin.group(name, with_unread=True)

    return await asyncio.to_thread(ask)


async def next_one(broker: RocketMQBroker, *, renew_for: str = PUSH, topic: str = "orders") -> Delivery:
    """Receive one message, however long it takes."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with suppress(BrokerUnavailable):  # it says so while the cluster is away
                if found := await broker.receive(
                    "readers", Subscription(topic), batch_max=1, invisible_ms=15_000, wait_ms=5_000, renew_for=renew_for
                ):
                    return found[0]


async def nack(broker: RocketMQBroker, delivery: Delivery) -> None:
    """Let a delivery fail, as its consumer does."""
    await broker.change_invisible("readers", delivery.topic, delivery.receipt_handle, 10)


async def ack(broker: RocketMQBroker, delivery: Delivery) -> None:
    """Finish a delivery."""
    assert await broker.ack("readers", delivery.topic, [delivery.receipt_handle]) == [None]


async def finished_there(cluster: Daemon) -> None:
    """Wait until the cluster has nothing left for the group."""
    async with asyncio.timeout(PATIENCE_S):
        while (found := await group_of(cluster)).unread or found.waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.05)  # no event tells of it


async def dead(daemon: Daemon) -> list[dict[str, object]]:
    """The dead letters of the group."""
    found = json.loads(await command(daemon, "dead", "ls", "readers", "--output", "json"))
    return list(found["letters"] if isinstance(found, dict) else found)


def test_it_is_retried_and_dies_here(data: Path, tmp_path: Path) -> None:
    """By the group's policy; its last attempt is a dead letter here, which is sent again to the group here."""

    async def scenario() -> None:
        async with client(front) as mine, client(cluster) as theirs:
            await theirs.ensure_group("readers")
            words = ("--retries", "here", "--fixed", "100ms", "--max-attempts", "3")
            assert "here" in await command(front, "group", "set-policy", "readers", *words)
            await mine.send([a_message("orders", b"fails")])
            for attempt in (1, 2, 3):
                found = await next_one(mine)
                assert (decode(found.payload).body, found.delivery_attempt) == (b"fails", attempt)
                await nack(mine, found)
            await finished_there(cluster)
            assert (await group_of(front)).dead == 1
            assert (await group_of(cluster)).dead == 0
            (letter,) = await dead(front)
            assert "exhausted" in str(letter).lower()
            await command(front, "dead", "redrive", "readers", "--yes")
            again = await next_one(mine)
            assert (decode(again.payload).body, again.delivery_attempt) == (b"fails", 1)
            await ack(mine, again)

    with Daemon(tmp_path / "cluster") as cluster, front_of(cluster, data) as front:
        play(scenario())
        front.stop()
        found = kinds(front)
        seen = [found[kind] for kind in ("TAKEN_OVER", "NACKED", "RETRIED", "DEAD_EXHAUSTED", "QUEUED_FOR_GROUP")]
        assert seen == [1, 2, 2, 1, 1]
        assert found["ACKED"] == 1
        checked = run_command("store", "check", str(data))
        assert checked.returncode == 0, checked.stdout


def test_a_simple_consumers_durations_are_obeyed(data: Path, tmp_path: Path) -> None:
    """What runs out, or is given back at once, comes from here with the next attempt; what is extended does not."""

    async def scenario() -> None:
        async with client(front) as mine, client(cluster) as theirs:
            await theirs.ensure_group("readers")
            await settle(front, "here")
            await mine.send([a_message("orders", b"slow")])
            first = await next_one(mine, renew_for="")
            assert 0 < first.invisible_ms <= 15_000
            began_s = asyncio.get_running_loop().time()
            handle = await mine.change_invisible("readers", "orders", first.receipt_handle, 1_000)
            second = await next_one(mine, renew_for="")
            assert second.delivery_attempt == 2
            assert asyncio.get_running_loop().time() - began_s >= 0.9
            with pytest.raises(Refused):  # it is somebody else's by now
                await mine.change_invisible("readers", "orders", handle, 1_000)
            (late,) = await mine.ack("readers", "orders", [handle])
            assert isinstance(late, Refused)
            await finished_there(cluster)
            await ack(mine, second)
            await mine.send([a_message("orders", b"given back")])
            third = await next_one(mine, renew_for="")
            await mine.change_invisible("readers", "orders", third.receipt_handle, 0)
            fourth = await next_one(mine, renew_for="")
            assert (fourth.message_id, fourth.delivery_attempt) == (third.message_id, 2)
            await mine.dead_letter("readers", "orders", fourth.receipt_handle, attempts=2)
            assert (await group_of(front)).dead == 1
            await finished_there(cluster)

    with Daemon(tmp_path / "cluster") as cluster, front_of(cluster, data) as front:
        play(scenario())


def test_it_comes_back_while_the_cluster_is_away(data: Path, tmp_path: Path) -> None:
    """What waits here does not need the cluster; it is told once it is back."""

    async def scenario() -> None:
        async with client(front) as mine, client(cluster) as theirs:
            await theirs.ensure_group("readers")
            await settle(front, "here", QUICK)
            await mine.send([a_message("orders")])
            first = await next_one(mine)
            cluster.kill()
            await nack(mine, first)
            second = await next_one(mine)
            assert (second.message_id, second.delivery_attempt) == (first.message_id, 2)
            await ack(mine, second)

    cluster = Daemon(tmp_path / "cluster")
    with cluster, front_of(cluster, data) as front:
        play(scenario())


def test_a_kill_between_here_and_there(data: Path, tmp_path: Path) -> None:
    """It is at both then: the cluster hands it out again, it is known here, and nobody gets it twice."""

    async def scenario() -> None:
        async with client(front) as mine, client(cluster) as theirs:
            await theirs.ensure_group("readers")
            await settle(front, "here")
            await mine.send([a_message("orders", b"both")])
            first = await next_one(mine, renew_for="")
            handle = await mine.change_invisible("readers", "orders", first.receipt_handle, 3_000)
            cluster.kill()
            await mine.change_invisible("readers", "orders", handle, 0)  # durable here, and nobody is there to be told
            front.kill()
        cluster.restart()
        front.restart()
        async with client(front) as mine:
            copy = await next_one(mine, renew_for="")
            assert (copy.message_id, copy.delivery_attempt) == (first.message_id, 2)
            assert (await group_of(cluster)).unread  # it is there as well
            async with asyncio.timeout(PATIENCE_S):
                while (await group_of(cluster)).unread:
                    assert not await mine.receive(
                        "readers", Subscription("orders"), batch_max=1, invisible_ms=15_000, wait_ms=1_000
                    )
            await ack(mine, copy)

    with Daemon(tmp_path / "cluster") as cluster, front_of(cluster, data) as front:
        play(scenario())
        front.stop()
        assert front.events("duplicate_retry")
        found = kinds(front)
        assert (found["TAKEN_OVER"], found["ACKED"]) == (1, 1)


def test_a_kill_before_it_is_here(data: Path, tmp_path: Path) -> None:
    """What was handed out is the cluster's; it comes again from there and fails here then."""

    async def scenario() -> None:
        async with client(front) as mine, client(cluster) as theirs:
            await theirs.ensure_group("readers")
            await settle(front, "here", QUICK)
            await mine.send([a_message("orders", b"once more")])
            first = await next_one(mine, renew_for="")
            handle = await mine.change_invisible("readers", "orders", first.receipt_handle, 10_000)
            front.kill()
            front.restart()
        async with client(front) as mine:
            # Its handle is the cluster's, and good: what the daemon does not know any more fails as the cluster has it.
            await mine.change_invisible("readers", "orders", handle, 100)
            second = await next_one(mine)
            assert (second.message_id, second.delivery_attempt) == (first.message_id, 2)
            await nack(mine, second)
            third = await next_one(mine)
            assert third.delivery_attempt == 3
            await ack(mine, third)
            await finished_there(cluster)

    with Daemon(tmp_path / "cluster") as cluster, front_of(cluster, data) as front:
        play(scenario())
        front.stop()
        assert kinds(front)["TAKEN_OVER"] == 1


def test_a_message_the_cluster_retried_too_often_dies_here_at_once(data: Path, tmp_path: Path) -> None:
    """Its attempts count; it is handed out no more, and the cluster is told."""

    async def scenario() -> None:
        async with client(front) as mine, client(cluster) as theirs:
            await theirs.ensure_group("readers")
            await mine.send([a_message("orders", b"old")])
            for _ in range(2):
                found = await next_one(theirs, renew_for="")
                await theirs.change_invisible("readers", "orders", found.receipt_handle, 0)
            await settle(front, "here", RetryPolicy(max_attempts=2))
            async with asyncio.timeout(PATIENCE_S):
                while not (await group_of(front)).dead:
                    assert not await mine.receive(
                        "readers", Subscription("orders"), batch_max=1, invisible_ms=15_000, wait_ms=1_000
                    )
            await finished_there(cluster)

    with Daemon(tmp_path / "cluster") as cluster, front_of(cluster, data) as front:
        play(scenario())


def test_the_order_of_a_message_group_stays_the_clusters(data: Path, tmp_path: Path) -> None:
    """A failed head is not taken over; and a group that is told to keep order cannot have its retries here."""

    async def scenario() -> None:
        async with client(front) as mine, client(cluster) as theirs:
            await theirs.ensure_group("readers")
            await settle(front, "here", QUICK)
            for body in (b"1", b"2"):
                await mine.send([a_message("orders", body, message_group="a")])
            head = await next_one(mine, renew_for="")
            await mine.change_invisible("readers", "orders", head.receipt_handle, 0)
            again = await next_one(mine, renew_for="")
            assert (decode(again.payload).body, again.delivery_attempt) == (b"1", 2)
            await ack(mine, again)
            assert (await group_of(front)).waiting == 0
            refused = await asyncio.to_thread(
                run_command, "group", "set-policy", "readers", "--fifo", "--address", front.address
            )
            assert refused.returncode != 0
            assert "cluster" in refused.stderr

    with Daemon(tmp_path / "cluster") as cluster, front_of(cluster, data) as front:
        play(scenario())
        front.stop()
        assert not kinds(front)["TAKEN_OVER"]


def test_back_to_the_cluster(data: Path, tmp_path: Path) -> None:
    """What waits here still comes; what fails from then on is the cluster's; a removal gives up what is here."""

    async def scenario() -> None:
        async with client(front) as mine, client(cluster) as theirs:
            await theirs.ensure_group("readers")
            await settle(front, "here", RetryPolicy(backoff=Fixed(3_600_000)))
            for body in (b"moves", b"stays"):
                await mine.send([a_message("orders", body)])
                await nack(mine, await next_one(mine))
            assert (await group_of(front)).waiting == 2
            listed = json.loads(await command(front, "retry", "ls", "readers", "--output", "json"))
            entries = listed["retries"] if isinstance(listed, dict) else listed
            await command(front, "retry", "run-now", "readers", "--entry", str(entries[0]["entry"]), "--yes")
            await settle(front, "cluster")
            found = await next_one(mine)
            assert (decode(found.payload).body, found.delivery_attempt) == (b"moves", 2)
            await ack(mine, found)
            await mine.send([a_message("orders", b"theirs")])
            await nack(mine, await next_one(mine))
            assert (await group_of(front)).waiting == 1
            assert (await group_of(cluster)).waiting == 1
            refused = await asyncio.to_thread(
                run_command, "group", "rm", "readers", "--yes", "--address", front.address
            )
            assert "1 retries wait" in refused.stderr
            await command(front, "group", "rm", "readers", "--force", "--yes")

    with Daemon(tmp_path / "cluster") as cluster, front_of(cluster, data) as front:
        play(scenario())
