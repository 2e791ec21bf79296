"""Failed deliveries: the next attempt, or the dead-letter topic.

Imports: groups, topics and below. Interface: failure decisions and waiting retries.
"""

from __future__ import annotations

from dmq.broker.failures.failures import POSTPONED_MS, Failures
from dmq.broker.failures.outcomes import FailedMessage, Outcomes, come_back
from dmq.broker.failures.waiting_retries import WaitingRetries, WaitingRetry, next_of

__all__ = [
    "POSTPONED_MS",
    "FailedMessage",
    "Failures",
    "Outcomes",
    "WaitingRetries",
    "WaitingRetry",
    "come_back",
    "next_of",
]
