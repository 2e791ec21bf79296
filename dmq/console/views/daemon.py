"""Parts of the daemon, from its status: the scheduler, the store with its copies, and the audit trail."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlencode

from dmq.admin.client.client import AdminClient, NotFound
from dmq.console.views.overview import problems
from dmq.console.views.screens import Form, Query, Screen, Values, command, number_in


def scheduler(client: AdminClient, query: Query) -> Values:  # noqa: ARG001 - the signature of a view
    """Position of the scheduler, its commits, the processes, the clock, and the cluster if there is one."""
    return {**_status(client), "command": command("status")}


def store(client: AdminClient, query: Query) -> Values:  # noqa: ARG001 - the signature of a view
    """The store, its commits, its backups and its second copy."""
    return {**_status(client), "command": command("status")}


def audit(client: AdminClient, query: Query) -> Values:
    """The audit trail, its gaps, and the verification of the ledger that the address names."""
    number = number_in(query, "verification")
    verification, is_forgotten = None, False
    if number:
        try:
            verification = client.verify_ledger(number)
        except NotFound:
            is_forgotten = True
    return {
        **_status(client),
        "verification": verification,
        "is_forgotten": is_forgotten,
        "command": command("audit", "run", "--out", "report"),
    }


def _status(client: AdminClient) -> Values:
    status = client.status()
    return {"status": status, "problems": problems(status), "now_ms": status.now_ms}


def _verify(client: AdminClient, fields: Query) -> str:  # noqa: ARG001 - the signature of a change
    return "/audit?" + urlencode({"verification": client.verify_ledger(0).number})


SCREENS: Final = (
    Screen("/scheduler", "scheduler", scheduler, menu="Scheduler", is_live=True),
    Screen("/store", "store", store, menu="Store", is_live=True),
    Screen("/audit", "audit", audit, menu="Audit", is_live=True),
)
FORMS: Final = (Form("/audit/verify", _verify, "verified in the console"),)
