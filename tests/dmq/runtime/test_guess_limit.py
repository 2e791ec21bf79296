"""Limit of refused credentials: parallel attempts, other addresses, many addresses, memory."""

from __future__ import annotations

import pytest

from broker_adapter.runtime.clock import ManualClock
from dmq.runtime import guess_limit
from dmq.runtime.guess_limit import GuessLimit, GuessRate, place_of

pytestmark = pytest.mark.unit
RATE = GuessRate(per_address=5, in_all=20, period_s=60.0)
ATTACKER, OPERATOR = "203.0.113.7", "198.51.100.9"


def spend(limit: GuessLimit, address: str, count: int = 100) -> int:
    """Guess ``count`` times at once; return the number of guesses that may be checked."""
    return sum(limit.admit(address) == 0 for _ in range(count))


def test_parallel_guesses_of_an_address_are_bounded_and_refill() -> None:
    """An attempt counts before its result is known; later there are as many as the rate allows."""
    clock = ManualClock()
    limit = GuessLimit(RATE, clock)
    assert spend(limit, ATTACKER) == RATE.per_address
    assert 0 < limit.admit(ATTACKER) <= 12
    clock.advance(12_000)
    assert spend(limit, ATTACKER) == 1


def test_an_attacker_locks_out_no_other_address() -> None:
    """Neither one that was never right, nor this host."""
    limit = GuessLimit(RATE, ManualClock())
    spend(limit, ATTACKER, 1_000)
    assert [spend(limit, each) for each in (OPERATOR, "127.0.0.1", "::1")] == [RATE.per_address] * 3


def test_guesses_of_many_addresses_are_bounded_in_all() -> None:
    """An address that was right before, and this host, are not affected by them."""
    limit = GuessLimit(RATE, ManualClock())
    assert limit.admit(OPERATOR) == 0
    limit.right(OPERATOR)
    assert sum(spend(limit, f"203.0.113.{number}") for number in range(200)) == RATE.in_all
    assert [spend(limit, each) for each in (OPERATOR, "127.0.0.1")] == [RATE.per_address] * 2


def test_right_credentials_are_not_limited_by_a_neighbour() -> None:
    """They are not those of the neighbour at the same address; other ones are limited."""
    limit = GuessLimit(RATE, ManualClock())
    assert limit.admit(OPERATOR, "mine") == 0
    limit.right(OPERATOR, "mine")
    spend(limit, OPERATOR)
    assert limit.admit(OPERATOR, "mine") == 0
    limit.not_refused(OPERATOR, "mine")
    assert limit.admit(OPERATOR, "other") > 0


def test_a_check_before_an_attempt_counts_nothing() -> None:
    """It knows both limits, and right credentials are not held up."""
    limit = GuessLimit(RATE, ManualClock())
    limit.right(OPERATOR, "mine")
    assert limit.wait_s(ATTACKER, lambda: "") == 0
    spend(limit, ATTACKER)
    spend(limit, OPERATOR)
    assert 0 < limit.wait_s(ATTACKER, lambda: "other") <= 12
    assert (limit.wait_s(OPERATOR, lambda: "mine"), limit.wait_s("192.0.2.1", lambda: "other")) == (0, 0)
    for number in range(RATE.in_all):
        spend(limit, f"203.0.113.{number}")
    assert 0 < limit.wait_s("192.0.2.1", lambda: "other") <= 3
    assert limit.wait_s("127.0.0.1", lambda: "other") == 0


def test_credentials_that_are_not_refused_do_not_count() -> None:
    """A call that fails for another reason is no guess; what was not counted is not given back."""
    limit = GuessLimit(RATE, ManualClock())
    for _ in range(3 * RATE.in_all):
        assert limit.admit(OPERATOR, "mine") == 0
        limit.not_refused(OPERATOR, "mine")
    limit.not_refused(ATTACKER)
    assert spend(limit, ATTACKER) == RATE.per_address


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses and credentials that were not used for longest are forgotten."""
    monkeypatch.setattr(guess_limit, "PLACES_MAX", 10)
    monkeypatch.setattr(guess_limit, "RIGHT_MAX", 10)
    limit = GuessLimit(RATE._replace(in_all=1_000_000), ManualClock())
    for number in range(100):
        limit.admit(f"203.0.113.{number}", str(number))
        limit.right(f"203.0.113.{number}", str(number))
    assert max(len(each) for each in (limit._places, limit._right, limit._right_places)) == 10


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("203.0.113.7", "203.0.113.7"),
        ("::ffff:203.0.113.7", "203.0.113.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::1"),
        ("", ""),
        ("testclient", "testclient"),
    ],
)
def test_all_addresses_of_a_host_are_one(address: str, place: str) -> None:
    """A host has a whole network of IPv6 addresses."""
    assert place_of(address) == place
