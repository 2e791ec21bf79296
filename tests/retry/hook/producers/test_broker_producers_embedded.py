"""Our own producers behind ``durable``, on the embedded broker: an outage costs nothing, neither ids nor order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import pytest
from support.clients.embedded.consumers import PATIENCE_S, Members, Seen
from support.rigs.broker.rig import EmbeddedRig, play

from broker_adapter.contracts.classic import ReceivedMessage, Start
from broker_adapter.contracts.message import Message
from broker_adapter.queue_client import blocking
from broker_adapter.queue_client.consumer import ConsumerOptions
from dmq import Spool, durable
from retry import Fixed, RetryPolicy, Spooled
from retry.hook.producers.rocketmq import UID_PROPERTY
from retry.testing import MemorySink, advance

pytestmark = pytest.mark.integration

TOPIC, GROUP = "orders", "workers"


def test_messages_kept_in_an_outage_come_afterwards_in_order_and_under_their_ids(tmp_path: Path) -> None:
    """Of an asynchronous producer, whose repetitions run on its own loop; a level counts from the first send."""

    async def run(rig: EmbeddedRig) -> None:
        members = Members(rig)
        producer = await members.client("sender").producer("senders")
        proxy = durable(producer, MemorySink(rig.clock), autostart=False)
        members.brokers["sender"].failing = frozenset({"send"})
        begun_ms = rig.clock.now_ms()
        kept = [
            await proxy.send(Message(TOPIC, f"{group}{number}".encode(), message_group=group))
            for number in range(3)
            for group in "ab"
        ]
        kept.append(await proxy.send(Message(TOPIC, b"later"), delay_level=5))
        assert all(isinstance(each, Spooled) for each in kept)
        await asyncio.to_thread(advance, proxy.redelivery, rig.clock, 20_000)
        members.brokers["sender"].failing = frozenset()
        await asyncio.to_thread(advance, proxy.redelivery, rig.clock, 35_000)
        assert proxy.redelivery._sink.entries == []
        seen = Seen()
        members.consumer("a", seen, GROUP, {TOPIC: "*"})
        await seen.until(lambda: len(seen.bodies) >= 6)
        assert b"later" not in seen.bodies
        await members.pass_time(begun_ms + 60_000 - rig.clock.now_ms())
        await seen.until(lambda: len(seen.bodies) >= 7)
        came = [each.message for _, batch in seen.batches for each in batch]
        by_group = groupby(sorted(came, key=lambda each: each.message_group), lambda each: each.message_group)
        assert {group: [each.body for each in found] for group, found in by_group} == {
            "": [b"later"],
            "a": [b"a0", b"a1", b"a2"],
            "b": [b"b0", b"b1", b"b2"],
        }
        assert {each.properties[UID_PROPERTY] for each in came} == {each.uid.hex() for each in kept}
        assert all(each.born_at_ms == begun_ms for each in came)
        await members.close()
        await asyncio.to_thread(proxy.redelivery.close)

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False, queues=2), run))


def test_the_next_run_sends_the_kept_messages(tmp_path: Path) -> None:
    """Of a blocking producer whose client is gone: kept on disk, and sent by the next process's producer."""
    address, spool, body = f"embedded:{tmp_path / 'dmq'}", tmp_path / "spool", b"kept"
    came: list[ReceivedMessage] = []
    arrived = threading.Event()
    with blocking.connect(address) as broker:
        soon = RetryPolicy(backoff=Fixed(50), max_attempts=1_000)
        proxy = durable(broker.producer("senders"), Spool(spool), policy=soon)
        first = proxy.send(Message(TOPIC, b"first", message_id="its-own"))
        assert first.message_id == "its-own"
    outcome = proxy.send(Message(TOPIC, body))
    assert isinstance(outcome, Spooled)
    assert not outcome.is_uncertain
    proxy.redelivery.close()
    with blocking.connect(address) as broker:
        proxy = durable(broker.producer("senders"), Spool(spool))

        @broker.consumer(GROUP, {TOPIC: "*"}, ConsumerOptions(start=Start.FIRST_OFFSET))
        def handle(batch: Sequence[ReceivedMessage]) -> None:
            came.extend(batch)
            if any(each.message.body == body for each in batch):
                arrived.set()

        assert arrived.wait(PATIENCE_S)
        proxy.redelivery.close()
    (kept,) = [each.message for each in came if each.message.body == body]
    assert kept.properties == {UID_PROPERTY: outcome.uid.hex()}
