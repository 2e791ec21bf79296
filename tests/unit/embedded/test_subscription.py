"""Who is woken: one receive per arrival, that can use it, and that is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from dmq.embedded.names import Topic
from dmq.embedded.subscription import Subscription

LONG_S = 60.0


def play(scenario: Callable[[Subscription], Coroutine[object, object, None]]) -> None:
    """Run a scenario on a group that sees four queues."""

    async def on_loop() -> None:
        async with asyncio.timeout(10):
            await scenario(Subscription(1, Topic(2, "orders", 4, 0)))

    asyncio.run(on_loop())


async def waiters(found: Subscription, *queue_ids: int) -> list[asyncio.Task[None]]:
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

    async def scenario(found: Subscription) -> None:
        tasks = await waiters(found, -1, -1, -1)
        assert found.wake(2)
        assert found.waiting == 2
        assert await woken(tasks) == [0]
        assert found.waiting == 0
        assert not found.wake(2)

    play(scenario)


def test_an_arrival_wakes_somebody_who_can_use_it() -> None:
    """Who waits for another queue goes on waiting, in its place."""

    async def scenario(found: Subscription) -> None:
        tasks = await waiters(found, 0, 1, -1, 1)
        assert found.wake(1)
        assert found.wake(3)
        assert not found.wake(3)
        assert await woken(tasks) == [1, 2]

    play(scenario)


def test_a_wake_up_that_meets_a_cancelled_receive_is_passed_on() -> None:
    """Woken and cancelled before it could run: somebody else gets what it was woken for."""

    async def scenario(found: Subscription) -> None:
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


def test_a_wake_up_that_nobody_needs_is_not_passed_on() -> None:
    """What it was for is gone: waking others would only cost."""

    async def scenario(found: Subscription) -> None:
        tasks = await waiters(found, -1, -1)
        assert found.wake(2)
        tasks[0].cancel()
        assert await woken(tasks) == []

    play(scenario)


def test_a_receive_whose_time_is_up_leaves_the_queue_of_waiters() -> None:
    """It is not woken any more, and the next one is."""

    async def scenario(found: Subscription) -> None:
        await found.wait(-1, 0.001)
        assert found.waiting == 0
        tasks = await waiters(found, -1)
        assert found.wake(0)
        assert await woken(tasks) == [0]

    play(scenario)


def test_queues_take_turns_and_looking_is_no_turn() -> None:
    """Each receive starts with the next queue, however often somebody asked whether there is something."""
    found = Subscription(1, Topic(2, "orders", 4, 0))
    starts = []
    for _ in range(8):
        found.has_available()
        starts.append(next(iter(found.choose(-1))).queue_id)
    assert starts == [1, 2, 3, 0] * 2
    assert [queue.queue_id for queue in found.choose(2)] == [2]
