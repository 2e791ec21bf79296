"""Calls that the key of a person allows, for the buttons of a page. The daemon checks each call all the same."""

from __future__ import annotations

from dmq.admin.client.client import AdminClient


def allowed(client: AdminClient, *, topic: str = "", group: str = "") -> frozenset[str]:
    """Return the names of the RPCs that the key allows for a topic and a group; for any of them without a name."""
    return frozenset(client.access(topic, group).rpcs)
