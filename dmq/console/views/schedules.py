"""Recurring messages: the list, one schedule, and its changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final
from urllib.parse import urlencode

from dmq.admin import admin_v1 as wire
from dmq.admin.client import AdminClient, CallRefused, NotAllowed
from dmq.config.units import parse_duration
from dmq.console.views.screens import PAGE, Form, Query, Screen, Values, body_in, command, is_unmasked, topic_names


def schedules(client: AdminClient, query: Query) -> Values:
    """A page of the schedules, by name."""
    topic = query.get("topic", "")
    page = client.schedules(topic=topic, token=query.get("token", ""), limit=PAGE)
    return {
        "schedules": page.schedules,
        "token": page.next_token,
        "topic": topic,
        "topics": topic_names(client),
        "now_ms": client.now_ms(),
        "command": command("cron", "ls", *(["--topic", topic] if topic else [])),
    }


def schedule(client: AdminClient, query: Query) -> Values:
    """One schedule: its rule, its next times and its message."""
    name = query.get("name", "")
    try:
        found, is_hidden = client.schedule(name, True, is_unmasked(query)), False
    except NotAllowed:  # a key without the right to read bodies may still read the rest
        found, is_hidden = client.schedule(name, False), True
    return {
        "found": found,
        "body": None if is_hidden else body_in(found.content, query),
        "is_hidden": is_hidden,
        "now_ms": client.now_ms(),
        "command": command("cron", "show", name),
    }


def _add(client: AdminClient, fields: Query) -> str:
    made = wire.Schedule(name=fields["name"], topic=fields["topic"], catch_up=fields["catch_up"])
    if bool(fields["every"]) == bool(fields["cron"]):
        raise CallRefused("give an interval or a cron expression, and not both")
    if fields["every"]:
        try:
            made.interval_ms = parse_duration(fields["every"])
        except ValueError as error:
            raise CallRefused(f"interval {fields['every']!r:.40}: {error}") from None
    made.cron, made.time_zone = fields["cron"], fields["zone"]
    made.content.body, made.content.tag = fields["body"].encode(), fields["tag"]
    return _page_of(client.add_schedule(made).schedule)


def _pause(client: AdminClient, fields: Query) -> str:
    return _page_of(client.pause_schedule(fields["name"]))


def _resume(client: AdminClient, fields: Query) -> str:
    return _page_of(client.resume_schedule(fields["name"]))


def _remove(client: AdminClient, fields: Query) -> str:
    client.remove_schedule(fields["name"])
    return "/schedules"


def _page_of(found: wire.Schedule) -> str:
    return "/schedule?" + urlencode({"name": found.name})


def _form(change: str, act: Callable[[AdminClient, Query], str], done: str) -> Form:
    return Form(f"/schedules/{change}", act, f"{done} in the console")


SCREENS: Final = (
    Screen("/schedules", "schedules", schedules, menu="Schedules", is_live=True),
    Screen("/schedule", "schedule", schedule, parent="/schedules"),
)
FORMS: Final = (
    _form("add", _add, "added"),
    _form("pause", _pause, "paused"),
    _form("resume", _resume, "resumed"),
    _form("remove", _remove, "removed"),
)
