"""What ``dmq msg get`` says of a message: its state, and what each group did with it, as far as that is known."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from support.clients.embedded.admin_answers import message_of
from support.clients.embedded.failing import change, give_up, pushed_one
from support.clients.embedded.retain import TOLD, keep, turn
from support.forges.messages.letters import (
    REDRIVE,
    a_message,
    children,
    fail,
    finish,
    only,
    set_policy,
    to_dead,
    waiting,
)
from support.forges.messages.own_keys import keyed
from support.rigs.broker.rig import (
    GROUP,
    INVISIBLE_MS,
    TOPIC,
    EmbeddedRig,
    End,
    ack,
    every_durable_broker,
    play,
    receive,
    send,
    until,
)
from support.rigs.store.rows import GatedEngine

from dmq.admin.operations.messages import MessageCalls
from dmq.broker.operations.admin import BEGIN, END
from dmq.states import MessageState as S
from dmq.store.engines.engine import Engine
from retry.failure_reason import FailureReason

pytestmark = pytest.mark.contract
MINUTE_MS = 60_000


async def state(rig: EmbeddedRig, message_id: str) -> S:
    """The state of a message."""
    return (await message_of(rig, message_id)).state


async def groups(rig: EmbeddedRig, message_id: str) -> dict[str, tuple[S, int, int]]:
    """What each group did with it: the state, the attempt, and when, in ms from now; 0: no time."""
    status = await message_of(rig, message_id)
    found = await MessageCalls(rig.store, rig.broker).group_states(TOPIC, message_id, status)
    now_ms = rig.clock.now_ms()
    return {
        each.group: (S(each.state), each.attempt, 0 if S(each.state) is S.DEAD else each.at_ms and each.at_ms - now_ms)
        for each in found
    }


async def of(rig: EmbeddedRig, message_id: str, group: str = GROUP) -> tuple[S, int, int]:
    """What one group did with it."""
    return (await groups(rig, message_id))[group]


@every_durable_broker()
async def test_each_group_has_a_state_of_its_own(rig: EmbeddedRig) -> None:
    """Not handed out, handed out, acknowledged, failed once, and dead: of one message, also in the next run."""
    await send(rig, "m")
    assert (await state(rig, "m"), await groups(rig, "m")) == (S.QUEUED, {})
    await send(rig, "other")
    for group in ("asleep", "eager", "done", "slow", "gone"):
        await set_policy(rig, 3, MINUTE_MS, group=group)
        taken = {each.message_id: each for each in await receive(rig, group=group, renew_for="c")}
        match group:
            case "asleep":
                await rig.restart(End.KILL)  # with it went its lease
            case "done":
                await ack(rig, *taken.values(), group=group)
            case "slow":
                await change(rig, taken["m"], group=group)
            case "gone":
                await give_up(rig, taken["m"], 3, group=group)
    dead = S.DEAD, 0, 0
    expected = {
        "asleep": (S.READY, 1, 0),
        "done": (S.ACKNOWLEDGED, 0, 0),
        "slow": (S.RETRYING, 2, MINUTE_MS),
        "gone": dead,
    }
    assert (await groups(rig, "m")).items() >= expected.items()
    assert (await of(rig, "m", "eager"))[:2] == (S.LEASED, 1)
    assert (await of(rig, "m", "eager"))[2] > 0
    await rig.restart(End.KILL)
    assert await groups(rig, "m") == expected | {"eager": (S.READY, 1, 0)}


@every_durable_broker()
async def test_a_retry_is_followed_to_its_end(rig: EmbeddedRig) -> None:
    """It waits, is visible, is handed out, fails again, and is acknowledged or dead; by hand as well."""
    await set_policy(rig, 3, MINUTE_MS)
    await fail(rig, "m", "by-hand")
    (entry,) = [each.entry for each in await waiting(rig) if each.message_id == "by-hand"]
    await to_dead(rig, entry)
    assert (await of(rig, "by-hand"))[0] is S.DEAD
    await rig.pass_ms(MINUTE_MS)
    assert await of(rig, "m") == (S.READY, 2, 0)
    delivery = await pushed_one(rig)
    assert (await of(rig, "m"))[:2] == (S.LEASED, 2)
    await change(rig, delivery)
    assert await of(rig, "m") == (S.RETRYING, 3, MINUTE_MS)
    await rig.pass_ms(MINUTE_MS)
    await ack(rig, await pushed_one(rig))
    assert await of(rig, "m") == (S.ACKNOWLEDGED, 0, 0)


@every_durable_broker()
async def test_a_message_in_order_keeps_its_last_error(rig: EmbeddedRig) -> None:
    """While it is hidden, ready again, leased again, and after a kill."""
    reason = FailureReason("RuntimeError", "no courier", "worker-7", "client-1", "192.0.2.7")

    async def last() -> tuple[S, int, int, str]:
        status = await message_of(rig, "m")
        (found,) = await MessageCalls(rig.store, rig.broker).group_states(TOPIC, "m", status)
        return S(found.state), found.attempt, found.failed_at_ms, found.failure.error_text if found.failure else ""

    await set_policy(rig, 3, MINUTE_MS)
    await rig.broker.send([a_message("m", message_group="g")])
    delivery = await pushed_one(rig)
    assert rig.broker.note_failure(GROUP, delivery.receipt_handle, reason)
    failed_at_ms = rig.clock.now_ms()
    await change(rig, delivery)
    assert (await last())[2:] == (failed_at_ms, reason.error_text)
    await rig.pass_ms(MINUTE_MS)
    assert await last() == (S.READY, 2, failed_at_ms, reason.error_text)
    await pushed_one(rig)
    assert await last() == (S.LEASED, 2, failed_at_ms, reason.error_text)
    await rig.restart(End.KILL)
    assert await last() == (S.READY, 2, failed_at_ms, reason.error_text)


@every_durable_broker()
async def test_a_message_that_comes_back_is_ready_with_its_next_attempt(rig: EmbeddedRig) -> None:
    """Its lease ended; nothing failed it."""
    await send(rig, "m")
    await receive(rig)
    assert await of(rig, "m") == (S.LEASED, 1, INVISIBLE_MS)
    await rig.pass_ms(INVISIBLE_MS)
    assert await of(rig, "m") == (S.READY, 2, 0)


@every_durable_broker()
async def test_a_possibly_skipped_message_is_not_called_acknowledged(rig: EmbeddedRig) -> None:
    """By a filter, by a reset, by where a group began; one that pulls has read past it or not."""
    await rig.broker.send([a_message("m", tag="red")])
    await receive(rig, group="picky", tags=["blue"])
    await receive(rig, group="reset")
    await rig.broker.operator.reset_group("reset", TOPIC, END)
    where = await message_of(rig, "m")
    await rig.broker.pulls.commit_offset("puller", TOPIC, where.queue_id, where.queue_offset + 1)
    await rig.broker.pulls.commit_offset("late", TOPIC, where.queue_id, where.queue_offset)
    finished, ready = (S.FINISHED, 0, 0), (S.READY, 0, 0)
    assert await groups(rig, "m") == {"picky": finished, "reset": finished, "puller": finished, "late": ready}
    await rig.broker.operator.reset_group("reset", TOPIC, BEGIN)
    assert await of(rig, "m", "reset") == (S.READY, 1, 0)
    await ack(rig, *await receive(rig, group="reset"), group="reset")
    assert await of(rig, "m", "reset") == finished


@every_durable_broker()
async def test_a_letter_from_before_a_reset_may_be_delivered_again(rig: EmbeddedRig) -> None:
    """What it did then is what counts."""
    await send(rig, "m")
    await give_up(rig, await pushed_one(rig), 17)
    assert (await of(rig, "m"))[0] is S.DEAD
    await rig.broker.operator.reset_group(GROUP, TOPIC, BEGIN)
    assert await of(rig, "m") == (S.READY, 1, 0)
    delivery = await pushed_one(rig)
    await ack(rig, delivery)
    assert await of(rig, "m") == (S.FINISHED, 0, 0)


@every_durable_broker()
async def test_a_message_removed_from_its_queue_is_expired(rig: EmbeddedRig) -> None:
    """A group that had acknowledged it has done so; of what the others did, or did not do, nothing is known."""
    await send(rig, "m")
    await receive(rig, group="asleep")
    await rig.restart(End.KILL)
    await ack(rig, await pushed_one(rig))
    await receive(rig, group="picky", tags=["blue"])
    await receive(rig, group="awake")
    await keep(rig, TOLD)
    await rig.pass_ms(2 * INVISIBLE_MS)
    await turn(rig)
    assert await state(rig, "m") is S.EXPIRED
    unknown = S.UNKNOWN, 0, 0
    assert await groups(rig, "m") == {
        GROUP: (S.ACKNOWLEDGED, 0, 0),
        "picky": unknown,
        "awake": unknown,
        "asleep": unknown,
    }


@every_durable_broker()
async def test_a_message_never_delivered_shows_the_reason(rig: EmbeddedRig) -> None:
    """Recalled, replaced, absorbed, or not known: each is a state, and no group had it."""
    due_ms = rig.clock.now_ms() + MINUTE_MS
    (receipt,) = await send(rig, "r", deliver_at_ms=due_ms)
    assert (await state(rig, "r"), await state(rig, "nobody")) == (S.WAITING, S.UNKNOWN)
    await rig.broker.recall(TOPIC, receipt.recall_handle)
    await rig.broker.send([keyed("old", due_ms)])
    await rig.broker.send([keyed("new", due_ms)])
    await rig.broker.send([keyed("kept-out", due_ms, keeps=True)])
    states = [await state(rig, each) for each in ("r", "old", "new", "kept-out")]
    assert states == [S.RECALLED, S.REPLACED, S.WAITING, S.ABSORBED]
    assert (await message_of(rig, "r")).ended_at_ms == rig.clock.now_ms()
    assert await groups(rig, "r") == {}


@every_durable_broker()
async def test_a_redriven_message_is_that_of_one_group(rig: EmbeddedRig) -> None:
    """No other group of the topic gets it."""
    await set_policy(rig, 3, MINUTE_MS)
    await rig.broker.send([a_message("m")])
    await give_up(rig, await pushed_one(rig), 17)
    await receive(rig, group="others")
    await finish(rig, replace(REDRIVE, filter=only("m")))
    child = children(rig)["m"][0].message.message_id
    assert await groups(rig, child) == {GROUP: (S.READY, 1, 0)}
    await change(rig, await pushed_one(rig))
    assert await groups(rig, child) == {GROUP: (S.RETRYING, 2, MINUTE_MS)}
    assert (await of(rig, "m"))[0] is S.DEAD


def test_a_message_on_its_way_to_the_disk_is_waited_for(tmp_path: Path) -> None:
    """A failure is in memory before its copy is written: the message is not called acknowledged in between."""
    engines: list[GatedEngine] = []

    def gated(inner: Engine) -> Engine:
        engines.append(GatedEngine(inner))
        return engines[-1]

    async def scenario(rig: EmbeddedRig) -> None:
        await set_policy(rig, 3, MINUTE_MS)
        await send(rig, "m")
        delivery = await pushed_one(rig)
        (queues,) = [each.queues for each in rig.broker.subscriptions.all()]
        engines[-1].hold()
        before = asyncio.ensure_future(send(rig, "before"))
        await asyncio.to_thread(engines[-1].await_sync)
        failing = asyncio.ensure_future(change(rig, delivery))
        await until(lambda: any(each.finished_count for each in queues))
        asked = asyncio.ensure_future(of(rig, "m"))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not asked.done()
        engines[-1].let_go()
        assert await asked == (S.RETRYING, 2, MINUTE_MS)
        await asyncio.gather(before, failing)

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=False, wrap=gated), scenario))
