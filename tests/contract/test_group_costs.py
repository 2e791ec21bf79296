"""A message costs the same whatever the number of groups that read its topic."""

from __future__ import annotations

import sys
from collections.abc import Callable
from unittest.mock import patch

from support.rigs import EmbeddedRig, an_envelope, every_durable_broker, receive

from dmq.embedded.subscriptions import Subscriptions
from dmq.store.ops import Appended


def counting(calls: list[int]) -> Callable[[Subscriptions, Appended], None]:
    """Return ``Subscriptions.on_appended`` that notes the number of calls it makes."""
    on_appended = Subscriptions.on_appended

    def counted(subscriptions: Subscriptions, appended: Appended) -> None:
        made = 0

        def count(_: object, event: str, __: object) -> None:
            nonlocal made
            made += event in {"call", "c_call"}

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            on_appended(subscriptions, appended)
        finally:
            sys.setprofile(before)
        calls.append(made)

    return counted


@every_durable_broker(queues=1)
async def test_a_message_costs_no_more_with_ten_times_as_many_groups(rig: EmbeddedRig) -> None:
    """Danger: each message went through all groups of its topic, 17 ms for 2,000 of them."""
    costs: list[int] = []
    for groups in (5, 50):
        topic = f"read-by-{groups}"
        await rig.broker.send([an_envelope(f"{topic}-1", topic=topic)])
        for number in range(groups):
            assert len(await receive(rig, topic=topic, group=f"group-{number}")) == 1
        await rig.broker.send([an_envelope(f"{topic}-2", topic=topic)])
        calls: list[int] = []
        with patch.object(Subscriptions, "on_appended", counting(calls)):
            await rig.broker.send([an_envelope(f"{topic}-3", topic=topic)])
        costs.append(sum(calls))
        for number in range(groups):  # each is told of all messages all the same
            assert len(await receive(rig, topic=topic, group=f"group-{number}")) == 2
    assert costs[0] == costs[1]
