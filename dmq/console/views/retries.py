"""Pending retries of each group, and their changes."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlencode

from dmq.admin import admin_v1 as wire
from dmq.admin.client import AdminClient, CallRefused, NotAllowed
from dmq.console.views.screens import CALLS_PER_PAGE_MAX, PAGE, Form, Query, Screen, Values, command, number_in

_CHANGES: Final = ("run-now", "to-dead")


def retries(client: AdminClient, query: Query) -> Values:
    """Groups with pending retries, or a page of the retries of one group by due time."""
    group, topic = query.get("group", ""), query.get("topic", "")
    try:
        groups = sorted((each for each in client.groups() if each.waiting), key=lambda each: -each.waiting)
    except NotAllowed:
        if not group:
            raise
        groups = []
    if not group:
        return {"groups": groups, "group": "", "now_ms": client.now_ms(), "command": command("retry", "stats")}
    found, token = list[wire.WaitingRetry](), query.get("token", "")
    for _ in range(CALLS_PER_PAGE_MAX):
        page = client.retries(group, topic=topic, token=token, limit=PAGE - len(found))
        found += page.retries
        token = page.next_token
        if len(found) == PAGE or not token:
            break
    of_group = client.group(group)
    change = query.get("change", "")
    return {
        "groups": groups,
        "group": group,
        "waiting": of_group.waiting,
        "attempts_max": of_group.policy.max_attempts,
        "topics": sorted({each.topic for each in of_group.lags if each.in_retry} | ({topic} - {""})),
        "topic": topic,
        "retries": found,
        "token": token,
        "change": change if change in _CHANGES else "",
        "moved": number_in(query, "moved"),
        "gone": number_in(query, "gone"),
        "now_ms": client.now_ms(),
        "command": command("retry", "ls", group, *(["--topic", topic] if topic else [])),
    }


def change_retries(client: AdminClient, fields: Query) -> str:
    """Start the next attempt of the chosen retries now, or make dead letters of them."""
    group, topic, change = fields.get("group", ""), fields.get("topic", ""), fields.get("change", "")
    entries = fields.get("entry", "").split()
    if not entries:
        raise CallRefused("no retry is chosen")
    if change not in _CHANGES:
        raise CallRefused(f"unknown change {change!r:.40}; expected {' or '.join(_CHANGES)}")
    answer = client.run_retries_now(group, entries) if change == "run-now" else client.end_retries(group, entries)
    result = {"change": change, "moved": answer.moved, "gone": answer.gone}
    return "/retries?" + urlencode({"group": group} | ({"topic": topic} if topic else {}) | result)


SCREENS: Final = (Screen("/retries", "retries", retries, menu="Retries"),)
FORMS: Final = (Form("/retries", change_retries, "changed in the console"),)
