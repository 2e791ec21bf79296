"""Facts for people that more than one command shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dmq.cli import output as out
from dmq.units import format_duration, format_size, format_time

if TYPE_CHECKING:
    from dmq.admin import admin_v1 as wire


def content_facts(content: wire.Content) -> list[tuple[str, str]]:
    """Return what a producer sent: one fact per field, in the order a person asks; the body only if it is there."""
    encoding = f", {content.body_encoding.lower()}" if content.body_encoding != "IDENTITY" else ""
    return [
        ("tag", content.tag),
        ("keys", " ".join(content.keys)),
        ("message group", content.message_group),
        ("properties", " ".join(f"{name}={value}" for name, value in sorted(content.properties.items()))),
        ("born", " on ".join(filter(None, (out.when(content.born_at_ms), content.born_host)))),
        ("body size", f"{content.body_bytes} B{encoding}"),
        ("body", out.body_text(content.body) if content.HasField("body") else ""),
    ]


def clock_line(clock: wire.Clock) -> str:
    """Return how the clock is, in one line."""
    last = f"; stepped by {_signed(clock.last_step_ms)} at {format_time(clock.last_step_at_ms)}" if clock.steps else ""
    if clock.is_held:
        behind = format_duration(clock.wall_ms - clock.believed_ms)
        return f"HELD {behind} behind the host's, for {format_duration(clock.steady_in_ms)} or 'dmq clock accept'{last}"
    if not clock.is_steady:
        wait = format_duration(clock.steady_in_ms)
        return f"NOT STEADY, nothing is removed by age for {wait} or until 'dmq clock accept'{last}"
    return f"steady{last}"


def _signed(ms: int) -> str:
    return ("-" if ms < 0 else "+") + format_duration(abs(ms))


def shown_quota(quota: wire.Quota) -> str:
    """Return what is used of a quota, and its limit."""
    if quota.quota.endswith("bytes"):
        return f"{format_size(quota.used)} of {format_size(quota.limit)}"
    return f"{quota.used:,} of {quota.limit:,}" + (" a second" if quota.quota.endswith("rate") else "")
