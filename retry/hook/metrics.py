"""Counts of the hook, a snapshot of them, and the snapshot in Prometheus's text format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from retry.hook.destinations import BreakerState, Destination
from retry.hook.sending import Handler, Sender, Settler, SinkHealth
from retry.sink import DelaySink, SinkStats

# Gauge values of breaker states: greater is worse.
BREAKER_NUMBERS = {BreakerState.CLOSED: 0, BreakerState.PROBING: 1, BreakerState.OPEN: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class HookMetrics:
    """Counts of the hook since its creation, and the current contents of its sink.

    ``waiting``, ``held``, ``dead`` and ``unclaimed`` are ``None`` while the sink cannot report them. ``unclaimed`` are
    the messages waiting in the sink for types without a handler here.
    """

    sends: Mapping[tuple[str, str], int]  # (type, outcome)
    rejects: Mapping[tuple[str, str], int]  # (type, why)
    attempts: Mapping[tuple[str, str], int]  # (type, result), direct sends and repetitions
    redelivered: Mapping[str, int]
    buried: Mapping[str, int]
    breakers: Mapping[str, BreakerState]  # by destination
    running: int
    in_doubt: int  # failed sink calls whose effect is unknown
    sink_errors: int
    callback_errors: int
    classifier_errors: int
    unsettled: int  # results that the sink has not confirmed yet
    waiting: int | None
    waiting_bytes: int | None
    held: int | None
    dead: int | None
    unclaimed: int | None
    oldest_age_s: float | None  # of the oldest waiting message; None: none waits

    def render_prometheus(self) -> str:
        """Return the metrics in Prometheus's text format."""
        lines: list[str] = []
        by_type = ("type",)
        _add(lines, "sends_total", "counter", "Sends by outcome.", ("type", "outcome"), self.sends.items())
        _add(lines, "rejects_total", "counter", "Rejected sends by cause.", ("type", "cause"), self.rejects.items())
        _add(lines, "attempts_total", "counter", "Attempts by result.", ("type", "result"), self.attempts.items())
        _add(lines, "redelivered_total", "counter", "Kept and sent.", by_type, _single(self.redelivered))
        _add(lines, "buried_total", "counter", "Moved to the dead set.", by_type, _single(self.buried))
        states = [((name,), BREAKER_NUMBERS[state]) for name, state in self.breakers.items()]
        _add(lines, "breaker_state", "gauge", "0 closed, 1 probing, 2 open.", ("destination",), states)
        plain: list[tuple[str, str, str, float | None]] = [
            ("running", "gauge", "Handlers and sends that run now.", self.running),
            ("in_doubt_total", "counter", "Calls of the sink whose effect is not known.", self.in_doubt),
            ("sink_errors_total", "counter", "Calls of the sink that failed.", self.sink_errors),
            ("callback_errors_total", "counter", "Callbacks that raised.", self.callback_errors),
            ("classifier_errors_total", "counter", "Classifiers that raised.", self.classifier_errors),
            ("unsettled", "gauge", "Results the sink has not confirmed yet.", self.unsettled),
            ("waiting", "gauge", "Messages that wait in the sink.", self.waiting),
            ("waiting_bytes", "gauge", "Bytes that wait in the sink.", self.waiting_bytes),
            ("held", "gauge", "Messages of the sink in hand.", self.held),
            ("dead", "gauge", "Messages in the dead set.", self.dead),
            ("unclaimed", "gauge", "Messages that wait for types without a handler.", self.unclaimed),
            ("oldest_age_seconds", "gauge", "Age of the oldest message that waits.", self._age_shown()),
        ]
        for name, kind, about, value in plain:
            if value is not None:
                _add(lines, name, kind, about, (), [((), value)])
        return "\n".join(lines) + "\n"

    def _age_shown(self) -> float | None:
        return 0.0 if self.waiting == 0 else self.oldest_age_s


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


def _single(counts: Mapping[str, int]) -> Iterable[tuple[tuple[str, ...], int]]:
    return [((name,), count) for name, count in counts.items()]


def _add(
    lines: list[str],
    name: str,
    kind: str,
    about: str,
    labels: tuple[str, ...],
    values: Iterable[tuple[tuple[str, ...], float]],
) -> None:
    full = f"retry_hook_{name}"
    lines += [f"# HELP {full} {about}", f"# TYPE {full} {kind}"]
    for texts, value in values:
        pairs = ",".join(f'{label}="{_escape(text)}"' for label, text in zip(labels, texts, strict=True))
        lines.append(f"{full}{{{pairs}}} {value}" if pairs else f"{full} {value}")


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
