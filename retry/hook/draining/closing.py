"""Close a hook in an order that loses no message, and report the result."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import wait
from dataclasses import dataclass

from broker_adapter.runtime.clock import SystemClock
from retry.hook.draining.attempts import Attempts
from retry.hook.draining.drain import Drain
from retry.hook.runtime import HookLog
from retry.hook.sending import CallPatience, Handler, HookTally, Settler, SinkCalls, SinkHealth
from retry.hook.verdicts import describe
from retry.sink import DelaySink

# Maximum time reserved for the sink, while a handler hangs: to record the results of the others, and to close.
SINK_S = 1.0
SINK_S_MIN = 0.5  # minimum, however short the time limit is: a working sink needs some time
THREADS_S = 0.5  # maximum wait for threads to notice the stop: they are daemons and block nothing
_REAL = SystemClock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """Counts of the hook up to ``close``, and the remaining work. ``None``: the sink could not report it."""

    sent: int = 0  # at the first attempt or later
    spooled: int = 0
    rejected: int = 0
    running: int = 0  # handlers still running at the timeout; those of kept messages run again in the next run
    unsettled: int = 0  # results that the sink did not confirm in time; their messages are sent again too
    still_waiting: int | None = None
    dead: int | None = None


def close(
    handlers: Iterable[Handler],
    *,
    drain: Drain,
    settler: Settler,
    attempts: Attempts,
    sink: DelaySink,
    calls: SinkCalls,
    health: SinkHealth,
    log: HookLog,
    timeout_s: float,
    owns_sink: bool,
) -> Closed:
    """Stop accepting sends, wait for running ones, settle, and close the sink if owned: all within ``timeout_s``.

    The sink gets at least half a second. Slower work is left to daemon threads, which block nothing.
    """
    rest_s = _countdown(max(timeout_s, SINK_S_MIN))
    handlers_s = _countdown(timeout_s - min(SINK_S, timeout_s / 4))
    tallies = [handler.tally for handler in handlers]
    stop_beginning(tallies, drain)
    running = drain.stop(handlers_s(), calls.threads)
    running += sum(tally.wait_idle(handlers_s()) for tally in tallies)
    _within(rest_s(), calls, lambda: settler.run_due(is_forced=True))
    settler.wait(rest_s())
    _within(rest_s(), calls, attempts.tell)
    still_waiting = dead = None
    try:
        stats = calls.ask(sink.stats, CallPatience(rest_s()))
        still_waiting, dead = stats.waiting + stats.held, stats.dead
    except Exception as error:  # noqa: BLE001 - the counts are optional
        health.failed(error)
    if owns_sink:
        try:
            if not _within(rest_s(), calls, sink.close):
                log.warning("sink_close_timed_out", after_s=timeout_s)
        except Exception as error:  # noqa: BLE001 - the process ends; durable entries are safe
            log.warning("sink_close_failed", error=describe(error))
        _within(rest_s(), calls, attempts.tell)
    attempts.close(min(THREADS_S, rest_s()))
    if not running:
        drain.join(min(THREADS_S, rest_s()))
    return Closed(
        sent=sum(tally.delivered + tally.redelivered for tally in tallies),
        spooled=sum(tally.spooled for tally in tallies),
        rejected=sum(tally.rejected for tally in tallies),
        running=running,
        unsettled=settler.pending,
        still_waiting=still_waiting,
        dead=dead,
    )


def stop_beginning(tallies: Iterable[HookTally], drain: Drain) -> None:
    """Start no further send or repetition; running ones continue."""
    for tally in tallies:
        tally.close()
    drain.begin_nothing()


def _within(timeout_s: float, calls: SinkCalls, call: Callable[[], None]) -> bool:
    """Submit ``call``, and return True if it ends within ``timeout_s``; it continues otherwise."""
    done = calls.threads.submit(call)
    if not wait([done], timeout_s).done:
        return False
    done.result()
    return True


def _countdown(timeout_s: float) -> Callable[[], float]:
    ends_at_s = _REAL.monotonic_s() + timeout_s
    return lambda: max(0.0, ends_at_s - _REAL.monotonic_s())
