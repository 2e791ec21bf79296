"""Taking messages from the inner topic: what a cluster that comes back changes."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from broker_adapter.contracts.adapter import PopBroker
from broker_adapter.contracts.errors import BrokerUnavailable, Refused
from broker_adapter.contracts.message import Delivery, Message
from broker_adapter.runtime.clock import SystemClock
from broker_adapter.wire.delay import INNER_TOPIC, wrap
from broker_adapter.wire.mapping import encode
from dmq.broker.broker import EmbeddedBroker
from dmq.cluster import inner
from dmq.cluster.inner import InnerTopic

RECEIVERS = inner._RECEIVERS


class AwayCluster:
    """A cluster that does not answer, until it is back; then it has nothing, and says who asked."""

    def __init__(self) -> None:
        self.is_back = False
        self.refused = self.asked = 0
        self.news = asyncio.Event()

    async def ensure_group(self, group: str) -> None:
        pass

    async def receive(self, *_: Any, **__: Any) -> list[Delivery]:  # noqa: ANN401
        if self.is_back:
            self.asked += 1
            self.news.set()
            await asyncio.Event().wait()  # a long poll
        self.refused += 1
        self.news.set()
        raise BrokerUnavailable("away")


async def until(cluster: AwayCluster, name: str, count: int) -> None:
    """Return once a count of the cluster has come so far."""
    async with asyncio.timeout(30):
        while getattr(cluster, name) < count:
            cluster.news.clear()
            await cluster.news.wait()


def test_a_cluster_that_is_back_is_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the pause is that began while it was away."""
    monkeypatch.setattr(inner, "_PAUSES_S", (3_600.0,))

    async def scenario() -> None:
        cluster = AwayCluster()
        taking = InnerTopic(
            cast("PopBroker", cluster),
            cast("EmbeddedBroker", None),
            SystemClock(),
            topic="inner",
            group="group",
            levels_ms=(1_000,),
            delay_max_ms=None,
        )
        taking.start()
        await until(cluster, "refused", 4)
        assert taking.error
        cluster.is_back = True
        taking.try_now()
        await until(cluster, "asked", 4)
        await taking.close()

    asyncio.run(scenario())


class OneMessage(AwayCluster):
    """A cluster that hands out one message to each who asks first, and then has nothing."""

    def __init__(self, delivery: Delivery) -> None:
        super().__init__()
        self.is_back = True
        self._left = [delivery] * RECEIVERS

    async def receive(self, *_: Any, **__: Any) -> list[Delivery]:  # noqa: ANN401
        return [self._left.pop()] if self._left else await super().receive()


def test_an_unexpected_error_ends_no_receiver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Danger: four messages that met a fault of ours, or one four times, and the topic was left alone for ever."""
    monkeypatch.setattr(inner, "_PAUSES_S", (0.0,))

    async def scenario() -> None:
        cluster = OneMessage(a_delivery({}))
        taking = InnerTopic(
            cast("PopBroker", cluster),
            cast("EmbeddedBroker", None),  # which no message can be sent to
            SystemClock(),
            topic=INNER_TOPIC,
            group="group",
            levels_ms=(1_000,),
            delay_max_ms=None,
        )
        taking.start()
        await until(cluster, "asked", RECEIVERS)
        assert "AttributeError" in taking.error
        await taking.close()

    asyncio.run(scenario())


def a_delivery(properties: dict[str, str]) -> Delivery:
    """What the cluster hands out of the inner topic."""
    payload = encode(wrap(Message("orders", b"body", message_id="01A", properties=properties), 0)).payload
    return Delivery(
        INNER_TOPIC,
        "01A",
        payload,
        0,
        0,
        receipt_handle="h",
        delivery_attempt=1,
        invisible_ms=1,
        stored_at_ms=1,
        deliver_at_ms=0,
    )


def test_a_schedule_is_not_made_through_the_topic() -> None:
    """Its properties would be for nobody: whoever meant one hears of it by a dead letter."""
    taking = InnerTopic(
        cast("PopBroker", None),
        cast("EmbeddedBroker", None),
        SystemClock(),
        topic=INNER_TOPIC,
        group="group",
        levels_ms=(1_000,),
        delay_max_ms=None,
    )
    for properties, text in (
        ({"DMQ_SCHEDULE_NAME": "tick"}, "requires a direct send to this daemon"),
        ({"color": "red"}, ""),
    ):
        delivery = a_delivery(properties)
        if text:
            with pytest.raises(Refused, match=text):
                taking.envelope_of(delivery)
        else:
            assert taking.envelope_of(delivery).topic == "orders"
