"""Bulk redrives and purges: the plan of one, and the progress and the outcomes of one that was started."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final
from urllib.parse import urlencode

from dmq.admin import admin_v1 as wire
from dmq.admin.client import AdminClient, CallRefused, NotFound
from dmq.console.views.letters import Choice, choice_in, ids_of, page_of
from dmq.console.views.screens import PAGE, Form, Query, Screen, Values, command, number_in, topic_names, word_of

SAMPLES: Final = 20
UNCONFIRMED_MAX: Final = 1_000  # messages that a bulk change may cover without the typed name of the group
_IDS_MAX: Final = 1_000  # of a filter
_KINDS: Final = {"redrive": wire.REDRIVE, "purge": wire.PURGE}


def plan(client: AdminClient, query: Query) -> Values:
    """Count the dead letters that a redrive or a purge would cover, and show the first ones; nothing is changed."""
    chosen, kind = choice_in(query), query.get("kind", "") or "redrive"
    request = _request(client, chosen, query)
    samples = page_of(client, chosen, 0, SAMPLES).letters
    request.is_dry_run = True
    request.why = "dry run" if kind == "purge" else ""
    would: wire.Job = client.start_job(request)
    return {
        "kind": kind,
        "choice": chosen,
        "would": would,
        "samples": [(each, word_of(each, "reason")) for each in samples],
        "ids_max": _IDS_MAX if chosen.error is not None and would.done == _IDS_MAX else 0,
        "must_confirm": would.done > UNCONFIRMED_MAX,
        "topics": topic_names(client),
        "to": query.get("to", ""),
        "all_groups": query.get("all_groups", ""),
        "now_ms": client.now_ms(),
        "command": command("dead", kind, chosen.group, *chosen.options, *_receivers(request), "--dry-run"),
    }


def start(client: AdminClient, fields: Query) -> str:
    """Start the job of a plan; its page shows the progress."""
    chosen = choice_in(fields)
    if number_in(fields, "count") > UNCONFIRMED_MAX and fields.get("confirm", "") != chosen.group:
        raise CallRefused(
            f"type the name of the group, {chosen.group}, to confirm more than {UNCONFIRMED_MAX:,} messages"
        )
    request = _request(client, chosen, fields)
    request.rate_per_s = rate_in(fields)
    if fields.get("kind") == "purge":
        request.why = fields.get("why", "")
    job: wire.Job = client.start_job(request)
    return "/job?" + urlencode({"id": job.job_id})


def job(client: AdminClient, query: Query) -> Values:
    """Progress of a job, and the outcome of each letter that it covers."""
    job_id, offset = number_in(query, "id"), number_in(query, "offset")
    found = next((each for each in client.jobs() if each.job_id == job_id), None)
    if found is None:
        raise NotFound(f"job {job_id} is not among the 100 newest jobs")
    first = max(offset, found.first_offset)
    page = client.dead_letters(found.group, found.filter, offset=first, limit=PAGE, with_outcome=True)
    is_past = 0 <= page.next_offset < found.end_offset
    return {
        "job": found,
        "kind": word_of(found, "kind"),
        "state": word_of(found, "state"),
        "looked": min(found.next_offset, found.end_offset) - found.first_offset,
        "size": found.end_offset - found.first_offset,
        "letters": [(each, word_of(each, "reason")) for each in page.letters if each.offset < found.end_offset],
        "next_offset": page.next_offset if is_past else -1,
        "reasons": [wire.Reason.Name(each).lower().replace("_", " ") for each in found.filter.reasons],
        "now_ms": client.now_ms(),
        "command": command("dead", "jobs", found.group),
    }


def change_job(client: AdminClient, fields: Query) -> str:
    """Stop or resume a job; its page shows its state."""
    return "/job?" + urlencode({"id": changed_job(fields, {"stop": client.stop_job, "resume": client.resume_job})})


def changed_job(fields: Query, calls: Mapping[str, Callable[[int], object]]) -> int:
    """Change a job with one of the calls; return its number."""
    job_id, change = number_in(fields, "id"), fields.get("change", "")
    if change not in calls:
        raise CallRefused(f"unknown change {change!r:.40}; expected {' or '.join(calls)}")
    calls[change](job_id)
    return job_id


def _request(client: AdminClient, chosen: Choice, query: Query) -> wire.StartJobRequest:
    """Return the request of a choice. Letters with one type of error are named one by one."""
    kind = query.get("kind", "") or "redrive"
    if kind not in _KINDS:
        raise CallRefused(f"unknown kind {kind!r:.40}; expected redrive or purge")
    named = chosen.filter
    if chosen.error is not None:
        named.message_ids.extend(ids_of(client, chosen, _IDS_MAX))
        if not named.message_ids:
            raise NotFound(f"group {chosen.group} has no dead letter with this error")
    return wire.StartJobRequest(
        kind=_KINDS[kind],
        group=chosen.group,
        filter=named,
        to_topic=query.get("to", ""),
        all_groups=query.get("all_groups", "") == "1",
    )


def _receivers(request: wire.StartJobRequest) -> list[str]:
    """Return the options of ``dmq dead redrive``."""
    return ["--to", request.to_topic] if request.to_topic else ["--all-groups"] * request.all_groups


def rate_in(fields: Query) -> float:
    """Return the rate of a form in messages per second; 0 for no limit."""
    text = fields.get("rate", "").strip()
    try:
        rate = float(text or 0)
    except ValueError:
        rate = math.nan
    if not 0 <= rate < math.inf:
        raise CallRefused(f"invalid rate {text!r:.40}; expected messages per second, or none for no limit")
    return rate


SCREENS: Final = (
    Screen("/bulk", "bulk", plan, parent="/dead"),
    Screen("/job", "job", job, parent="/dead", is_live=True),
)
FORMS: Final = (
    Form("/bulk", start, "started in the console"),
    Form("/job", change_job, "changed in the console"),
)
