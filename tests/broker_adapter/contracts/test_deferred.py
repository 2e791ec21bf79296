"""A value that comes later: told once, to a listener or to one who waits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from broker_adapter.contracts.deferred import Deferred


def told(later: Deferred[int]) -> list[int | str]:
    """What a listener heard."""
    heard: list[int | str] = []
    later.then(lambda each: heard.append(str(each.error) if each.error is not None else each.value))
    return heard


def test_a_listener_hears_at_once_whether_it_came_before_or_after() -> None:
    """No turn of the loop lies between the telling and the hearing."""
    before: Deferred[int] = Deferred()
    heard = told(before)
    assert heard == []
    before.settle(1)
    assert heard == [1]
    assert told(Deferred.given(2)) == [2]


def value_plus_one(later: Deferred[int]) -> int:
    """A step that passes an error on."""
    if later.error is not None:
        raise later.error
    return later.value + 1


def error_or_value(later: Deferred[int]) -> str:
    """A step that makes a value of either."""
    return f"value {later.value}" if later.error is None else f"error {later.error}"


def test_steps_convert_it_in_order_before_it_is_open() -> None:
    """Those that came before it was there and those that came after; a step may raise, or answer an error."""
    coming: Deferred[int] = Deferred()
    heard = told(coming.convert(value_plus_one).convert(value_plus_one))
    coming.settle(1)
    assert heard == [3]
    failing: Deferred[int] = Deferred()
    heard = told(failing.convert(value_plus_one).convert(error_or_value))  # type: ignore[arg-type]  # of texts
    failing.fail(ValueError("in doubt"))
    assert heard == ["error in doubt"]
    assert told(Deferred.given(0).convert(lambda each: 1 // each.value)) == ["integer division or modulo by zero"]
    assert told(Deferred.given(1).convert(value_plus_one)) == [2]


def test_it_can_be_awaited() -> None:
    """Before and after it is there, with a value and with an error."""

    async def scenario() -> None:
        assert await Deferred.given(1) == 1
        coming: Deferred[int] = Deferred()
        asyncio.get_running_loop().call_soon(coming.settle, 2)
        assert await coming == 2
        failing: Deferred[int] = Deferred()
        asyncio.get_running_loop().call_soon(failing.fail, ValueError("no"))
        with pytest.raises(ValueError, match="no"):
            await failing

    asyncio.run(scenario())


def test_a_waiter_may_leave() -> None:
    """A waiter that was cancelled leaves it whole: telling it then harms nobody."""

    async def scenario() -> None:
        coming: Deferred[int] = Deferred()

        async def wait() -> int:
            return await coming

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        coming.settle(1)

    asyncio.run(scenario())


def test_a_coroutine_becomes_one() -> None:
    """Its value, its error, and its being cancelled are told."""

    async def scenario() -> None:
        gate = asyncio.Event()

        async def work(value: int) -> int:
            await gate.wait()
            return 6 // value

        heard: Sequence[list[int | str]] = [told(Deferred.of(work(2))), told(Deferred.of(work(0)))]
        done = Deferred.given(1)
        assert Deferred.of(done) is done
        task = asyncio.create_task(work(1))
        cancelled = told(Deferred.of(task))
        await asyncio.sleep(0)
        task.cancel()
        gate.set()
        await asyncio.gather(task, return_exceptions=True)
        for _ in range(3):
            await asyncio.sleep(0)
        assert heard == [[3], ["integer division or modulo by zero"]]
        assert cancelled == ["the call was given up before its end"]

    asyncio.run(scenario())
