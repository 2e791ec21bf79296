"""Messages of a topic, one message, and the changes of pending ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Final
from urllib.parse import urlencode

from broker_adapter.runtime.clock import SystemClock
from dmq.admin import admin_v1 as wire
from dmq.admin.client import AdminClient, CallRefused, NotAllowed
from dmq.admin.requests.message_query import QueryRefused, completions, resolve
from dmq.config.units import After, parse_when
from dmq.console.views.message_jobs import jobs_of
from dmq.console.views.screens import (
    CALLS_PER_PAGE_MAX,
    PAGE,
    Form,
    Query,
    Screen,
    Values,
    body_in,
    command,
    is_unmasked,
    number_in,
    topic_names,
    word_of,
)

_JOBS_SHOWN: Final = 5
_GROUPS_MAX: Final = 20  # of one page whose retry policies are read
EXAMPLES: Final = ("state:waiting", "state:queued", "state:held", "due-before:+1h", "order:newest")
_CHANGES: Final = ("cancel", "fire", "reschedule")
_OUTCOMES: Final = frozenset(name.lower() for name in wire.ChangedMessage.Outcome.keys())  # noqa: SIM118 - an enum


def messages(client: AdminClient, query: Query) -> Values:
    """A page of the messages of a topic."""
    topic, text = query.get("topic", ""), " ".join(query.get("q", "").split())
    values: Values = {
        "topics": topic_names(client),
        "query": query,
        "text": text,
        "examples": EXAMPLES,
        "messages": [],
        "token": "",
        "now_ms": 0,
        "problem": "",
        "caret": "",
        "change": query.get("change", "") if query.get("change", "") in _CHANGES else "",
        "outcomes": _outcomes_in(query),
        "jobs": [],
        "has_pending": False,
        "command": command("msg", "ls", topic, *(["--query", text] if text else []))
        if topic
        else command("topic", "ls"),
    }
    request = wire.ListMessagesRequest(topic=topic, query=text, token=query.get("token", ""))
    try:
        resolve(request, SystemClock().now_ms())
    except QueryRefused as error:
        return {**values, "problem": error.why, "caret": " " * (error.position - 1) + "^", "status_code": 400}
    if not topic:
        return values
    if topic not in values["topics"]:
        near = get_close_matches(topic, values["topics"], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return {**values, "problem": f"There is no topic {topic}{hint}", "status_code": 404}
    found = list[wire.ListedMessage]()
    for _ in range(CALLS_PER_PAGE_MAX):
        request.limit = PAGE - len(found)
        page = client.messages(request)
        found += page.messages
        request.token = page.next_token
        if len(found) == PAGE or not page.next_token:
            break
    return {
        **values,
        "messages": [(each, "held" if each.is_held else word_of(each, "state")) for each in found],
        # All pages of a list have the same columns, so only a list of one page may be without the choice.
        "has_pending": bool(request.token or query.get("token")) or any(each.state == wire.WAITING for each in found),
        "token": request.token,
        "now_ms": client.now_ms(),
        "jobs": jobs_of(client, topic, _JOBS_SHOWN) if not query.get("token", "") else [],
    }


def complete(client: AdminClient, query: Query) -> Values:  # noqa: ARG001 - the signature of a view
    """Queries that continue the one in the field."""
    return {"options": completions(query.get("q", "")), "command": ""}


def message(client: AdminClient, query: Query) -> Values:
    """One message: its state, that of each group, its changes and its body."""
    topic, message_id = query.get("topic", ""), query.get("id", "")
    try:
        found, is_hidden = client.message(topic, message_id, True, unmasked=is_unmasked(query)), False
    except NotAllowed:  # a key without the right to read bodies may still read the state
        found, is_hidden = client.message(topic, message_id, False), True
    change, outcome = query.get("change", ""), query.get("outcome", "")
    return {
        "message": found,
        "state": "held" if found.is_held else word_of(found, "state"),
        "groups": [(each, word_of(each, "state"), _attempts_max(client, each)) for each in found.groups[:_GROUPS_MAX]],
        "groups_left": max(0, len(found.groups) - _GROUPS_MAX),
        "body": body_in(found.content, query) if found.HasField("content") and not is_hidden else None,
        "is_hidden": is_hidden,
        "change": change if change in _CHANGES and outcome in _OUTCOMES else "",
        "outcome": outcome,
        "outcome_at_ms": number_in(query, "at_ms"),
        "held_by": query.get("held_by", ""),
        "query": query,
        "now_ms": client.now_ms(),
        "command": command("msg", "get", topic, message_id),
    }


def change_message(client: AdminClient, fields: Query) -> str:
    """Cancel, deliver or reschedule one message; its page shows the outcome, and its state if it had changed."""
    topic, message_id = fields.get("topic", ""), fields.get("id", "")
    (changed,) = _changed(client, fields, [message_id])
    result = {"change": fields["change"], "outcome": word_of(changed, "outcome"), "at_ms": changed.at_ms}
    held = {"held_by": word_of(changed, "held_by")} if changed.held_by else {}
    return "/message?" + urlencode({"topic": topic, "id": message_id, **result, **held})


def change_messages(client: AdminClient, fields: Query) -> str:
    """Cancel, deliver or reschedule the chosen messages; their list shows the number of each outcome."""
    ids = [each for each in fields.get("entry", "").split("\n") if each]
    if not ids:
        raise CallRefused("no message is chosen")
    counted = Counter(word_of(each, "outcome") for each in _changed(client, fields, ids))
    outcomes = ",".join(f"{outcome}:{number}" for outcome, number in counted.most_common())
    kept = {name: fields.get(name, "") for name in ("topic", "q", "change")}
    return "/messages?" + urlencode({**kept, "outcomes": outcomes})


def _changed(client: AdminClient, fields: Query, ids: Sequence[str]) -> Sequence[wire.ChangedMessage]:
    topic, change = fields.get("topic", ""), fields.get("change", "")
    match change:
        case "cancel":
            return client.cancel(topic, ids)
        case "fire":
            return client.fire(topic, ids)
        case "reschedule":
            return client.reschedule(topic, ids, deliver_at_ms=_deliver_at_ms(client, fields))
    raise CallRefused(f"unknown change {change!r:.40}; expected {', '.join(_CHANGES)}")


def _outcomes_in(query: Query) -> list[tuple[str, int]]:
    """Return the outcomes of an address with their numbers; anything else in it is left out."""
    pairs = (each.partition(":") for each in query.get("outcomes", "").split(","))
    return [(name, int(number)) for name, _, number in pairs if name in _OUTCOMES and number.isdecimal()]


def _deliver_at_ms(client: AdminClient, fields: Query) -> int:
    try:
        when = parse_when(fields.get("at", ""))
    except ValueError as error:
        raise CallRefused(f"invalid delivery time {fields.get('at', '')!r:.60}: {error}") from None
    return client.now_ms() + when.delay_ms if isinstance(when, After) else when.epoch_ms


def _attempts_max(client: AdminClient, group: wire.GroupState) -> int:
    """Return the attempts that the policy of the group allows; 0 without another one, or if the key may not read it."""
    if group.state not in {wire.RETRYING, wire.LEASED, wire.READY}:
        return 0
    try:
        return client.group(group.group).policy.max_attempts
    except CallRefused:
        return 0


SCREENS: Final = (
    Screen("/messages", "messages", messages, menu="Messages"),
    Screen("/complete", "complete", complete, parent="/messages"),
    Screen("/message", "message", message, parent="/messages"),
)
FORMS: Final = (
    Form("/message", change_message, "changed in the console"),
    Form("/messages", change_messages, "changed in the console"),
)
