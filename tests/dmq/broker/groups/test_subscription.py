"""Who is woken: one receive per arrival, that can use it, and that is still there."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine

import pytest
from support.effort import EFFORT, SEED

from dmq.broker.groups.group_queue import GroupQueue
from dmq.broker.groups.subscription import GroupSubscription
from dmq.broker.topics.registry import Topic
from dmq.errors import StoreFailed
from dmq.store.schema.messages.record import QueuedMessage

LONG_S = 60.0


def play(scenario: Callable[[GroupSubscription], Coroutine[object, object, None]]) -> None:
    """Run a scenario on a group that sees four queues."""

    async def on_loop() -> None:
        async with asyncio.timeout(10):
            await scenario(GroupSubscription(1, Topic(2, "orders", 4, 0)))

    asyncio.run(on_loop())


async def waiters(found: GroupSubscription, *queue_ids: int) -> list[asyncio.Task[None]]:
    """Start waiting, in this order."""
    tasks = [asyncio.ensure_future(found.wait(queue_id, LONG_S)) for queue_id in queue_ids]
    while found.waiting < len(tasks):  # noqa: ASYNC110 - one turn of the loop
        await asyncio.sleep(0)
    return tasks


async def woken(tasks: list[asyncio.Task[None]]) -> list[int]:
    """Which of them were woken, once whoever was has noticed; the rest is called off."""
    for _ in range(10):
        await asyncio.sleep(0)
    numbers = [number for number, task in enumerate(tasks) if task.done() and not task.cancelled()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return numbers


def test_one_arrival_wakes_the_one_that_waits_longest() -> None:
    """And only that one."""

    async def scenario(found: GroupSubscription) -> None:
        tasks = await waiters(found, -1, -1, -1)
        assert found.wake(2)
        assert found.waiting == 2
        assert await woken(tasks) == [0]
        assert found.waiting == 0
        assert not found.wake(2)

    play(scenario)


def test_an_arrival_wakes_a_receive_that_can_use_it() -> None:
    """Who waits for another queue goes on waiting, in its place."""

    async def scenario(found: GroupSubscription) -> None:
        tasks = await waiters(found, 0, 1, -1, 1)
        assert found.wake(1)
        assert found.wake(3)
        assert not found.wake(3)
        assert await woken(tasks) == [1, 2]

    play(scenario)


def test_a_wake_up_that_meets_a_cancelled_receive_is_passed_on() -> None:
    """Woken and cancelled before it could run: somebody else gets what it was woken for."""

    async def scenario(found: GroupSubscription) -> None:
        for steps in range(4):
            found.queues[2].end = 1
            tasks = await waiters(found, -1, 0, -1)
            assert found.wake(2)
            for _ in range(steps):
                await asyncio.sleep(0)
            tasks[0].cancel()
            numbers = await woken(tasks)
            assert numbers in ([2], [0]), steps  # [0]: it had run already
            assert steps or numbers == [2]

    play(scenario)


def test_an_unneeded_wake_up_is_not_passed_on() -> None:
    """What it was for is gone: waking others would only cost."""

    async def scenario(found: GroupSubscription) -> None:
        tasks = await waiters(found, -1, -1)
        assert found.wake(2)
        tasks[0].cancel()
        assert await woken(tasks) == []

    play(scenario)


def test_an_expired_receive_leaves_the_queue_of_waiters() -> None:
    """It is not woken any more, and the next one is."""

    async def scenario(found: GroupSubscription) -> None:
        await found.wait(-1, 0.001)
        assert found.waiting == 0
        tasks = await waiters(found, -1)
        assert found.wake(0)
        assert await woken(tasks) == [0]

    play(scenario)


def test_a_wake_up_considers_only_receives_that_can_use_it() -> None:
    """Danger: 8,000 receives that waited for one queue were looked through for each message of another."""

    async def scenario(found: GroupSubscription) -> None:
        tasks = await waiters(found, *[0] * 50, -1, 2, *[0] * 50)
        looks = 0

        class Counting(asyncio.Future[bool]):
            def done(self) -> bool:
                nonlocal looks
                looks += 1
                return super().done()

        for waiting in found._waiters.values():
            for number in waiting:
                waiting[number] = Counting()
        assert found.wake(2)
        assert found.wake(2)
        assert not found.wake(2)
        assert looks <= 4
        await woken(tasks)

    play(scenario)


def test_queues_take_turns_and_looking_is_no_turn() -> None:
    """Each receive starts with the next queue, however often somebody asked whether there is something."""
    found = GroupSubscription(1, Topic(2, "orders", 4, 0))
    for queue in found.queues:
        queue.end = 1
    starts = []
    for _ in range(8):
        found.has_available()
        starts.append(found.choose(found.available(), 1)[0][0].queue_id)
    assert starts == [1, 2, 3, 0] * 2
    assert [(queue.queue_id, limit) for queue, limit in found.choose(found.available(2), 5)] == [(2, 5)]


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_no_queue_is_far_ahead_of_another(batch: int) -> None:
    """Of each other queue at most two batches of younger messages come before a message, however uneven they are."""
    rng = random.Random(SEED)
    for _ in range(50 * EFFORT):
        queues = rng.randrange(2, 9)
        found = GroupSubscription(1, Topic(2, "orders", queues, 0))
        lots: list[list[int]] = [[] for _ in range(queues)]
        weights = [rng.random() ** 3 for _ in range(queues)]
        due_ms = 1
        while due_ms < 400:  # in runs, which come to one queue, and mixed
            for _ in range(rng.choice((1, 1, 1, 40))):
                lots[rng.choices(range(queues), weights)[0]].append(due_ms)
                due_ms += rng.randrange(1, 5)
        for queue, lot in zip(found.queues, lots, strict=True):
            queue.end = len(lot)
            queue.due_ms = lot[0] - 1 if lot else 0
        came: list[tuple[int, int, int]] = []  # the receive, the queue, the due time
        number = 0
        while (available := found.available()) and (number := number + 1):
            taken = 0
            while taken < batch and (chosen := found.choose(found.available(), batch - taken)):
                assert sum(limit for _, limit in chosen) <= batch - taken or len(chosen) == 1
                for queue, limit in chosen:
                    dues = [lots[queue.queue_id][offset] for offset, _ in queue.take(limit)]
                    came += [(number, queue.queue_id, each) for each in dues]
                    taken += len(dues)
            assert taken == batch or not found.available()
            for queue in available:
                read = [each for look, queue_id, each in came if (look, queue_id) == (number, queue.queue_id)]
                if read:
                    found.was_read(queue, a_record(read[0]), a_record(read[-1]))
        assert len(came) == sum(map(len, lots))
        for at, (look, queue_id, each) in enumerate(came):
            younger = Counter(other for before, other, ms in came[:at] if before < look and ms > each)
            del younger[queue_id]
            assert all(count <= 2 * batch for count in younger.values()), (each, younger)


def a_record(due_ms: int) -> QueuedMessage:
    """A message with a delivery time."""
    return QueuedMessage(0, due_ms, due_ms, b"id", "", "", b"", None)


@pytest.mark.parametrize("end", ["written", "failed", "cancelled"])
def test_offsets_are_released_only_once_that_is_durable(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits behind them in a message group must not pass one that a crash would bring back."""
    released: list[tuple[GroupQueue, int]] = []
    monkeypatch.setattr(GroupQueue, "release", lambda queue, offset: released.append((queue, offset)))

    async def scenario(found: GroupSubscription) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        places = [(found.queues[1], 7), (found.queues[2], 8)]
        found.release_after(done, places)
        await asyncio.sleep(0)
        assert not released
        if end == "written":
            done.set_result(None)
        elif end == "failed":
            done.set_exception(StoreFailed("full"))
        else:
            done.cancel()
        await asyncio.gather(done, return_exceptions=True)
        await asyncio.sleep(0)
        assert released == (places if end == "written" else [])

    play(scenario)
