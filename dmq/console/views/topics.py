"""Topics."""

from __future__ import annotations

from typing import Final

from dmq.admin.client import AdminClient
from dmq.console.views.overview import due_of
from dmq.console.views.screens import Query, Screen, Values, command


def topics(client: AdminClient, query: Query) -> Values:  # noqa: ARG001 - the signature of a view
    """All topics."""
    return {"topics": client.topics(), "now_ms": client.now_ms(), "command": command("topic", "ls")}


def topic(client: AdminClient, query: Query) -> Values:
    """One topic: its queues, its readers, and when its messages are due."""
    name = query.get("name", "")
    found = client.topic(name)
    values = due_of(client, "" if name.startswith("%") else name, query.get("span", "hour"))
    return {**values, "found": found, "now_ms": client.now_ms(), "command": command("topic", "show", name)}


SCREENS: Final = (
    Screen("/topics", "topics", topics, menu="Topics"),
    Screen("/topic", "topic", topic, parent="/topics"),
)
