"""Calls of the sink on behalf of those who send, and of ``close``: none is waited for longer than was said.

A sink calls the disk, and a disk may stand still for as long as it likes. So threads of ours call, and a sender waits:
for ``Patience``, which is for all calls of one send together. When it is over there are two truths. A call that no
thread had come to is withdrawn: the message is not kept. One that had begun goes on, and may keep it: that is in doubt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from broker_adapter.runtime.clock import SystemClock
from retry.hook.threads import DaemonThreads
from retry.sink import Held, SinkUnavailable

# Most calls take microseconds. Those that wait do so beside each other: for room in a spool that is full, say.
THREADS = 32
# Real time, whatever clock the sink has: how long a thread waits for another one.
_REAL = SystemClock()
_T = TypeVar("_T")


class SinkNotAsked(SinkUnavailable):
    """The sink was busy with calls of others all the time: it has no part of what it was to do."""


class Patience:
    """How long one caller waits for the sink, in all; what passes between two calls does not count.

    ``cancelled`` is what asked a task to end while it waited for what must be done in any case.
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
    """Makes the calls. ``on_late`` is given what a call took into its caller's hands after that one had gone."""

    def __init__(self, on_late: Callable[[Held], None]) -> None:
        self.threads = DaemonThreads("retry-sink", THREADS)
        self._on_late = on_late

    def ask(self, call: Callable[[], _T], patience: Patience) -> _T:
        """Return what ``call`` returns; ``SinkUnavailable`` if that takes too long."""
        asked = self.threads.submit(call)
        return _wait(asked, asked, patience)

    def keep(self, call: Callable[[], Future[_T]], patience: Patience) -> _T:
        """Return the result of the future that ``call`` returns; ``SinkUnavailable`` if that takes too long."""
        asked, kept = self._keep(call)
        try:
            return _wait(asked, kept, patience)
        except BaseException:
            self._look_after(kept)
            raise

    def tell(self, call: Callable[[], None], patience: Patience) -> None:
        """Have ``call`` made, now or later, and wait for it while there is patience."""
        told = self.threads.submit(call)
        with patience as left_s, suppress(TimeoutError):
            told.result(left_s)

    async def ask_async(self, call: Callable[[], _T], patience: Patience) -> _T:
        """As ``ask``, on an event loop."""
        asked = self.threads.submit(call)
        with patience as left_s:
            await asyncio.wait([_seen(asked)], timeout=left_s)
        return _result_of(asked, asked, patience)

    async def keep_async(self, call: Callable[[], Future[_T]], patience: Patience) -> _T:
        """As ``keep``, on an event loop. A cancellation ends it no sooner, and is noted in ``patience``."""
        asked, kept = self._keep(call)
        try:
            await _until_done(kept, patience)
            return _result_of(asked, kept, patience)
        except BaseException:
            self._look_after(kept)
            raise

    async def tell_async(self, call: Callable[[], None], patience: Patience) -> None:
        """As ``tell``, on an event loop. A cancellation ends it no sooner, and is noted in ``patience``."""
        await _until_done(self.threads.submit(call), patience)

    def after_fork(self) -> None:
        """A child asks its parent's sink nothing."""
        self.threads.after_fork()

    def _keep(self, call: Callable[[], Future[_T]]) -> tuple[Future[None], Future[_T]]:
        """Have ``call`` made; return when that is done, and its result: who waits is woken once, as that is dear."""
        kept: Future[_T] = Future()
        kept.set_running_or_notify_cancel()  # what it stands for cannot be cancelled

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
        """What nobody waits for any more must not stay in nobody's hands."""

        def came(done: Future[Any]) -> None:
            if done.exception() is None and isinstance(held := done.result(), Held):
                self.threads.submit(lambda: self._on_late(held))

        kept.add_done_callback(came)


def _wait(asked: Future[Any], done: Future[_T], patience: Patience) -> _T:
    with patience as left_s, suppress(TimeoutError):
        return done.result(left_s)
    return _result_of(asked, done, patience)


def _result_of(asked: Future[Any], done: Future[_T], patience: Patience) -> _T:
    """Return the result if there is one, or say what is true of a call that has none yet."""
    if done.done():  # at the last moment; or what was raised is a timeout of the sink itself
        return done.result()
    if asked.cancel():
        raise SinkNotAsked(f"the sink answered others for {patience.timeout_s:g} s, and was not asked")
    raise SinkUnavailable(f"the sink gave no answer within {patience.timeout_s:g} s")


async def _until_done(done: Future[Any], patience: Patience) -> None:
    """Wait on the running event loop, whoever cancels this task: at the end of a program its loop cancels all."""
    seen = _seen(done)
    while patience.left_s > 0 and not seen.done():
        with patience as left_s:
            try:
                await asyncio.wait([seen], timeout=left_s)
            except asyncio.CancelledError as error:
                patience.cancelled = error


def _seen(done: Future[Any]) -> asyncio.Future[Any]:
    """Return ``done`` for the running event loop; given up, it leaves ``done`` as it is."""
    seen = asyncio.wrap_future(done)
    seen.add_done_callback(lambda told: told.cancelled() or told.exception())  # asyncio logs what nobody looks at
    return seen
