"""Consumer groups."""

from __future__ import annotations

from typing import Final

from dmq.admin.client import AdminClient
from dmq.console.views.screens import Query, Screen, Values, command


def groups(client: AdminClient, query: Query) -> Values:  # noqa: ARG001 - the signature of a view
    """All consumer groups."""
    return {"groups": client.groups(), "now_ms": client.now_ms(), "command": command("group", "ls")}


def group(client: AdminClient, query: Query) -> Values:
    """One consumer group: its lag in each topic and its retry policy."""
    name = query.get("name", "")
    found = client.group(name, True)
    return {"found": found, "now_ms": client.now_ms(), "command": command("group", "show", name)}


SCREENS: Final = (
    Screen("/groups", "groups", groups, menu="Groups"),
    Screen("/group", "group", group, parent="/groups"),
)
