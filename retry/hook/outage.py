"""Poison or outage: the same class of error on many different messages is the destination's fault, not theirs.

A message that no broker will ever take must run out of attempts; a broker that answers everything with an error nobody
knows must not make every message run out of them. What tells the two apart is how many messages fail alike, with no
success between them.
"""

from __future__ import annotations

from collections import deque

MESSAGES = 20
WINDOW_S = 60.0


class OutageRule:
    """Counts different messages per class of error within a sliding window. No clock, no lock.

    It remembers at most ``messages`` failures per class and ``classes`` classes, whatever happens.
    """

    def __init__(self, messages: int = MESSAGES, window_s: float = WINDOW_S, classes: int = 64) -> None:
        assert messages >= 1
        self._messages = messages
        self._window_s = window_s
        self._classes = classes
        self._failed: dict[str, deque[tuple[float, bytes]]] = {}

    @property
    def is_calm(self) -> bool:
        """Whether it remembers nothing."""
        return not self._failed

    def on_failure(self, error_class: str, uid: bytes, now_s: float) -> bool:
        """Note a failure; say whether ``messages`` different ones failed alike within the window."""
        recent = self._failed.pop(error_class, None)
        if recent is None:
            if len(self._failed) >= self._classes:
                del self._failed[next(iter(self._failed))]  # the class that was quiet for longest
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
        """An attempt succeeded, or the outage is known: count anew."""
        self._failed.clear()
