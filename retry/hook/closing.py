"""The end of a hook, in the order that loses nothing, and what is told of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from broker_adapter.clock import SystemClock
from retry.hook.attempts import Attempts
from retry.hook.classify import describe
from retry.hook.drain import Drain
from retry.hook.handlers import Handler
from retry.hook.logs import HookLog
from retry.hook.settle import Settler, SinkHealth
from retry.sink import DelaySink

GRACE_S = 0.5  # what was sent should not be sent again for the sake of a moment
_REAL = SystemClock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """What was done until ``close``, and what is left. ``None``: the sink could not say."""

    sent: int = 0  # at the first attempt or later
    spooled: int = 0
    rejected: int = 0
    running: int = 0  # handlers that had not returned when time was up: those of kept messages run again, next time
    unsettled: int = 0  # results the sink did not confirm in time: those messages come again too
    still_waiting: int | None = None
    dead: int | None = None


def close(
    handlers: Iterable[Handler],
    *,
    drain: Drain,
    settler: Settler,
    attempts: Attempts,
    sink: DelaySink,
    health: SinkHealth,
    log: HookLog,
    timeout_s: float,
    owns_sink: bool,
) -> Closed:
    """Stop accepting, wait for what runs until ``timeout_s`` is over, settle, close the sink if it is ours."""
    rest_s = _countdown(timeout_s)
    tallies = [handler.tally for handler in handlers]
    for tally in tallies:
        tally.close()
    running = drain.stop(rest_s())
    running += sum(tally.wait_idle(rest_s()) for tally in tallies)
    settler.run_due(is_forced=True)
    settler.wait(max(GRACE_S, rest_s()))
    attempts.tell()
    still_waiting = dead = None
    try:
        stats = sink.stats()
        still_waiting, dead = stats.waiting + stats.held, stats.dead
    except Exception as error:  # noqa: BLE001 - the figures are a courtesy
        health.failed(error)
    if owns_sink:
        try:
            sink.close()
        except Exception as error:  # noqa: BLE001 - the process ends; what is durable is durable
            log.warning("sink_close_failed", error=describe(error))
        attempts.tell()
    attempts.close(GRACE_S)
    if not running:
        drain.join(GRACE_S)
    return Closed(
        sent=sum(tally.delivered + tally.redelivered for tally in tallies),
        spooled=sum(tally.spooled for tally in tallies),
        rejected=sum(tally.rejected for tally in tallies),
        running=running,
        unsettled=settler.pending,
        still_waiting=still_waiting,
        dead=dead,
    )


def _countdown(timeout_s: float) -> Callable[[], float]:
    ends_at_s = _REAL.monotonic_s() + timeout_s
    return lambda: max(0.0, ends_at_s - _REAL.monotonic_s())
