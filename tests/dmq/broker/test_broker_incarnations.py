"""What has the name of something that was there before is not taken for it: groups that begin anew, and stores."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from support.clients.embedded.failing import pushed, pushed_one
from support.forges.messages.letters import DEAD, PURGE, finish
from support.rigs.broker.rig import (
    GROUP,
    TOPIC,
    EmbeddedRig,
    End,
    ack,
    every_durable_broker,
    ids,
    play,
    receive_one,
    send,
)

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.message import Delivery
from dmq.broker.failures.outcomes import FailedMessage
from dmq.broker.operations.admin import BEGIN, END
from dmq.store.schema.messages.index import Receipt
from dmq.store.writer.operations import Op

pytestmark = pytest.mark.contract
RETRY_MS = 1_000


async def nacked(rig: EmbeddedRig, delivery: Delivery) -> None:
    """Fail a delivery, and let its retry be due."""
    await rig.broker.change_invisible(GROUP, TOPIC, delivery.receipt_handle, 0)
    await rig.pass_ms(RETRY_MS)


async def refused(rig: EmbeddedRig, delivery: Delivery) -> bool:
    """Say whether a handle is refused by all that takes one, with the code of a handle that is not valid."""
    told = list(await ack(rig, delivery))
    for call in (
        lambda: rig.broker.change_invisible(GROUP, TOPIC, delivery.receipt_handle, 10_000),
        lambda: rig.broker.dead_letter(GROUP, TOPIC, delivery.receipt_handle, attempts=1),
        lambda: rig.broker.send_back(GROUP, TOPIC, delivery.receipt_handle, -1),
    ):
        try:
            await call()
        except Refused as error:
            told.append(error)
        else:
            told.append(None)
    return all(isinstance(each, Refused) and each.rule is Rule.RECEIPT_HANDLE for each in told)


@every_durable_broker(queues=1)
async def test_a_failure_after_a_reset_is_a_new_one(rig: EmbeddedRig) -> None:
    """Nack, retry, acknowledge, back to the beginning, nack: the message comes again, each time that is done."""
    await rig.set_group(GROUP, max_attempts=3, delays_ms=(RETRY_MS,))
    await send(rig, "m-1")
    for _ in range(3):
        await nacked(rig, await pushed_one(rig))
        again = await pushed_one(rig)
        assert (again.message_id, again.delivery_attempt) == ("m-1", 2)
        assert await ack(rig, again) == [None]
        assert await rig.broker.operator.reset_group(GROUP, TOPIC, BEGIN) == (0,)


@every_durable_broker(queues=1)
async def test_a_death_after_a_reset_is_a_new_one(rig: EmbeddedRig) -> None:
    """A message that was forwarded, and is forwarded again after a reset, lies in the dead-letter queue twice."""
    await send(rig, "m-1")
    for count in range(1, 4):
        await rig.broker.dead_letter(GROUP, TOPIC, (await receive_one(rig)).receipt_handle, attempts=1)
        assert rig.store.queue_end(rig.broker.names.topics[DEAD].topic_id, 0) == count
        assert await rig.broker.operator.reset_group(GROUP, TOPIC, BEGIN) == (0,)


@every_durable_broker(queues=1)
async def test_a_death_in_a_recreated_group_is_a_new_one(rig: EmbeddedRig) -> None:
    """Forward, purge, remove, make anew, forward: what the second group gave up is there."""
    await send(rig, "m-1")
    for count in range(1, 4):
        await rig.broker.dead_letter(GROUP, TOPIC, (await receive_one(rig)).receipt_handle, attempts=1)
        letters = rig.broker.names.topics[DEAD]
        assert rig.store.queue_end(letters.topic_id, 0) == count
        assert await rig.broker.dead_letters.count(letters) == 1
        await finish(rig, PURGE)
        await rig.broker.operator.remove_group(GROUP, is_forced=True)


@every_durable_broker(queues=1)
async def test_a_retry_that_waits_while_its_group_is_reset_is_another_one(rig: EmbeddedRig) -> None:
    """It comes, and so does the retry of the message that was handed out again."""
    await rig.set_group(GROUP, max_attempts=3, delays_ms=(RETRY_MS,))
    await send(rig, "m-1")
    await rig.broker.change_invisible(GROUP, TOPIC, (await pushed_one(rig)).receipt_handle, 0)
    await rig.broker.operator.reset_group(GROUP, TOPIC, BEGIN)
    await rig.broker.change_invisible(GROUP, TOPIC, (await pushed_one(rig)).receipt_handle, 0)
    await rig.pass_ms(RETRY_MS)
    found = await pushed(rig)
    assert [(each.message_id, each.delivery_attempt) for each in found] == [("m-1", 2)] * 2
    assert rig.store.pending().get(rig.broker.names.groups[GROUP].group_id, 0) == 0
    assert await ack(rig, *found) == [None, None]


@every_durable_broker(queues=1)
async def test_a_handle_from_before_a_reset_is_refused(rig: EmbeddedRig) -> None:
    """Also after a restart or a kill, of a queue and of the lane; the messages come again."""
    await rig.set_group(GROUP, max_attempts=3, delays_ms=(RETRY_MS,))
    await send(rig, "m-1", "m-2")
    first, second = await pushed(rig)
    assert await ack(rig, second) == [None]
    await nacked(rig, first)
    earlier: list[Delivery] = [second]
    for end in (None, End.CLOSE, End.KILL):
        for to in (END, BEGIN):
            earlier += await pushed(rig)
            await rig.broker.operator.reset_group(GROUP, TOPIC, to)
            if end is not None:
                await rig.restart(end)
            for each in earlier:
                assert await refused(rig, each)
            if to == END:
                earlier += (found := await pushed(rig))
                assert ids(found) == ["m-1"]  # in the lane: what was failed comes all the same
    after = await pushed(rig)
    assert sorted(ids(after)) == ["m-1", "m-1", "m-2"]
    assert await ack(rig, *after) == [None] * 3


@pytest.mark.parametrize("kill_at", range(8))
def test_a_kill_while_a_group_is_reset_leaves_it_before_or_after(tmp_path: Path, kill_at: int) -> None:
    """Handles from before are good until the order is durable, and void from then on; what fails again is a new one."""

    async def scenario(rig: EmbeddedRig) -> None:
        await rig.set_group(GROUP, max_attempts=3, delays_ms=(RETRY_MS,))
        await send(rig, "m-1", "m-2")
        first, second = await pushed(rig)
        await nacked(rig, first)
        lane = await pushed(rig)
        assert await ack(rig, *lane) == [None]
        await ack(rig, second)
        left, dead = kill_at, asyncio.Event()
        submit = rig.broker.commits.submit

        def counted(ops: Sequence[Op], *, is_urgent: bool = True) -> asyncio.Future[list[Receipt]]:
            nonlocal left
            if not left:
                dead.set()
                return asyncio.get_running_loop().create_future()
            left -= 1
            return submit(ops, is_urgent=is_urgent)

        with patch.object(rig.broker.commits, "submit", counted):
            reset = asyncio.ensure_future(rig.broker.operator.reset_group(GROUP, TOPIC, BEGIN))
            died = asyncio.ensure_future(dead.wait())
            await asyncio.wait((reset, died), return_when=asyncio.FIRST_COMPLETED)
            await rig.store.commit_async([])
            reset.cancel()
            died.cancel()
            await rig.restart(End.KILL)
        if not kill_at:
            assert await ack(rig, second, *lane) == [None, None]
            assert await pushed(rig) == []
            return
        for each in (first, second, *lane):
            assert await refused(rig, each)
        again, _ = await pushed(rig)
        await nacked(rig, again)
        assert [(each.message_id, each.delivery_attempt) for each in await pushed(rig)] == [(again.message_id, 2)]

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False, queues=1), scenario))


@every_durable_broker(queues=1)
async def test_retries_of_format_2_go_on(rig: EmbeddedRig) -> None:
    """Their keys have no epoch: they are found when they are due, run at once, ended or removed with their topic."""
    await rig.set_group(GROUP, max_attempts=3, delays_ms=(RETRY_MS,))
    await send(rig, "m-1", "m-2", "m-3", "m-4")
    message_of = rig.broker.failures._failed_message

    def without_epoch(*given: Any) -> FailedMessage:  # noqa: ANN401 - as the patched method
        failed = message_of(*given)
        return failed._replace(history=failed.history._replace(epoch=0))

    with patch.object(rig.broker.failures, "_failed_message", without_epoch):
        for each in await pushed(rig):
            await rig.broker.change_invisible(GROUP, TOPIC, each.receipt_handle, 0)
    await rig.restart(End.KILL)
    group_id = rig.broker.names.groups[GROUP].group_id
    assert rig.store.pending()[group_id] == 4
    operations = rig.broker.retries
    first, second, *_ = [each.entry for each in (await operations.page(GROUP, topic="", token="", limit=9)).retries]
    assert (await operations.run_now(GROUP, [first])).moved == 1
    assert (await operations.end(GROUP, [second])).moved == 1
    await rig.pass_ms(RETRY_MS)
    found = await pushed(rig)
    assert [each.delivery_attempt for each in found] == [2, 2, 2]
    assert rig.store.pending().get(group_id, 0) == 0
    for each in found:  # and from here on they have one
        await rig.broker.change_invisible(GROUP, TOPIC, each.receipt_handle, 0)
    await rig.broker.operator.remove_topic(TOPIC, is_forced=True)
    assert rig.store.pending().get(group_id, 0) == 0
