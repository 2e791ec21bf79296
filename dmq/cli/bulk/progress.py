"""Progress of long work, on stderr: a bar on a terminal, else a line now and then; nothing if the work is quick."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self

from broker_adapter.runtime.clock import SystemClock
from dmq.cli.output.output import note, printable

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

LINE_EVERY_S = 5.0


class Progress:
    """Progress of one piece of work; use it as a context manager. ``show`` may be called often and limits its own
    output.
    """

    def __init__(self, what: str, *, quiet: bool = False) -> None:
        self._what = printable(what)
        self._quiet = quiet
        self._clock = SystemClock()
        self._told_s = self._clock.monotonic_s()
        self._bar: tuple[Bar, TaskID] | None = None

    def __enter__(self) -> Self:
        if not self._quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TextColumn("{task.fields[reached]}"),
            )
            bar = Progress(*columns, console=Console(stderr=True, highlight=False), transient=True)
            self._bar = bar, bar.add_task(self._what, total=None, reached="")
            bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar[0].stop()

    def show(self, reached: str, *, done: int = 0, of: int | None = None) -> None:
        """Show the progress; ``of`` is None if the total is unknown."""
        if self._bar is not None:
            bar, task = self._bar
            bar.update(task, completed=done, total=of, reached=reached)
            return
        now_s = self._clock.monotonic_s()
        if not self._quiet and now_s - self._told_s >= LINE_EVERY_S:
            self._told_s = now_s
            note(f"{self._what}: {reached}")
