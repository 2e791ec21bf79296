"""Health of the hook, and a dry run of its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from retry.hook.destinations import BreakerState
from retry.hook.metrics import HookMetrics
from retry.hook.sending import make_uid
from retry.sink import DelaySink, Entry

CHECK_TYPE = "retry-hook-check"
CHECK_TIMEOUT_S = 10.0
_DAY_MS = 86_400_000


class HealthStatus(StrEnum):
    """Overall health of the hook."""

    HEALTHY = "healthy"
    STARTING = "starting"
    DEGRADED = "degraded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Health with its reasons. ``healthy``: no message waits for long, or a send succeeded recently.

    ``starting``: the waiting messages come from an earlier run, the hook has run for less than ``oldest_max_s``, and
    there is no other problem. ``reasons`` lists every problem.
    """

    status: HealthStatus
    reasons: tuple[str, ...] = ()
    last_success_age_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HookHealth:
    """Result of ``check``: the effective settings, and the error of a test write (empty: it succeeded)."""

    is_ok: bool
    error: str
    settings: Mapping[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{name} = {value}" for name, value in self.settings.items()]
        return "\n".join([*lines, f"write: {'ok' if self.is_ok else self.error}"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Ages:
    """Ages of events in seconds. ``kept_s``: since the first kept send after the last success."""

    running_s: float
    last_success_s: float | None
    kept_s: float | None


def judge_health(metrics: HookMetrics, sink_error: str | None, ages: Ages, oldest_max_s: float) -> Health:
    """Return the health of the hook, from its metrics."""
    reasons: list[str] = []
    of_waiting: list[str] = []  # may be caused by the backlog of an earlier run
    if sink_error is not None:
        reasons.append(f"the sink failed: {sink_error}")
    elif metrics.waiting is None:
        reasons.append("the sink does not answer")
    if metrics.oldest_age_s is not None and metrics.oldest_age_s > oldest_max_s:
        of_waiting.append(
            f"the oldest message is pending for {metrics.oldest_age_s:.0f} s, more than {oldest_max_s:.0f} s"
        )
    reasons += [
        f"destination {name} is away" for name, state in metrics.breakers.items() if state is not BreakerState.CLOSED
    ]
    if metrics.unclaimed:
        reasons.append(f"{metrics.unclaimed} messages wait for types without a handler")
    is_young = ages.running_s <= oldest_max_s
    if metrics.waiting:
        # The idle time starts only when a message waits and the hook runs.
        waited_s = ages.kept_s if metrics.oldest_age_s is None else metrics.oldest_age_s
        idle_s = min(each for each in (ages.running_s, ages.last_success_s, waited_s) if each is not None)
        if idle_s > oldest_max_s:
            of_waiting.append(f"messages wait, and none was sent for {idle_s:.0f} s")
        elif is_young and ages.last_success_s is None:
            of_waiting.append(f"messages wait, and none was sent yet, {ages.running_s:.0f} s after the start")
    status = HealthStatus.HEALTHY
    if reasons or of_waiting:
        status = HealthStatus.DEGRADED if reasons or not is_young else HealthStatus.STARTING
    return Health(status=status, reasons=(*reasons, *of_waiting), last_success_age_s=ages.last_success_s)


def dry_run(sink: DelaySink) -> None:
    """Write an entry as a send would, and remove it; raise the errors that a send would get.

    A sink that cannot hold would keep the entry, so for such a sink only ``stats`` is called.
    """
    if not sink.can_hold:
        sink.stats()
        return
    now_ms = sink.clock.now_ms()
    entry = Entry(
        type_name=CHECK_TYPE,
        uid=make_uid(now_ms),
        payload=b"check",
        created_at_ms=now_ms,
        due_at_ms=now_ms + _DAY_MS,
    )
    held = sink.put(entry, is_held=True).result(CHECK_TIMEOUT_S)
    assert held is not None, "a sink that can hold returns what it holds"
    sink.finish(held).result(CHECK_TIMEOUT_S)
    for left_over in sink.take(CHECK_TYPE, 100, 0.0):  # entries of a process that ended between put and finish
        sink.finish(left_over).result(CHECK_TIMEOUT_S)
