"""When lanes may try a cluster that was away."""

from __future__ import annotations

import asyncio

from dmq.cluster.reach import _TOGETHER, ClusterReach


def test_they_wait_until_it_is_back_and_go_on_in_turn() -> None:
    """A few at a time, so that the loop is free for others; one that was called off takes nobody's turn."""

    async def scenario() -> None:
        reach = ClusterReach()
        order: list[int] = []

        async def go(number: int) -> None:
            await reach.wait()
            order.append(number)

        reach.away()
        count = 3 * _TOGETHER
        tasks = [asyncio.ensure_future(go(number)) for number in range(count)]
        await asyncio.sleep(0)
        assert not order
        tasks[0].cancel()
        reach.back()
        late = asyncio.ensure_future(go(count))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert 0 < len(order) < count
        await asyncio.gather(*tasks[1:], late)
        assert order == list(range(1, count + 1))

    asyncio.run(scenario())


def test_those_that_had_not_gone_wait_again_when_it_goes_away() -> None:
    """Whatever the order of the news."""

    async def scenario() -> None:
        reach = ClusterReach()
        reach.away()
        tasks = [asyncio.ensure_future(reach.wait()) for _ in range(2 * _TOGETHER)]
        await asyncio.sleep(0)
        reach.back()
        reach.away()
        await asyncio.sleep(0)
        assert not any(task.done() for task in tasks)
        reach.back()
        await asyncio.gather(*tasks)
        await reach.wait()

    asyncio.run(scenario())
