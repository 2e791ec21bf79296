"""Circuit breaker of one destination, as a plain state machine: no clock, no lock, no thread.

    closed --5 consecutive failures, of different messages, or an outage--> open
    open   --a step of 1, 2, 5, 10, 30 s is over: one probe-------------> probing
    probing --success--> closed          probing --failure--> open, with the next step
    probing --60 s without a result-------------------------------------> a further probe
    probing --no information (message refused, throttled)--> open, probe again at once

Unless it is closed, only a probe may be attempted. A success of an attempt that began before it opened closes it too:
the destination has answered.
"""

from __future__ import annotations

from enum import StrEnum

FAILURES_TO_OPEN = 5
PROBE_STEPS_S = (1.0, 2.0, 5.0, 10.0, 30.0)
# A probe that hangs must not keep the breaker from ever closing.
PROBE_TIMEOUT_S = 60.0


class BreakerState(StrEnum):
    """State of a breaker."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


class Breaker:
    """Circuit breaker. Times are monotonic seconds from the caller and never decrease."""

    def __init__(self) -> None:
        self.state = BreakerState.CLOSED
        self.next_probe_s = 0.0  # while not closed: earliest time of the next probe
        self._failed_uids: set[bytes] = set()  # different messages that failed consecutively
        self._step = 0

    @property
    def is_calm(self) -> bool:
        """Whether it is closed and has recorded no failure, so that a success changes nothing."""
        return self.state is BreakerState.CLOSED and not self._failed_uids

    @property
    def failures(self) -> int:
        """Number of different messages that failed consecutively."""
        return len(self._failed_uids)

    def may_probe(self, now_s: float) -> bool:
        """Return True if a probe may begin."""
        return self.state is not BreakerState.CLOSED and now_s >= self.next_probe_s

    def begin_probe(self, now_s: float) -> bool:
        """Begin a probe if one may begin; after ``True`` the caller must end it with an ``on_`` method."""
        if not self.may_probe(now_s):
            return False
        self.state = BreakerState.PROBING
        self.next_probe_s = now_s + PROBE_TIMEOUT_S
        return True

    def on_success(self) -> bool:
        """Record a successful attempt; return True if it closed the breaker."""
        was_open = self.state is not BreakerState.CLOSED
        self.state = BreakerState.CLOSED
        self._failed_uids.clear()
        self._step = 0
        return was_open

    def on_failure(self, uid: bytes, now_s: float) -> bool:
        """Record a failed attempt other than a probe; return True if it opened the breaker."""
        if self.state is not BreakerState.CLOSED:
            return False  # it began before the breaker opened and adds no information
        self._failed_uids.add(uid)
        if len(self._failed_uids) < FAILURES_TO_OPEN:
            return False
        self.open(now_s)
        return True

    def on_probe_failed(self, now_s: float) -> None:
        """Record a failed probe: wait for the next step."""
        if self.state is not BreakerState.PROBING:
            return  # already closed by an attempt that began earlier
        self.state = BreakerState.OPEN
        self._step = min(self._step + 1, len(PROBE_STEPS_S) - 1)
        self.next_probe_s = now_s + PROBE_STEPS_S[self._step]

    def on_probe_void(self, now_s: float) -> None:
        """Record a probe without information about the destination: another may begin at once."""
        if self.state is BreakerState.PROBING:
            self.state = BreakerState.OPEN
            self.next_probe_s = now_s

    def open(self, now_s: float) -> None:
        """Open the breaker, also for an outage detected elsewhere; do nothing if it is open."""
        if self.state is not BreakerState.CLOSED:
            return
        self.state = BreakerState.OPEN
        self._failed_uids.clear()
        self._step = 0
        self.next_probe_s = now_s + PROBE_STEPS_S[0]
