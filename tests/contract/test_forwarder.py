"""What leaves for a cluster, on an embedded broker: nothing is left lying, nothing is sent that was given up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from support.lanes import LanesRig, with_lanes
from support.rigs import TOPIC, until

from broker_adapter.errors import BrokerUnavailable, Refused, Rule
from broker_adapter.message import Envelope
from dmq.forwarder import lane

NO_ANSWER = BrokerUnavailable("no answer")


@pytest.fixture
def short_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let lanes end after a moment without a message."""
    monkeypatch.setattr(lane, "IDLE_MS", 10)


@pytest.mark.usefixtures("short_idle")
@with_lanes
async def test_what_waits_behind_a_message_that_took_long_goes_on(rig: LanesRig) -> None:
    """A lane does not end while something of its topic is neither at the cluster nor finished."""
    hold = asyncio.Event()

    async def slow(envelopes: Sequence[Envelope]) -> None:
        await hold.wait()

    rig.cluster.answer = slow
    await rig.keep("first", message_group="g")
    await rig.cluster.until(lambda: rig.cluster.calls)
    await rig.keep("second", "third", message_group="g")
    for _ in range(5):  # longer than a lane is idle
        rig.clock.advance(1_000)
        await asyncio.sleep(0.02)
    hold.set()
    await rig.forwarded("first", "second", "third")
    assert rig.cluster.taken == ["first", "second", "third"]


@with_lanes
async def test_what_is_given_up_with_its_topic_is_not_sent(rig: LanesRig) -> None:
    """Not when the cluster is back either; the topic does not come back by itself, and one made anew is served."""
    rig.cluster.says(Refused(Rule.FORBIDDEN, "the key may not"))
    await rig.keep(*(f"old-{number}" for number in range(20)))  # more than are in flight at a time
    await rig.cluster.until(lambda: rig.cluster.calls)
    await rig.broker.operator.remove_topic(TOPIC, is_forced=True)
    rig.cluster.answer = rig.cluster.ok
    rig.forwarder.try_now()
    lane_of = rig.forwarder.lane(TOPIC)
    await until(lambda: not lane_of.in_flight and lane_of._running is not None and lane_of._running.done())
    assert TOPIC not in rig.broker.names.topics
    assert not lane_of.gate.error
    await rig.keep("new")
    await rig.forwarded("new")
    assert rig.cluster.taken == ["new"]
