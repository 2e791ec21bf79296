"""What a run is asked for, and how it tells where it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rich.progress import Progress, TaskID

from bench.load import Load
from bench.rocketmq import RocketMQ
from broker_adapter.runtime.clock import SystemClock


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Options of a run, handed to every figure. ``step`` moves the progress bar of the figure at work.

    ``peer`` is there if it was asked for; ``minutes`` bounds each figure, see ``each_round``.
    """

    rounds: int
    is_quick: bool
    minutes: float
    peer: RocketMQ | None
    pending: int
    many: int
    retries: int
    overdue: int
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

    def each_round(self) -> Iterator[int]:
        """Yield the rounds: as many as were asked for, or fewer, once they have taken ``minutes``."""
        clock = SystemClock()
        until_s = clock.monotonic_s() + self.minutes * 60
        for number in range(self.rounds):
            if number and clock.monotonic_s() >= until_s:
                self.progress.console.print(
                    f"after {number} of {self.rounds} rounds the {self.minutes:g} minutes are over"
                )
                return
            yield number

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
