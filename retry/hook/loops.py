"""The event loops on which repetitions of async handlers run: the application's while it runs, else one of ours.

A client of an async library belongs to the loop that it was made on, and that is where the application sends. So a
repetition goes there too. A program without a loop, or whose loop has ended, has its repetitions on a loop in a thread
of ours.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from typing import Any

from broker_adapter.runtime.cancellation import is_cancelled_here

LOOK_S = 0.5  # how often to look whether a loop that was given something still runs


class LoopEnded(Exception):
    """The event loop ended, or the hook was closed, before the handler had returned."""


class Loops:
    """Runs async handlers for threads that wait. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callers: asyncio.AbstractEventLoop | None = None
        self._own: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._running: dict[Future[Any], asyncio.AbstractEventLoop] = {}

    def note_running(self) -> None:
        """Remember the loop that runs in this thread, if one does, as the application's."""
        self._callers = _running_here() or self._callers

    def run(self, make: Callable[[], Any]) -> Any:  # noqa: ANN401 - return type of the user's function
        """Await what ``make`` returns on a loop, and wait for it in this thread: return, or raise, what comes of it."""
        call = _outcome_of(make)
        loop = self._loop()
        try:
            running = asyncio.run_coroutine_threadsafe(call, loop)
        except RuntimeError:
            call.close()
            raise LoopEnded("the event loop of the application has just ended") from None
        with self._lock:
            self._running[running] = loop
        try:
            while not wait([running], LOOK_S).done:
                if self._is_over(loop) and not wait([running], LOOK_S).done:
                    raise LoopEnded("the event loop ended before the handler had returned")
            try:
                result, error = running.result()
            except CancelledError:
                raise LoopEnded("the event loop ended, and cancelled the handler") from None
        finally:
            with self._lock:
                self._running.pop(running, None)
            _cancel(running, loop)
            if inspect.getcoroutinestate(call) == inspect.CORO_CREATED and loop.is_closed():
                call.close()  # it never began, and Python would say so
        if error is not None:
            raise error
        return result

    def close(self, timeout_s: float) -> None:
        """Cancel what still runs, and end our loop."""
        with self._lock:
            running, loop, thread = list(self._running.items()), self._own, self._thread
            self._own = self._thread = None
        for each, its_loop in running:
            _cancel(each, its_loop)
        if loop is None or thread is None:
            return
        with suppress(RuntimeError):  # it is closed already
            # One more turn, in which the tasks see their cancellation.
            loop.call_soon_threadsafe(loop.call_soon, loop.stop)
        thread.join(timeout_s)

    def after_fork(self) -> None:
        """The loops and the thread are the parent's."""
        self._lock = threading.Lock()
        self._callers = self._own = self._thread = None
        self._running = {}

    def _loop(self) -> asyncio.AbstractEventLoop:
        callers = self._callers
        if (
            callers is not None and callers.is_running() and callers is not _running_here()
        ):  # it could not be waited for
            return callers
        with self._lock:
            if self._own is None:
                self._own = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_run, args=(self._own,), name="retry-loop", daemon=True)
                self._thread.start()
            return self._own

    def _is_over(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Say whether a loop will not go on; ours may not have begun yet."""
        return loop.is_closed() or (loop is not self._own and not loop.is_running())


async def _outcome_of(make: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Return what comes of a handler; an interrupt that it raises as well, as a task would end its loop with that."""
    try:
        return await make(), None
    except asyncio.CancelledError as error:
        if is_cancelled_here():
            raise
        return None, failure_of(error)
    except BaseException as error:  # noqa: BLE001 - the waiting caller decides
        return None, error


def failure_of(error: asyncio.CancelledError) -> Exception:
    """Return the cancellation of something that a handler waited for as the failure of its attempt that it is.

    It is the error with which futures of threads say so, and no interrupt of whoever called the handler.
    """
    failure = CancelledError(*error.args)
    failure.__cause__ = error
    return failure


def _running_here() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _cancel(running: Future[Any], loop: asyncio.AbstractEventLoop) -> None:
    """Cancel a task, unless its loop is closed: nobody is there to hear it, and futures log that with a traceback."""
    if not loop.is_closed():
        running.cancel()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
