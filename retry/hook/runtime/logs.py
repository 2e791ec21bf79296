"""Rate-limited logs of the hook: an outage fails thousands of messages and must not fill the disk with log lines.

An application that has configured structlog gets these events through it. Otherwise they go to the standard logger
``retry.hook``, which is silent below warnings. Nothing is written to stdout, and payloads are never logged.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from broker_adapter.runtime.clock import Clock
from broker_adapter.runtime.log import LibraryLog

INTERVAL_S = 10.0
KINDS_MAX = 1_000


class HookLog:
    """Logs each kind of event at most once per ``interval_s``, with the number of suppressed events."""

    def __init__(self, clock: Clock, interval_s: float = INTERVAL_S) -> None:
        self._clock = clock
        self._library = LibraryLog("retry.hook")
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, ...], list[float]] = {}  # kind -> [logged at, suppressed since]

    def warning(self, event: str, *, per: tuple[str, ...] = (), **fields: Any) -> None:  # noqa: ANN401 - any value
        """Log a warning; the kind of the event consists of its name and ``per``."""
        self._log(logging.WARNING, event, per, fields)

    def error(self, event: str, *, per: tuple[str, ...] = (), **fields: Any) -> None:  # noqa: ANN401 - any value
        """Log an error."""
        self._log(logging.ERROR, event, per, fields)

    def info(self, event: str, *, per: tuple[str, ...] = (), **fields: Any) -> None:  # noqa: ANN401 - any value
        """Log an event that is part of normal operation."""
        self._log(logging.INFO, event, per, fields)

    def after_fork(self) -> None:
        """Create a new lock in a forked child."""
        self._lock = threading.Lock()

    def _log(self, level: int, event: str, per: tuple[str, ...], fields: dict[str, Any]) -> None:
        left_out = self._admit((event, *per))
        if left_out is None:
            return
        if left_out:
            fields["left_out"] = left_out
        try:
            self._library.log(level, event, **fields)
        except Exception:  # noqa: BLE001 - a log write error (e.g. a full disk) must not lose a message
            return

    def _admit(self, kind: tuple[str, ...]) -> int | None:
        """Return the number of suppressed events of this kind, or ``None`` if this one is suppressed too."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            seen = self._seen.get(kind)
            if seen is not None and now_s - seen[0] < self._interval_s:
                seen[1] += 1
                return None
            if len(self._seen) >= KINDS_MAX:  # kinds come from error classes, so this many are abnormal
                self._seen.clear()
            self._seen[kind] = [now_s, 0]
            return int(seen[1]) if seen else 0
