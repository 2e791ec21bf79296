"""Fault avoidance of a producer: pauses of slow or failed brokers.

Each send reports the latency of its broker. A table maps the latency to a time for which the broker is not
*available*. A failed send counts as a very high latency. RocketMQ 5.x pauses brokers for seconds, 4.x for minutes (10
minutes after a failure). 5.x never shortens a pause; in 4.x the last send decides. Off by default in both
(``sendLatencyFaultEnable``).
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import NamedTuple


class FaultRules(NamedTuple):
    """Table of latencies and pauses; the highest step that does not exceed the latency applies."""

    steps_ms: tuple[tuple[int, int], ...]  # (latency, not available for), ascending
    failure_latency_ms: int  # assumed latency of a failed send
    only_extends: bool  # a pause is never shortened

    def unavailable_ms(self, latency_ms: float) -> int:
        """Return the pause of a broker with the given latency; 0 for none."""
        return next((pause_ms for step_ms, pause_ms in reversed(self.steps_ms) if latency_ms >= step_ms), 0)


# org.apache.rocketmq.client.latency.MQFaultStrategy of 4.9, and of 5.5
RULES_4 = FaultRules(
    ((50, 0), (100, 0), (550, 30_000), (1000, 60_000), (2000, 120_000), (3000, 180_000), (15_000, 600_000)),
    failure_latency_ms=30_000,
    only_extends=False,
)
RULES_5 = FaultRules(
    ((50, 0), (100, 0), (550, 2000), (1800, 5000), (3000, 6000), (5000, 10_000), (15_000, 30_000)),
    failure_latency_ms=10_000,
    only_extends=True,
)


class RoundRobin:
    """Counter with a random start. Each sending thread has its own, so that they do not run in lockstep."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._number = random.getrandbits(31)

    def next(self) -> int:
        """Return the next number, not negative."""
        self._number = (self._number + 1) & 0x7FFFFFFF
        return self._number

    def restart(self) -> None:
        """Restart at another random number: 5.x does so before a repeated send."""
        self._number = self._random.getrandbits(31)


@dataclass(slots=True)
class BrokerFault:
    """State of one broker."""

    latency_ms: float  # of the last send
    available_at_ms: int
    is_reachable: bool = True


class FaultTable:
    """States of the brokers that a producer has used. A broker without an entry is available and reachable."""

    def __init__(self, rules: FaultRules, random: Random) -> None:
        self.rules = rules
        self.brokers: dict[str, BrokerFault] = {}
        self._random = random
        self._turn = RoundRobin(random)

    def note(
        self, broker: str, latency_ms: float, now_ms: int, *, failed: bool = False, is_reachable: bool = True
    ) -> None:
        """Record the result of a send. ``is_reachable`` is False after a failed connection, if the broker is then
        probed.
        """
        pause_ms = self.rules.unavailable_ms(self.rules.failure_latency_ms if failed else latency_ms)
        available_at_ms = now_ms + pause_ms
        known = self.brokers.get(broker)
        if known is not None and self.rules.only_extends:
            available_at_ms = max(available_at_ms, known.available_at_ms) if pause_ms else known.available_at_ms
        self.brokers[broker] = BrokerFault(latency_ms, available_at_ms, is_reachable)

    def remove(self, broker: str) -> None:
        """Remove the entry of a broker."""
        self.brokers.pop(broker, None)

    def is_available(self, broker: str, now_ms: int) -> bool:
        """Return True if a broker is not paused."""
        known = self.brokers.get(broker)
        return known is None or now_ms >= known.available_at_ms

    def is_reachable(self, broker: str) -> bool:
        """Return True unless the last connection to a broker failed."""
        known = self.brokers.get(broker)
        return known is None or known.is_reachable

    def pick_one_at_least(self, now_ms: int) -> str | None:
        """Return a broker although none is available, or ``None`` if there is no candidate.

        4.x: round-robin over the better half, by availability, latency, and end of the pause. 5.x: any reachable
        broker.
        """
        names = [*self.brokers]
        self._random.shuffle(names)
        if self.rules.only_extends:
            return next((name for name in names if self.is_reachable(name)), None)
        names.sort(key=lambda name: self._rank(name, now_ms))
        return names[self._turn.next() % max(1, len(names) // 2)] if names else None

    def _rank(self, broker: str, now_ms: int) -> tuple[bool, float, int]:
        known = self.brokers[broker]
        return now_ms < known.available_at_ms, known.latency_ms, known.available_at_ms
