"""A daemon with a message, a group, its retries and its dead letters, for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.forges.messages.letters import a_message, die, fail, set_policy
from support.rigs.commands.live_cell import LiveCell, live_cell

HOUR_MS = 3_600_000


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCell]:
    """The parts of a daemon in this process."""
    with live_cell(tmp_path_factory.mktemp("cell") / "data") as live:
        rig = live.rig

        async def fill() -> None:
            await set_policy(rig, 3, HOUR_MS, group="billing")
            await die(rig, *(a_message(f"D{number}", keys=(f"k{number}",)) for number in range(4)), group="billing")
            await fail(rig, "M0", "M1", group="billing")
            await fail(rig, "R0", group="billing", topic="refunds")
            await rig.broker.send([a_message("waiting", deliver_at_ms=rig.clock.now_ms() + HOUR_MS)])

        live.do(fill())
        yield live
