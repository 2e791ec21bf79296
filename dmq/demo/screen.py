"""Display of the demo: a live table on a terminal; elsewhere one line per event, and progress lines."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from broker_adapter.runtime.clock import Clock
from dmq.demo.ledger import Ledger, Tally
from dmq.demo.plan import Plan

_PROGRESS_EVERY_S = 5.0
_EVENTS_SHOWN = 8


@dataclass(slots=True)
class DaemonFacts:
    """Figures of the daemon that are shown."""

    state: str = "starting"
    pid: int = 0
    pending: int = 0
    now_ms: int = 0
    next_due_at_ms: int = 0


@dataclass(slots=True)
class Screen:
    """Screen of one run; use it as a context manager. ``tick`` may be called often and limits its own output."""

    console: Console
    clock: Clock
    plan: Plan
    ledger: Ledger
    daemon: DaemonFacts = field(default_factory=DaemonFacts)
    _events: deque[str] = field(default_factory=lambda: deque(maxlen=_EVENTS_SHOWN))
    _began_s: float | None = None
    _told_s: float = 0.0
    _live: Live | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> Self:
        self._told_s = self.clock.monotonic_s()
        if self.console.is_terminal:
            self._live = Live(get_renderable=self._picture, console=self.console, refresh_per_second=5)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def begin(self) -> None:
        """Start to count the seconds."""
        self._began_s = self.clock.monotonic_s()

    @property
    def elapsed_s(self) -> float:
        """Seconds since ``begin``, 0 before it."""
        return 0.0 if self._began_s is None else self.clock.monotonic_s() - self._began_s

    def event(self, text: str) -> None:
        """Show an event."""
        line = f"{self.elapsed_s:6.1f} s  {text}"
        with self._lock:
            self._events.append(line)
        if self._live is None:
            self._print(line)

    def tick(self) -> None:
        """Print a line of progress if it is due; a live table redraws itself."""
        now_s = self.clock.monotonic_s()
        if self._live is not None or now_s - self._told_s < _PROGRESS_EVERY_S:
            return
        self._told_s = now_s
        total = self.ledger.total()
        counts = f"sent {total.sent} of {total.planned}, received {total.received}, waiting {self.daemon.pending}"
        self._print(f"{self.elapsed_s:6.1f} s  {counts}")

    def final(self, lines: list[str]) -> None:
        """Print the result. Call it after the context, so that it stays visible."""
        for line in lines:
            self._print(line)

    def _print(self, line: str) -> None:
        self.console.print(line, soft_wrap=True, highlight=False, markup=False)

    def _picture(self) -> RenderableType:
        daemon = self.daemon
        style = "bold green" if daemon.state == "serving" else "bold red"
        head = Text.assemble(
            "Rock-DMQ demo  ",
            (f"{self.elapsed_s:.0f} s", "bold"),
            f" of about {self.plan.end_ms / 1000:.0f} s    daemon ",
            (daemon.state, style),
            f" (pid {daemon.pid})" if daemon.pid else "",
        )
        if daemon.pid:
            head.append(f"    waiting {daemon.pending:,}")
            if daemon.next_due_at_ms:
                head.append(f", next in {max(0, daemon.next_due_at_ms - daemon.now_ms) / 1000:.1f} s")
        with self._lock:
            events = list(self._events)
        return Group(head, self._table(), Text("\n".join(events), style="dim"))

    def _table(self) -> Table:
        table = Table()
        table.add_column("due by")
        for name in ("planned", "sent", "received", "latest by"):
            table.add_column(name, justify="right")
        for kind, tally in self.ledger.tallies.items():
            table.add_row(kind.value, *_cells(tally))
        table.add_section()
        table.add_row("all", *_cells(self.ledger.total()), style="bold")
        return table


def _cells(tally: Tally) -> tuple[str, str, str, str]:
    late = f"{tally.late_ms_max:,} ms" if tally.late_ms_max >= 0 else ""
    return f"{tally.planned:,}", f"{tally.sent:,}", f"{tally.received:,}", late
