"""What a run is asked for, and how it tells where it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rich.progress import Progress, TaskID

from bench.load import Load


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Options of a run, handed to every figure. ``step`` moves the progress bar of the figure at work."""

    rounds: int
    is_quick: bool
    pending: int
    retries: int
    spooled: int
    events: int
    load: Load
    progress: Progress
    task: TaskID

    def expect(self, steps: int) -> None:
        """Say how many steps the figure takes."""
        self.progress.reset(self.task, total=steps, completed=-1)  # a step counts once the next one begins

    def step(self, what: str) -> None:
        """Say that a step begins; the one before is done."""
        self.progress.update(self.task, what=what)
        if not self.progress.console.is_terminal:
            self.progress.console.print(f"{self.progress.tasks[self.task].description}: {what}")
        self.progress.advance(self.task)

    def pick(self, *, full: int, quick: int) -> int:
        """Return the size for this run."""
        return quick if self.is_quick else full


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What a process and its directory take once nothing changes any more."""

    rss_bytes: int
    disk: dict[str, int]
    seconds: float
    reason: Literal["settled", "time is up"]
