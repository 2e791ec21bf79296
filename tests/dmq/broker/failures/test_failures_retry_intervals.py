"""Every interval of every kind of policy, to the millisecond, on a clock that moves only when told.

The figures are written out here a second time: a slip in the tables of ``retry.policy`` is one slip and not two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest
from support.clients.embedded.failing import change, dead_letters, is_over, pushed, pushed_one
from support.models.store.outbox import read_outbox
from support.rigs.broker.rig import (
    GROUP,
    INVISIBLE_MS,
    EmbeddedRig,
    End,
    an_envelope,
    every_durable_broker,
    on_memory,
    on_rocksdb,
    play,
    receive_one,
)

from broker_adapter.contracts.adapter import GroupSettings
from broker_adapter.contracts.message import Delivery
from dmq.trail.events import LANE, EventKind
from retry.policy import Exponential, Fixed, RetryPolicy, Table

pytestmark = pytest.mark.contract

S, M, H = 1_000, 60_000, 3_600_000
DEFAULT_MS = (
    *(10 * S, 30 * S, 1 * M, 2 * M, 3 * M, 4 * M, 5 * M, 6 * M),
    *(7 * M, 8 * M, 9 * M, 10 * M, 20 * M, 30 * M, 1 * H, 2 * H),
)
ATTEMPTS = 17


class Case(NamedTuple):
    """A policy (``None``: nobody set one) and the waits it means."""

    policy: RetryPolicy | None
    waits_ms: Sequence[int]


CASES = {
    "default": Case(None, DEFAULT_MS),
    "default with fewer attempts": Case(RetryPolicy(max_attempts=4), DEFAULT_MS[:3]),
    "default with more attempts": Case(RetryPolicy(max_attempts=20), (*DEFAULT_MS, 2 * H, 2 * H, 2 * H)),
    "table": Case(RetryPolicy(backoff=Table((1, 999, 1_000, 61_000)), max_attempts=7), (1, 999, 1_000, *[61_000] * 3)),
    "table with no wait": Case(RetryPolicy(backoff=Table((0, 5)), max_attempts=3), (0, 5)),
    "fixed": Case(RetryPolicy(backoff=Fixed(7_777), max_attempts=5), [7_777] * 4),
    "exponential": Case(
        RetryPolicy(backoff=Exponential(initial_ms=1_000, max_ms=60_000), max_attempts=9),
        (1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 60_000, 60_000),
    ),
    "exponential with a fraction": Case(
        RetryPolicy(backoff=Exponential(initial_ms=100, max_ms=500, multiplier=1.5), max_attempts=6),
        (100, 150, 225, 338, 500),
    ),
    "one attempt": Case(RetryPolicy(max_attempts=1), ()),
}
WISHES: dict[str, Callable[[int], int]] = {
    "nothing": lambda _: 0,
    "less": lambda wait_ms: wait_ms // 2,
    "one less": lambda wait_ms: max(0, wait_ms - 1),
    "one more": lambda wait_ms: wait_ms + 1,
    "more": lambda wait_ms: wait_ms * 2 + 5_000,
}
Pass = Callable[[int], Awaitable[None]]


async def begin(rig: EmbeddedRig, policy: RetryPolicy | None, message_group: str) -> None:
    """Send one message, and one behind it if it has a message group."""
    if policy is not None:
        await rig.broker.set_group(GROUP, policy=policy)
    await rig.broker.send([an_envelope("m-1", message_group=message_group)])
    if message_group:
        await rig.broker.send([an_envelope("m-2", message_group=message_group)])


async def walk(
    rig: EmbeddedRig, waits_ms: Sequence[int], wish: Callable[[int], int], passes: Pass | None = None
) -> list[int]:
    """Fail the message each time it comes, which is after its wait and not a millisecond before; return when it did."""
    passes = passes or rig.pass_ms
    failed_at_ms = []
    delivery = await pushed_one(rig)
    for attempt, wait_ms in enumerate(waits_ms, start=1):
        assert (delivery.message_id, delivery.delivery_attempt) == ("m-1", attempt)
        failed_at_ms.append(rig.clock.now_ms())
        await change(rig, delivery, wish(wait_ms))
        delivery = await comes(rig, max(wait_ms, wish(wait_ms)), passes, attempt)
    assert (delivery.message_id, delivery.delivery_attempt) == ("m-1", len(waits_ms) + 1)
    failed_at_ms.append(rig.clock.now_ms())
    await change(rig, delivery, 1_000_000)  # whatever it asks for: it was the last one
    return failed_at_ms


async def comes(rig: EmbeddedRig, wait_ms: int, passes: Pass, attempt: int) -> Delivery:
    """Return the message that comes after ``wait_ms``."""
    if wait_ms:
        await passes(wait_ms - 1)
        assert not await pushed(rig), f"the retry after attempt {attempt} came earlier than {wait_ms} ms"
    await rig.pass_ms(1 if wait_ms else 0)
    found = await pushed(rig)
    assert found, f"the retry after attempt {attempt} was not there after {wait_ms} ms"
    (delivery,) = found
    return delivery


async def is_dead(rig: EmbeddedRig, attempts: int, first_ms: int, last_ms: int) -> None:
    """Check that the message is in the dead-letter queue, once, with its facts."""
    ((message_id, facts),) = await dead_letters(rig)
    assert (message_id, facts.attempts, facts.reason) == ("m-1", attempts, "exhausted")
    assert (facts.first_failed_at_ms, facts.last_failed_at_ms) == (first_ms, last_ms)


@pytest.mark.parametrize("message_group", ["", "a"], ids=["alone", "in a message group"])
@pytest.mark.parametrize("wish", WISHES)
@pytest.mark.parametrize("case", CASES)
def test_every_interval_to_the_millisecond(case: str, wish: str, message_group: str) -> None:
    """A push consumer that fails each time: every wait of its policy, or the longer one it asked for, then death."""

    async def scenario(rig: EmbeddedRig) -> None:
        policy, waits_ms = CASES[case]
        await begin(rig, policy, message_group)
        failed_at_ms = await walk(rig, waits_ms, WISHES[wish])
        await is_dead(rig, len(waits_ms) + 1, failed_at_ms[0], failed_at_ms[-1])
        if message_group:
            behind = await pushed_one(rig)
            assert (behind.message_id, behind.delivery_attempt) == ("m-2", 1)
        else:
            assert await is_over(rig)

    asyncio.run(play(EmbeddedRig(Path(), on_disk=False), scenario))


@every_durable_broker()
async def test_the_default_policy_is_the_tables_sixteen_retries(rig: EmbeddedRig) -> None:
    """What a group is told, what it lives through, and what the trail says of it are the same figures."""
    assert len(DEFAULT_MS) == ATTEMPTS - 1
    assert rig.broker.group_settings(GROUP) == GroupSettings(False, ATTEMPTS, DEFAULT_MS)
    await begin(rig, None, "")
    failed_at_ms = await walk(rig, DEFAULT_MS, WISHES["nothing"])
    await is_dead(rig, ATTEMPTS, failed_at_ms[0], failed_at_ms[-1])
    told = [event for _, event in read_outbox(rig.store)]
    nacked = [(each.attempt, each.time_ms) for each in told if each.kind is EventKind.NACKED]
    due_ms = [at_ms + wait_ms for at_ms, wait_ms in zip(failed_at_ms, DEFAULT_MS, strict=False)]
    assert nacked == list(enumerate(due_ms, start=1))
    retried = [(each.queue_id, each.attempt, each.time_ms) for each in told if each.kind is EventKind.RETRIED]
    assert retried == [(LANE, attempt, at_ms) for attempt, at_ms in enumerate(due_ms, start=2)]
    assert [each.attempt for each in told if each.kind is EventKind.DEAD_EXHAUSTED] == [ATTEMPTS]


def test_jitter_only_ever_adds() -> None:
    """Each wait is the policy's and up to its share more, and differs from retry to retry."""
    waits_ms = (10_000, 30_000, 60_000, 60_000)
    policy = RetryPolicy(backoff=Table(waits_ms), max_attempts=5, jitter=0.25)
    added: list[float] = []

    async def scenario(rig: EmbeddedRig) -> None:
        rig.broker.outcomes._rng = Random(7)
        chance = Random(7)
        shares = [chance.random() for _ in waits_ms]
        added.extend(shares)
        await begin(rig, policy, "")
        jittered = [wait_ms + int(wait_ms * 0.25 * share) for wait_ms, share in zip(waits_ms, shares, strict=True)]
        assert all(wait_ms < each <= wait_ms * 1.25 for wait_ms, each in zip(waits_ms, jittered, strict=True))
        failed_at_ms = await walk(rig, jittered, WISHES["nothing"])
        await is_dead(rig, 5, failed_at_ms[0], failed_at_ms[-1])

    asyncio.run(play(EmbeddedRig(Path(), on_disk=False), scenario))
    assert len(set(added)) == len(waits_ms)


@pytest.mark.parametrize("message_group", ["", "a"], ids=["alone", "in a message group"])
@pytest.mark.parametrize(
    ("make", "end"),
    [(on_rocksdb, End.CLOSE), (on_rocksdb, End.KILL), (on_memory, End.KILL), (on_memory, End.POWER_LOSS)],
    ids=["rocksdb-close", "rocksdb-kill", "memory-kill", "memory-power-loss"],
)
def test_a_restart_in_the_middle_of_an_interval_changes_nothing(
    make: Callable[[Path, int], EmbeddedRig], end: End, message_group: str, tmp_path: Path
) -> None:
    """In each of the sixteen, with a third of it spent down, and behind the last of them."""

    async def scenario(rig: EmbeddedRig) -> None:
        async def pass_with_an_end(ms: int) -> None:
            await rig.pass_ms(ms // 3)
            await rig.restart(end, down_ms=ms // 3)
            assert not await pushed(rig)  # and what the group has is loaded
            await rig.pass_ms(ms - ms // 3 * 2)

        await begin(rig, None, message_group)
        failed_at_ms = await walk(rig, DEFAULT_MS, WISHES["nothing"], pass_with_an_end)
        await rig.restart(end)
        await is_dead(rig, ATTEMPTS, failed_at_ms[0], failed_at_ms[-1])
        assert [each.message_id for each in await pushed(rig)] == (["m-2"] if message_group else [])

    asyncio.run(play(make(tmp_path, 1), scenario))


@every_durable_broker()
async def test_a_retry_that_fell_due_without_a_run_is_there_at_once(rig: EmbeddedRig) -> None:
    """However long ago; its attempt is the next one, and its next wait counts from its next failure."""
    await begin(rig, None, "")
    await change(rig, await pushed_one(rig))
    await rig.restart(End.KILL, down_ms=DEFAULT_MS[0] * 1_000)
    await rig.settle()
    second = await pushed_one(rig)
    assert second.delivery_attempt == 2
    await change(rig, second)
    third = await comes(rig, DEFAULT_MS[1], rig.pass_ms, 2)
    assert third.delivery_attempt == 3


@every_durable_broker()
async def test_a_lease_that_ends_comes_back_at_once_and_counts(rig: EmbeddedRig) -> None:
    """Sixteen times at the very end of the lease, whatever the policy's delays are; the seventeenth is the last."""
    await begin(rig, None, "")
    failed_at_ms = []
    for attempt in range(1, ATTEMPTS + 1):
        delivery = await receive_one(rig)
        assert delivery.delivery_attempt == attempt
        await rig.pass_ms(INVISIBLE_MS - 1)
        assert not await pushed(rig)
        await rig.pass_ms(1)
        failed_at_ms.append(rig.clock.now_ms())
    await is_dead(rig, ATTEMPTS, failed_at_ms[0], failed_at_ms[-1])
    assert await is_over(rig)


@every_durable_broker()
async def test_a_lease_that_ends_takes_its_place_in_the_table(rig: EmbeddedRig) -> None:
    """Every other failure is a lease that ends: each nack has the wait of its attempt, not of its number of nacks."""
    await begin(rig, None, "")
    for attempt in range(1, ATTEMPTS, 2):
        expires = await receive_one(rig)
        assert expires.delivery_attempt == attempt
        await rig.pass_ms(INVISIBLE_MS)
        nacked = await pushed_one(rig)
        assert nacked.delivery_attempt == attempt + 1
        await change(rig, nacked)
        await rig.pass_ms(DEFAULT_MS[attempt] - 1)
        assert not await pushed(rig), f"the retry after attempt {attempt + 1} is early"
        await rig.pass_ms(1)
    last = await pushed_one(rig)
    assert last.delivery_attempt == ATTEMPTS
    await change(rig, last)
    assert [facts.attempts for _, facts in await dead_letters(rig)] == [ATTEMPTS]
