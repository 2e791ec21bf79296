"""A RocketMQ proxy that is away is asked for a sign of life, again and again."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from unittest.mock import patch

from broker_adapter.contracts.errors import BrokerUnavailable
from broker_adapter.rocketmq.proxies import Proxies
from broker_adapter.runtime.clock import ManualClock


def test_a_process_that_stood_still_asks_again_soon() -> None:
    """Danger: one that was stopped for an hour in the middle of a probe asked the proxy again four hours later."""
    clock, proxy, pauses_s = ManualClock(), SimpleNamespace(is_isolated=True), list[float]()

    async def ask(*_: object, timeout_ms: int) -> None:
        assert timeout_ms == 1_000
        clock.advance(3_600_000)
        raise BrokerUnavailable("no answer")

    async def pause(pause_s: float) -> None:
        pauses_s.append(pause_s)
        proxy.is_isolated = False

    with patch("broker_adapter.rocketmq.proxies.asyncio.sleep", pause):
        asyncio.run(Proxies._probe(SimpleNamespace(_clock=clock, ask=ask), proxy))  # type: ignore[arg-type]
    assert pauses_s == [4.0]
