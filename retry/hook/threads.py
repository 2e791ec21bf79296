"""Threads for calls that may hang: whoever waits for one may stop waiting, and the process may end.

The executors of the standard library will not do: at its end the interpreter waits for every thread of theirs.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

_T = TypeVar("_T")
_Work = tuple["Future[Any]", Callable[[], Any]]


class DaemonThreads:
    """Runs calls in at most ``limit`` threads, in the order in which they are given. Thread-safe.

    What is waiting for a thread may be cancelled; what has begun may not. Threads are started as they are needed.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self.after_fork()

    def start(self) -> None:
        """Start a thread if there is none: at the end of the interpreter none can be started any more."""
        with self._lock:
            if not self._count:
                self._start_one()

    def submit(self, call: Callable[[], _T]) -> Future[_T]:
        """Have ``call`` made by a thread; its result, or what it raises, is the future's."""
        done: Future[_T] = Future()
        with self._lock:
            queue = self._queue
            queue.put((done, call))
            if not self._idle.acquire(blocking=False) and self._count < self._limit:
                with suppress(RuntimeError):  # no further thread can be had: one that there is comes to it
                    self._start_one()
            has_none = not self._count
        if has_none:
            _run_next(queue)
        return done

    def close(self) -> None:
        """Let the threads end once all that they were given is done; what is given later has others."""
        with self._lock:
            queue = self._queue
            self._begin()
        queue.put(None)

    def after_fork(self) -> None:
        """The threads are the parent's."""
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._count = 0
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)  # threads that wait for work
        weakref.finalize(self, self._queue.put, None).atexit = False

    def _start_one(self) -> None:
        name = f"{self._name}-{self._count}"
        threading.Thread(target=_work, args=(self._queue, self._idle), name=name, daemon=True).start()
        self._count += 1


def _work(queue: SimpleQueue[_Work | None], idle: threading.Semaphore) -> None:
    while True:
        try:
            work = queue.get_nowait()
        except Empty:
            idle.release()
            work = queue.get()
        if work is None:
            queue.put(None)  # for the next one
            return
        _run(work)
        del work  # what it holds must not live on while this thread waits


def _run_next(queue: SimpleQueue[_Work | None]) -> None:
    with suppress(Empty):
        if (work := queue.get_nowait()) is not None:
            _run(work)


def _run(work: _Work) -> None:
    done, call = work
    if not done.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - the waiting caller decides
        done.set_exception(error)
    else:
        done.set_result(result)
