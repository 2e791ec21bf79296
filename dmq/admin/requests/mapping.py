"""Mapping between values of ``retry`` and wire messages of ``admin_v1``. Pure; used at both ends.

``..._of`` reads from the wire and raises ``Refused`` for invalid input; ``wire_...`` writes to it.
"""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.wire import mapping
from dmq.admin import admin_v1 as wire
from dmq.store.schema.operators.message_jobs import MessageJob, MessageJobKind
from retry.dead_letter import DeadFilter, Job
from retry.failure_reason import FailureReason
from retry.policy import Backoff, Exponential, Fixed, PolicyError, Reason, RetryPolicy, Table

_Made = TypeVar("_Made", bound=Message)


def filled(kind: type[_Made], value: object, /, **fields: object) -> _Made:
    """Return a message with the given fields; the others are the attributes of ``value`` with their names."""
    others = {name: getattr(value, name) for name in kind.DESCRIPTOR.fields_by_name if name not in fields}
    return kind(**others, **fields)


def wire_content(payload: bytes, *, with_body: bool) -> wire.Content:
    """Return a stored message, on request with its body. Raise ``DecodeError`` if the bytes are not a message."""
    message = mapping.decode(payload)
    body = message.body if with_body else None
    encoding = message.body_encoding.name
    sizes = {"body_bytes": len(message.body), "body_encoding": encoding}
    return filled(wire.Content, message, **sizes, body=body, masking=None)


def content_if_readable(payload: bytes, *, with_body: bool) -> wire.Content | None:
    """Return a stored message; None if it cannot be read, so that it does not hide the others of a list."""
    if not payload:  # of a purged dead letter: the content is gone
        return None
    try:
        return wire_content(payload, with_body=with_body)
    except DecodeError:
        return None


def wire_policy(policy: RetryPolicy) -> wire.Policy:
    """Undo ``policy_of``."""
    backoff = policy.backoff
    return filled(
        wire.Policy,
        policy,
        table=filled(wire.TableBackoff, backoff) if isinstance(backoff, Table) else None,
        exponential=filled(wire.ExponentialBackoff, backoff) if isinstance(backoff, Exponential) else None,
        fixed=filled(wire.FixedBackoff, backoff) if isinstance(backoff, Fixed) else None,
    )


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
    raise PolicyError("the policy has no backoff")


def wire_reason(reason: FailureReason | None) -> wire.FailureReason | None:
    """Return the reason of a failed delivery; None if it is unknown."""
    return wire.FailureReason(**reason._asdict()) if reason is not None else None


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
    return filled(wire.Job, job, kind=job.kind.name, filter=wire_filter(job.filter), state=job.state.name)


def wire_message_job(job: MessageJob) -> wire.MessageJob:
    """Return the current state of a bulk change of pending messages."""
    is_move = job.kind is MessageJobKind.RESCHEDULE
    return wire.MessageJob(
        job_id=job.job_id,
        topic=job.topic,
        query=job.query,
        rate_per_s=job.rate_per_s,
        created_at_ms=job.created_at_ms,
        state=job.state.name,
        is_selected=job.is_selected,
        selected=job.end_offset,
        decided=job.done + job.gone + job.unchanged,
        done=job.done,
        gone=job.gone,
        unchanged=job.unchanged,
        cancel=job.kind is MessageJobKind.CANCEL or None,
        fire=job.kind is MessageJobKind.FIRE or None,
        deliver_at_ms=job.deliver_at_ms if is_move and not job.delay_by_ms else None,
        delay_by_ms=job.delay_by_ms or None,
    )


# Reasons are numbers in one direction; everything else is matched by name.
assert {reason.name: reason.value for reason in Reason}.items() <= dict(wire.Reason.items()).items()
