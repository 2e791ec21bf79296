"""Event loops for repetitions of async handlers: the application's loop while it runs, else the hook's own loop.

A client of an async library belongs to the loop on which it was created, which is also the loop on which the
application sends. So repetitions run on that loop. If the program has no loop, or its loop has ended, they run on a
loop in a thread of the hook.
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

LOOK_S = 0.5  # interval of the check that the loop of a running handler still runs


class LoopEnded(Exception):
    """The event loop ended, or the hook was closed, before the handler returned."""


class Loops:
    """Runs async handlers for threads that wait for them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callers: asyncio.AbstractEventLoop | None = None
        self._own: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._running: dict[Future[Any], asyncio.AbstractEventLoop] = {}

    def note_running(self) -> None:
        """Record the loop that runs in this thread, if any, as the application's."""
        self._callers = _running_here() or self._callers

    def run(self, make: Callable[[], Any]) -> Any:  # noqa: ANN401 - return type of the user's function
        """Await the result of ``make`` on a loop and block this thread until it is done; return the result or raise its
        error.
        """
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
                    raise LoopEnded("the event loop ended before the handler returned")
            try:
                result, error = running.result()
            except CancelledError:
                raise LoopEnded("the event loop ended, and cancelled the handler") from None
        finally:
            with self._lock:
                self._running.pop(running, None)
            _cancel(running, loop)
            if inspect.getcoroutinestate(call) == inspect.CORO_CREATED and loop.is_closed():
                call.close()  # it never started, and Python would warn about that
        if error is not None:
            raise error
        return result

    def close(self, timeout_s: float) -> None:
        """Cancel the running handlers, and end the hook's own loop."""
        with self._lock:
            running, loop, thread = list(self._running.items()), self._own, self._thread
            self._own = self._thread = None
        for each, its_loop in running:
            _cancel(each, its_loop)
        if loop is None or thread is None:
            return
        with suppress(RuntimeError):  # already closed
            # One more iteration of the loop, in which the tasks receive their cancellation.
            loop.call_soon_threadsafe(loop.call_soon, loop.stop)
        thread.join(timeout_s)

    def after_fork(self) -> None:
        """Reset the state in a forked child: the loops and the thread belong to the parent."""
        self._lock = threading.Lock()
        self._callers = self._own = self._thread = None
        self._running = {}

    def _loop(self) -> asyncio.AbstractEventLoop:
        callers = self._callers
        if (
            callers is not None and callers.is_running() and callers is not _running_here()
        ):  # waiting for the loop of this thread would block it
            return callers
        with self._lock:
            if self._own is None:
                self._own = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_run, args=(self._own,), name="retry-loop", daemon=True)
                self._thread.start()
            return self._own

    def _is_over(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Return True if a loop has ended for good; the hook's own loop may not have started yet."""
        return loop.is_closed() or (loop is not self._own and not loop.is_running())


async def _outcome_of(make: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Return the result or the error of a handler. Interrupts are returned too: raised in a task they would end the
    loop.
    """
    try:
        return await make(), None
    except asyncio.CancelledError as error:
        if is_cancelled_here():
            raise
        return None, failure_of(error)
    except BaseException as error:  # noqa: BLE001 - the waiting caller decides
        return None, error


def failure_of(error: asyncio.CancelledError) -> Exception:
    """Return a cancellation inside a handler as the failure of its attempt.

    The result has the error type with which futures of threads report a cancellation. It does not interrupt the caller
    of the handler.
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
    """Cancel a task unless its loop is closed: the task could not react, and futures log that with a traceback."""
    if not loop.is_closed():
        running.cancel()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
