"""Clients of the public protocol, and the thread stacks of one."""

from __future__ import annotations

from typing import Final

from dmq.admin.client import AdminClient, NotFound
from dmq.console.views.screens import Query, Screen, Values, command


def clients(client: AdminClient, query: Query) -> Values:
    """Clients that were active within the last two minutes, all or those of a group."""
    group = query.get("group", "")
    return {
        "clients": client.clients(group),
        "group": group,
        "now_ms": client.now_ms(),
        "command": command("client", "ls", *(["--group", group] if group else [])),
    }


def client_page(client: AdminClient, query: Query) -> Values:
    """One client, with its thread stacks on request."""
    client_id = query.get("id", "")
    found = [each for each in client.clients("") if each.client_id == client_id]
    if not found:
        raise NotFound(f"client {client_id!r:.100} has not been active within the last two minutes")
    return {
        "found": found,
        "client_id": client_id,
        "can_answer": any(each.streams for each in found),
        "stack": client.client_stack(client_id) if query.get("stack") else None,
        "now_ms": client.now_ms(),
        "command": command("client", "stack", client_id),
    }


SCREENS: Final = (
    Screen("/clients", "clients", clients, menu="Clients", is_live=True),
    Screen("/client", "client", client_page, parent="/clients"),
)
