"""Daemon threads for calls that may hang: a caller may stop waiting, and the process may end.

Executors of the standard library are unsuitable: at its end the interpreter waits for all of their threads.
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
    """Runs calls in at most ``limit`` threads, in the order of submission. Thread-safe.

    A call that waits for a thread may be cancelled; a started one may not. Threads are started on demand.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self.after_fork()

    def start(self) -> None:
        """Start a thread if there is none: during the shutdown of the interpreter none can be started."""
        with self._lock:
            if not self._count:
                self._start_one()

    def submit(self, call: Callable[[], _T]) -> Future[_T]:
        """Run ``call`` in a thread; return a future of its result or error."""
        done: Future[_T] = Future()
        with self._lock:
            queue = self._queue
            queue.put((done, call))
            if not self._idle.acquire(blocking=False) and self._count < self._limit:
                with suppress(RuntimeError):  # no thread can be started: an existing one runs the call
                    self._start_one()
            has_none = not self._count
        if has_none:
            _run_next(queue)
        return done

    def close(self) -> None:
        """Stop the threads after all submitted calls are done; later calls get new threads."""
        with self._lock:
            queue = self._queue
            self._begin()
        queue.put(None)

    def after_fork(self) -> None:
        """Reset the state in a forked child: the threads belong to the parent."""
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._count = 0
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)  # counts idle threads
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
            queue.put(None)  # stops the next thread
            return
        _run(work)
        del work  # the call's objects must not stay alive while this thread waits


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
