"""Reports the results of attempts to the sink, and repeats failed reports.

A sent message that stays in the sink would be sent twice. An unreported failure would leave its entry held by this
process for ever and block its key. So a report that the sink could not process is repeated until it succeeds or the
sink is closed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from broker_adapter.runtime.clock import Clock, SystemClock
from retry.hook.runtime import HookLog
from retry.hook.verdicts import describe
from retry.sink import SinkClosed, SinkFull, SinkUnavailable

STEPS_S = (1.0, 2.0, 5.0, 10.0, 30.0)
# Real time, independent of the sink's clock: threads wait for each other in real time.
_REAL = SystemClock()


class SinkHealth:
    """Results of sink calls. Thread-safe."""

    def __init__(self) -> None:
        self.after_fork()

    def after_fork(self) -> None:
        """Reset the counts in a forked child."""
        self._lock = threading.Lock()
        self.error: str | None = None  # of the last call, if it failed
        self.errors = 0
        self.in_doubt = 0

    def failed(self, error: BaseException, *, is_write: bool = False) -> None:
        """Count a failed call. A full sink is not an error of the sink; a failed write may have taken effect."""
        with self._lock:
            self.errors += 1
            if isinstance(error, SinkFull):
                return
            self.error = describe(error)
            if is_write and not isinstance(error, SinkClosed):
                self.in_doubt += 1

    def worked(self) -> None:
        """Record a successful call."""
        if self.error is not None:
            with self._lock:
                self.error = None


@dataclass(slots=True, eq=False)
class _Debt:
    what: str
    type_name: str
    ask: Callable[[], Future[None]]
    then: Callable[[], None] | None
    failures: int = 0
    due_at_s: float = field(default=0.0)


class Settler:
    """Reports results to the sink, and repeats failed reports. Thread-safe; ``then`` runs once, without a lock, after
    the sink has confirmed.
    """

    def __init__(self, clock: Clock, log: HookLog, health: SinkHealth) -> None:
        self._clock = clock
        self._log = log
        self._health = health
        self._changed = threading.Condition()
        self._asked = 0
        self._owed: list[_Debt] = []

    @property
    def pending(self) -> int:
        """Number of results that the sink has not confirmed."""
        with self._changed:
            return self._asked + len(self._owed)

    def settle(
        self, what: str, type_name: str, ask: Callable[[], Future[None]], then: Callable[[], None] | None = None
    ) -> None:
        """Report a result to the sink without waiting for its confirmation; the call itself may block as long as the
        sink's.
        """
        self.asking(what, type_name, ask, then)()

    def asking(
        self, what: str, type_name: str, ask: Callable[[], Future[None]], then: Callable[[], None] | None = None
    ) -> Callable[[], None]:
        """Return a call that reports a result, for a thread that may block on the sink; it counts as pending from now
        on.
        """
        debt = _Debt(what, type_name, ask, then)
        with self._changed:
            self._asked += 1
        return lambda: self._ask(debt)

    def run_due(self, *, is_forced: bool = False) -> None:
        """Repeat the failed reports that are due again; with ``is_forced`` all of them."""
        if not self._owed:
            return
        now_s = self._clock.monotonic_s()
        with self._changed:
            due = [debt for debt in self._owed if is_forced or debt.due_at_s <= now_s]
            self._owed = [debt for debt in self._owed if debt not in due]
            self._asked += len(due)  # ``pending`` must count them at all times
        for debt in due:
            self._ask(debt)

    def wait(self, timeout_s: float, *, until: int = 0) -> bool:
        """Wait until at most ``until`` confirmations are outstanding; reports that wait for their repetition do not
        count.
        """
        ends_at_s = _REAL.monotonic_s() + timeout_s
        with self._changed:
            while self._asked > until:
                rest_s = ends_at_s - _REAL.monotonic_s()
                if rest_s <= 0:
                    return False
                self._changed.wait(rest_s)
            return True

    def after_fork(self) -> None:
        """Reset the state in a forked child: the entries belong to the parent."""
        self._changed = threading.Condition()
        self._asked = 0
        self._owed = []

    def _ask(self, debt: _Debt) -> None:
        try:
            future = debt.ask()
        except Exception as error:  # noqa: BLE001 - any failure of the sink is handled alike
            self._answered(debt, error)
            return
        future.add_done_callback(lambda done: self._answered(debt, _error_of(done)))

    def _answered(self, debt: _Debt, error: BaseException | None) -> None:
        if error is None:
            self._health.worked()
            try:
                if debt.then is not None:
                    debt.then()
            finally:
                self._close()
            return
        self._health.failed(error, is_write=True)
        is_hopeless = isinstance(error, SinkClosed) or not isinstance(error, SinkUnavailable | SinkFull)
        self._log.error(
            "sink_update_failed",
            per=(debt.what, debt.type_name, type(error).__name__),
            what=debt.what,
            type=debt.type_name,
            error=describe(error),
            will_repeat=not is_hopeless,
        )
        if is_hopeless:
            self._close()
            return
        with self._changed:
            debt.due_at_s = self._clock.monotonic_s() + STEPS_S[min(debt.failures, len(STEPS_S) - 1)]
            debt.failures += 1
            self._owed.append(debt)
            self._asked -= 1
            self._changed.notify_all()

    def _close(self) -> None:
        with self._changed:
            self._asked -= 1
            self._changed.notify_all()


def _error_of(done: Future[Any]) -> BaseException | None:
    return TimeoutError("the sink gave the call up") if done.cancelled() else done.exception()
