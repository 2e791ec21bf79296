"""What a front believes of the time."""

from __future__ import annotations

from broker_adapter.runtime.clock import SystemClock
from dmq.processes.clocks import NEAR_MS, FrontClock, wall_less_boot_ms

_HOUR_MS = 3_600_000


class Stalling:
    """This host's clocks, of a process that is held up for an hour behind each of its first readings."""

    def __init__(self, stalls: int) -> None:
        self._system = SystemClock()
        self._stalls = stalls
        self._later_ms = 0
        self.monotonic_s = self._system.monotonic_s
        self.boot_id = self._system.boot_id

    def now_ms(self) -> int:
        now_ms = self._system.now_ms() + self._later_ms
        if self._stalls:
            self._stalls -= 1
            self._later_ms += _HOUR_MS
        return now_ms

    def boot_ms(self) -> int:
        return self._system.boot_ms() + self._later_ms


def test_two_clocks_are_read_at_one_moment() -> None:
    """A process that is held up between two readings does not believe that a clock was set."""
    told_ms = wall_less_boot_ms(Stalling(stalls=3))
    assert abs(told_ms - wall_less_boot_ms(SystemClock())) <= NEAR_MS


def test_a_front_has_the_host_s_clock_as_long_as_it_is_believed() -> None:
    """A wrong reading of some milliseconds moves nothing: no delay is shorter for it."""
    clock = FrontClock(wall_less_boot_ms(SystemClock()) - NEAR_MS // 2)
    before_ms, believed_ms, after_ms = SystemClock().now_ms(), clock.now_ms(), SystemClock().now_ms()
    assert before_ms <= believed_ms <= after_ms


def test_a_front_believes_the_store_process_and_not_a_clock_that_was_set() -> None:
    """What the store process says counts, an hour away as well."""
    for away_ms in (-_HOUR_MS, _HOUR_MS):
        clock = FrontClock(wall_less_boot_ms(SystemClock()) + away_ms)
        wall_ms = SystemClock().now_ms()
        assert 0 <= clock.now_ms() - wall_ms - away_ms + NEAR_MS < _HOUR_MS // 2
