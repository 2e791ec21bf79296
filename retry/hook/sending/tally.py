"""Counts of the sends and repetitions of one type, since the hook was created."""

from __future__ import annotations

import threading
from collections import Counter

from retry.outcome import Delivered, Outcome, Rejected, Spooled


class HookTally:
    """Counts of one type. ``enter`` and ``leave`` bracket each direct send."""

    def __init__(self) -> None:
        self.after_fork()

    def enter(self) -> bool:
        """Count a send as running; return ``False`` once the hook is closed."""
        with self.lock:
            if self.is_closed:
                return False
            self.running += 1
            return True

    def leave(self) -> None:
        """Count a send as ended."""
        with self.lock:
            self.running -= 1
            if self.is_closed:
                self._is_idle.notify_all()

    def leave_delivered(self) -> None:
        """Count a send as ended and delivered, under one lock, because this is the hot path."""
        with self.lock:
            self.running -= 1
            self.delivered += 1
            if self.is_closed:
                self._is_idle.notify_all()

    def note_outcome(self, outcome: Outcome) -> None:
        """Count the outcome of a send."""
        with self.lock:
            match outcome:
                case Delivered():
                    self.delivered += 1
                case Spooled():
                    self.spooled += 1
                case Rejected():
                    self.rejected += 1

    def note_refusal(self, why: str) -> None:
        """Count the reason of a refused message; a last attempt may still send it."""
        with self.lock:
            self.rejects[why] += 1

    def note_attempt(self, verdict: str) -> None:
        """Count a failed attempt by its verdict."""
        with self.lock:
            self.attempts[verdict] += 1

    def note_redelivered(self) -> None:
        """Count a message of the sink as sent."""
        with self.lock:
            self.redelivered += 1

    def note_buried(self) -> None:
        """Count a message that moved to the dead set."""
        with self.lock:
            self.buried += 1

    def close(self) -> None:
        """Refuse further sends."""
        with self.lock:
            self.is_closed = True

    def wait_idle(self, timeout_s: float) -> int:
        """Wait until no send runs, at most ``timeout_s``; return how many still run."""
        with self.lock:
            self._is_idle.wait_for(lambda: self.running == 0, timeout_s)
            return self.running

    def after_fork(self) -> None:
        """Reset the counts in a forked child."""
        self.lock = threading.Lock()
        self._is_idle = threading.Condition(self.lock)
        self.is_closed = False
        self.running = 0
        self.delivered = 0
        self.redelivered = 0
        self.spooled = 0
        self.rejected = 0
        self.buried = 0
        self.attempts: Counter[str] = Counter()  # by verdict
        self.rejects: Counter[str] = Counter()  # by reason
