"""Long work of one client has others' turns in between, in the order in which it was asked for."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest

from broker_adapter.runtime.clock import ManualClock
from dmq.runtime.slices import SLICE_S, Slices, in_slices

SLICE_MS = int(SLICE_S * 1000)


class Rig:
    """Slices by a clock that only work moves, and a record of what was done."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.slices = Slices(self.clock)
        self.done: list[object] = []

    def work(self, name: str, takes_ms: int) -> str:
        self.clock.advance(takes_ms)
        self.done.append(name)
        return name

    async def do(self, name: str, takes_ms: int = 0) -> str:
        return await self.slices.do(partial(self.work, name, takes_ms))


def test_short_work_is_done_at_once() -> None:
    """Without a turn of the loop, as long as it is no more than a slice together."""

    async def scenario() -> None:
        rig = Rig()
        for number in range(4):
            with pytest.raises(StopIteration) as done:
                rig.do(f"{number}").send(None)
            assert done.value.value == f"{number}"

    asyncio.run(scenario())


def test_others_have_turns_behind_each_slice() -> None:
    """Danger: filters of one client held up everybody else for seconds."""

    async def scenario() -> None:
        rig = Rig()

        async def others() -> None:
            while len(rig.done) < 10:
                rig.done.append("others")
                await asyncio.sleep(0)

        await asyncio.gather(*(rig.do(name, SLICE_MS) for name in "abc"), others())
        assert [each for each in rig.done if each != "others"] == ["a", "b", "c"]
        first, second, third = (rig.done.index(name) for name in "abc")
        assert "others" in rig.done[first:second]
        assert "others" in rig.done[second:third]

    asyncio.run(scenario())


def test_a_leaving_waiter_passes_the_turn_on() -> None:
    """Before it comes, and at the moment when it does; work that raises costs no other its turn."""

    async def scenario() -> None:
        rig = Rig()
        go_on = rig.slices._go_on

        def go_on_and_cancel() -> None:
            go_on()
            waiting[1].cancel()

        with patch.object(rig.slices, "_go_on", go_on_and_cancel):
            await rig.do("long", SLICE_MS)
        waiting = [asyncio.ensure_future(rig.do(name)) for name in "abcd"]
        await asyncio.sleep(0)
        waiting[0].cancel()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert [isinstance(each, asyncio.CancelledError) for each in found] == [True, True, False, False]
        with pytest.raises(ZeroDivisionError):
            await rig.slices.do(lambda: 1 // 0)
        assert await rig.do("last") == "last"
        assert rig.done == ["long", "c", "d", "last"]

    asyncio.run(scenario())


def test_a_process_that_stood_still_rests_for_a_moment_only() -> None:
    """Danger: one that was stopped for an hour in the middle of a slice served no filter, or list, for another hour."""
    delays_s: list[float] = []

    async def scenario() -> None:
        loop, rig = asyncio.get_running_loop(), Rig()
        call_later = loop.call_later

        def at_once(delay_s: float, *arguments: Any) -> asyncio.TimerHandle:  # noqa: ANN401 - as call_later
            delays_s.append(delay_s)
            return call_later(0, *arguments)

        with patch.object(loop, "call_later", at_once), patch("dmq.runtime.slices._now_s", rig.clock.monotonic_s):
            await rig.do("stopped", 3_600_000)
            async for _ in in_slices(range(2)):
                rig.clock.advance(3_600_000)
        assert len(delays_s) == 3
        assert max(delays_s) <= 0.1

    asyncio.run(scenario())


def test_a_long_list_is_worked_on_in_slices() -> None:
    """Behind each slice of what is done with its members others have a turn."""

    async def scenario() -> None:
        clock, turns = ManualClock(), 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        had = []
        with patch("dmq.runtime.slices._now_s", clock.monotonic_s):
            async for _ in in_slices(range(7)):
                had.append(turns)
                clock.advance(SLICE_MS // 2)
        counting.cancel()
        assert had[0] == had[1] < had[2] == had[3] < had[4] == had[5] < had[6]

    asyncio.run(scenario())
