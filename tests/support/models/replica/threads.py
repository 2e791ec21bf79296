"""Threads of simulated processes: real code in greenlets, one at a time, under a seeded scheduler in simulated time.

``Condition``, ``Event`` and ``Thread`` stand for those of ``threading``, ``ThreadPoolExecutor`` for that of
``concurrent.futures``. A thread yields where it waits, and at some of the locks that it enters.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Any, Self

from greenlet import GreenletExit, getcurrent, greenlet

_EXPIRED = object()
_PREEMPTED = 0.05
_PREEMPTED_MS_MAX = 5


class Scheduler:
    """Simulated time, and the events that are due: calls, and wake-ups of threads."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now_ms = 0
        self.hub = getcurrent()
        self._events: list[tuple[int, int, Callable[[], None] | None, Task | None, int, object]] = []
        self._order = count()

    def at(self, delay_ms: int, event: Callable[[], None]) -> None:
        """Run an event later."""
        heappush(self._events, (self.now_ms + delay_ms, next(self._order), event, None, 0, None))

    def wake_at(self, delay_ms: int, task: Task, turn: int, value: object = None) -> None:
        """Wake a thread later."""
        heappush(self._events, (self.now_ms + delay_ms, next(self._order), None, task, turn, value))

    def below(self, bound: int) -> int:
        """Return a random number below the bound, faster than ``randint``."""
        return int(self.rng.random() * bound)

    def run(self, until_ms: int, after_each: Callable[[], None]) -> None:
        """Run the events until a time. Call ``after_each`` after the events of each millisecond."""
        events = self._events
        while events and self.now_ms < until_ms:
            at_ms, _, event, task, turn, value = heappop(events)
            if task is not None and (turn != task.turn or task.process.is_dead):
                continue
            if at_ms != self.now_ms:
                after_each()
                self.now_ms = at_ms
            if event is not None:
                event()
            elif task is not None:
                task.wake(turn, value)
        after_each()


class Process:
    """Threads that stop, continue and die together. Also their ``Clock``, which differs from those of other hosts."""

    def __init__(self, scheduler: Scheduler, host: Any, offset_ms: int) -> None:  # noqa: ANN401 - the test's own
        self.scheduler = scheduler
        self.host = host
        self.is_dead = False
        self.stopped_until_ms = 0
        self._offset_ms = offset_ms
        self._tasks: list[Task] = []

    def now_ms(self) -> int:
        return self.scheduler.now_ms + self._offset_ms

    boot_ms = now_ms

    def monotonic_s(self) -> float:
        return self.now_ms() / 1000

    def boot_id(self) -> str:
        return ""

    def start(self, work: Callable[[], None]) -> Task:
        """Start a thread."""
        task = Task(self, work)
        self._tasks.append(task)
        return task

    def kill(self) -> None:
        """End all threads where they wait."""
        self.is_dead = True
        for task in self._tasks:
            task.end()


class Task:
    """One thread."""

    def __init__(self, process: Process, work: Callable[[], None]) -> None:
        self.process = process
        self.has_ended = False
        self._work = work
        self._scheduler = process.scheduler
        self.turn = 0  # of its waits; a wake-up for an earlier one is late
        self._greenlet = greenlet(self._run, self._scheduler.hub)
        self._greenlet.task = self
        self._scheduler.wake_at(0, self, 0)

    def wait(self, timeout_ms: int | None = None) -> object:
        """Wait for ``wake`` of this turn, and return its value; ``_EXPIRED`` after the timeout."""
        if self.process.is_dead:
            raise GreenletExit
        if timeout_ms is not None:
            self._scheduler.wake_at(timeout_ms, self, self.turn, _EXPIRED)
        return self._scheduler.hub.switch()

    def wake(self, turn: int, value: object = None) -> None:
        """Continue the thread, later if its process is stopped."""
        if turn != self.turn or self.process.is_dead:
            return
        stopped_ms = self.process.stopped_until_ms - self._scheduler.now_ms
        if stopped_ms > 0:
            self._scheduler.wake_at(stopped_ms, self, turn, value)
            return
        self.turn += 1
        self._greenlet.switch(value)

    def end(self) -> None:
        """End the thread where it waits."""
        if self._greenlet:
            self._greenlet.throw(GreenletExit)

    def _run(self, _: object) -> None:
        try:
            self._work()
        finally:
            self.has_ended = True


def current_task() -> Task:
    """Return the thread that runs."""
    task: Task = getcurrent().task
    return task


def wait_ms(timeout_ms: int) -> None:
    """Wait."""
    current_task().wait(timeout_ms)


def request(begin: Callable[[Task, int], None], timeout_ms: int) -> object:
    """Begin a request, with the thread and turn that its answer wakes. Return the answer; None after the timeout."""
    task: Task = getcurrent().task
    if task.process.is_dead:
        raise GreenletExit
    begin(task, task.turn)
    answer = task.wait(timeout_ms)
    return None if answer is _EXPIRED else answer


class Condition:
    """``threading.Condition``, with a reentrant lock."""

    def __init__(self) -> None:
        self._owner: Task | None = None
        self._depth = 0
        self._entering: list[tuple[Task, int]] = []
        self._waiting: list[tuple[Task, int]] = []

    def __enter__(self) -> Self:
        task: Task = getcurrent().task
        if self._owner is task:
            self._depth += 1
            return self
        scheduler = task.process.scheduler
        if scheduler.rng.random() < _PREEMPTED:
            task.wait(scheduler.below(_PREEMPTED_MS_MAX + 1))
        self._acquire(task, 1)
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            if self._entering:
                _wake(self._entering)

    def wait(self, timeout: float | None = None) -> bool:
        task, depth = current_task(), self._depth
        assert self._owner is task
        self._waiting.append((task, task.turn))
        self._depth = 1
        self.__exit__()
        value = task.wait(None if timeout is None else _ms(timeout))
        self._acquire(task, depth)
        return value is not _EXPIRED

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        clock = current_task().process
        until_ms = None if timeout is None else clock.now_ms() + _ms(timeout)
        while not (result := predicate()):
            left_ms = None if until_ms is None else until_ms - clock.now_ms()
            if left_ms is not None and left_ms <= 0:
                break
            self.wait(None if left_ms is None else left_ms / 1000)
        return result

    def notify_all(self) -> None:
        _wake(self._waiting)

    def _acquire(self, task: Task, depth: int) -> None:
        while self._owner is not None:
            self._entering.append((task, task.turn))
            task.wait()
        self._owner, self._depth = task, depth


class Event:
    """``threading.Event``."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[tuple[Task, int]] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        _wake(self._waiting)

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            task = current_task()
            self._waiting.append((task, task.turn))
            task.wait(None if timeout is None else _ms(timeout))
        return self._is_set


class Thread:
    """``threading.Thread``."""

    def __init__(self, *, target: Callable[..., None], name: str, daemon: bool, args: tuple[object, ...] = ()) -> None:
        assert name
        assert daemon
        self.ident: int | None = None
        self._ended = Event()
        self._target = partial(target, *args)

    def start(self) -> None:
        self.ident = 1
        current_task().process.start(self._work)

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)

    def _work(self) -> None:
        self._target()
        self._ended.set()


class Call:
    """``concurrent.futures.Future`` of a call in a thread of its own."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._ended = Event()
        self._value: object = None
        self._error: Exception | None = None
        current_task().process.start(self._run)

    def result(self) -> object:
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._value

    def _run(self) -> None:
        try:
            self._value = self._work()
        except Exception as error:  # noqa: BLE001 - raised by ``result``
            self._error = error
        self._ended.set()


class ThreadPoolExecutor:
    """``concurrent.futures.ThreadPoolExecutor`` that has a thread for each call."""

    def __init__(self, max_workers: int, thread_name_prefix: str) -> None:
        assert max_workers
        assert thread_name_prefix

    def submit(self, work: Callable[..., object], *arguments: object) -> Call:
        return Call(partial(work, *arguments))

    def shutdown(self, *, wait: bool, cancel_futures: bool) -> None:
        """Leave the calls alone."""
        assert cancel_futures
        assert not wait


def _wake(waiting: list[tuple[Task, int]]) -> None:
    for task, turn in waiting:
        task.process.scheduler.wake_at(0, task, turn)
    waiting.clear()


def _ms(timeout_s: float) -> int:
    return max(math.ceil(timeout_s * 1000), 0)
