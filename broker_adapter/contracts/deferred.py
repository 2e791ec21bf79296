"""A value that comes later on the event loop, for calls that come by the ten thousand a second.

A coroutine needs a task, and each wait in it a future and a turn of the loop: more than all the rest of a short call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Generic, TypeVar

from broker_adapter.contracts.errors import CallGivenUp

T = TypeVar("T")
_Made = TypeVar("_Made")

_running: set[asyncio.Future[Any]] = set()  # the loop itself would forget them


class Deferred(Generic[T]):
    """A value or an error that is told once, at once, to the one who asked ``then`` or awaits it. For one loop.

    Whoever awaits it may go away; what it stands for goes on.
    """

    __slots__ = ("_is_there", "_steps", "_told", "error", "value")

    value: T  # once it is told without an error

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._is_there = False
        self._steps: list[Callable[[Deferred[Any]], Any]] | None = None
        self._told: Callable[[Deferred[T]], None] | None = None

    @classmethod
    def of(cls, awaitable: Awaitable[T]) -> Deferred[T]:
        """Return what ``awaitable`` will give; anything but a ``Deferred`` gets a task."""
        if isinstance(awaitable, Deferred):
            return awaitable
        made: Deferred[T] = Deferred()
        task = asyncio.ensure_future(awaitable)
        _running.add(task)

        def done(task: asyncio.Future[T]) -> None:
            _running.discard(task)
            if task.cancelled():
                made.fail(CallGivenUp("the call was given up before its end"))
            elif isinstance(error := task.exception(), Exception):
                made.fail(error)
            else:
                made.settle(task.result())

        task.add_done_callback(done)
        return made

    @classmethod
    def given(cls, value: T) -> Deferred[T]:
        """Return one that is there."""
        made: Deferred[T] = Deferred()
        made.settle(value)
        return made

    def settle(self, value: T) -> None:
        """Tell the value."""
        self.value = value
        self._tell()

    def fail(self, error: Exception) -> None:
        """Tell an error."""
        self.error = error
        self._tell()

    def then(self, told: Callable[[Deferred[T]], None]) -> None:
        """Have ``told`` called with this, once, at once if it is there. It must not raise."""
        assert self._told is None, "one listener is enough"
        self._told = told
        if self._is_there:
            told(self)

    def convert(self, step: Callable[[Deferred[T]], _Made]) -> Deferred[_Made]:
        """Return this very object, which will tell what ``step`` makes of its value or error; or what ``step`` raises.

        So a call that passes several layers needs one object. Steps are taken in the order they were asked for.
        """
        if self._is_there:
            self._take(step)
        elif self._steps is None:
            self._steps = [step]
        else:
            self._steps.append(step)
        return self  # type: ignore[return-value]  # its type changes with its value

    def _tell(self) -> None:
        self._is_there = True
        if self._steps is not None:
            for step in self._steps:
                self._take(step)
        if self._told is not None:
            self._told(self)

    def _take(self, step: Callable[[Deferred[Any]], Any]) -> None:
        try:
            self.value = step(self)
        except Exception as error:  # noqa: BLE001 - it is told
            self.error = error
        else:
            self.error = None

    def __await__(self) -> Generator[Any, None, T]:
        """Wait for it."""
        if not self._is_there:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.then(lambda _: None if waiter.done() else waiter.set_result(None))
            yield from waiter
        if self.error is not None:
            raise self.error
        return self.value
