"""The overview, and when entries are due."""

from __future__ import annotations

from typing import Final, NamedTuple

from dmq.admin import admin_v1 as wire
from dmq.admin.client import AdminClient, NotAllowed
from dmq.console.views.screens import Query, Screen, Values, command, topic_names, word_of


class Bar(NamedTuple):
    """A bar of a histogram: its time, its number, and its height in percent."""

    until_ms: int
    entries: int
    height: float


def overview(client: AdminClient, query: Query) -> Values:
    """State of the daemon, its rates, and when entries are due."""
    return {**status_of(client), **due_of(client, "", query.get("span", "hour")), "command": command("status")}


def status_of(client: AdminClient) -> Values:
    """State and figures of the daemon, and the problems that need a person."""
    status = client.status()
    return {"status": status, "state": word_of(status, "state"), "problems": problems(status), "now_ms": status.now_ms}


def dead_of(client: AdminClient) -> int:
    """Number of dead letters of all groups."""
    return sum(group.dead for group in client.groups(with_removed=True))


def problems(status: wire.GetStatusResponse) -> list[str]:
    """Return the states that need a person, the worst first."""
    found = [status.state_reason]
    if status.disk.refuses_sends:
        found.append("Sends are refused: the disk is almost full.")
    if status.outbox.lost_rows:
        found.append(f"{status.outbox.lost_rows:,} audit events were lost.")
    if status.outbox.export_error:
        found.append(f"The audit trail is not written: {status.outbox.export_error}")
    if status.HasField("backups") and status.backups.error:
        found.append(f"The last backup failed: {status.backups.error}")
    return [each for each in found if each]


def due_of(client: AdminClient, topic: str, span: str) -> Values:
    """Entries by due time: bars of a minute for the next hour, or of an hour for the next day."""
    try:
        found = client.due_histogram(topic)
    except NotAllowed:
        return {"due": None, "bars": [], "span": span, "topic": topic, "most": 0}
    buckets = found.hours if span == "day" else found.minutes
    later = found.later + sum(each.count for each in found.hours) - sum(each.count for each in buckets)
    most = max([found.overdue, *(each.count for each in buckets)])
    bars = [Bar(each.until_ms, each.count, _height(each.count, most)) for each in buckets]
    overdue = Bar(found.now_ms, found.overdue, _height(found.overdue, most))
    return {
        "due": found,
        "bars": bars,
        "overdue": overdue,
        "later": later,
        "span": "day" if span == "day" else "hour",
        "width_ms": 3_600_000 if span == "day" else 60_000,
        "most": most,
        "topic": topic,
        "now_ms": found.now_ms,
    }


def due(client: AdminClient, query: Query) -> Values:
    """When the entries of one topic, or of all, are due."""
    topic = query.get("topic", "")
    named = [topic] if topic else []
    values = due_of(client, topic, query.get("span", "hour"))
    return {**values, "topics": topic_names(client), "command": command("ledger", *named)}


def _height(count: int, most: int) -> float:
    """Return the height of a bar in percent; a number that is not 0 is always visible."""
    return max(1.5, 100 * count / most) if count else 0


SCREENS: Final = (
    Screen("/", "overview", overview, menu="Overview"),
    Screen("/due", "due", due, menu="Due"),
)
