"""For how long a producer leaves a broker alone; a test on RocketMQ compares 5.x's table with the Java client's."""

from __future__ import annotations

from random import Random

import pytest

from broker_adapter.queue_client.balance.faults import RULES_4, RULES_5, FaultRules, FaultTable, RoundRobin

NOW = 1_000_000


@pytest.mark.parametrize(
    ("rules", "pauses_ms"),
    [
        (
            RULES_4,
            {
                549: 0,
                550: 30_000,
                999: 30_000,
                1000: 60_000,
                2000: 120_000,
                3000: 180_000,
                14_999: 180_000,
                15_000: 600_000,
            },
        ),
        (RULES_5, {549: 0, 550: 2000, 1799: 2000, 1800: 5000, 3000: 6000, 5000: 10_000, 15_000: 30_000, 10**6: 30_000}),
    ],
)
def test_the_table(rules: FaultRules, pauses_ms: dict[int, int]) -> None:
    """Source: MQFaultStrategy of RocketMQ 4.9 and of 5.5.0."""
    assert {latency_ms: rules.unavailable_ms(latency_ms) for latency_ms in pauses_ms} == pauses_ms
    assert rules.unavailable_ms(0) == rules.unavailable_ms(49.9) == 0


@pytest.mark.parametrize(("rules", "pause_ms"), [(RULES_4, 600_000), (RULES_5, 10_000)])
def test_a_send_that_failed_counts_as_a_long_one(rules: FaultRules, pause_ms: int) -> None:
    """10 minutes in 4.x (30 s of latency), 10 s in 5.x (10 s of latency)."""
    faults = FaultTable(rules, Random(1))
    faults.note("a", 5, NOW, failed=True)
    assert not faults.is_available("a", NOW + pause_ms - 1)
    assert faults.is_available("a", NOW + pause_ms)
    assert faults.is_available("b", NOW)


def test_a_time_is_never_shortened_in_5() -> None:
    """And is by the next send in 4.x."""
    for rules, expected in ((RULES_5, False), (RULES_4, True)):
        faults = FaultTable(rules, Random(1))
        faults.note("a", 15_000, NOW)
        faults.note("a", 1, NOW)
        assert faults.is_available("a", NOW) is expected
        faults.note("a", 600, NOW)
        assert faults.is_available("a", NOW + 29_999) is False


def test_a_later_time_extends() -> None:
    """In 5.x too."""
    faults = FaultTable(RULES_5, Random(1))
    faults.note("a", 600, NOW)
    faults.note("a", 600, NOW + 1000)
    assert not faults.is_available("a", NOW + 2999)
    assert faults.is_available("a", NOW + 3000)


def test_a_broker_is_reachable_until_a_connection_fails() -> None:
    """And again with the next that holds."""
    faults = FaultTable(RULES_5, Random(1))
    assert faults.is_reachable("a")
    faults.note("a", 1, NOW, failed=True, is_reachable=False)
    assert not faults.is_reachable("a")
    faults.note("a", 1, NOW)
    assert faults.is_reachable("a")
    faults.note("a", 1, NOW, is_reachable=False)
    faults.remove("a")
    assert faults.is_reachable("a")


def picked(faults: FaultTable, now_ms: int) -> set[str | None]:
    return {faults.pick_one_at_least(now_ms) for _ in range(40)}


def test_4_picks_from_the_better_half() -> None:
    """By availability, then latency, then when it is available again; the only one if there is one."""
    faults = FaultTable(RULES_4, Random(1))
    assert picked(faults, NOW) == {None}
    faults.note("slow", 600, NOW)
    assert picked(faults, NOW) == {"slow"}
    faults.note("good", 10, NOW)
    assert picked(faults, NOW) == {"good"}
    faults.note("slower", 2000, NOW)
    faults.note("fair", 60, NOW)
    assert picked(faults, NOW) == {"good", "fair"}
    faults.note("good", 600, NOW + 1)
    faults.note("fair", 600, NOW + 2)
    assert picked(faults, NOW + 3) == {"slow", "good"}  # all of 600 ms: whoever is available first
    assert picked(faults, NOW + 30_000) == {"slow", "good"}
    faults.note("slower", 3000, NOW - 180_000)
    assert picked(faults, NOW + 3) == {"slower", "slow"}  # it is available, if slow


def test_5_picks_any_that_is_reachable() -> None:
    """Available or not."""
    faults = FaultTable(RULES_5, Random(1))
    assert picked(faults, NOW) == {None}
    faults.note("a", 15_000, NOW)
    faults.note("b", 1, NOW)
    faults.note("c", 1, NOW, is_reachable=False)
    assert picked(faults, NOW) == {"a", "b"}
    faults.remove("a")
    faults.remove("b")
    assert picked(faults, NOW) == {None}


def test_turns_begin_anywhere_and_never_leave_the_positive() -> None:
    """Two threads do not go in step; what counts up for ever is never negative."""
    turn, other = RoundRobin(Random(1)), RoundRobin(Random(2))
    first = turn.next()
    assert turn.next() == first + 1 != other.next()
    turn.restart()
    assert turn.next() != first + 2

    class Last(Random):
        def getrandbits(self, k: int, /) -> int:
            return (1 << k) - 1

    assert RoundRobin(Last()).next() == 0
