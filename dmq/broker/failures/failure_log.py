"""Log lines about retried and dead-lettered messages: at most one for each kind of failure in ``INTERVAL_S``.

A kind is the event, the group, the topic and the error. A handler that fails every message causes six lines a minute.
Each line includes the number of suppressed lines.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Literal

import structlog

from broker_adapter.runtime.clock import Clock

log = structlog.get_logger("dmq.broker")

INTERVAL_S: Final = 10.0
KINDS_MAX: Final = 1_000  # an error text that contains a number is a new kind each time
LINES_MAX: Final = 20  # of all kinds in ``INTERVAL_S``

Event = Literal["message_retried", "message_dead_lettered"]


class FailureLog:
    """Rate-limited failure log. It belongs to the event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kinds: OrderedDict[tuple[str, ...], float] = OrderedDict()  # time of the last line, oldest first
        self._left_out = 0
        self._since_s, self._lines = 0.0, 0

    def failed(self, event: Event, *, group: str, topic: str, error: str, **facts: str | int) -> None:
        """Log one failure, unless its kind was logged within ``INTERVAL_S`` or ``LINES_MAX`` is reached."""
        now_s, kind = self._clock.monotonic_s(), (event, group, topic, error)
        if now_s - self._since_s >= INTERVAL_S:
            self._since_s, self._lines = now_s, 0
        logged_s = self._kinds.get(kind)
        if self._lines >= LINES_MAX or (logged_s is not None and now_s - logged_s < INTERVAL_S):
            self._left_out += 1
            return
        self._kinds[kind] = now_s
        self._kinds.move_to_end(kind)
        if len(self._kinds) > KINDS_MAX:
            self._kinds.popitem(last=False)
        self._lines += 1
        left_out, self._left_out = self._left_out, 0
        told = {"left_out": left_out} if left_out else {}
        write = log.warning if event == "message_dead_lettered" else log.info
        write(event, group=group, topic=topic, error=error, **facts, **told)
