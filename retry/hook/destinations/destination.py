"""Permits for attempts at one destination: breaker, outage rule, throttling and ramp under one lock.

Several types may share a destination (one broker), and then share its state.
"""

from __future__ import annotations

import threading
from enum import Enum, auto

from broker_adapter.runtime.clock import Clock
from retry.hook.destinations.breaker import Breaker, BreakerState
from retry.hook.destinations.outage import OutageRule
from retry.hook.destinations.ramp import Ramp
from retry.hook.runtime import HookLog
from retry.hook.verdicts import Retry


class Permit(Enum):
    """Kind of an attempt."""

    NORMAL = auto()
    PROBE = auto()  # its failure costs no attempt


class Destination:
    """One destination of messages. No method blocks, and none is called while a handler runs in the same call stack."""

    def __init__(self, name: str, clock: Clock, log: HookLog, limit_per_s: float | None = None) -> None:
        self.name = name
        # Sends read these two without the lock; a value that is slightly out of date does no harm.
        self.is_blocked = False
        self.is_calm = True
        self.last_success_s: float | None = None
        self._kept_s: float | None = None  # time of the first kept send since the last success
        self._clock = clock
        self._log = log
        self._lock = threading.Lock()
        self._breaker = Breaker()
        self._outage = OutageRule()
        self._ramp = Ramp(limit_per_s)
        self._paused_until_s = 0.0

    @property
    def state(self) -> BreakerState:
        """State of the breaker."""
        return self._breaker.state

    @property
    def rate_per_s(self) -> float | None:
        """Maximum number of kept messages sent per second; ``None``: unlimited."""
        return self._ramp.rate_per_s

    @property
    def kept_since_s(self) -> float | None:
        """Time of the first kept send since the last success; ``None`` if there is none."""
        kept_s, success_s = self._kept_s, self.last_success_s
        return None if kept_s is None or (success_s is not None and success_s >= kept_s) else kept_s

    def on_kept(self) -> None:
        """Record a kept send."""
        if self.kept_since_s is None:
            self._kept_s = self._clock.monotonic_s()

    def admits_send(self) -> bool:
        """Return True if a direct send may be attempted: not while the breaker is open, and not during a pause."""
        if not self.is_blocked:
            return True
        with self._lock:
            self._refresh(self._clock.monotonic_s())
            return not self.is_blocked

    def pause_s(self, *, is_paced: bool = True) -> float:
        """Return the seconds that the drain must wait before its next attempt; 0: none."""
        with self._lock:
            return self._pause_s(self._clock.monotonic_s(), is_paced)

    def begin(self, *, is_paced: bool = True) -> Permit | None:
        """Begin an attempt of the drain if one is permitted now. The caller must end it with one of the ``on_``
        methods.
        """
        with self._lock:
            now_s = self._clock.monotonic_s()
            if self._pause_s(now_s, is_paced) > 0:
                return None
            if self._breaker.state is BreakerState.CLOSED:
                if is_paced:
                    self._ramp.spend(now_s)
                return Permit.NORMAL
            return Permit.PROBE if self._breaker.begin_probe(now_s) else None

    def start_slowly(self) -> None:
        """Start with the ramp, because an earlier run may have left a backlog."""
        with self._lock:
            self._ramp.start(self._clock.monotonic_s())

    def on_success(self) -> None:
        """Record a successful attempt."""
        now_s = self._clock.monotonic_s()
        self.last_success_s = now_s
        if self.is_calm and self._ramp.rate_per_s is None:
            return
        with self._lock:
            was_open = self._breaker.on_success()
            self._outage.clear()
            if was_open:
                self._ramp.start(now_s)
            else:
                self._ramp.on_success(now_s)
            self._refresh(now_s)
        if was_open:
            self._log.warning("destination_available", per=(self.name,), destination=self.name)

    def on_failure(self, permit: Permit, uid: bytes, error: BaseException, *, verdict_type: type) -> None:
        """Record an attempt that failed for a reason that may pass."""
        error_class = f"{type(error).__module__}.{type(error).__qualname__}"
        with self._lock:
            now_s = self._clock.monotonic_s()
            # An unknown error may be a poison message: a few of them must neither stop nor slow the others.
            is_destination = issubclass(verdict_type, Retry)
            if is_destination:
                self._ramp.on_failure(now_s)
            if permit is Permit.PROBE:
                self._breaker.on_probe_failed(now_s)
                opened = False
            else:
                opened = is_destination and self._breaker.on_failure(uid, now_s)
                if self._outage.on_failure(error_class, uid, now_s) and self._breaker.state is BreakerState.CLOSED:
                    self._breaker.open(now_s)
                    opened = True
                if opened:
                    self._outage.clear()
            self._refresh(now_s)
        if opened:
            self._log.warning(
                "destination_unavailable", per=(self.name,), destination=self.name, error_class=error_class
            )

    def on_throttled(self, permit: Permit, after_s: float) -> None:
        """Record an attempt at which the destination requested a pause."""
        with self._lock:
            now_s = self._clock.monotonic_s()
            self._paused_until_s = max(self._paused_until_s, now_s + after_s)
            self._ramp.on_failure(now_s)
            if permit is Permit.PROBE:
                self._breaker.on_probe_void(now_s)
            self._refresh(now_s)

    def on_void(self, permit: Permit) -> None:
        """Record an attempt without information about the destination: the message was refused or given up."""
        if permit is Permit.PROBE:
            with self._lock:
                now_s = self._clock.monotonic_s()
                self._breaker.on_probe_void(now_s)
                self._refresh(now_s)

    def after_fork(self) -> None:
        """Reset lock and state in a forked child, which determines the state of the destination by itself."""
        self._lock = threading.Lock()
        self._breaker = Breaker()
        self._outage = OutageRule()
        self.is_blocked, self.is_calm = False, True

    def _pause_s(self, now_s: float, is_paced: bool) -> float:
        pause_s = max(0.0, self._paused_until_s - now_s)
        if self._breaker.state is BreakerState.CLOSED:
            return max(pause_s, self._ramp.wait_s(now_s)) if is_paced else pause_s
        return max(pause_s, self._breaker.next_probe_s - now_s)

    def _refresh(self, now_s: float) -> None:
        self.is_blocked = self._breaker.state is not BreakerState.CLOSED or now_s < self._paused_until_s
        self.is_calm = not self.is_blocked and self._breaker.is_calm and self._outage.is_calm
