"""Plan of a run: messages, with their send times and delays. Pure.

0            0.5          0.6                      1.2   times the longest delay
|-- sends ----|-- sends ---|                         |
|             kill: sends and deliveries continue    |
|-- deliveries --------------------------------------|
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from random import Random

LEVELS = 18
_SENDING_SHARE = 0.6
_KILL_SHARE = 0.5
_END_SHARE = 1.2
_LONGEST_LEVEL_SHARE = 0.9


class Kind(StrEnum):
    """Form in which a message requests its delivery time."""

    TIMESTAMP = "delivery timestamp"
    LEVEL = "delay level"
    MILLISECONDS = "TIMER_DELAY_MS"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSend:
    """Planned message: its send time from the start of the run, and its delay."""

    number: int
    at_ms: int
    kind: Kind
    delay_ms: int  # for a timestamp: before it is rounded up to a whole second, the resolution of the client
    level: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
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
    kinds = tuple(Kind)
    sends = []
    for number in range(messages):
        at_ms = round(longest_ms * _SENDING_SHARE * number / messages)
        longest_now_ms = min(longest_ms, end_ms - at_ms)
        kind = kinds[number % len(kinds)]
        if kind is Kind.LEVEL:
            fitting = sum(level_ms <= longest_now_ms for level_ms in levels_ms)
            level = number // len(kinds) % fitting + 1
            sends.append(PlannedSend(number=number, at_ms=at_ms, kind=kind, delay_ms=levels_ms[level - 1], level=level))
        else:
            delay_ms = random.randint(1, longest_now_ms)
            sends.append(PlannedSend(number=number, at_ms=at_ms, kind=kind, delay_ms=delay_ms))
    return Plan(levels_ms=levels_ms, sends=tuple(sends), kill_at_ms=round(longest_ms * _KILL_SHARE), end_ms=end_ms)
