"""Circuit breaker of one destination, as a plain state machine: no clock, no lock, no thread.

    closed --5 failures in a row, of different messages, or an outage--> open
    open   --a step of 1, 2, 5, 10, 30 s is over: one probe----------> probing
    probing --success--> closed          probing --failure--> open, with the next step
    probing --60 s without a result----------------------------------> a further probe
    probing --no answer to the question (refused message, throttled)--> open, probe again at once

While it is not closed only a probe may be attempted. A success from an attempt that began before it opened closes it
as well: the destination has answered.
"""

from __future__ import annotations

from enum import StrEnum

FAILURES_TO_OPEN = 5
PROBE_STEPS_S = (1.0, 2.0, 5.0, 10.0, 30.0)
# A probe that hangs must not keep the breaker from ever closing.
PROBE_TIMEOUT_S = 60.0


class BreakerState(StrEnum):
    """Where a breaker is."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


class Breaker:
    """Says whether an attempt may be made. Times are monotonic seconds, given by the caller, never going back."""

    def __init__(self) -> None:
        self.state = BreakerState.CLOSED
        self.next_probe_s = 0.0  # while not closed: when the next probe may begin
        self._failed_uids: set[bytes] = set()  # of different messages, in a row
        self._step = 0

    @property
    def is_calm(self) -> bool:
        """Whether it is closed and remembers no failure, so that a success changes nothing."""
        return self.state is BreakerState.CLOSED and not self._failed_uids

    @property
    def failures(self) -> int:
        """How many different messages failed in a row."""
        return len(self._failed_uids)

    def may_probe(self, now_s: float) -> bool:
        """Say whether a probe may begin."""
        return self.state is not BreakerState.CLOSED and now_s >= self.next_probe_s

    def begin_probe(self, now_s: float) -> bool:
        """Begin the probe if one may begin; whoever gets ``True`` must end it with one of the next four."""
        if not self.may_probe(now_s):
            return False
        self.state = BreakerState.PROBING
        self.next_probe_s = now_s + PROBE_TIMEOUT_S
        return True

    def on_success(self) -> bool:
        """An attempt succeeded; say whether that closed the breaker."""
        was_open = self.state is not BreakerState.CLOSED
        self.state = BreakerState.CLOSED
        self._failed_uids.clear()
        self._step = 0
        return was_open

    def on_failure(self, uid: bytes, now_s: float) -> bool:
        """An attempt that was no probe failed; say whether that opened the breaker."""
        if self.state is not BreakerState.CLOSED:
            return False  # it began before the breaker opened, and says nothing new
        self._failed_uids.add(uid)
        if len(self._failed_uids) < FAILURES_TO_OPEN:
            return False
        self.open(now_s)
        return True

    def on_probe_failed(self, now_s: float) -> None:
        """The probe failed: wait for the next step."""
        if self.state is not BreakerState.PROBING:
            return  # closed meanwhile by an attempt that began earlier
        self.state = BreakerState.OPEN
        self._step = min(self._step + 1, len(PROBE_STEPS_S) - 1)
        self.next_probe_s = now_s + PROBE_STEPS_S[self._step]

    def on_probe_void(self, now_s: float) -> None:
        """The probe said nothing about the destination: another may begin at once."""
        if self.state is BreakerState.PROBING:
            self.state = BreakerState.OPEN
            self.next_probe_s = now_s

    def open(self, now_s: float) -> None:
        """Open it, for an outage that was seen elsewhere too; nothing changes if it is open."""
        if self.state is not BreakerState.CLOSED:
            return
        self.state = BreakerState.OPEN
        self._failed_uids.clear()
        self._step = 0
        self.next_probe_s = now_s + PROBE_STEPS_S[0]
