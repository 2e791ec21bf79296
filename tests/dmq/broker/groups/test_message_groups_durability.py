"""Of a message group nothing goes out before what let it go is durable: a crash would bring back what was before it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from support.forges.messages.letters import BreakingRig
from support.rigs.broker.rig import GROUP, TOPIC, ack, an_envelope, ids, play, receive

from broker_adapter.contracts.message import Delivery

pytestmark = pytest.mark.contract
Ends = Callable[[BreakingRig, Delivery], Awaitable[object]]


async def acknowledged(rig: BreakingRig, head: Delivery) -> object:
    return await ack(rig, head)


async def buried(rig: BreakingRig, head: Delivery) -> None:
    await rig.broker.dead_letter(GROUP, TOPIC, head.receipt_handle, attempts=1)


@pytest.mark.parametrize("ends", [acknowledged, buried])
def test_the_next_one_waits_for_the_sync(tmp_path: Path, ends: Ends) -> None:
    """However the head ended: while that is being written, the next one is not there for anybody."""

    async def scenario(rig: BreakingRig) -> None:
        await rig.broker.send([an_envelope(f"m-{number}", message_group="a") for number in (1, 2)])
        (head,) = await receive(rig, batch_max=1)
        rig.engine.hold()
        ending = asyncio.ensure_future(ends(rig, head))
        await asyncio.to_thread(rig.engine.await_sync)
        early = await receive(rig)
        rig.engine.let_go()
        await ending
        assert not early
        assert ids(await receive(rig)) == ["m-2"]

    asyncio.run(play(BreakingRig(tmp_path, on_disk=False), scenario))
