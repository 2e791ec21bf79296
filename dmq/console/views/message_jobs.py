"""Bulk changes of pending messages: the plan of one, and the progress and the outcomes of one that was started."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import urlencode

from dmq.admin import admin_v1 as wire
from dmq.admin.client import AdminClient, CallRefused, NotFound
from dmq.config.units import After, format_duration, format_time, parse_around
from dmq.console.views.jobs import UNCONFIRMED_MAX, changed_job, rate_in
from dmq.console.views.screens import PAGE, Form, Query, Screen, Values, command, number_in, topic_names, word_of

# The command of a change, its option with the value, and the word for a changed message.
_COMMANDS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "cancel": ("recall", ""),
        "fire": ("fire", ""),
        "reschedule": ("reschedule", "--at"),
        "move": ("reschedule", "--by"),
    }
)
_DEFAULTS: Final[Mapping[str, str]] = MappingProxyType({"reschedule": "+1h", "move": "+1h"})


def plan(client: AdminClient, query: Query) -> Values:
    """Count the messages that a change would cover, and show the first ones; nothing is changed."""
    request = _request(client, query)
    request.is_dry_run = True
    would = client.start_message_job(request)
    change, value = _change_in(query), _value_in(query)
    verb, option = _COMMANDS[change]
    selection = ["--query", request.query] if request.query else ["--all"]
    return {
        "topic": request.topic,
        "q": request.query,
        "change": change,
        "value": value,
        "job": would.job,
        "samples": [(each, "held" if each.is_held else "waiting") for each in would.samples],
        "must_confirm": would.job.selected > UNCONFIRMED_MAX,
        "topics": topic_names(client),
        "now_ms": client.now_ms(),
        "command": command(
            "msg", verb, request.topic, *([f"{option}={value}"] if option else []), *selection, "--dry-run"
        ),
    }


def start(client: AdminClient, fields: Query) -> str:
    """Start the job of a plan; its page shows the progress."""
    request = _request(client, fields)
    if number_in(fields, "count") > UNCONFIRMED_MAX and fields.get("confirm", "") != request.topic:
        text = f"type the name of the topic, {request.topic}, to confirm more than {UNCONFIRMED_MAX:,} messages"
        raise CallRefused(text)
    request.rate_per_s = rate_in(fields)
    return "/message-job?" + urlencode({"id": client.start_message_job(request).job.job_id})


def job(client: AdminClient, query: Query) -> Values:
    """Progress of a job, and the outcome of each message that it selected."""
    job_id, offset = number_in(query, "id"), number_in(query, "offset")
    found = next((each for each in client.message_jobs() if each.job_id == job_id), None)
    if found is None:
        raise NotFound(f"job {job_id} is not among the 100 newest jobs")
    only_missed = query.get("missed", "") == "1"
    request = wire.ListMessageJobOutcomesRequest(job_id=job_id, offset=offset, limit=PAGE, only_missed=only_missed)
    page = client.message_job_outcomes(request)
    return {
        "job": found,
        "change": found.WhichOneof("change"),
        "state": word_of(found, "state"),
        "only_missed": only_missed,
        "messages": [(each, word_of(each, "outcome")) for each in page.messages],
        "next_offset": page.next_offset,
        "now_ms": client.now_ms(),
        "command": command("msg", "outcomes", str(job_id), *(["--missed"] if only_missed else [])),
    }


def change_job(client: AdminClient, fields: Query) -> str:
    """Stop or resume a job; its page shows its state."""
    calls = {"stop": client.stop_message_job, "resume": client.resume_message_job}
    return "/message-job?" + urlencode({"id": changed_job(fields, calls)})


def jobs_of(client: AdminClient, topic: str, limit: int) -> list[tuple[wire.MessageJob, str, str]]:
    """Return the newest jobs of a topic, with their changes and states."""
    return [(each, change_text(each), word_of(each, "state")) for each in client.message_jobs(topic)[:limit]]


def change_text(found: wire.MessageJob) -> str:
    """Return the change of a job as a text."""
    match found.WhichOneof("change"):
        case "deliver_at_ms":
            return f"reschedule to {format_time(found.deliver_at_ms)}"
        case "delay_by_ms":
            return f"move by {'+' if found.delay_by_ms > 0 else '-'}{format_duration(abs(found.delay_by_ms))}"
        case "fire":
            return "deliver now"
        case _:
            return "cancel"


def _request(client: AdminClient, query: Query) -> wire.StartMessageJobRequest:
    return wire.StartMessageJobRequest(
        topic=query.get("topic", ""), query=" ".join(query.get("q", "").split()), **_fields(client, query)
    )


def _fields(client: AdminClient, query: Query) -> dict[str, Any]:
    """Return the field of the request that the change means."""
    change, value = _change_in(query), _value_in(query)
    if change in {"cancel", "fire"}:
        return {change: True}
    try:
        when = parse_around(value)
    except ValueError as error:
        raise CallRefused(f"invalid time {value!r:.60}: {error}") from None
    if change == "reschedule":
        return {"deliver_at_ms": client.now_ms() + when.delay_ms if isinstance(when, After) else when.epoch_ms}
    if not isinstance(when, After) or not when.delay_ms:
        raise CallRefused(f"invalid offset {value!r:.60}; expected for example +1h or -30m")
    return {"delay_by_ms": when.delay_ms}


def _change_in(query: Query) -> str:
    change = query.get("change", "") or "cancel"
    if change not in _COMMANDS:
        raise CallRefused(f"unknown change {change!r:.40}; expected {', '.join(_COMMANDS)}")
    return change


def _value_in(query: Query) -> str:
    return query.get("value", "").strip() or _DEFAULTS.get(_change_in(query), "")


SCREENS: Final = (
    Screen("/bulk-change", "bulk_change", plan, parent="/messages"),
    Screen("/message-job", "message_job", job, parent="/messages", is_live=True),
)
FORMS: Final = (
    Form("/bulk-change", start, "started in the console"),
    Form("/message-job", change_job, "changed in the console"),
)
