"""Plan of a run: messages, with their send times and delays. Pure.

0            0.5          0.6                      1.2   times the longest delay
|-- sends ----|-- sends ---|                         |
|             kill: sends and deliveries continue    |
|-- deliveries --------------------------------------|
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

LEVELS = 18
KINDS = ("delivery timestamp", "delay level", "TIMER_DELAY_MS")  # forms in which a message requests its delivery time
_SENDING_SHARE, _KILL_SHARE, _END_SHARE, _LONGEST_LEVEL_SHARE = 0.6, 0.5, 1.2, 0.9


class PlannedSend(NamedTuple):
    """Planned message: its send time from the start of the run, and its delay."""

    number: int
    at_ms: int
    kind: str
    delay_ms: int  # for a timestamp: before it is rounded up to a whole second, the resolution of the client
    level: int = 0


class Plan(NamedTuple):
    """Plan of a run. Times are milliseconds from its start."""

    levels_ms: tuple[int, ...]
    sends: tuple[PlannedSend, ...]
    kill_at_ms: int
    end_ms: int


def make_plan(messages: int, seconds: float, random: Random) -> Plan:
    """Spread ``messages`` over a run with delays of up to ``seconds``, a third of them of each kind."""
    longest_ms = max(1000, round(seconds * 1000))
    levels_ms = tuple(round(longest_ms * _LONGEST_LEVEL_SHARE * level / LEVELS) for level in range(1, LEVELS + 1))
    end_ms = round(longest_ms * _END_SHARE)
    sends = []
    for number in range(messages):
        at_ms = round(longest_ms * _SENDING_SHARE * number / messages)
        longest_now_ms = min(longest_ms, end_ms - at_ms)
        kind, level, delay_ms = KINDS[number % len(KINDS)], 0, random.randint(1, longest_now_ms)
        if kind == "delay level":
            level = number // len(KINDS) % sum(level_ms <= longest_now_ms for level_ms in levels_ms) + 1
            delay_ms = levels_ms[level - 1]
        sends.append(PlannedSend(number, at_ms, kind, delay_ms, level))
    return Plan(levels_ms, tuple(sends), round(longest_ms * _KILL_SHARE), end_ms)
