"""Sink calls on behalf of senders and of ``close``, each with a time limit.

A sink accesses the disk, and a disk may block for any time. So threads of the hook make the calls, and a sender waits
for ``CallPatience``, which covers all calls of one send together. A timeout has two cases. A call that no thread has
started is withdrawn: the message is not kept. A call that has started continues and may keep the message: it is in
doubt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from broker_adapter.runtime.clock import SystemClock
from retry.hook.runtime import DaemonThreads
from retry.sink import Held, SinkUnavailable

# Most calls need microseconds. Slow ones run in parallel, for example while they wait for room in a full spool.
THREADS = 32
# Real time, independent of the sink's clock: threads wait for each other in real time.
_REAL = SystemClock()
_T = TypeVar("_T")


class SinkNotAsked(SinkUnavailable):
    """The sink was busy with other calls for the whole time limit: this call had no effect."""


class CallPatience:
    """Total time that one caller waits for the sink; time between two calls does not count.

    ``cancelled`` is the cancellation of a task during a wait that must not be abandoned.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.left_s = timeout_s
        self.cancelled: asyncio.CancelledError | None = None

    def __enter__(self) -> float:
        self._began_s = _REAL.monotonic_s()
        return self.left_s

    def __exit__(self, *_: object) -> None:
        self.left_s = max(0.0, self.left_s - (_REAL.monotonic_s() - self._began_s))


class SinkCalls:
    """Makes the calls. ``on_late`` gets each entry that arrives as held after its caller stopped waiting."""

    def __init__(self, on_late: Callable[[Held], None]) -> None:
        self.threads = DaemonThreads("retry-sink", THREADS)
        self._on_late = on_late

    def ask(self, call: Callable[[], _T], patience: CallPatience) -> _T:
        """Return the result of ``call``; raise ``SinkUnavailable`` on a timeout."""
        asked = self.threads.submit(call)
        return _wait(asked, asked, patience)

    def keep(self, call: Callable[[], Future[_T]], patience: CallPatience) -> _T:
        """Return the result of the future that ``call`` returns; raise ``SinkUnavailable`` on a timeout."""
        asked, kept = self._keep(call)
        try:
            return _wait(asked, kept, patience)
        except BaseException:
            self._look_after(kept)
            raise

    def tell(self, call: Callable[[], None], patience: CallPatience) -> None:
        """Make ``call`` now or later, and wait for it only within the remaining patience."""
        told = self.threads.submit(call)
        with patience as left_s, suppress(TimeoutError):
            told.result(left_s)

    async def ask_async(self, call: Callable[[], _T], patience: CallPatience) -> _T:
        """Do the same as ``ask``, on an event loop."""
        asked = self.threads.submit(call)
        with patience as left_s:
            await asyncio.wait([_seen(asked)], timeout=left_s)
        return _result_of(asked, asked, patience)

    async def keep_async(self, call: Callable[[], Future[_T]], patience: CallPatience) -> _T:
        """Do the same as ``keep``, on an event loop. A cancellation does not shorten it, and is recorded in
        ``patience``.
        """
        asked, kept = self._keep(call)
        try:
            await _until_done(kept, patience)
            return _result_of(asked, kept, patience)
        except BaseException:
            self._look_after(kept)
            raise

    async def tell_async(self, call: Callable[[], None], patience: CallPatience) -> None:
        """Do the same as ``tell``, on an event loop. A cancellation does not shorten it, and is recorded in
        ``patience``.
        """
        await _until_done(self.threads.submit(call), patience)

    def after_fork(self) -> None:
        """Reset the threads in a forked child, which must not call its parent's sink."""
        self.threads.after_fork()

    def _keep(self, call: Callable[[], Future[_T]]) -> tuple[Future[None], Future[_T]]:
        """Submit ``call``; return its own future and that of its result. The waiter is woken once, as a wake-up is
        expensive.
        """
        kept: Future[_T] = Future()
        kept.set_running_or_notify_cancel()  # the sink call cannot be cancelled

        def answered(done: Future[_T]) -> None:
            error = SinkUnavailable("the sink gave the call up") if done.cancelled() else done.exception()
            if error is not None:
                kept.set_exception(error)
            else:
                kept.set_result(done.result())

        def ask() -> None:
            try:
                call().add_done_callback(answered)
            except BaseException as error:  # noqa: BLE001 - the waiting caller decides
                kept.set_exception(error)

        return self.threads.submit(ask), kept

    def _look_after(self, kept: Future[Any]) -> None:
        """Pass a held entry that arrives after its caller has stopped waiting to ``on_late``, so that it is not held
        for ever.
        """

        def came(done: Future[Any]) -> None:
            if done.exception() is None and isinstance(held := done.result(), Held):
                self.threads.submit(lambda: self._on_late(held))

        kept.add_done_callback(came)


def _wait(asked: Future[Any], done: Future[_T], patience: CallPatience) -> _T:
    with patience as left_s, suppress(TimeoutError):
        return done.result(left_s)
    return _result_of(asked, done, patience)


def _result_of(asked: Future[Any], done: Future[_T], patience: CallPatience) -> _T:
    """Return the result of a call if there is one; else raise an error: not asked, or in doubt."""
    if done.done():  # finished at the last moment, or the sink itself raised a timeout
        return done.result()
    if asked.cancel():
        raise SinkNotAsked(f"the sink was busy for {patience.timeout_s:g} s; the call was not made")
    raise SinkUnavailable(f"the sink gave no answer within {patience.timeout_s:g} s")


async def _until_done(done: Future[Any], patience: CallPatience) -> None:
    """Wait on the running event loop despite cancellations: at the end of a program its loop cancels all tasks."""
    seen = _seen(done)
    while patience.left_s > 0 and not seen.done():
        with patience as left_s:
            try:
                await asyncio.wait([seen], timeout=left_s)
            except asyncio.CancelledError as error:
                patience.cancelled = error


def _seen(done: Future[Any]) -> asyncio.Future[Any]:
    """Return ``done`` as a future of the running event loop; cancelling it does not affect ``done``."""
    seen = asyncio.wrap_future(done)
    seen.add_done_callback(lambda told: told.cancelled() or told.exception())  # asyncio logs unread errors
    return seen
