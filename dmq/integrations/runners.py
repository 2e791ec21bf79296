"""Runners of consumer handlers: threads that do not keep a process alive, or an event loop."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

Message = Any  # rocketmq.Message; the client has no types
Function = Callable[[Message], Any]
StopRunning = Callable[[Callable[[], None]], None]


class Threads:
    """Run functions in threads that do not keep a process alive, each paired with one thread of the client."""

    def __init__(self) -> None:
        self._of_this_thread = threading.local()

    def run(self, function: Function, message: Message, done: Future[None]) -> StopRunning:
        """Start the function. Return a callable that ends the wait; its argument is called when the function returns
        later.
        """
        partner = getattr(self._of_this_thread, "partner", None)
        if partner is None:
            partner = self._of_this_thread.partner = queue.SimpleQueue[Any]()
            threading.Thread(target=_work, args=(partner,), name="dmq-consumer", daemon=True).start()
        over: Future[None] = Future()
        partner.put((function, message, done, over))

        def stop_running(returned: Callable[[], None]) -> None:
            del self._of_this_thread.partner
            partner.put(None)  # the thread ends after the function returns
            over.add_done_callback(lambda _: returned())

        return stop_running

    def close(self) -> None:
        """Do nothing: the threads end with the process."""


def _work(jobs: queue.SimpleQueue[Any]) -> None:
    while (job := jobs.get()) is not None:
        function, message, done, over = job
        try:
            function(message)
        except BaseException as error:  # noqa: BLE001 - passed to the waiter
            with suppress(InvalidStateError):
                done.set_exception(error)
        else:
            with suppress(InvalidStateError):
                done.set_result(None)
        over.set_result(None)


class Loop:
    """Run coroutines on one event loop in a thread, which starts with the first one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, function: Function, message: Message, done: Future[None]) -> StopRunning:
        """Like ``Threads.run``; a call that is no longer awaited is cancelled."""

        over: Future[None] = Future()

        async def call() -> None:
            try:
                await function(message)
            except BaseException as error:  # noqa: BLE001 - passed to the waiter
                with suppress(InvalidStateError):
                    done.set_exception(error)
            else:
                with suppress(InvalidStateError):
                    done.set_result(None)

        loop = self._started()
        begun: list[asyncio.Task[None]] = []

        def begin() -> None:
            task = loop.create_task(call())
            task.add_done_callback(lambda _: over.set_result(None))  # also if it is cancelled before it runs
            begun.append(task)

        def cancel() -> None:  # called after ``begin``
            begun.pop().cancel()

        loop.call_soon_threadsafe(begin)

        def stop_running(returned: Callable[[], None]) -> None:
            over.add_done_callback(lambda _: returned())
            with suppress(RuntimeError):  # the loop was closed in the meantime
                loop.call_soon_threadsafe(cancel)

        return stop_running

    def close(self) -> None:
        """End the loop."""
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_serve, args=(self._loop,), name="dmq-consumer-loop", daemon=True).start()
            return self._loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()
