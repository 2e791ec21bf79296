"""Result that arrives later on the event loop, for calls at rates of tens of thousands a second.

A coroutine needs a task, and each wait in it a future and a turn of the loop. That costs more than all the rest of a
short call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Generic, TypeVar

from broker_adapter.contracts.errors import CallGivenUp

T = TypeVar("T")
_Made = TypeVar("_Made")

_running: set[asyncio.Future[Any]] = set()  # the loop itself keeps only weak references


class Deferred(Generic[T]):
    """Value or error, reported once and synchronously to the one listener of ``then`` or ``await``. For one event loop.

    A cancelled waiter does not cancel the operation.
    """

    __slots__ = ("_is_there", "_steps", "_told", "error", "value")

    value: T  # set by ``settle`` or a step

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._is_there = False
        self._steps: list[Callable[[Deferred[Any]], Any]] | None = None
        self._told: Callable[[Deferred[T]], None] | None = None

    @classmethod
    def of(cls, awaitable: Awaitable[T]) -> Deferred[T]:
        """Return a ``Deferred`` with the result of ``awaitable``; anything but a ``Deferred`` is run as a task."""
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
        """Return a ``Deferred`` that already has a value."""
        made: Deferred[T] = Deferred()
        made.settle(value)
        return made

    def settle(self, value: T) -> None:
        """Set the value and notify the listener."""
        self.value = value
        self._tell()

    def fail(self, error: Exception) -> None:
        """Set an error and notify the listener."""
        self.error = error
        self._tell()

    def then(self, told: Callable[[Deferred[T]], None]) -> None:
        """Register the listener ``told``. It is called once, at once if the result exists. It must not raise."""
        assert self._told is None, "one listener is enough"
        self._told = told
        if self._is_there:
            told(self)

    def convert(self, step: Callable[[Deferred[T]], _Made]) -> Deferred[_Made]:
        """Return this object, whose result becomes the return value or the error of ``step``.

        So a call through several layers needs one object. Steps run in the order of their registration.
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
        except Exception as error:  # noqa: BLE001 - reported
            self.error = error
        else:
            self.error = None

    def __await__(self) -> Generator[Any, None, T]:
        """Wait for the result."""
        if not self._is_there:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.then(lambda _: None if waiter.done() else waiter.set_result(None))
            yield from waiter
        if self.error is not None:
            raise self.error
        return self.value
