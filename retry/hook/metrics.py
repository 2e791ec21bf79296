"""Counts of the hook, a snapshot of them, and the snapshot in Prometheus's text format."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from retry.hook.destinations import BreakerState
from retry.outcome import Delivered, Outcome, Rejected, Spooled

# Gauge values of breaker states: greater is worse.
BREAKER_NUMBERS = {BreakerState.CLOSED: 0, BreakerState.PROBING: 1, BreakerState.OPEN: 2}


class HookTally:
    """Counts of one type. ``enter`` and ``leave`` bracket each direct send."""

    def __init__(self) -> None:
        self.after_fork()

    def enter(self) -> bool:
        """Count a send as running; return ``False`` once the hook is closed."""
        with self.lock:
            if self.is_closed:
                return False
            self.running += 1
            return True

    def leave(self) -> None:
        """Count a send as ended."""
        with self.lock:
            self.running -= 1
            if self.is_closed:
                self._is_idle.notify_all()

    def leave_delivered(self) -> None:
        """Count a send as ended and delivered, under one lock, because this is the hot path."""
        with self.lock:
            self.running -= 1
            self.delivered += 1
            if self.is_closed:
                self._is_idle.notify_all()

    def note_outcome(self, outcome: Outcome) -> None:
        """Count the outcome of a send."""
        with self.lock:
            match outcome:
                case Delivered():
                    self.delivered += 1
                case Spooled():
                    self.spooled += 1
                case Rejected():
                    self.rejected += 1

    def note_refusal(self, why: str) -> None:
        """Count the reason of a refused message; a last attempt may still send it."""
        with self.lock:
            self.rejects[why] += 1

    def note_attempt(self, verdict: str) -> None:
        """Count a failed attempt by its verdict."""
        with self.lock:
            self.attempts[verdict] += 1

    def note_redelivered(self) -> None:
        """Count a message of the sink as sent."""
        with self.lock:
            self.redelivered += 1

    def note_buried(self) -> None:
        """Count a message that moved to the dead set."""
        with self.lock:
            self.buried += 1

    def close(self) -> None:
        """Refuse further sends."""
        with self.lock:
            self.is_closed = True

    def wait_idle(self, timeout_s: float) -> int:
        """Wait until no send runs, at most ``timeout_s``; return how many still run."""
        with self.lock:
            self._is_idle.wait_for(lambda: self.running == 0, timeout_s)
            return self.running

    def after_fork(self) -> None:
        """Reset the counts in a forked child."""
        self.lock = threading.Lock()
        self._is_idle = threading.Condition(self.lock)
        self.is_closed = False
        self.running = 0
        self.delivered = 0
        self.redelivered = 0
        self.spooled = 0
        self.rejected = 0
        self.buried = 0
        self.attempts: Counter[str] = Counter()  # by verdict
        self.rejects: Counter[str] = Counter()  # by reason


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
