"""Commands on retries that wait: what they do, and that a retry has one outcome whatever comes between or after.

That may be a turn of the scheduler, another command, or a crash, before or after which everything is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest
from support.clients.embedded.admin_answers import group_of
from support.clients.embedded.failing import change, comes_after, pushed, pushed_one
from support.forges.messages.letters import (
    COMMANDS,
    DEAD,
    UNDERTAKER,
    Break,
    BreakingRig,
    Command,
    a_message,
    entries,
    fail,
    letters,
    run_now,
    set_policy,
    to_dead,
    told,
    waiting,
)
from support.rigs.broker.rig import (
    GROUP,
    TOPIC,
    EmbeddedRig,
    End,
    ack,
    every_durable_broker,
    ids,
    play,
    receive,
    until,
)

from broker_adapter.contracts.errors import BrokerUnavailable
from broker_adapter.contracts.message import pack_id
from dmq.admin.requests.mapping import policy_of
from dmq.broker.failures.waiting_retries import RetryOutcomes
from dmq.store.writer.operations import Op
from dmq.trail.events import EventKind
from retry.policy import Fixed, Reason

pytestmark = pytest.mark.contract
HOUR_MS = 3_600_000
MOVED, GONE = RetryOutcomes(moved=1), RetryOutcomes(gone=1)
OTHERS = "others"
KINDS = (EventKind.RETRIED, EventKind.RETRY_MOVED, EventKind.DEAD_BY_OPERATOR)
RUNS = ((True, End.KILL), (False, End.KILL), (False, End.POWER_LOSS))  # on which engine, and how the run ends


@every_durable_broker()
async def test_a_retry_run_now_comes_at_once_with_its_attempt(rig: EmbeddedRig) -> None:
    """Who waits for messages gets it; the others wait on; its next failure counts on from there."""
    await set_policy(rig, 3, HOUR_MS)
    await fail(rig, "m-1", "m-2")
    for attempt in (2, 3):
        (entry,) = [each.entry for each in await waiting(rig) if each.message_id == "m-1"]
        wakes = asyncio.ensure_future(receive(rig, wait_ms=60_000, renew_for="client-1"))
        await until(lambda: rig.receives_waiting == 1)
        assert await run_now(rig, entry) == RetryOutcomes(moved=1)
        (delivery,) = await wakes
        assert (delivery.message_id, delivery.delivery_attempt) == ("m-1", attempt)
        await change(rig, delivery)
    assert [(each.dead.message_id, each.dead.attempts) for each in await letters(rig)] == [("m-1", 3)]
    assert [each.message_id for each in await waiting(rig)] == ["m-2"]
    assert (await comes_after(rig, HOUR_MS)).message_id == "m-2"


@pytest.mark.parametrize("command", COMMANDS)
def test_each_entry_is_counted_once(tmp_path: Path, command: Command) -> None:
    """Named twice in a call, or again in a later one, or unknown, or another's: gone, and nothing is done for it."""

    async def scenario(rig: EmbeddedRig) -> None:
        for group in (GROUP, OTHERS):
            await set_policy(rig, 3, HOUR_MS, group=group)
        for tens in range(4):  # more than one unit takes
            await fail(rig, *(f"m-{tens}{number}" for number in range(10)))
        await fail(rig, "x-1", group=OTHERS, topic="refunds")
        await rig.broker.send([a_message("d-1", topic="delayed", deliver_at_ms=rig.clock.now_ms() + 1)])
        named, foreign = await entries(rig), await entries(rig, group=OTHERS)
        found = rig.store.find(rig.broker.names.topics["delayed"].topic_id, pack_id("d-1"))
        assert found is not None
        delayed = f"{found.at_ms}-{found.sequence}"
        assert await command(rig) == RetryOutcomes()
        told = await command(rig, *named[:35], *named[:35], *foreign, delayed, "1-1")
        assert told == RetryOutcomes(moved=35, gone=3)
        assert await command(rig, *named) == RetryOutcomes(moved=5, gone=35)
        assert await command(rig, *named) == RetryOutcomes(gone=40)
        assert len(await letters(rig)) == (40 if command is to_dead else 0)
        assert rig.broker.outcomes.dead_total == len(await letters(rig))
        assert len(await pushed(rig)) == (32 if command is run_now else 0)
        assert len(await pushed(rig)) == (8 if command is run_now else 0)
        assert await entries(rig, group=OTHERS) == foreign
        await rig.pass_ms(1)
        assert ids(await receive(rig, topic="delayed")) == ["d-1"]

    for on_disk in (True, False):
        asyncio.run(play(EmbeddedRig(tmp_path, on_disk=on_disk, queues=1), scenario))


async def turn(rig: EmbeddedRig, *_: str) -> RetryOutcomes:
    """Let the scheduler hand over what is due."""
    await asyncio.to_thread(rig.scheduler.turn)
    return RetryOutcomes()


async def check_visible_once(rig: EmbeddedRig, kind: EventKind) -> None:
    """The retry of m-1 is visible, as its second attempt, and nowhere else, however long one waits."""
    delivery = await pushed_one(rig)
    assert (delivery.message_id, delivery.topic, delivery.delivery_attempt) == ("m-1", TOPIC, 2)
    await rig.pass_ms(2 * HOUR_MS)
    await ack(rig, delivery)
    assert not await pushed(rig)
    assert not await letters(rig)
    assert [event.kind for event in told(rig, *KINDS)] == [kind]


async def check_dead_once(rig: EmbeddedRig) -> None:
    """It is in the dead-letter queue, by hand, and nowhere else."""
    (letter,) = await letters(rig)
    dead = letter.dead
    assert (dead.message_id, dead.origin_topic, dead.reason, dead.attempts) == ("m-1", TOPIC, Reason.OPERATOR, 1)
    await rig.pass_ms(2 * HOUR_MS)
    assert not await pushed(rig)
    (received,) = await receive(rig, group=UNDERTAKER, topic=DEAD)
    assert received.dead_letter == (TOPIC, "m-1", 1, "operator", dead.first_failed_at_ms, dead.last_failed_at_ms)
    assert [event.kind for event in told(rig, *KINDS)] == [EventKind.DEAD_BY_OPERATOR]


async def check_once(rig: EmbeddedRig, command: Command) -> None:
    """What a command did is there once."""
    assert (await group_of(rig)).waiting == 0
    if command is run_now:
        await check_visible_once(rig, EventKind.RETRY_MOVED)
    else:
        await check_dead_once(rig)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("on_disk", "end"), RUNS)
def test_a_retry_that_is_handed_over_first_is_gone(
    tmp_path: Path, command: Command, end: End, *, on_disk: bool
) -> None:
    """The scheduler takes it between the read of a command and its commit: it is visible, once, and not dead."""

    async def scenario(rig: EmbeddedRig) -> None:
        await set_policy(rig, 3, HOUR_MS)
        await fail(rig, "m-1")
        (entry,) = await entries(rig)
        rig.clock.advance(HOUR_MS)
        submit = rig.broker.commits.submit
        turns: list[int] = []

        def late(ops: Sequence[Op]) -> object:
            turns.append(rig.scheduler.turn().handed_over)
            return submit(ops)

        with patch.object(rig.broker.commits, "submit", late):
            assert await command(rig, entry) == GONE
        assert turns[0] == 1
        await rig.restart(end)
        await check_visible_once(rig, EventKind.RETRIED)

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=on_disk), scenario))


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("on_disk", "end"), RUNS)
def test_a_retry_that_is_taken_first_is_not_handed_over(
    tmp_path: Path, command: Command, end: End, *, on_disk: bool
) -> None:
    """The command commits between the scheduler's read and its commit: what it asked for is done, and nothing else."""

    async def scenario(rig: EmbeddedRig) -> None:
        await set_policy(rig, 3, HOUR_MS)
        await fail(rig, "m-1")
        (entry,) = await entries(rig)
        rig.clock.advance(HOUR_MS)
        loop = asyncio.get_running_loop()
        hand_over = rig.broker.placement.hand_over
        told: list[RetryOutcomes] = []

        def late(rows: Sequence[tuple[bytes, bytes]], now_ms: int) -> object:
            made = hand_over(rows, now_ms)
            told.append(asyncio.run_coroutine_threadsafe(command(rig, entry), loop).result())
            return made

        with patch.object(rig.broker.placement, "hand_over", late):
            await asyncio.to_thread(rig.scheduler.turn)
        assert told == [MOVED]
        assert await command(rig, entry) == GONE
        await rig.restart(end)
        await check_once(rig, command)

    asyncio.run(play(EmbeddedRig(tmp_path, on_disk=on_disk), scenario))


@pytest.mark.parametrize("on_disk", [True, False])
@pytest.mark.parametrize(
    ("first", "second"), [(turn, run_now), (turn, to_dead), (run_now, turn), (to_dead, turn), (run_now, to_dead)]
)
def test_in_one_batch_the_first_has_it(tmp_path: Path, first: Command, second: Command, *, on_disk: bool) -> None:
    """All of them read the retry as it waits; what comes second into the batch finds it gone."""

    async def scenario(rig: BreakingRig) -> None:
        await set_policy(rig, 3, HOUR_MS)
        await fail(rig, "m-1")
        (entry,) = await entries(rig)
        rig.clock.advance(HOUR_MS)
        rig.engine.hold()
        other = rig.store.commit_async([])
        await asyncio.to_thread(rig.engine.await_sync)
        tasks = []
        for work in (first, second):
            before = rig.store.writer.pending_ops
            tasks.append(asyncio.ensure_future(work(rig, entry)))
            await until(lambda before=before: rig.store.writer.pending_ops > before)  # type: ignore[misc]
        rig.engine.let_go()
        told = await asyncio.gather(*tasks)
        await other
        if first is not turn:
            assert told[0] == MOVED
        if second is not turn:
            assert told[1] == GONE
        await rig.restart(End.KILL)
        if first is turn:
            await check_visible_once(rig, EventKind.RETRIED)
        else:
            await check_once(rig, first)

    asyncio.run(play(BreakingRig(tmp_path, on_disk=on_disk), scenario))


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("where", Break)
@pytest.mark.parametrize(("on_disk", "end"), RUNS)
def test_a_crash_leaves_a_retry_before_or_after(
    tmp_path: Path, command: Command, where: Break, end: End, *, on_disk: bool
) -> None:
    """It waits, and comes in its time; or what was asked for is done, and it does not come by its time too."""

    async def scenario(rig: BreakingRig) -> None:
        await set_policy(rig, 3, HOUR_MS)
        await fail(rig, "m-1")
        before = await entries(rig)
        rig.engine.break_at(where)
        with pytest.raises(BrokerUnavailable):
            await command(rig, *before)
        await rig.restart(end)
        if where.leaves(end):
            assert await command(rig, *before) == GONE
            await check_once(rig, command)
        else:
            assert await entries(rig) == before
            await rig.pass_ms(HOUR_MS - 1)
            assert not await pushed(rig)
            await rig.pass_ms(1)
            await check_visible_once(rig, EventKind.RETRIED)

    asyncio.run(play(BreakingRig(tmp_path, on_disk=on_disk), scenario))


@pytest.mark.parametrize("where", Break)
@pytest.mark.parametrize(("on_disk", "end"), RUNS)
def test_a_crash_leaves_the_old_policy_or_the_new_one(tmp_path: Path, where: Break, end: End, *, on_disk: bool) -> None:
    """For what waits and for what is told, and never a mixture."""

    async def scenario(rig: BreakingRig) -> None:
        await set_policy(rig, 3, 1_000)
        await fail(rig, "m-1")
        rig.engine.break_at(where)
        with pytest.raises(BrokerUnavailable):
            await set_policy(rig, 1, 7_000)
        await rig.restart(end)
        found = policy_of((await group_of(rig)).policy)
        is_new = where.leaves(end)
        assert (found.max_attempts, found.backoff) == ((1, Fixed(7_000)) if is_new else (3, Fixed(1_000)))
        await rig.pass_ms(1_000)
        assert ids(await pushed(rig)) == ([] if is_new else ["m-1"])
        await rig.settle()
        assert len(await letters(rig)) == is_new

    asyncio.run(play(BreakingRig(tmp_path, on_disk=on_disk), scenario))


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("callers", [1, 2])
def test_a_command_is_not_answered_before_it_is_durable(tmp_path: Path, command: Command, callers: int) -> None:
    """Nor is a second one that finds the retry gone because of the first: a power loss would bring it back."""

    async def scenario(rig: BreakingRig) -> None:
        await set_policy(rig, 3, HOUR_MS)
        await fail(rig, "m-1")
        (entry,) = await entries(rig)
        rig.engine.hold()
        asked = [asyncio.ensure_future(command(rig, entry))]
        await asyncio.to_thread(rig.engine.await_sync)
        asked += [asyncio.ensure_future(command(rig, entry)) for _ in range(1, callers)]
        done, _ = await asyncio.wait(asked, timeout=0.1)
        rig.engine.let_go()
        assert [await each for each in asked] == [MOVED, GONE][:callers]
        assert not done

    asyncio.run(play(BreakingRig(tmp_path, on_disk=False), scenario))
