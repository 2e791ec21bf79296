"""Facts that several commands show in their text output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from dmq.cli.output import output as out
from dmq.config.units import format_duration, format_size, format_time
from retry.failure_reason import NOT_REPORTED, FailureReason

if TYPE_CHECKING:
    from dmq.admin import admin_v1 as wire


def content_facts(content: wire.Content) -> list[tuple[str, str]]:
    """Return the fields of a sent message, one fact each, most important first; the body only if it is included."""
    encoding = f", {content.body_encoding.lower()}" if content.body_encoding != "IDENTITY" else ""
    return [
        ("tag", content.tag),
        ("keys", " ".join(content.keys)),
        ("message group", content.message_group),
        ("properties", " ".join(f"{name}={value}" for name, value in sorted(content.properties.items()))),
        ("born", " on ".join(filter(None, (out.when(content.born_at_ms), content.born_host)))),
        ("body size", f"{content.body_bytes} B{encoding}"),
        ("body", out.body_text(content.body) if content.HasField("body") else ""),
        ("masked", masking_of(content)),
    ]


def masking_of(content: wire.Content) -> str:
    """Return the mask of a message; empty if it has none."""
    word = content.Masking.Name(content.masking).lower()
    by = "by a rule of the daemon (redact); --unmasked shows it to an admin key"
    return {"fields": f"*** stands for values, {by}", "body": f"the body is hidden {by}"}.get(word, "")


def flow_word(found: wire.Topic | wire.Group) -> str:
    """Return one word for the state of a topic or a group: removed, paused, its rate, or active."""
    if getattr(found, "is_removed", False):
        return "removed"
    if found.paused_since_ms:
        return "paused"
    return f"{found.deliver_rate:,}/s" if found.deliver_rate else "active"


def reason_of(failure: wire.FailureReason) -> FailureReason:
    """Return the failure reason of a delivery as a value."""
    return FailureReason(failure.error_type, failure.error_text, failure.host, failure.client_id, failure.address)


def failure_facts(failure: wire.FailureReason) -> list[tuple[str, str]]:
    """Return the failure reason of a delivery, and the client that reported it."""
    reason = reason_of(failure)
    return [("error", reason.error or NOT_REPORTED), ("failed by", reason.client)]


def unread_fact(group: wire.Group) -> str:
    """Return the number of unfinished messages of a group and the age of the oldest; empty if unknown."""
    if not group.HasField("unread_messages"):
        return ""
    oldest = shown_age(group, group.unread_messages)
    return f"{group.unread_messages:,}" + (f", the oldest for {oldest}" if oldest else "")


def shown_age(lag: wire.Group | wire.Lag | wire.Reader, unread: int) -> str:
    """Return the age of the oldest unread message; empty if there is none or it is unknown."""
    return out.about(lag.oldest_unread_age_ms) if unread and lag.HasField("oldest_unread_age_ms") else ""


def show_lags(heading: str, lags: Sequence[tuple[str, wire.Lag | wire.Reader]]) -> None:
    """Print the lag of groups, one line per topic or group."""
    columns = ("UNREAD", "OLDEST", "IN FLIGHT", "IN RETRY", "DIED")
    rows = [
        (
            *(name, "-" if _is_unknown(lag) else f"{lag.unread:,}", shown_age(lag, lag.unread)),
            *(f"{lag.in_flight:,}", f"{lag.in_retry:,}", f"{lag.dead:,}"),
        )
        for name, lag in lags
    ]
    if rows:
        typer.echo()
        out.show_table((heading, *columns), rows, numbers=columns)


def _is_unknown(lag: wire.Lag | wire.Reader) -> bool:
    return lag.DESCRIPTOR.fields_by_name["unread"].has_presence and not lag.HasField("unread")


def clock_line(clock: wire.Clock) -> str:
    """Return the clock state in one line."""
    last = f"; stepped by {_signed(clock.last_step_ms)} at {format_time(clock.last_step_at_ms)}" if clock.steps else ""
    if clock.is_held:
        behind = format_duration(clock.wall_ms - clock.believed_ms)
        return f"HELD {behind} behind the host's, for {format_duration(clock.steady_in_ms)} or 'dmq clock accept'{last}"
    if not clock.is_steady:
        wait = format_duration(clock.steady_in_ms)
        return f"NOT STEADY, nothing is removed by age for {wait} or until 'dmq clock accept'{last}"
    return f"steady{last}"


def lateness_line(late: wire.Lateness) -> str:
    """Return the lateness of deliveries; empty if there were none."""
    texts = (f"{name} {out.about(getattr(late, f'{name}_ms'))}" for name in ("p50", "p99", "max"))
    return ", ".join(texts) if late.count else ""


def paused_line(timeline: wire.Timeline) -> str:
    """Return the numbers of paused topics and groups; empty if there are none."""
    counts = ((timeline.paused_topics, "topic"), (timeline.paused_groups, "group"))
    return ", ".join(out.counted(count, noun) for count, noun in counts if count)


def disk_line(disk: wire.Disk) -> str:
    """Return the free space of the disk, and the limit below which sends are refused."""
    low = "SENDS REFUSED, " if disk.refuses_sends else ""
    return f"{low}{format_size(disk.free_bytes)} free, sends refused below {format_size(disk.low_water_bytes)}"


def _signed(ms: int) -> str:
    return ("-" if ms < 0 else "+") + format_duration(abs(ms))


def shown_quota(quota: wire.Quota) -> str:
    """Return the use and the limit of a quota."""
    if quota.quota.endswith("bytes"):
        return f"{format_size(quota.used)} of {format_size(quota.limit)}"
    return f"{quota.used:,} of {quota.limit:,}" + (" a second" if quota.quota.endswith("rate") else "")
