"""Parts of the daemon, from its status: the scheduler, and the store with its copies."""

from __future__ import annotations

from typing import Final

from dmq.admin.client import AdminClient
from dmq.console.views.overview import problems
from dmq.console.views.screens import Query, Screen, Values, command


def scheduler(client: AdminClient, query: Query) -> Values:  # noqa: ARG001 - the signature of a view
    """Position of the scheduler, its commits, the processes, the clock, and the cluster if there is one."""
    return {**state_of(client), "command": command("status")}


def store(client: AdminClient, query: Query) -> Values:  # noqa: ARG001 - the signature of a view
    """The store, its commits, its backups and its second copy."""
    return {**state_of(client), "command": command("status")}


def state_of(client: AdminClient) -> Values:
    """Return the status of the daemon, and its problems."""
    status = client.status()
    return {"status": status, "problems": problems(status), "now_ms": status.now_ms}


SCREENS: Final = (
    Screen("/scheduler", "scheduler", scheduler, menu="Scheduler", is_live=True),
    Screen("/store", "store", store, menu="Store", is_live=True),
)
