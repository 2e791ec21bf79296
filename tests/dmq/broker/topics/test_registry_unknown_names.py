"""A handle of a group or topic that nobody ever named."""

from __future__ import annotations

import pytest
from support.rigs.broker.rig import EmbeddedRig, every_durable_broker

from broker_adapter.contracts.errors import Refused

pytestmark = pytest.mark.contract


@every_durable_broker(queues=1)
async def test_finishing_creates_neither_topic_nor_group(rig: EmbeddedRig) -> None:
    """A garbage ack is refused entry by entry and leaves no topic or group behind."""
    results = await rig.broker.ack("nobody", "nowhere", ["x", "y"])
    assert [type(result) for result in results] == [Refused, Refused]
    assert rig.broker.names.topics == {}
    assert rig.broker.names.groups == {}
