"""Result of the demo as text. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dmq.demo.plan import Plan
from dmq.demo.verdict import Lateness, Outage, Verdict

if TYPE_CHECKING:
    from dmq.admin import admin_v1 as wire

_SHOWN_MAX = 10


@dataclass(slots=True)
class Life:
    """One life of the daemon, from its own status. Lateness is measured at the queue, or at the cluster."""

    start_s: float = 0.0  # from the start of the process until ready
    down_s: float = 0.0  # from the kill before until ready
    open_ms: float = 0.0
    late_count: int = 0
    late_p50_ms: float = 0.0
    late_p99_ms: float = 0.0
    late_max_ms: float = 0.0
    late_where: str = "in the queue"

    def note(self, found: wire.GetStatusResponse) -> None:
        """Record the current status of the daemon."""
        self.open_ms = found.recovery.open_ms
        is_behind = found.HasField("cluster")
        late = found.cluster.lateness if is_behind else found.lateness
        self.late_where = "at the cluster" if is_behind else "in the queue"
        self.late_count = late.count
        self.late_p50_ms, self.late_p99_ms, self.late_max_ms = late.p50_ms, late.p99_ms, late.max_ms


def lines_of(verdict: Verdict, outage: Outage | None, lives: Sequence[Life]) -> list[str]:
    """Return the result, line by line; the positions of the figures are fixed."""
    lines = [
        _line("sent", verdict.sent, _about_sent(verdict)),
        _line("received", verdict.received, "each of them at least once, by the official client"),
        _line("lost", len(verdict.lost), _numbers(verdict.lost)),
        _line("duplicated", verdict.duplicated, _about_duplicates(verdict)),
        _line("early", len(verdict.early), _numbers(verdict.early)),
        f"{'lateness':<11}{_spread(verdict.lateness)}; at the consumer, {verdict.lateness.count:,} messages",
    ]
    if outage is not None:
        lines.append(
            f"{'':<11}{_spread(verdict.lateness_of_outage)}; at the consumer,"
            f" {verdict.lateness_of_outage.count:,} messages that fell due while nobody could deliver them"
        )
    names = ("before the kill", "after it, its arrears included") if len(lives) > 1 else ("",)
    for life, name in zip(lives, names, strict=False):
        when = f", {name}" if name else ""
        lines.append(
            f"{'':<11}p50 {life.late_p50_ms:.1f} ms, p99 {life.late_p99_ms:.1f} ms, max {life.late_max_ms:.1f} ms;"
            f" {life.late_where}, by the daemon's own count of {life.late_count:,}{when}"
        )
    if outage is not None:
        lines.append(_about_kill(outage, lives[-1]))
    lines.append(_summary(verdict))
    return lines


def missing_lines(verdict: Verdict, plan: Plan, where: Callable[[int], str]) -> list[str]:
    """Describe the missing messages, a few in detail; ``where`` queries the daemon for the state of one."""
    lines = []
    if not verdict.is_complete:
        lines.append(f"{verdict.planned - verdict.sent} messages were not sent: no OK came for them")
    for number in verdict.lost[:_SHOWN_MAX]:
        send = plan.sends[number]
        lines.append(f"missing: message {number}, {send.kind.value}, delay {send.delay_ms} ms; {where(number)}")
    if len(verdict.lost) > _SHOWN_MAX:
        lines.append(f"missing: and {len(verdict.lost) - _SHOWN_MAX} more")
    return lines


def _line(name: str, count: int, about: str) -> str:
    return f"{name:<11}{count:>7,}{'   ' + about if about else ''}"


def _about_sent(verdict: Verdict) -> str:
    of = "" if verdict.is_complete else f"of {verdict.planned:,} planned; "
    resent = f"; {verdict.resent:,} of them after a repetition with the same message id" if verdict.resent else ""
    return f"{of}answered OK, and durable before that{resent}"


def _about_duplicates(verdict: Verdict) -> str:
    reasons = []
    if verdict.repeated_unacked:
        reasons.append(f"{verdict.repeated_unacked:,} received but not acknowledged before the kill")
    if verdict.repeated_expired:
        reasons.append(f"{verdict.repeated_expired:,} not acknowledged within the invisible duration")
    if verdict.repeated_in_doubt:
        reasons.append(f"{verdict.repeated_in_doubt:,} sent to the cluster again because no answer was known")
    if verdict.repeated_forgotten:
        reasons.append(f"{verdict.repeated_forgotten:,} acknowledged at the broker that was killed, which forgot it")
    if verdict.unexplained:
        reasons.append(f"{len(verdict.unexplained):,} WITHOUT A REASON: {_numbers(verdict.unexplained)}")
    return ", ".join(reasons)


def _about_kill(outage: Outage, life: Life) -> str:
    parts = [
        f"{'kill':<11}SIGKILL; down for {life.down_s:.2f} s",
        *([f"its broker for {(outage.serving_at_ms - outage.killed_at_ms) / 1000:.2f} s"] * outage.is_of_broker),
        f"started again: store open in {life.open_ms:.0f} ms, serving {life.start_s * 1000:.0f} ms after its start",
    ]
    if outage.received_at_ms:
        back_s = (outage.received_at_ms - outage.killed_at_ms) / 1000
        parts.append(f"next message received {back_s:.2f} s after the kill")
    return "; ".join(parts)


def _summary(verdict: Verdict) -> str:
    if verdict.exit_code == 0:
        return "OK: nothing lost, nothing early"
    faults = [
        text
        for text, is_so in (
            ("messages were lost", verdict.lost),
            ("messages were early", verdict.early),
            ("messages came twice without a reason", verdict.unexplained),
            ("not everything could be sent", not verdict.is_complete),
        )
        if is_so
    ]
    return f"FAILED: {', '.join(faults)}"


def _numbers(numbers: Sequence[int]) -> str:
    if not numbers:
        return ""
    more = f" and {len(numbers) - _SHOWN_MAX} more" if len(numbers) > _SHOWN_MAX else ""
    return "messages " + ", ".join(map(str, numbers[:_SHOWN_MAX])) + more


def _spread(lateness: Lateness) -> str:
    return f"p50 {lateness.p50_ms:,} ms, p99 {lateness.p99_ms:,} ms, max {lateness.max_ms:,} ms"
