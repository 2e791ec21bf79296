"""Validation of admin requests. Pure functions on wire requests; each refusal names the limit and the value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.message import Message

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.contracts.limits import DELIVER_AT_MS_MAX, MESSAGE_ID_BYTES_MAX, PROPERTIES_BYTES_MAX
from broker_adapter.contracts.own_keys import check_own_key
from broker_adapter.contracts.topics import check_group, check_topic
from dmq.admin import admin_v1 as wire
from dmq.admin.requests.mapping import filter_of
from dmq.store.schema.operators.message_jobs import MessageFilter, MessageJob, MessageJobKind
from retry.dead_letter import DeadFilter, Job, JobKind

PAGE_MAX = 1_000
ENTRIES_MAX = 1_000
CHOICES_MAX = 1_000  # of one list of a filter
WHY_CHARS_MAX = 1_000
WHY_HEADER = "x-dmq-why"  # the reason for any change, percent-encoded UTF-8
HEADER_WHY_CHARS_MAX = 200
CLIENT_MS_MAX = 60_000  # longest wait for the answer of a client
RATE_MIN, RATE_MAX = 0.001, 1_000_000.0
_TOKEN_CHARS_MAX = 1_000
_ENTRY_CHARS_MAX = 100
_HANDLE_CHARS_MAX = 2_000  # a topic, an id, and an authentication code


def given(request: Message, *fields: str) -> list[Any]:
    """Return the values of optional fields; None for each one that is absent."""
    return [getattr(request, field) if request.HasField(field) else None for field in fields]


def check_message_id(message_id: str) -> str:
    """Return ``message_id`` if it is a valid id."""
    if not message_id.strip() or len(message_id.encode()) > MESSAGE_ID_BYTES_MAX:
        limit = f"1 to {MESSAGE_ID_BYTES_MAX} bytes"
        raise Refused(Rule.MESSAGE_ID, "the message id is blank or too long", value=message_id, limit=limit)
    return message_id


def check_timeout_ms(timeout_ms: int) -> int:
    """Return the timeout for the answer of a client, in ms."""
    if not 1 <= timeout_ms <= CLIENT_MS_MAX:
        limit = f"1 to {CLIENT_MS_MAX} ms"
        raise Refused(Rule.REQUEST, "the timeout is out of range, in ms", value=timeout_ms, limit=limit)
    return timeout_ms


def check_limit(limit: int) -> int:
    """Return the number of rows per page."""
    if not 1 <= limit <= PAGE_MAX:
        raise Refused(Rule.REQUEST, "the page size is out of range", value=limit, limit=f"1 to {PAGE_MAX}")
    return limit


def check_token(token: str, chars_max: int = _TOKEN_CHARS_MAX) -> str:
    """Return the page token. Only its issuer can check its content."""
    if len(token) > chars_max:
        raise Refused(Rule.REQUEST, "the page token is too long", limit=f"{chars_max} characters")
    return token


def check_times(since_ms: int, until_ms: int) -> None:
    """Raise if a range of times is invalid; 0 is no bound."""
    for at_ms in (since_ms, until_ms):
        if not 0 <= at_ms <= DELIVER_AT_MS_MAX:
            raise Refused(Rule.REQUEST, "the time is out of range", value=at_ms, limit=f"0 to {DELIVER_AT_MS_MAX} ms")
    if until_ms and until_ms <= since_ms:
        raise Refused(Rule.REQUEST, "the time range ends before it begins", value=until_ms)


def check_offset(offset: int) -> int:
    """Return the offset of a page of dead letters."""
    if offset < 0:
        raise Refused(Rule.REQUEST, "the offset must be 0 or more", value=offset)
    return offset


def check_entries(entries: Sequence[str]) -> tuple[str, ...]:
    """Return the named retries without duplicates, in order. Only the broker can check that they exist."""
    if not 1 <= len(entries) <= ENTRIES_MAX:
        limit = f"1 to {ENTRIES_MAX}"
        raise Refused(
            Rule.REQUEST, "the number of retries in a request is out of range", value=len(entries), limit=limit
        )
    for entry in entries:
        if not entry.strip() or len(entry) > _ENTRY_CHARS_MAX:
            raise Refused(
                Rule.REQUEST,
                "not an entry of the list of retries",
                value=entry,
                limit=f"1 to {_ENTRY_CHARS_MAX} characters",
            )
    return tuple(dict.fromkeys(entries))


def check_change(request: wire.ChangeMessagesRequest) -> str:
    """Return the change that the request asks for, as the name of its field."""
    named = len(request.message_ids) + len(request.recall_handles) + len(request.own_keys)
    if not 1 <= named <= ENTRIES_MAX:
        why = "too many messages in one request" if named else "no message is named"
        raise Refused(Rule.REQUEST, why, value=named, limit=f"1 to {ENTRIES_MAX}")
    for handle in request.recall_handles:
        if len(handle) > _HANDLE_CHARS_MAX:
            raise Refused(Rule.REQUEST, "a recall handle is too long", limit=f"{_HANDLE_CHARS_MAX} characters")
    for own_key in request.own_keys:
        check_own_key(own_key)
    kind: str | None = request.WhichOneof("change")
    if kind is None or (kind != "deliver_at_ms" and not getattr(request, kind)):
        raise Refused(Rule.REQUEST, "the request contains no change", limit="cancel, fire or deliver_at_ms")
    if kind == "deliver_at_ms":
        _check_delivery_time(request.deliver_at_ms)
    return kind


def check_filter(chosen: wire.DeadFilter) -> DeadFilter:
    """Return the filter of dead letters."""
    for given in (chosen.reasons, chosen.topics, chosen.keys, chosen.message_ids):
        if len(given) > CHOICES_MAX:
            raise Refused(Rule.REQUEST, "too many values in a filter", value=len(given), limit=CHOICES_MAX)
    for topic in chosen.topics:
        check_topic(topic)
    for key in chosen.keys:
        if not key.strip() or len(key.encode()) > PROPERTIES_BYTES_MAX:
            raise Refused(Rule.KEY, "the key is blank or too long", value=key, limit=f"{PROPERTIES_BYTES_MAX} bytes")
    for message_id in chosen.message_ids:
        check_message_id(message_id)
    check_times(chosen.since_ms, chosen.until_ms)
    return filter_of(chosen)


def check_job(request: wire.StartJobRequest) -> Job:
    """Return the requested job. Only the broker can check its group and topic."""
    group = check_group(request.group)
    chosen = check_filter(request.filter)
    _check_rate(request.rate_per_s)
    kind = {wire.REDRIVE: JobKind.REDRIVE, wire.PURGE: JobKind.PURGE}.get(request.kind)
    if kind is None:
        raise Refused(Rule.REQUEST, "unknown kind of job", value=int(request.kind), limit="REDRIVE, PURGE")
    if kind is JobKind.REDRIVE and request.why:
        raise Refused(Rule.REQUEST, "a reason is for a purge only")
    if kind is JobKind.PURGE and request.to_topic:
        raise Refused(Rule.REQUEST, "a target topic is for a redrive only", value=request.to_topic)
    if kind is JobKind.PURGE and request.all_groups:
        raise Refused(Rule.REQUEST, "a choice of groups is for a redrive only")
    if request.to_topic and request.all_groups:
        why = "a redrive goes to another topic, or to all groups of the topics they came from: not both"
        raise Refused(Rule.REQUEST, why, value=request.to_topic)
    return Job(
        job_id=0,
        kind=kind,
        group=group,
        filter=chosen,
        to_topic=check_topic(request.to_topic) if request.to_topic else "",
        all_groups=request.all_groups,
        why=_check_why(request.why) if kind is JobKind.PURGE else "",
        rate_per_s=request.rate_per_s,
    )


def check_message_job(request: wire.StartMessageJobRequest, chosen: MessageFilter) -> MessageJob:
    """Return the requested bulk change of the messages of a filter. Only the broker can check its topic."""
    _check_rate(request.rate_per_s)
    change = request.WhichOneof("change")
    if change is None or not getattr(request, change):
        limit = "cancel, fire, deliver_at_ms or delay_by_ms"
        raise Refused(Rule.REQUEST, "the request contains no change", limit=limit)
    if change == "deliver_at_ms":
        _check_delivery_time(request.deliver_at_ms)
    if not -DELIVER_AT_MS_MAX <= request.delay_by_ms <= DELIVER_AT_MS_MAX:
        limit = f"{-DELIVER_AT_MS_MAX} to {DELIVER_AT_MS_MAX} ms"
        raise Refused(Rule.DELIVERY_TIME, "the delay is out of range", value=request.delay_by_ms, limit=limit)
    kinds = {"cancel": MessageJobKind.CANCEL, "fire": MessageJobKind.FIRE}
    return MessageJob(
        job_id=0,
        kind=kinds.get(change, MessageJobKind.RESCHEDULE),
        topic=check_topic(request.topic),
        query=request.query,
        filter=chosen,
        deliver_at_ms=request.deliver_at_ms,
        delay_by_ms=request.delay_by_ms,
        rate_per_s=request.rate_per_s,
    )


def check_job_id(job_id: int) -> int:
    """Return the job id if it is valid."""
    if job_id < 1:
        raise Refused(Rule.REQUEST, "job numbers begin at 1", value=job_id)
    return job_id


def _check_rate(rate: float) -> None:
    if rate != 0 and not RATE_MIN <= rate <= RATE_MAX:  # NaN is outside as well
        limit = f"0, or {RATE_MIN:g} to {RATE_MAX:g}"
        raise Refused(Rule.REQUEST, "the rate is out of range, in messages a second", value=rate, limit=limit)


def _check_delivery_time(deliver_at_ms: int) -> None:
    if not 1 <= deliver_at_ms <= DELIVER_AT_MS_MAX:
        limit = f"1 to {DELIVER_AT_MS_MAX} ms"
        raise Refused(Rule.DELIVERY_TIME, "the delivery time is out of range", value=deliver_at_ms, limit=limit)


def _check_why(why: str) -> str:
    if not why.strip():
        raise Refused(Rule.REQUEST, "a purge needs a reason")
    if len(why) > WHY_CHARS_MAX:
        raise Refused(Rule.REQUEST, "the reason is too long", value=len(why), limit=f"{WHY_CHARS_MAX} characters")
    return why
