"""Which brokers a producer leaves alone for a while, because they were slow or failed.

Each send reports how long its broker took; a table says for how long a broker that took so long is not *available*. A
send that failed counts as a very long one. RocketMQ 5.x leaves brokers alone for seconds, 4.x for minutes (a failure
costs 10 minutes there); 5.x never shortens such a time, in 4.x the last send decides. Off by default in both
(``sendLatencyFaultEnable``).
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import NamedTuple


class FaultRules(NamedTuple):
    """For how long which latency makes a broker unavailable; the last step that is not above the latency counts."""

    steps_ms: tuple[tuple[int, int], ...]  # (latency, not available for), ascending
    failure_latency_ms: int  # what a send that failed counts as
    only_extends: bool  # a time that was set is never shortened

    def unavailable_ms(self, latency_ms: float) -> int:
        """Return for how long a broker that took ``latency_ms`` is left alone; 0: not at all."""
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
    """Numbers in turn, from a random one on. Each thread that sends has its own, so that they do not go in step."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._number = random.getrandbits(31)

    def next(self) -> int:
        """Return the next number, not negative."""
        self._number = (self._number + 1) & 0x7FFFFFFF
        return self._number

    def restart(self) -> None:
        """Go on from another random number: 5.x does it before a repeated send."""
        self._number = self._random.getrandbits(31)


@dataclass(slots=True)
class BrokerFault:
    """What is known of one broker."""

    latency_ms: float  # of the last send
    available_at_ms: int
    is_reachable: bool = True


class FaultTable:
    """The brokers that a producer sent to. A broker that is not in it is available and reachable."""

    def __init__(self, rules: FaultRules, random: Random) -> None:
        self.rules = rules
        self.brokers: dict[str, BrokerFault] = {}
        self._random = random
        self._turn = RoundRobin(random)

    def note(
        self, broker: str, latency_ms: float, now_ms: int, *, failed: bool = False, is_reachable: bool = True
    ) -> None:
        """Note how a send went. ``is_reachable`` is false where a connection failed, and somebody will probe it."""
        pause_ms = self.rules.unavailable_ms(self.rules.failure_latency_ms if failed else latency_ms)
        available_at_ms = now_ms + pause_ms
        known = self.brokers.get(broker)
        if known is not None and self.rules.only_extends:
            available_at_ms = max(available_at_ms, known.available_at_ms) if pause_ms else known.available_at_ms
        self.brokers[broker] = BrokerFault(latency_ms, available_at_ms, is_reachable)

    def remove(self, broker: str) -> None:
        """Forget a broker."""
        self.brokers.pop(broker, None)

    def is_available(self, broker: str, now_ms: int) -> bool:
        """Say whether a broker need not be left alone now."""
        known = self.brokers.get(broker)
        return known is None or now_ms >= known.available_at_ms

    def is_reachable(self, broker: str) -> bool:
        """Say whether the last connection to a broker held."""
        known = self.brokers.get(broker)
        return known is None or known.is_reachable

    def pick_one_at_least(self, now_ms: int) -> str | None:
        """Return a broker to send to although none is good, ``None`` if none is known.

        4.x: in turn one of the better half, by availability, latency, and when it is available again.
        5.x: any that is reachable.
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
