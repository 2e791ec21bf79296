"""Outage detection: one error class on many different messages is an error of the destination, not of the messages.

A poison message, which no broker ever accepts, must run out of attempts. A broker that answers every message with an
unknown error must not use up the attempts of all of them. The rule distinguishes the two by the number of messages
that fail with one error class, without a success in between.
"""

from __future__ import annotations

from collections import deque

MESSAGES = 20
WINDOW_S = 60.0


class OutageRule:
    """Counts different messages per error class within a sliding window. No clock, no lock.

    It stores at most ``messages`` failures per class and ``classes`` classes.
    """

    def __init__(self, messages: int = MESSAGES, window_s: float = WINDOW_S, classes: int = 64) -> None:
        assert messages >= 1
        self._messages = messages
        self._window_s = window_s
        self._classes = classes
        self._failed: dict[str, deque[tuple[float, bytes]]] = {}

    @property
    def is_calm(self) -> bool:
        """Whether no failure is recorded."""
        return not self._failed

    def on_failure(self, error_class: str, uid: bytes, now_s: float) -> bool:
        """Record a failure; return True if ``messages`` different ones failed with this class within the window."""
        recent = self._failed.pop(error_class, None)
        if recent is None:
            if len(self._failed) >= self._classes:
                del self._failed[next(iter(self._failed))]  # the class with the oldest last failure
            recent = deque()
        self._failed[error_class] = recent
        known = next((one for one in recent if one[1] == uid), None)
        if known is not None:
            recent.remove(known)
        recent.append((now_s, uid))
        while recent[0][0] <= now_s - self._window_s:
            recent.popleft()
        if len(recent) > self._messages:
            recent.popleft()
        return len(recent) >= self._messages

    def clear(self) -> None:
        """Discard all failures, after a success or once the outage is detected."""
        self._failed.clear()
