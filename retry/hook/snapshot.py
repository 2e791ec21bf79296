"""Metrics of all parts of the hook at one moment, as one value."""

from __future__ import annotations

from collections.abc import Mapping

from retry.hook.destinations import Destination
from retry.hook.handlers import Handler
from retry.hook.metrics import HookMetrics
from retry.hook.sender import Sender
from retry.hook.settle import Settler, SinkHealth
from retry.sink import DelaySink, SinkStats


def snapshot(
    handlers: Mapping[str, Handler],
    destinations: Mapping[str, Destination],
    *,
    sink: DelaySink,
    sender: Sender,
    settler: Settler,
    health: SinkHealth,
    running: int,
    is_closed: bool,
) -> HookMetrics:
    """Return the counts of the hook and the contents of its sink. A failed sink call is not repeated."""
    sends: dict[tuple[str, str], int] = {}
    rejects: dict[tuple[str, str], int] = {}
    attempts: dict[tuple[str, str], int] = {}
    redelivered: dict[str, int] = {}
    buried: dict[str, int] = {}
    for name, handler in list(handlers.items()):
        tally = handler.tally
        with tally.lock:
            sends |= {
                (name, "delivered"): tally.delivered,
                (name, "spooled"): tally.spooled,
                (name, "rejected"): tally.rejected,
            }
            rejects |= {(name, why): count for why, count in tally.rejects.items()}
            attempts |= {(name, result): count for result, count in tally.attempts.items()}
            attempts[name, "success"] = tally.delivered + tally.redelivered
            redelivered[name], buried[name] = tally.redelivered, tally.buried
            running += tally.running
    stats, unclaimed = (None, None) if sender.is_child or is_closed else _ask(handlers, sink, sender, health)
    oldest_at_ms = None if stats is None else stats.oldest_at_ms
    return HookMetrics(
        sends=sends,
        rejects=rejects,
        attempts=attempts,
        redelivered=redelivered,
        buried=buried,
        breakers={name: destination.state for name, destination in list(destinations.items())},
        running=running,
        in_doubt=health.in_doubt,
        sink_errors=health.errors,
        callback_errors=sender.callback_errors,
        classifier_errors=sender.classifier_errors,
        unsettled=settler.pending,
        waiting=None if stats is None else stats.waiting,
        waiting_bytes=None if stats is None else stats.waiting_bytes,
        held=None if stats is None else stats.held,
        dead=None if stats is None else stats.dead,
        unclaimed=unclaimed,
        oldest_age_s=None if oldest_at_ms is None else max(0.0, (sink.clock.now_ms() - oldest_at_ms) / 1000),
    )


def _ask(
    handlers: Mapping[str, Handler], sink: DelaySink, sender: Sender, health: SinkHealth
) -> tuple[SinkStats | None, int | None]:
    try:
        stats, claimed = sender.ask(
            lambda: (
                sink.stats(),
                sum(sink.stats(name).waiting for each in list(handlers.values()) for name in each.names_in(sink)),
            )
        )
    except Exception as error:  # noqa: BLE001 - metrics must not fail: these are reported as unknown
        health.failed(error)
        return None, None
    return stats, max(0, stats.waiting - claimed)
