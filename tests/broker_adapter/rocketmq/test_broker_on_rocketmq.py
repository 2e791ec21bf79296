"""The adapter in front of a real cluster: what it refuses, and what it does while brokers come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.rigs.rocketmq.cluster import cluster
from support.rigs.rocketmq.real_time import INVISIBLE_MS, PATIENCE_S, REQUEST_MS, Rig, a_message, now_ms, rocketmq

from broker_adapter.contracts.adapter import Subscription
from broker_adapter.contracts.errors import BrokerUnavailable, Refused, Rule
from broker_adapter.contracts.message import Delivery, Envelope
from broker_adapter.rocketmq import ClusterOptions, RocketMQBroker
from broker_adapter.runtime.clock import SystemClock
from dmq.rocketmq_server.transport.tls import self_signed

pytestmark = pytest.mark.cluster
SHORT_MS = 1_000


def play(scenario: Coroutine[object, object, None]) -> None:
    """Run a scenario on a loop of its own."""
    asyncio.run(scenario)


@pytest.fixture(scope="module", autouse=True)
def _running() -> None:
    cluster()


def refusal(envelope: Envelope) -> Rule:
    """Send a message, and return why it was refused."""
    rules: list[Rule] = []

    async def scenario() -> None:
        async with rocketmq(None) as rig:  # type: ignore[arg-type]
            with pytest.raises(Refused) as refused:
                await rig.broker.send([envelope])
            rules.append(refused.value.rule)

    play(scenario())
    return rules[0]


def test_a_type_that_a_topic_does_not_accept_is_refused() -> None:
    """With the cluster's own rule: a type, a delay beyond its maximum, a topic that is not there, an empty body."""
    normal, delayed = cluster().topic(), cluster().topic("DELAY")
    assert refusal(a_message(normal, deliver_at_ms=now_ms() + 5_000)) is Rule.MESSAGE_TYPE
    assert refusal(a_message(normal, message_group="g")) is Rule.MESSAGE_TYPE
    assert refusal(a_message(delayed, deliver_at_ms=now_ms() + 3 * 86_400_000)) is Rule.DELIVERY_TIME
    assert refusal(a_message("no-such-topic")) is Rule.TOPIC_UNKNOWN
    assert refusal(a_message(normal, b"")) is Rule.BODY_EMPTY


def test_a_group_that_the_cluster_does_not_have_is_refused() -> None:
    """A proxy makes none."""

    async def scenario() -> None:
        async with rocketmq(None) as rig:  # type: ignore[arg-type]
            with pytest.raises(Refused) as refused:
                await rig.broker.ensure_group("no-such-group")
            assert refused.value.rule is Rule.GROUP_UNKNOWN

    play(scenario())


def test_the_settings_of_a_group_are_the_clusters() -> None:
    """Once it was asked."""
    group = cluster().group(attempts=4)

    async def scenario() -> None:
        async with rocketmq(None) as rig:  # type: ignore[arg-type]
            await rig.broker.ensure_group(group)
            settings = rig.broker.group_settings(group)
            assert (settings.max_attempts, settings.is_fifo) == (4, False)
            assert settings.delays_ms[:3] == (1_000, 5_000, 10_000)

    play(scenario())


def test_its_certificate_is_checked(tmp_path: Path) -> None:
    """Everything goes through TLS with the cluster's own; with somebody else's nothing does, and the error says why."""
    topic, group = cluster().topic(), cluster().group()
    foreign, _ = self_signed(tmp_path, now_ms())

    async def scenario() -> None:
        options = ClusterOptions(endpoints=cluster().endpoints, request_timeout_ms=REQUEST_MS)
        broker = RocketMQBroker(replace(options, tls_ca=cluster().certificate), SystemClock())
        try:
            await broker.ensure_group(group)
            rig = Rig(broker, broker, cluster().topic, cluster().group)
            (sent,) = await rig.send(topic, b"secret")
            (found,) = await rig.receive(group, topic)
            assert found.message_id == sent.message_id
            assert list(await broker.ack(group, topic, [found.receipt_handle])) == [None]
        finally:
            await broker.close()
        broker = RocketMQBroker(replace(options, tls_ca=foreign), SystemClock())
        try:
            with pytest.raises(BrokerUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
                await broker.send([a_message(topic)])
        finally:
            await broker.close()

    play(scenario())


def test_no_pull_waits_at_an_empty_broker() -> None:
    """What lies at one of two brokers comes with each receive, whichever is asked first."""
    topic, group = cluster().topic(), cluster().group()

    async def scenario() -> None:
        async with rocketmq(None) as rig:  # type: ignore[arg-type]
            await rig.broker.ensure_group(group)
            for node in cluster().rocketmq.nodes:
                one = RocketMQBroker(
                    ClusterOptions(endpoints=(node.address,), request_timeout_ms=REQUEST_MS), SystemClock()
                )
                try:
                    sent = [a_message(topic, b"body") for _ in range(4)]
                    for each in sent:
                        await one.send([each])
                finally:
                    await one.close()
                found = []
                for _ in sent:
                    deliveries = await rig.broker.receive(
                        group, Subscription(topic), batch_max=1, invisible_ms=INVISIBLE_MS * 6, wait_ms=20_000
                    )
                    found += [each.message_id for each in deliveries]
                    await rig.broker.ack(group, topic, [each.receipt_handle for each in deliveries])
                assert sorted(found) == sorted(each.message_id for each in sent)

    play(scenario())


def test_a_broker_that_dies_and_comes_back() -> None:
    """Sends go to the other one meanwhile; nothing that was accepted is lost; the adapter finds back by itself."""
    running = cluster().rocketmq
    topic, group = cluster().topic(), cluster().group()
    dies, _ = running.nodes

    async def scenario() -> None:
        options = ClusterOptions(endpoints=cluster().endpoints, heartbeat_ms=1_000, request_timeout_ms=REQUEST_MS)
        events: list[tuple[str, object]] = []
        broker = RocketMQBroker(options, SystemClock(), lambda event, **facts: events.append((event, facts["address"])))
        rig = Rig(broker, broker, cluster().topic, cluster().group)
        try:
            await broker.ensure_group(group)
            accepted = {each.message_id for each in await rig.send(topic, *(b"before",) * 10)}
            running.kill(dies)
            for _ in range(20):
                accepted |= {each.message_id for each in await rig.send(topic, b"meanwhile")}
            assert ("proxy_isolated", dies.address) in events
            running.start(dies)  # in this thread: it ends with the thread that started it
            async with asyncio.timeout(PATIENCE_S):
                while ("proxy_returned", dies.address) not in events:  # noqa: ASYNC110 - no event tells of it
                    await asyncio.sleep(0.05)
            found: set[str] = set()
            async with asyncio.timeout(PATIENCE_S):
                while not accepted <= found:
                    try:
                        deliveries = await broker.receive(
                            group, Subscription(topic), batch_max=32, invisible_ms=INVISIBLE_MS * 6, wait_ms=1_000
                        )
                    except BrokerUnavailable:
                        continue
                    found |= {each.message_id for each in deliveries}
                    await broker.ack(group, topic, [each.receipt_handle for each in deliveries])
        finally:
            await broker.close()

    play(scenario())


def test_a_short_receive_takes_nothing_away() -> None:
    """Who waits for less than a proxy does, again and again, is given the next message, on its first attempt."""
    topic, group = cluster().topic(), cluster().group()

    async def scenario() -> None:
        options = ClusterOptions(endpoints=cluster().endpoints[:1], request_timeout_ms=REQUEST_MS)
        broker = RocketMQBroker(options, SystemClock())

        async def receive() -> list[Delivery]:
            receiving = broker.receive(
                group, Subscription(topic), batch_max=1, invisible_ms=INVISIBLE_MS, wait_ms=SHORT_MS
            )
            try:
                return list(await asyncio.wait_for(receiving, SHORT_MS / 1000))
            except TimeoutError:
                return []

        try:
            await broker.ensure_group(group)
            for _ in range(3):
                assert await receive() == []
            await broker.send([a_message(topic)])
            async with asyncio.timeout(PATIENCE_S):
                while not (found := await receive()):
                    pass
            assert [each.delivery_attempt for each in found] == [1]
            await broker.ack(group, topic, [each.receipt_handle for each in found])
        finally:
            await broker.close()

    play(scenario())


def test_messages_that_a_killed_process_received_for_a_push_consumer_come_back() -> None:
    """Soon, though the consumer lives on: the proxy would renew it for three hours, for nobody."""
    topic, group = cluster().topic(), cluster().group()
    options = ClusterOptions(endpoints=cluster().endpoints[:1], request_timeout_ms=REQUEST_MS)

    async def receive(broker: RocketMQBroker) -> Sequence[Delivery]:
        return await broker.receive(
            group, Subscription(topic), batch_max=1, invisible_ms=0, wait_ms=20_000, renew_for=f"consumer of {group}"
        )

    async def scenario() -> None:
        killed = RocketMQBroker(options, SystemClock())
        await killed.ensure_group(group)
        await killed.send([a_message(topic)])
        assert len(await receive(killed)) == 1
        await killed.proxies.close()  # and no goodbye: what a proxy sees of a kill
        broker = RocketMQBroker(options, SystemClock())
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not (found := await receive(broker)):
                    pass
            assert [each.delivery_attempt for each in found] == [2]
            await broker.ack(group, topic, [each.receipt_handle for each in found])
        finally:
            await broker.close()

    play(scenario())
