"""A clock that moves within an operation, as those of a host do."""

from __future__ import annotations

from random import Random

from broker_adapter.runtime.clock import ManualClock


class MovingClock(ManualClock):
    """Clocks that advance by 0 to 2 ms at each reading, besides the steps that a test makes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = Random(seed)
        self.was_set = True  # two readings differ, so no two ages of a message are equal

    def now_ms(self) -> int:
        self._move()
        return super().now_ms()

    def monotonic_s(self) -> float:
        self._move()
        return super().monotonic_s()

    def boot_ms(self) -> int:
        self._move()
        return super().boot_ms()

    def _move(self) -> None:
        self.advance(self._random.randint(0, 2))
