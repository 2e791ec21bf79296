"""A daemon in front of a cluster: what is kept, what is passed on, and what becomes of it while the cluster is away.

A second daemon of ours stands for the cluster where its faults matter more than its make; the real one is in
``test_broker_on_rocketmq``. What the trail says is read as the audit reads it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from support.rigs.daemon.acl import ACL, OPERATOR, write_acl
from support.rigs.daemon.process import Daemon, run_command
from support.rigs.rocketmq.front import client, front_of, kinds, play, receive, status, until
from support.rigs.rocketmq.real_time import INVISIBLE_MS, a_message, now_ms

from broker_adapter.contracts.adapter import Subscription
from broker_adapter.contracts.errors import BrokerUnavailable, Refused, Rule
from broker_adapter.contracts.message import SendReceipt
from broker_adapter.rocketmq import RocketMQBroker
from broker_adapter.wire.mapping import decode

pytestmark = pytest.mark.integration


def test_only_delayed_messages_wait_here(data: Path, tmp_path: Path) -> None:
    """A delayed message is at the cluster when it is due and not before; an undelayed one never is in our store."""

    async def scenario() -> None:
        async with client(front) as mine, client(cluster) as theirs:
            await theirs.ensure_group("readers")
            due_ms = now_ms() + 1_500
            await mine.send([a_message("orders", b"later", deliver_at_ms=due_ms)])
            await mine.send([a_message("orders", b"now")])
            found: dict[bytes, int] = {}
            for broker in (theirs, mine):
                (each,) = await receive(broker, "orders", 1)
                message = decode(each.payload)
                found[message.body] = now_ms()
                assert not message.deliver_at_ms  # the delayed one went as an undelayed one
            assert found.keys() == {b"later", b"now"}
            assert found[b"later"] >= due_ms
        await until(front, lambda said: said.forwarded == 1 and not said.waiting)

    with Daemon(tmp_path / "cluster") as cluster, front_of(cluster, data) as front:
        play(scenario())
        front.stop()
        found = kinds(front)
        assert (found["SCHEDULED"] + found["QUEUED"], found["FORWARDED"]) == (1, 1)


async def kept(broker: RocketMQBroker) -> SendReceipt:
    """Send a message that is still to come when it is accepted, however slow this machine is."""
    delay_ms = 100
    while True:
        delay_ms *= 2
        (receipt,) = await broker.send([a_message("orders", deliver_at_ms=now_ms() + delay_ms)])
        if receipt.recall_handle:
            return receipt


def test_a_recall_is_truthful(data: Path, tmp_path: Path) -> None:
    """What waits here is gone for good; what went to the cluster is said to have been delivered."""

    async def scenario() -> None:
        async with client(front) as mine:
            (waits,) = await mine.send([a_message("orders", deliver_at_ms=now_ms() + 3_600_000)])
            goes = await kept(mine)
            await until(front, lambda found: not found.waiting and found.forwarded)
            assert (await mine.recall("orders", waits.recall_handle)).message_id == waits.message_id
            with pytest.raises(Refused) as refused:
                await mine.recall("orders", goes.recall_handle)
            assert refused.value.rule is Rule.NOT_FOUND
            assert "delivered at" in str(refused.value)

    with Daemon(tmp_path / "cluster") as cluster, front_of(cluster, data) as front:
        play(scenario())


def test_a_cluster_that_is_away(data: Path, tmp_path: Path) -> None:
    """Sends are accepted, receives end at once, the status says so; all arrive when it is back, in their order."""
    sent: list[str] = []

    async def away() -> None:
        async with client(front) as mine:
            for number in range(40):
                message = a_message("orders", b"%d" % number, message_group="abc"[number % 3])
                await mine.send([message])
                sent.append(message.message_id)
            found = await until(front, lambda found: found.away_since_ms)
            assert found.waiting == 40
            began_s = time.monotonic()
            with pytest.raises(BrokerUnavailable):  # dead letters here never leave, so none is accepted for the cluster
                await mine.send([a_message("%DLQ%readers")])
            with pytest.raises(Refused):
                await mine.send([a_message("%DLQ%others", deliver_at_ms=now_ms() + 60_000)])
            with pytest.raises(BrokerUnavailable):
                await mine.receive(
                    "readers", Subscription("orders"), batch_max=1, invisible_ms=INVISIBLE_MS, wait_ms=20_000
                )
            assert time.monotonic() - began_s < 10

    async def back() -> None:
        async with client(front) as mine:
            await until(front, lambda found: found.forwarded >= 40)
            found = await receive(mine, "orders", 40)
            assert {each.message_id for each in found} == set(sent)
            for group in "abc":
                bodies = [int(decode(each.payload).body) for each in found if each.message_group == group]
                assert bodies == sorted(bodies)

    cluster = Daemon(tmp_path / "cluster")
    with cluster, front_of(cluster, data) as front:
        cluster.kill()
        play(away())
        cluster.restart()
        play(back())
        front.stop()
        assert front.events("cluster_unreachable")
        assert front.events("cluster_reachable")
        # told once, not with each receive that comes meanwhile
        assert not [each for each in front.events("broker_unavailable") if each["rpc"] == "ReceiveMessage"]


def test_sends_that_are_to_be_refused_meanwhile(data: Path, tmp_path: Path) -> None:
    """With ``away = refuse``; a delayed one is kept all the same, since the cluster is not needed for it yet."""

    async def scenario() -> None:
        async with client(front) as mine:
            await mine.send([a_message("orders", deliver_at_ms=now_ms() + 1)])
            cluster.kill()
            with pytest.raises(BrokerUnavailable):
                await mine.send([a_message("orders")])
            await mine.send([a_message("orders", deliver_at_ms=now_ms() + 1)])
            assert (await asyncio.to_thread(status, front)).kept == 0

    cluster = Daemon(tmp_path / "cluster")
    with cluster, front_of(cluster, data, "--away", "refuse") as front:
        play(scenario())


def test_a_kill_of_the_daemon_repeats_and_reports_it(data: Path, tmp_path: Path) -> None:
    """What was on its way is sent again under its id, and each message that may be there twice has its event."""
    ids: list[str] = []

    async def scenario() -> None:
        async with client(front) as mine, client(cluster) as theirs:
            await theirs.ensure_group("readers")
            for _ in range(200):
                message = a_message("orders", deliver_at_ms=now_ms() + 300)
                ids.append(message.message_id)
                await mine.send([message])
            await until(front, lambda found: found.forwarded > 0)
            cluster.signal(signal.SIGSTOP)
            for _ in range(50):
                message = a_message("orders", deliver_at_ms=now_ms() + 1)
                ids.append(message.message_id)
                await mine.send([message])
            await until(front, lambda found: found.in_flight > 0)
            front.kill()
            cluster.signal(signal.SIGCONT)
            front.restart()
            found: Counter[str] = Counter()
            while set(found) != set(ids):
                found.update(each.message_id for each in await receive(theirs, "orders", 1))
            await until(front, lambda found: not found.waiting)
            assert set(found) == set(ids)

    with Daemon(tmp_path / "cluster") as cluster, front_of(cluster, data) as front:
        play(scenario())
        front.stop()
        found = kinds(front)
        assert found["FORWARDED"] == len(ids)
        assert found["FORWARD_IN_DOUBT"] > 0


def test_a_permanent_refusal_by_the_cluster_is_a_dead_letter(data: Path, tmp_path: Path) -> None:
    """With the code; a redrive sends it again, without what was written on it, once the cluster takes it."""

    async def scenario() -> None:
        async with client(front) as mine, client(cluster) as theirs:
            # The cluster's topic changes its mind after the front has asked what it takes.
            await mine.send([a_message("bills", b"first", deliver_at_ms=now_ms() + 1)])
            await receive(theirs, "bills", 1)
            ran = await asyncio.to_thread(
                run_command, "topic", "set", "bills", "--type", "fifo", "--address", cluster.address
            )
            assert ran.returncode == 0, ran.stderr
            await mine.send([a_message("bills", b"delayed", deliver_at_ms=now_ms() + 1)])
            await until(front, lambda found: found.refused == 1)
            ran = await asyncio.to_thread(
                run_command, "dead", "ls", "dmq-forwarder", "--address", front.address, "--output", "json"
            )
            assert "refused" in ran.stdout.lower(), ran.stdout
            await mine.send([a_message("orders", b"others", deliver_at_ms=now_ms() + 1)])
            await until(front, lambda found: found.forwarded == 2)
            await asyncio.to_thread(
                run_command, "topic", "set", "bills", "--type", "mixed", "--address", cluster.address
            )
            ran = await asyncio.to_thread(
                run_command, "dead", "redrive", "dmq-forwarder", "--yes", "--address", front.address
            )
            assert ran.returncode == 0, ran.stderr
            (again,) = await receive(theirs, "bills", 1)
            message = decode(again.payload)
            assert (message.body, dict(message.properties).get("DMQ_REFUSED")) == (b"delayed", None)

    with Daemon(tmp_path / "cluster") as cluster, front_of(cluster, data) as front:
        play(scenario())
        front.stop()
        found = kinds(front)
        assert (found["FORWARD_REFUSED"], found["FORWARDED"]) == (1, 3)


def test_a_key_that_is_withdrawn_loses_nothing(data: Path, tmp_path: Path) -> None:
    """What an operator can mend is waited for, with a clear word; other topics are not disturbed; a mend is noticed."""
    key = {"DMQ_CLUSTER_ACCESS_KEY": OPERATOR.access_key, "DMQ_CLUSTER_SECRET_KEY": OPERATOR.secret_key}
    only_orders = ACL.replace("admin = true", 'topics = { "orders" = "PUB" }')

    async def scenario() -> None:
        async with client(front) as mine:
            for topic in ("bills", "orders"):  # the front learns their routes
                await mine.send([a_message(topic)])
            write_acl(tmp_path, only_orders)
            for _ in range(6):
                await mine.send([a_message("bills", deliver_at_ms=now_ms() + 1_500)])
            found = await until(front, lambda found: found.lanes)
            assert [lane.topic for lane in found.lanes] == ["bills"]
            assert "40300" in found.lanes[0].why
            through = found.forwarded  # some may have been there before the cluster read its keys again
            await mine.send([a_message("orders", deliver_at_ms=now_ms() + 1)])
            await until(front, lambda found: found.forwarded == through + 1)
            write_acl(tmp_path)
            await until(front, lambda found: found.forwarded == 7)

    with Daemon(tmp_path / "cluster", "--acl", str(write_acl(tmp_path))) as cluster:
        front = front_of(cluster, data, env={**os.environ, **key})
        with front:
            play(scenario())


def test_no_operator_moves_the_forwarder(data: Path, tmp_path: Path) -> None:
    """A reset or a removal of its group would lose what it has not sent yet."""
    with Daemon(tmp_path / "cluster") as cluster, front_of(cluster, data) as front:
        for words in (
            ("group", "rm", "dmq-forwarder", "--force", "--yes"),
            ("group", "reset", "dmq-forwarder", "orders", "--to", "end", "--yes"),
        ):
            ran = run_command(*words, "--address", front.address)
            assert ran.returncode != 0
            assert "cluster" in ran.stderr, ran.stderr


def test_a_daemon_that_had_a_broker_of_its_own(data: Path, tmp_path: Path) -> None:
    """What its groups have not finished goes to the cluster, what they have does not, and what waits goes when due."""

    async def before() -> None:
        async with client(alone) as mine:
            await mine.ensure_group("readers")
            for number in range(20):
                await mine.send([a_message("orders", b"%d" % number)])
            await receive(mine, "orders", 20)
            await mine.send([a_message("orders", b"unread")])
            await mine.send([a_message("orders", b"waits", deliver_at_ms=now_ms() + 3_000)])

    async def after() -> None:
        async with client(cluster) as theirs:
            await theirs.ensure_group("readers")
            found = await receive(theirs, "orders", 2)
            assert sorted(decode(each.payload).body for each in found) == [b"unread", b"waits"]

    with Daemon(data) as alone:
        play(before())
        alone.stop()
    with Daemon(tmp_path / "cluster") as cluster, front_of(cluster, data):
        play(after())
