"""Threads that send waiting messages: a few workers per type, and a bounded queue between the sink and them.

One worker of a type at a time fetches a batch from the sink and shares it through the queue. A handler that hangs
therefore delays one message, not a batch. While the destination is unavailable only probes are fetched.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from broker_adapter.runtime.clock import SystemClock
from retry.hook.destinations import Permit
from retry.hook.draining.attempts import Attempts
from retry.hook.runtime import DaemonThreads, HookLog
from retry.hook.sending import STEPS_S, Handler, Settler, SinkHealth
from retry.hook.verdicts import describe
from retry.sink import DelaySink, Held, SinkClosed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

TAKE_TIMEOUT_S = 1.0
NAMES_EVERY_S = 10.0  # interval of the search for entries under earlier names
NAP_S = 0.2  # maximum sleep: the sink's clock may be stepped, or driven by a test
PACE_S = 1.0  # maximum wait of a worker for its permit while it holds a message
BATCH_PER_WORKER = 16
_REAL = SystemClock()


class TypeWorkers:
    """Workers of one type, and the entries queued between the sink and them."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.changed = threading.Condition()
        self.queue: deque[Held] = deque()
        self.is_fetching = False
        self.running = 0
        self.failures = 0  # consecutive failures of the sink
        self.names: tuple[str, ...] = (handler.type_name,)
        self.names_at_s = 0.0  # next search for other names; 0: at once


class Drain:
    """Workers of all types, and their threads. ``start`` may be called again after further handlers were added."""

    def __init__(
        self,
        sink: DelaySink,
        attempts: Attempts,
        settler: Settler,
        log: HookLog,
        health: SinkHealth,
        queue_max: int,
    ) -> None:
        self._sink = sink
        self._attempts = attempts
        self._settler = settler
        self._log = log
        self._health = health
        self._queue_max = queue_max
        self._lock = threading.Lock()
        self._by_type: dict[str, TypeWorkers] = {}
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()

    @property
    def running(self) -> int:
        """Number of repetitions that run now."""
        return sum(workers.running for workers in self._all())

    @property
    def in_hand(self) -> int:
        """Number of fetched entries that wait for a worker."""
        return sum(len(workers.queue) for workers in self._all())

    def start(self, handlers: Iterable[Handler], once: Callable[[], bool] | None = None) -> None:
        """Start the threads of ``handlers`` without threads; one thread calls ``once`` until it returns True.

        Makes no sink call: the caller may be an event loop, and the sink slow.
        """
        for handler in handlers:
            with self._lock:
                if handler.type_name in self._by_type or self._stop.is_set():
                    continue
                workers = self._by_type[handler.type_name] = TypeWorkers(handler)
                threads = [self._thread(workers, number, once) for number in range(handler.workers)]
                self._threads += threads
            once = None
            handler.destination.start_slowly()
            for thread in threads:
                thread.start()

    def run_due(self, handlers: Iterable[Handler], limit: int) -> int:
        """Attempt due entries in this thread, at most ``limit``; return the number of attempts."""
        self._settler.run_due()
        tried = 0
        for handler in handlers:
            names = handler.names_in(self._sink)
            while tried < limit and handler.destination.pause_s(is_paced=False) <= 0:
                taken = self._take(names, 1, 0.0)
                if not taken:
                    break
                permit = handler.destination.begin(is_paced=False)
                if permit is None:
                    self._attempts.give_back(taken[0])
                    break
                self._attempts.make(handler, taken[0], permit)
                tried += 1
        self._attempts.tell()
        return tried

    def begin_nothing(self) -> None:
        """Fetch no further entries, and start no attempt of fetched ones."""
        self._stop.set()

    def stop(self, timeout_s: float, threads: DaemonThreads) -> int:
        """Return unstarted entries to the sink through ``threads``, wait for running attempts; return how many still
        run.
        """
        self.begin_nothing()
        ends_at_s = _REAL.monotonic_s() + timeout_s
        for workers in self._all():
            with workers.changed:
                unbegun = list(workers.queue)
                workers.queue.clear()
                workers.changed.notify_all()
            for held in unbegun:
                threads.submit(self._attempts.giving_back(held))
        for workers in self._all():
            with workers.changed:
                while workers.running and (rest_s := ends_at_s - _REAL.monotonic_s()) > 0:
                    workers.changed.wait(rest_s)
        return self.running

    def join(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` for the threads to notice the stop."""
        ends_at_s = _REAL.monotonic_s() + timeout_s
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, ends_at_s - _REAL.monotonic_s()))

    def after_fork(self) -> None:
        """Reset the state in a forked child: the threads belong to the parent."""
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._stop.set()
        self._threads = []
        self._by_type = {}

    def _thread(self, workers: TypeWorkers, number: int, once: Callable[[], bool] | None) -> threading.Thread:
        return threading.Thread(
            target=self._work,
            args=(workers, None if number else once),
            name=f"retry-{workers.handler.type_name}-{number}",
            daemon=True,
        )

    def _all(self) -> list[TypeWorkers]:
        with self._lock:
            return list(self._by_type.values())

    def _work(self, workers: TypeWorkers, once: Callable[[], bool] | None) -> None:
        while not self._stop.is_set():
            try:
                if once is not None and once():
                    once = None
                self._settler.run_due()
                self._attempts.tell()
                self._turn(workers)
                workers.failures = 0
            except BaseException as error:  # noqa: BLE001 - a worker that ends never sends again
                self._rest(workers, error)

    def _turn(self, workers: TypeWorkers) -> None:
        destination = workers.handler.destination
        pause_s = destination.pause_s()
        if pause_s > 0:
            self._stop.wait(min(pause_s, NAP_S))
            return
        held = self._next(workers)
        if held is None:
            return
        try:
            permit = self._permit(workers)
            if permit is None:
                self._attempts.give_back(held)
            else:
                self._attempts.make(workers.handler, held, permit)
        finally:
            with workers.changed:
                workers.running -= 1
                workers.changed.notify_all()
        # The sink confirms in groups; a slow sink must slow the drain down, so the backlog of confirmations is bounded.
        self._settler.wait(NAP_S, until=self._queue_max)

    def _next(self, workers: TypeWorkers) -> Held | None:
        """Return an entry, counted as running; ``None`` if none arrives in time."""
        with workers.changed:
            if not workers.queue and workers.is_fetching:
                workers.changed.wait(NAP_S)
            if self._stop.is_set():
                return None
            if workers.queue:
                workers.running += 1
                return workers.queue.popleft()
            if workers.is_fetching:
                return None
            workers.is_fetching = True
        taken: list[Held] = []
        try:
            taken = self._take(self._names(workers), self._batch(workers), TAKE_TIMEOUT_S)
            self._health.worked()
        finally:
            with workers.changed:
                workers.is_fetching = False
                first = None
                if not self._stop.is_set() and taken:
                    first = taken.pop(0)
                    workers.running += 1
                    workers.queue.extend(taken)
                    taken = []
                workers.changed.notify_all()
        for held in taken:  # the drain was stopped during the fetch
            self._attempts.give_back(held)
        return first

    def _names(self, workers: TypeWorkers) -> tuple[str, ...]:
        now_s = _REAL.monotonic_s()
        if workers.handler.earlier_names and now_s >= workers.names_at_s:
            workers.names_at_s = now_s + NAMES_EVERY_S
            try:
                workers.names = workers.handler.names_in(self._sink)
            except Exception as error:  # noqa: BLE001 - entries under the current name must not wait for it
                type_name = workers.handler.type_name
                self._log.warning("type_names_unavailable", per=(type_name,), type=type_name, error=describe(error))
        return workers.names

    def _take(self, names: tuple[str, ...], limit: int, timeout_s: float) -> list[Held]:
        """Fetch entries of the first name with due entries; wait only for the last name."""
        for name in names[:-1]:
            if taken := self._sink.take(name, limit, 0.0):
                return list(taken)
        return list(self._sink.take(names[-1], limit, timeout_s))

    def _batch(self, workers: TypeWorkers) -> int:
        if workers.handler.destination.is_blocked:
            return 1
        limit = min(self._queue_max, BATCH_PER_WORKER * workers.handler.workers)
        rate_per_s = workers.handler.destination.rate_per_s
        return limit if rate_per_s is None else max(1, min(limit, int(rate_per_s * PACE_S / 4)))

    def _permit(self, workers: TypeWorkers) -> Permit | None:
        """Wait for the permit of a held message if it comes within ``PACE_S``; else return ``None``."""
        destination = workers.handler.destination
        while not self._stop.is_set():
            permit = destination.begin()
            if permit is not None:
                return permit
            pause_s = destination.pause_s()
            if pause_s > PACE_S or destination.is_blocked:
                return None
            self._stop.wait(min(pause_s, NAP_S))
        return None

    def _rest(self, workers: TypeWorkers, error: BaseException) -> None:
        """Log a failure of the sink or a bug, and wait, longer after each consecutive failure."""
        if self._stop.is_set():
            return
        self._health.failed(error)
        self._log.error(
            "drain_failed",
            per=(workers.handler.type_name, type(error).__name__),
            type=workers.handler.type_name,
            error=describe(error),
        )
        wait_s = STEPS_S[min(workers.failures, len(STEPS_S) - 1)]
        workers.failures += 1
        self._stop.wait(STEPS_S[-1] if isinstance(error, SinkClosed) else wait_s)
