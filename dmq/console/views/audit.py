"""Audits: the newest report, the run of a new one, the trail, and the verification of the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple
from urllib.parse import urlencode

from dmq.admin import admin_v1 as wire
from dmq.admin.client import AdminClient, CallFailed, CallRefused, NotFound
from dmq.config.units import format_time
from dmq.console.shown import count, duration
from dmq.console.views.daemon import state_of
from dmq.console.views.screens import Form, Query, Screen, Values, command, number_in, word_of

_HOUR_MS: Final = 3_600_000
_DAY_MS: Final = 24 * _HOUR_MS
DAYS_MAX: Final = 14
# By state of an hour: its words, and the letter on it, so that colour is not needed. As in the report.
HOUR_STATES: Final = {
    "clean": ("clean", ""),
    "few_late": ("late, early, overdue or twice: less than 1 %", "t"),
    "late": ("the same: 1 % and more", "T"),
    "inconclusive": ("inconclusive", "?"),
    "lost": ("lost", "L"),
    "waiting": ("not due yet", ""),
}
_COUNTS: Final = (
    "accepted_at_once", "scheduled", "fired", "cancelled", "expired", "pending", "overdue", "lost", "inconclusive",
    "late", "early", "duplicated",
)  # fmt: skip


class HourField(NamedTuple):
    """Field of the heat map. ``state`` is empty for an hour without messages."""

    hour: int  # 0 to 23
    state: str
    letter: str
    words: str


class HeatMap(NamedTuple):
    """Hours by day, the oldest day first, and the states that occur."""

    days: Sequence[tuple[str, Sequence[HourField]]]
    states: Sequence[str]


def audit(client: AdminClient, query: Query) -> Values:
    """The newest report, the last audit, the trail, and the verification of the ledger that the address names."""
    number = number_in(query, "verification")
    verification, is_forgotten = None, False
    if number:
        try:
            verification = client.verify_ledger(number)
        except NotFound:
            is_forgotten = True
    try:
        found, why_none = client.audit(), ""
    except (CallRefused, CallFailed) as error:
        found, why_none = wire.GetAuditResponse(), str(error)
    return {
        **state_of(client),
        "audit": found,
        "why_none": why_none,
        "report": found.report if found.HasField("report") else None,
        "run": found.run if found.HasField("run") else None,
        "run_state": word_of(found.run, "state") if found.HasField("run") else "",
        "heat_map": heat_map(found.report.hours),
        "hour_states": HOUR_STATES,
        "verification": verification,
        "is_forgotten": is_forgotten,
        "command": command("audit", "run", "--out", "report"),
    }


def heat_map(hours: Sequence[wire.AuditHour]) -> HeatMap | None:
    """Return the days of the hours with messages, the last ``DAYS_MAX`` of them; None without any hour."""
    by_start = {each.start_ms // _HOUR_MS: each for each in hours}
    if not by_start:
        return None
    last_day = max(by_start) // 24
    first_day = max(min(by_start) // 24, last_day - DAYS_MAX + 1)
    days = [
        (format_time(day * _DAY_MS)[:10], [_field(hour, by_start.get(24 * day + hour), day) for hour in range(24)])
        for day in range(first_day, last_day + 1)
    ]
    there = {field.state for _, fields in days for field in fields}
    return HeatMap(days, [each for each in HOUR_STATES if each in there])


def _field(hour: int, found: wire.AuditHour | None, day: int) -> HourField:
    at = f"{format_time(day * _DAY_MS)[:10]} {hour:02}:00 to {hour + 1:02}:00 UTC"
    if found is None:
        return HourField(hour, "", "", f"{at}: no messages")
    words, letter = HOUR_STATES.get(found.state, (found.state, "!"))
    there = [(name.replace("_", " "), number) for name in _COUNTS if (number := getattr(found, name))]
    counts = ", ".join(f"{name} {count(number)}" for name, number in there)
    latest = f", latest by {duration(found.lateness_max_ms)}" if found.lateness_max_ms else ""
    state = found.state if found.state in HOUR_STATES else "unknown"
    return HourField(hour, state, letter, f"{at}: {words}; {counts}{latest}")


def _start(client: AdminClient, fields: Query) -> str:  # noqa: ARG001 - the signature of a change
    client.start_audit()
    return "/audit"


def _verify(client: AdminClient, fields: Query) -> str:  # noqa: ARG001 - the signature of a change
    return "/audit?" + urlencode({"verification": client.verify_ledger(0).number})


SCREENS: Final = (Screen("/audit", "audit", audit, menu="Audit", is_live=True),)
FORMS: Final = (
    Form("/audit/run", _start, "started in the console"),
    Form("/audit/verify", _verify, "verified in the console"),
)
