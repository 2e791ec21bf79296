"""Message properties of sends that create schedules, and of occurrences, shared by all modules that parse sends."""

from __future__ import annotations

from collections.abc import Mapping

SCHEDULE, OCCURRENCE = "DMQ_SCHEDULE", "DMQ_OCCURRENCE"  # properties of an occurrence: schedule name, number
PREFIX = "DMQ_"  # of properties reserved by Rock-DMQ
# Properties of a send that creates a schedule instead of a message; see dmq.rocketmq_server.rpc.recurring.
NAME, CRON, EVERY, ZONE = "DMQ_SCHEDULE_NAME", "DMQ_CRON", "DMQ_EVERY", "DMQ_TIME_ZONE"
START, END, COUNT = "DMQ_START", "DMQ_END", "DMQ_COUNT"
JITTER, CATCH_UP = "DMQ_JITTER", "DMQ_CATCH_UP"
SCHEDULE_PROPERTIES = (NAME, CRON, EVERY, ZONE, START, END, COUNT, JITTER, CATCH_UP)
_SCHEDULE_PROPERTIES = frozenset(SCHEDULE_PROPERTIES)


def makes_schedule(properties: Mapping[str, str]) -> bool:
    """Return True if a send with these user properties creates a schedule."""
    return not _SCHEDULE_PROPERTIES.isdisjoint(properties)
