"""``connect("rocketmq://...")`` in front of a real daemon: the surface of a client of queues, over gRPC."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.clients.embedded.consumers import PATIENCE_S, Seen
from support.rigs.daemon.process import Daemon

from broker_adapter.contracts.classic import Decision, MessageQueue, ReceivedMessage
from broker_adapter.contracts.errors import Refused
from broker_adapter.contracts.message import Message
from broker_adapter.contracts.topics import dead_letter_topic
from broker_adapter.queue_client import blocking
from broker_adapter.queue_client.client import connect
from broker_adapter.queue_client.consumer import ConsumerOptions, Later, Outcome
from dmq import Spool, durable
from retry import Fixed, RetryPolicy, Spooled

pytestmark = pytest.mark.integration

TOPIC, GROUP = "orders", "workers"


def test_a_program_consumes_its_own_sends(tmp_path: Path) -> None:
    """Plain, delayed, grouped and of transactions; what is given up is a dead letter, what is recalled never comes."""

    async def run(address: str) -> None:
        def answer(received: ReceivedMessage) -> Outcome:
            return Later(delay_level=-1) if received.message.body == b"bad" else None

        async def execute(half: Message) -> Decision:
            return Decision.COMMIT if half.body == b"committed" else Decision.ROLLBACK

        seen, dead = Seen(answer), Seen()
        async with await connect(f"rocketmq://{address}") as broker:
            producer = await broker.producer("senders")
            broker.consumer(GROUP, {TOPIC: "*"})(seen.by("a"))
            receipt = await producer.send(Message(TOPIC, b"plain", tag="t", key="k", properties={"name": "value"}))
            assert receipt.queue == MessageQueue(TOPIC, address, -1)  # the protocol does not tell
            for number in range(3):
                await producer.send(Message("fifo", b"%d" % number, message_group="g"))
            await producer.send_batch([Message(TOPIC, b"one"), Message(TOPIC, b"two")])
            await producer.send_one_way(Message(TOPIC, b"bad"))
            recalled = await producer.send(Message(TOPIC, b"recalled"), delay_level=3)
            assert await producer.recall(TOPIC, recalled.recall_handle) == recalled.message_id
            for body in (b"committed", b"rolled back"):
                await producer.send_in_transaction(Message(TOPIC, body), execute)
            await producer.send(Message(TOPIC, b"later"), delay_level=1)
            expected = [b"bad", b"committed", b"later", b"one", b"plain", b"two"]
            await seen.until(lambda: len(seen.bodies) >= len(expected))
            assert sorted(seen.bodies) == expected
            (plain,) = [each for _, batch in seen.batches for each in batch if each.message.body == b"plain"]
            assert plain.queue[:2] == (TOPIC, address)
            assert plain.queue_offset == receipt.queue_offset
            assert plain.message.message_id == receipt.message_id
            assert (plain.message.tag, plain.message.keys) == ("t", ("k",))
            in_order = Seen()
            broker.consumer("in-order", {"fifo": "*"}, ConsumerOptions(in_order=True))(in_order.by("b"))
            broker.consumer("gravediggers", {dead_letter_topic(GROUP): "*"})(dead.by("c"))
            await in_order.until(lambda: in_order.bodies == [b"0", b"1", b"2"])
            await dead.until(lambda: dead.bodies == [b"bad"])
            with pytest.raises(Refused, match="body"):
                await producer.send(Message(TOPIC, b""))
        async with await connect(f"rocketmq://{address}") as broker:
            broker.consumer(GROUP, {TOPIC: "*"})(seen.by("again"))
            producer = await broker.producer("senders")
            await producer.send(Message(TOPIC, b"last"))
            await seen.until(lambda: b"last" in seen.bodies)
        assert sorted(seen.bodies) == sorted([*expected, b"last"])

    with Daemon(tmp_path / "data") as daemon:
        asyncio.run(run(daemon.address))


def test_a_blocking_program_outlives_a_restart_of_the_daemon(tmp_path: Path) -> None:
    """What is sent meanwhile is kept by the hook; the consumer goes on by itself."""
    came: list[bytes] = []
    arrived = threading.Condition()

    def wait_for(body: bytes) -> None:
        with arrived:
            assert arrived.wait_for(lambda: body in came, PATIENCE_S)

    with Daemon(tmp_path / "data") as daemon, blocking.connect(f"rocketmq://{daemon.address}") as broker:

        @broker.consumer(GROUP, {TOPIC: "*"}, ConsumerOptions(pause_ms=100))
        def handle(batch: Sequence[ReceivedMessage]) -> None:
            with arrived:
                came.extend(each.message.body for each in batch)
                arrived.notify_all()

        policy = RetryPolicy(backoff=Fixed(200), max_attempts=1_000)
        producer = durable(broker.producer("senders"), Spool(tmp_path / "spool"), policy=policy)
        producer.send(Message(TOPIC, b"before"))
        wait_for(b"before")
        daemon.stop()
        kept = producer.send(Message(TOPIC, b"meanwhile"))
        assert isinstance(kept, Spooled)
        daemon.restart()
        wait_for(b"meanwhile")
        producer.redelivery.close()
    assert set(came) == {b"before", b"meanwhile"}
    assert came.count(b"meanwhile") == 1  # the stop may have come before the acknowledgement of the other
