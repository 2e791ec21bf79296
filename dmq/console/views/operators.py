"""Operators: the activity log, the settings of the daemon, and quotas."""

from __future__ import annotations

from typing import Final

from dmq.admin import admin_v1 as wire
from dmq.admin.client import AdminClient, CallRefused
from dmq.config.units import parse_duration, parse_size
from dmq.console.views.screens import PAGE, Form, Query, Screen, Values, command, number_in

QUOTAS: Final = (
    *("topics", "groups", "schedules", "subscriptions", "new_per_min", "streams", "watches", "polls", "sends_per_s"),
    "bytes",
)


def activity(client: AdminClient, query: Query) -> Values:
    """A page of the activity log, newest first."""
    key, since, now_ms = query.get("key", ""), query.get("since", ""), client.now_ms()
    try:
        since_ms = now_ms - parse_duration(since) if since else 0
    except ValueError as error:
        raise CallRefused(f"since={since!r:.40}: {error}") from None
    page = client.activity(since_ms=since_ms, key=key, before=number_in(query, "before"), limit=PAGE)
    options = [
        part for name, value in (("--key", key), ("--since", since and f"-{since}")) if value for part in (name, value)
    ]
    return {
        "activities": page.activities,
        "next_before": page.next_before,
        "query": query,
        "now_ms": now_ms,
        "command": command("activity", "ls", *options),
    }


def settings(client: AdminClient, query: Query) -> Values:
    """Settings with their sources, all or those with another source than the defaults."""
    found, is_all = client.settings(), query.get("all") == "1"
    changed = [each for each in found if each.source != "default"]
    return {
        "settings": found if is_all else changed,
        "is_all": is_all,
        "changed_count": len(changed),
        "all_count": len(found),
        "command": command("config", "show", "--source"),
    }


def quotas(client: AdminClient, query: Query) -> Values:
    """Quotas in use, and those that an operator set."""
    return {
        "quotas": [(each, _share(each)) for each in client.quotas()],
        "names": QUOTAS,
        "query": query,
        "command": command("quota", "ls"),
    }


def _share(quota: wire.Quota) -> float | None:
    """Return the used share of a limit in percent; None without a limit."""
    if not quota.HasField("limit"):
        return None
    return min(100.0, 100 * quota.used / quota.limit) if quota.limit else 100.0


def _set_quota(client: AdminClient, fields: Query) -> str:
    text = fields["limit"].strip()
    try:
        limit = None if not text else int(text) if text.isascii() and text.isdigit() else parse_size(text)
    except ValueError as error:
        raise CallRefused(f"limit {text!r:.40}: {error}") from None
    client.set_quota(fields["kind"], fields["name"], fields["quota"], limit)
    return "/quotas"


SCREENS: Final = (
    Screen("/activity", "activity", activity, menu="Activity", is_live=True),
    Screen("/settings", "settings", settings, menu="Settings"),
    Screen("/quotas", "quotas", quotas, menu="Quotas", is_live=True),
)
FORMS: Final = (Form("/quotas/set", _set_quota, "set in the console"),)
