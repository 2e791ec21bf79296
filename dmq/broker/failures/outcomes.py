"""Outcomes of failed deliveries, whichever way the failure arrived: ``retry.flow`` decides, ``Outcomes.ops`` writes.

    retry later     a copy is pending for the group (in its retry lane when due)
    dead letter     a copy is stored in the group's dead-letter queue

A copy is written even if its id is already known, because only this copy continues the message that its unit finishes.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from broker_adapter.contracts.message import unpack_id
from dmq.broker.failures.failure_log import FailureLog
from dmq.broker.groups import ATTEMPT_MAX, DeliveryLease, SubscribedQueue, Subscriptions
from dmq.broker.topics import BrokerPart, SharedParts
from dmq.config.units import format_time
from dmq.metrics.counting import TopicCounts
from dmq.store.schema.messages.failure_reason import decode_reason
from dmq.store.schema.messages.index import failed_id
from dmq.store.schema.messages.record import (
    EntryKind,
    History,
    QueuedMessage,
    encode_body,
    encode_history,
    encode_queued,
    encode_waiting,
)
from dmq.store.schema.topics.group import ExceptionRow
from dmq.store.writer.operations import Append, Emit, IfKnown, Op, Schedule
from dmq.trail.events import LANE, EventKind, encode_event, with_reason
from retry.failure_reason import FailureReason
from retry.flow import Failure, Outcome, after_failure
from retry.policy import DeadLetter, Reason, RetryAt, RetryPolicy

DEAD_EVENTS = {
    Reason.EXHAUSTED: EventKind.DEAD_EXHAUSTED,
    Reason.TOO_OLD: EventKind.DEAD_TOO_OLD,
    Reason.FORWARDED: EventKind.DEAD_FORWARDED,
    Reason.SENT_BACK: EventKind.DEAD_SENT_BACK,
    Reason.OPERATOR: EventKind.DEAD_BY_OPERATOR,
    Reason.REFUSED: EventKind.FORWARD_REFUSED,
    Reason.TOO_LATE: EventKind.DEAD_TOO_LATE,
}


class FailedMessage(NamedTuple):
    """Message with a failed delivery. The history includes this failure, and its reason if one is known."""

    group_id: int
    topic_id: int  # of its subscription
    number: int  # of its queue, in audit events
    attempt: int
    record: QueuedMessage
    history: History


class Outcomes(BrokerPart):
    """Decides outcomes, and turns them into operations. It belongs to the event loop."""

    def __init__(self, shared: SharedParts, subscriptions: Subscriptions, *, levels_ms: Sequence[int]) -> None:
        super().__init__(shared)
        self._subscriptions = subscriptions
        self._levels_ms = tuple(levels_ms)
        self._rng = Random()  # jitter only
        self._log = FailureLog(self._clock)
        self.retried_total = 0
        self.dead = TopicCounts()

    @property
    def dead_total(self) -> int:
        """Number of new dead letters of all topics."""
        return self.dead.total

    def count_dead(self, topic_id: int, count: int = 1) -> None:
        """Count new dead letters of a topic."""
        self.dead.add(self._names.topics_by_id[topic_id].name, count)

    def decide(
        self, policy: RetryPolicy, failure: Failure, attempt: int, now_ms: int, *, since_ms: int, not_after_ms: int
    ) -> Outcome:
        """Return the outcome of a failure; 0 stands for an unknown time.

        A message does not expire while the clock is not steady: a clock step must not expire it.
        """
        return after_failure(
            policy,
            failure,
            attempt,
            now_ms,
            self._rng,
            since_ms=since_ms or None,
            not_after_ms=not_after_ms if not_after_ms and self._clock.is_steady() else 0,
            levels_ms=self._levels_ms,
        )

    def ops(self, failed: FailedMessage, outcome: RetryAt | DeadLetter, now_ms: int, *, code: int = 0) -> list[Op]:
        """Return the ops of an outcome, except for the end of the original. ``code`` is that of a cluster's refusal."""
        if isinstance(outcome, DeadLetter):
            self.count_dead(failed.topic_id)
            ops, letter = self.bury(failed, outcome.reason, now_ms, code=code)
            return [*ops, letter]
        self.retried_total += 1
        self.log_retry(failed, outcome.at_ms)
        group_id, topic_id, number, attempt, record, history = failed
        names = self._names
        lane_id, ops = self._subscriptions.lane_id(names.groups_by_id[group_id], names.topics_by_id[topic_id])
        body = copy_of(record, history)
        waiting = encode_waiting(EntryKind.RETRY, attempt, lane_id, group_id, outcome.at_ms, now_ms, body)
        event = encode_event(EventKind.NACKED, topic_id, group_id, number, attempt, outcome.at_ms, record.message_id)
        event = with_reason(event, decode_reason(history.failure))
        entry_id = failed_id(record.message_id, history, attempt)
        return [*ops, Schedule(group_id, entry_id, outcome.at_ms, waiting, event, if_known=IfKnown.WRITE)]

    def bury(self, failed: FailedMessage, why: Reason, now_ms: int, *, code: int = 0) -> tuple[list[Op], Append]:
        """Return the ops that the first use of the group's dead-letter queue needs, and the append to that queue."""
        group_id, topic_id, number, attempt, record, history = failed
        history = history._replace(reason=why)
        letters, ops = self._names.dead_letters(self._names.groups_by_id[group_id], now_ms)
        detail = {
            Reason.EXHAUSTED: self._catalog.policy(group_id).max_attempts,
            Reason.TOO_OLD: history.since_ms,
            Reason.TOO_LATE: record.not_after_ms,
        }
        event = encode_event(
            DEAD_EVENTS[why], topic_id, group_id, number, code or attempt, detail.get(why, 0), record.message_id
        )
        event = with_reason(event, decode_reason(history.failure))
        self._log.failed("message_dead_lettered", **self._facts(failed), attempts=attempt, reason=why.name.lower())
        copy = encode_queued(attempt, now_ms, 0, copy_of(record, history), has_history=True)
        entry_id = failed_id(record.message_id, history, attempt)
        return ops, Append(letters.topic_id, entry_id, letters.topic_id, 0, copy, event, IfKnown.WRITE)

    def taken_over(self, failed: FailedMessage, outcome: RetryAt | DeadLetter, now_ms: int) -> list[Op]:
        """As ``ops``, for a message without a delivery to the group in the audit trail."""
        place = failed.topic_id, failed.group_id, LANE, failed.attempt, failed.history.queue_offset
        taken = Emit(encode_event(EventKind.TAKEN_OVER, *place, failed.record.message_id))
        return [taken, *self.ops(failed, outcome, now_ms)]

    def log_retry(self, failed: FailedMessage, at_ms: int) -> None:
        """Log a retry, at a bounded rate."""
        self._log.failed("message_retried", **self._facts(failed), attempt=failed.attempt, retry_at=format_time(at_ms))

    def _facts(self, failed: FailedMessage) -> dict[str, str]:
        return {
            "group": self._names.groups_by_id[failed.group_id].name,
            "topic": self._names.topics_by_id[failed.topic_id].name,
            "error": decode_reason(failed.history.failure).error,
            "message_id": unpack_id(failed.record.message_id),
        }


def come_back(  # noqa: PLR0917 - the first four name the delivery
    queue: SubscribedQueue,
    offset: int,
    lease: DeliveryLease,
    now_ms: int,
    kind: EventKind = EventKind.LEASE_EXPIRED,
    reason: FailureReason | None = None,
    before: ExceptionRow | None = None,
) -> tuple[list[Op], int]:
    """Return the ops that make a message available again in its queue, and its next attempt.

    ``before`` is the row of the lease, if that has a failure reason, which the message then keeps.
    """
    attempt, rows = queue.plan_return(offset, lease, now_ms, before)
    total = min(lease.attempts_before + attempt, ATTEMPT_MAX)
    event = queue.subscription.event(kind, queue, total, offset, lease.message_id)
    return [*rows, Emit(with_reason(event, reason), offset)], attempt


def copy_of(record: QueuedMessage, history: History) -> bytes:
    """Return the body of a copy after its header: the history, and the message in its wire format."""
    return encode_history(history) + encode_body(
        record.message_id, record.tag.encode(), record.message_group.encode(), record.payload, record.not_after_ms
    )
