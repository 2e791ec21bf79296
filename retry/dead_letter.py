"""Dead letters as values: the facts of one dead letter, filters for dead letters, and the state of a redrive.

A dead letter keeps everything needed to understand and to repeat it. Its consumers see these facts as user properties.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from retry.failure_reason import FailureReason
from retry.policy import Reason

# RocketMQ's proxy reads the first two from messages that a broker wrote; the others are specific to Rock-DMQ.
ORIGIN_TOPIC = "DLQ_ORIGIN_TOPIC"
ORIGIN_MESSAGE_ID = "DLQ_ORIGIN_MESSAGE_ID"
ATTEMPTS = "DLQ_ATTEMPTS"
REASON = "DLQ_REASON"
FIRST_FAILED_AT = "DLQ_FIRST_FAILED_AT"  # epoch ms
LAST_FAILED_AT = "DLQ_LAST_FAILED_AT"  # epoch ms
# On a redriven message: the message id of the dead letter it was made from.
PARENT_MESSAGE_ID = "DLQ_PARENT_MESSAGE_ID"
REFUSED = "DMQ_REFUSED"  # on a dead letter refused by a cluster: the code and the reason
UNREADABLE = "DMQ_UNREADABLE"  # on a dead letter received from a cluster: why it could not be read
# Properties that only the service writes, never a sender.
WRITTEN = (ATTEMPTS, REASON, FIRST_FAILED_AT, LAST_FAILED_AT, PARENT_MESSAGE_ID, REFUSED, UNREADABLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dead:
    """One dead letter. ``reason`` is ``None`` for a message that a client sent directly to a dead-letter queue."""

    offset: int  # in its dead-letter queue
    message_id: str
    origin_topic: str = ""
    reason: Reason | None = None
    attempts: int = 0
    first_failed_at_ms: int = 0
    last_failed_at_ms: int = 0
    tag: str = ""
    keys: tuple[str, ...] = ()
    failure: FailureReason | None = None  # of the last failure; None: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadFilter:
    """Filter for dead letters; an empty field matches all. ``since_ms <= last failure < until_ms``."""

    reasons: frozenset[Reason | None] = frozenset()  # None: messages that clients sent directly to the queue
    topics: frozenset[str] = frozenset()
    keys: frozenset[str] = frozenset()
    message_ids: frozenset[str] = frozenset()
    since_ms: int = 0
    until_ms: int = 0  # 0: no end

    def matches(self, dead: Dead) -> bool:
        """Return True if ``dead`` matches the filter."""
        return (
            (not self.reasons or dead.reason in self.reasons)
            and (not self.topics or dead.origin_topic in self.topics)
            and (not self.keys or not self.keys.isdisjoint(dead.keys))
            and (not self.message_ids or dead.message_id in self.message_ids)
            and dead.last_failed_at_ms >= self.since_ms
            and (not self.until_ms or dead.last_failed_at_ms < self.until_ms)
        )


class JobKind(StrEnum):
    """Bulk operation on dead letters."""

    REDRIVE = "redrive"
    PURGE = "purge"


class JobState(StrEnum):
    """State of a redrive or purge job."""

    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"  # by an operator


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A redrive or purge job. It is durable and continues after a restart from its last write.

    A redriven dead letter goes only to its group, unless ``to_topic`` or ``all_groups`` makes it a message for all
    groups. The job processes each offset of ``[next_offset, end_offset)`` in the group's dead-letter queue once. The
    counts are messages: ``done`` were redriven or purged. ``passed`` did not match or already had an outcome.
    ``failed`` could not be read and stay dead.
    """

    job_id: int
    kind: JobKind
    group: str
    filter: DeadFilter = field(default_factory=DeadFilter)
    to_topic: str = ""  # of a redrive; empty: each to its original topic
    all_groups: bool = False  # of a redrive: a new message of its topic, for every consumer group
    why: str = ""  # of a purge
    rate_per_s: float = 0.0  # 0: no limit
    created_at_ms: int = 0
    first_offset: int = 0
    next_offset: int = 0
    end_offset: int = 0
    done: int = 0
    passed: int = 0
    failed: int = 0
    state: JobState = JobState.RUNNING

    def advanced(self, next_offset: int, *, done: int = 0, passed: int = 0, failed: int = 0) -> Job:
        """Return the job after it has processed all offsets below ``next_offset``."""
        assert next_offset >= self.next_offset, "a job looks at each offset once"
        return replace(
            self,
            next_offset=next_offset,
            done=self.done + done,
            passed=self.passed + passed,
            failed=self.failed + failed,
            state=JobState.DONE if next_offset >= self.end_offset and self.state is JobState.RUNNING else self.state,
        )
