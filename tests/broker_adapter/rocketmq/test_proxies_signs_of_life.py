"""What clients say of themselves in front of a cluster, where each has a session of its own there."""

from __future__ import annotations

import asyncio

from support.models.costs.unread import UnreadDict

from broker_adapter.rocketmq.broker import RocketMQBroker
from broker_adapter.rocketmq.proxies import ClusterOptions
from broker_adapter.runtime.clock import ManualClock


def test_a_heartbeat_visits_no_sessions_of_others() -> None:
    """Danger: each heartbeat and each goodbye went through the sessions of all consumers, ten thousand at most."""

    async def scenario() -> None:
        clock = ManualClock()
        broker = RocketMQBroker(ClusterOptions(endpoints=("127.0.0.1:1",)), clock)
        for group, client_id in (("g", "a"), ("h", "a"), ("g", "b"), ("g", "")):
            broker._consumer(group, client_id)
        began_s = clock.monotonic_s()
        sessions, broker._consumers = broker._consumers, UnreadDict(broker._consumers)
        clock.advance(1_000)
        broker.client_seen("a")
        broker.client_gone("b")
        broker.client_seen("stranger")
        broker.client_gone("stranger")
        seen_s = {key: used_s - began_s for key, used_s in broker._used_s.items()}
        assert seen_s == {("g", "a"): 1.0, ("h", "a"): 1.0, ("g", "b"): float("-inf"), ("g", ""): 0.0}
        broker._consumers = sessions
        for key in list(sessions):
            await broker._end_session(key)
        assert not any((broker._groups, broker._used_s, broker._consumers))
        await broker.close()

    asyncio.run(scenario())
