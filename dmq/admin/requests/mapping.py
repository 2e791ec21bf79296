"""Mapping between the values of ``status`` and the wire messages of ``admin_v1``. Pure; used at both ends.

``..._of`` reads from the wire and raises ``Refused`` for invalid input; ``wire_...`` writes to it.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from broker_adapter.contracts.adapter import PulledMessage
from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.wire import mapping
from dmq.admin import admin_v1 as wire
from dmq.admin.requests.status import DeadStatus, GroupStatus, TopicStatus
from retry.dead_letter import DeadFilter, Job
from retry.failure_reason import FailureReason
from retry.policy import Backoff, Exponential, Fixed, PolicyError, Reason, RetryPolicy, Table

if TYPE_CHECKING:  # the command line uses this module without loading the broker
    from dmq.broker.failures.waiting_retries import WaitingRetry
    from dmq.broker.operations.message_states import GroupState


def wire_content(payload: bytes, *, with_body: bool) -> wire.Content:
    """Return a stored message, on request with its body. Raise ``DecodeError`` if the bytes are not a message."""
    message = mapping.decode(payload)
    return wire.Content(
        tag=message.tag,
        keys=message.keys,
        properties=message.properties,
        message_group=message.message_group,
        born_at_ms=message.born_at_ms,
        born_host=message.born_host,
        body_encoding=message.body_encoding.name,
        body_bytes=len(message.body),
        body=message.body if with_body else None,
    )


def content_if_readable(payload: bytes, *, with_body: bool) -> wire.Content | None:
    """Return a stored message; None if it cannot be read, so that it does not hide the others of a list."""
    if not payload:  # of a purged dead letter: the content is gone
        return None
    try:
        return wire_content(payload, with_body=with_body)
    except DecodeError:
        return None


def wire_peeked(message: PulledMessage, *, with_body: bool) -> wire.PeekedMessage:
    """Return a message of a queue."""
    return wire.PeekedMessage(
        message_id=message.message_id,
        queue_id=message.queue_id,
        queue_offset=message.queue_offset,
        stored_at_ms=message.stored_at_ms,
        deliver_at_ms=message.deliver_at_ms,
        content=content_if_readable(message.payload, with_body=with_body),
    )


def wire_policy(policy: RetryPolicy) -> wire.Policy:
    """Undo ``policy_of``."""
    found = wire.Policy(max_attempts=policy.max_attempts, jitter=policy.jitter, max_age_ms=policy.max_age_ms)
    match policy.backoff:
        case Table(steps_ms):
            found.table.steps_ms.extend(steps_ms)
        case Exponential(initial_ms, max_ms, multiplier):
            exponential = wire.ExponentialBackoff(initial_ms=initial_ms, max_ms=max_ms, multiplier=multiplier)
            found.exponential.CopyFrom(exponential)
        case Fixed(delay_ms):
            found.fixed.CopyFrom(wire.FixedBackoff(delay_ms=delay_ms))  # a delay of 0 is valid too
    return found


def policy_of(policy: wire.Policy) -> RetryPolicy:
    """Return a policy from the wire. Raise ``Refused`` with the name of an invalid field."""
    try:
        return RetryPolicy(
            backoff=_backoff_of(policy),
            max_attempts=policy.max_attempts,
            jitter=policy.jitter,
            max_age_ms=policy.max_age_ms if policy.HasField("max_age_ms") else None,
        )
    except PolicyError as error:
        raise Refused(Rule.REQUEST, f"invalid retry policy: {error}") from error


def _backoff_of(policy: wire.Policy) -> Backoff:
    match policy.WhichOneof("backoff"):
        case "table":
            return Table(tuple(policy.table.steps_ms))
        case "exponential":
            given = policy.exponential
            return Exponential(given.initial_ms, given.max_ms, given.multiplier)
        case "fixed":
            return Fixed(policy.fixed.delay_ms)
    raise PolicyError("it has no backoff")


def wire_topic(topic: TopicStatus) -> wire.Topic:
    """Return a topic with its known figures."""
    queues = enumerate(topic.ranges)
    return wire.Topic(
        name=topic.name,
        queues=topic.queues,
        stored=topic.stored,
        pending=topic.pending,
        due=[wire.DueBucket(**asdict(bucket)) for bucket in topic.due],
        type=topic.type,
        created_at_ms=topic.created_at_ms,
        readers=[wire.Reader(**asdict(reader)) for reader in topic.readers],
        ranges=[wire.QueueRange(queue_id=at, begin_offset=each.begin, end_offset=each.end) for at, each in queues],
        oldest_at_ms=topic.oldest_at_ms,
        keep_time_ms=topic.keep.time_ms,
        keep_bytes=topic.keep.size_bytes,
        keep_unread=topic.keep.unread,
        keep_own=topic.keep_own,
        paused_since_ms=topic.paused_since_ms,
        deliver_rate=topic.deliver_rate,
        held=topic.held,
        pending_bytes=topic.pending_bytes,
        quotas=[wire.Quota(**asdict(each)) for each in topic.quotas],
    )


def wire_group(group: GroupStatus) -> wire.Group:
    """Return a group with its histogram."""
    return wire.Group(
        name=group.name,
        created_at_ms=group.created_at_ms,
        policy=wire_policy(group.policy),
        is_default_policy=group.is_default_policy,
        is_fifo=group.is_fifo,
        is_fifo_set=group.is_fifo_set,
        retries=group.retries,
        retries_in_force=group.retries_in_force,
        waiting=group.waiting,
        dead=group.dead,
        leased=group.leased,
        due=[wire.DueBucket(**asdict(bucket)) for bucket in group.due],
        is_removed=group.is_removed,
        unread=[wire.Unread(**asdict(each)) for each in group.unread],
        paused_since_ms=group.paused_since_ms,
        deliver_rate=group.deliver_rate,
        waiting_bytes=group.waiting_bytes,
        unread_messages=group.unread_messages,
        oldest_unread_age_ms=group.oldest_unread_age_ms,
        lags=[wire.Lag(**asdict(each)) for each in group.lags],
    )


def wire_retry(retry: WaitingRetry) -> wire.WaitingRetry:
    """Return a pending retry without the body of its message."""
    return wire.WaitingRetry(
        entry=retry.entry,
        group=retry.group,
        topic=retry.topic,
        message_id=retry.message_id,
        attempt=retry.attempt,
        due_at_ms=retry.due_at_ms,
        first_failed_at_ms=retry.first_failed_at_ms,
        last_failed_at_ms=retry.last_failed_at_ms,
        content=content_if_readable(retry.payload, with_body=False),
        failure=wire_reason(retry.failure),
    )


def wire_dead_letter(letter: DeadStatus, *, with_body: bool) -> wire.DeadLetter:
    """Return a dead letter, on request with the body of its message."""
    dead = letter.dead
    return wire.DeadLetter(
        offset=dead.offset,
        message_id=dead.message_id,
        origin_topic=dead.origin_topic,
        reason=dead.reason.name if dead.reason is not None else None,
        attempts=dead.attempts,
        first_failed_at_ms=dead.first_failed_at_ms,
        last_failed_at_ms=dead.last_failed_at_ms,
        tag=dead.tag,
        keys=dead.keys,
        dead_at_ms=letter.dead_at_ms,
        outcome=letter.outcome,
        outcome_at_ms=letter.outcome_at_ms,
        outcome_note=letter.outcome_note,
        content=content_if_readable(letter.payload, with_body=with_body),
        failure=wire_reason(dead.failure),
    )


def wire_reason(reason: FailureReason | None) -> wire.FailureReason | None:
    """Return the reason of a failed delivery; None if it is unknown."""
    return wire.FailureReason(**reason._asdict()) if reason is not None else None


def wire_group_state(state: GroupState) -> wire.GroupState:
    """Return the state of a message for a group."""
    facts = state._asdict()
    return wire.GroupState(**{**facts, "failure": wire_reason(state.failure)})


def wire_filter(chosen: DeadFilter) -> wire.DeadFilter:
    """Undo ``filter_of``; lists are sorted."""
    return wire.DeadFilter(
        reasons=sorted(wire.Reason.Name(reason or 0) for reason in chosen.reasons),
        topics=sorted(chosen.topics),
        keys=sorted(chosen.keys),
        message_ids=sorted(chosen.message_ids),
        since_ms=chosen.since_ms,
        until_ms=chosen.until_ms,
    )


def filter_of(chosen: wire.DeadFilter) -> DeadFilter:
    """Return a filter from the wire; its names and times are not checked here."""
    known = {wire.SENT_HERE, *(int(reason) for reason in Reason)}
    if unknown := [number for number in chosen.reasons if number not in known]:
        raise Refused(Rule.REQUEST, "unknown reason of death", value=unknown[0])
    return DeadFilter(
        reasons=frozenset(Reason(number) if number else None for number in chosen.reasons),
        topics=frozenset(chosen.topics),
        keys=frozenset(chosen.keys),
        message_ids=frozenset(chosen.message_ids),
        since_ms=chosen.since_ms,
        until_ms=chosen.until_ms,
    )


def wire_job(job: Job) -> wire.Job:
    """Return the current state of a job."""
    return wire.Job(
        job_id=job.job_id,
        kind=job.kind.name,
        group=job.group,
        filter=wire_filter(job.filter),
        to_topic=job.to_topic,
        all_groups=job.all_groups,
        why=job.why,
        rate_per_s=job.rate_per_s,
        created_at_ms=job.created_at_ms,
        first_offset=job.first_offset,
        next_offset=job.next_offset,
        end_offset=job.end_offset,
        done=job.done,
        passed=job.passed,
        failed=job.failed,
        state=job.state.name,
    )


# Reasons are numbers in one direction; everything else is matched by name.
assert {reason.name: reason.value for reason in Reason}.items() <= dict(wire.Reason.items()).items()
