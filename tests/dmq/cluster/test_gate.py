"""When messages of a topic may go to the cluster."""

from __future__ import annotations

import asyncio

import pytest

from broker_adapter.runtime.clock import SystemClock
from dmq.cluster.gate import ForwardGate
from retry.hook.destinations import breaker

FIVE = [f"message-{number}" for number in range(5)]


def is_shut(gate: ForwardGate) -> bool:
    """Whether nothing but a probe may go."""
    return not gate.is_open


def test_it_shuts_after_failures_of_different_messages_and_gives_the_reason() -> None:
    """One message that fails again and again is no outage; news is told once; a success opens it."""
    gate = ForwardGate(SystemClock())
    assert gate.failed(["message-0"], "no answer")
    for _ in range(10):
        assert not gate.failed(["message-0"], "no answer")
    assert gate.is_open
    assert gate.error == "no answer"
    gate.failed(FIVE, "no answer")
    assert is_shut(gate)
    assert gate.succeeded()
    assert not is_shut(gate)
    assert not gate.error
    assert not gate.succeeded()


def test_while_it_is_shut_one_probe_goes_at_a_time() -> None:
    """The others wait, in their order; a probe that succeeds lets them go, slowly at first."""

    async def scenario() -> None:
        gate = ForwardGate(SystemClock())
        gate.failed(FIVE, "no answer")
        order: list[str] = []

        async def go(name: str) -> bool:
            is_probe = await gate.enter(1)
            order.append(name)
            return is_probe

        first = asyncio.ensure_future(go("first"))
        await asyncio.sleep(0)
        others = [asyncio.ensure_future(go(name)) for name in ("second", "third")]
        await asyncio.sleep(0)
        assert not first.done()
        gate.try_now()
        assert await first
        assert not any(each.done() for each in others)
        gate.succeeded()
        assert await asyncio.gather(*others) == [False, False]
        assert order == ["first", "second", "third"]

    asyncio.run(scenario())


def test_a_probe_that_asked_nothing_allows_another() -> None:
    """It was cancelled, or found that there is nothing to ask."""

    async def scenario() -> None:
        gate = ForwardGate(SystemClock())
        gate.failed(FIVE, "no answer")
        gate.try_now()
        assert await gate.enter(1)
        waiting = asyncio.ensure_future(gate.enter(1))
        await asyncio.sleep(0)
        gate.void(is_probe=True)
        assert await waiting
        gate.failed(FIVE, "no answer", is_probe=True)
        assert not gate.is_open

    asyncio.run(scenario())


def test_the_next_probe_follows_on_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """After its step, and not after the time that a probe may take."""
    monkeypatch.setattr(breaker, "PROBE_STEPS_S", (0.01, 0.02))

    async def scenario() -> None:
        gate = ForwardGate(SystemClock())
        gate.failed(FIVE, "no answer")
        assert await gate.enter(1)
        waiting = asyncio.ensure_future(gate.enter(1))
        await asyncio.sleep(0)
        gate.failed(FIVE, "no answer", is_probe=True)
        async with asyncio.timeout(breaker.PROBE_TIMEOUT_S / 2):
            assert await waiting

    asyncio.run(scenario())
