"""Properties of the messages that make schedules, and of those that schedules send, for whoever reads a send."""

from __future__ import annotations

from collections.abc import Mapping

SCHEDULE, OCCURRENCE = "DMQ_SCHEDULE", "DMQ_OCCURRENCE"  # properties of an occurrence: which schedule, which number
PREFIX = "DMQ_"  # of properties that we give a meaning
# Properties of a send that makes a schedule instead of a message; see dmq.rocketmq_server.rpc.recurring.
NAME, CRON, EVERY, ZONE = "DMQ_SCHEDULE_NAME", "DMQ_CRON", "DMQ_EVERY", "DMQ_TIME_ZONE"
START, END, COUNT = "DMQ_START", "DMQ_END", "DMQ_COUNT"
JITTER, CATCH_UP = "DMQ_JITTER", "DMQ_CATCH_UP"
SCHEDULE_PROPERTIES = (NAME, CRON, EVERY, ZONE, START, END, COUNT, JITTER, CATCH_UP)
_SCHEDULE_PROPERTIES = frozenset(SCHEDULE_PROPERTIES)


def makes_schedule(properties: Mapping[str, str]) -> bool:
    """Say whether a message with these user properties asks for a schedule."""
    return not _SCHEDULE_PROPERTIES.isdisjoint(properties)
