"""The guard: who is let through, who is not, and what is said of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs
from support.rigs.daemon.acl import ACL, KEYS, OPERATOR, SHOP, Key, write_acl

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.runtime.clock import ManualClock
from dmq.acl.file import KeyFile
from dmq.acl.guard import Authenticator
from dmq.acl.rules import ADMIN_KEY, NAME_CHARS_MAX, PUB, TOPIC, Need
from dmq.acl.signature import Header

HOUR_MS = 3_600_000
ORDERS = Need(PUB, TOPIC, "orders")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def guard(tmp_path: Path, clock: ManualClock) -> Authenticator:
    return Authenticator(KeyFile(write_acl(tmp_path), clock), clock)


def signed(key: Key, clock: ManualClock, at_ms: int = 0) -> Header:
    """Give the headers of a call that ``key`` signs ``at_ms`` from now."""
    return dict(key.signer(ManualClock(clock.now_ms() + at_ms)).metadata()).get


def refusal(guard: Authenticator, header: Header, *needs: Need) -> Refused:
    """Return why a call is refused."""
    with pytest.raises(Refused) as caught:
        guard.admit("SendMessage", header, needs)
    assert not any(key.secret_key in str(caught.value) for key in KEYS)
    return caught.value


def test_a_good_signature_is_its_keys(guard: Authenticator, clock: ManualClock) -> None:
    """Whatever it is enough for."""
    assert guard.admit("SendMessage", signed(SHOP, clock), (ORDERS,)).name == "shop"
    assert guard.admit("GetStatus", signed(OPERATOR, clock), (ADMIN_KEY,)).is_admin


def test_a_stranger_and_a_wrong_secret_hear_the_same(guard: Authenticator, clock: ManualClock) -> None:
    """Nobody finds out by asking which access keys there are."""
    wrong = refusal(guard, signed(Key("shop", "guess"), clock), ORDERS)
    stranger = refusal(guard, signed(Key("nobody", "nobody"), clock), ORDERS)
    assert wrong.rule is stranger.rule is Rule.UNAUTHORIZED
    assert str(wrong) == str(stranger)


def test_a_missing_permission_is_named(guard: Authenticator, clock: ManualClock) -> None:
    """The first one, with the key, so that who reads it knows what to add to the file."""
    refused = refusal(guard, signed(SHOP, clock), ORDERS, Need(PUB, TOPIC, "prices"))
    assert refused.rule is Rule.FORBIDDEN
    assert str(refused) == "forbidden: access key 'shop' lacks PUB on topic 'prices'"
    assert "an admin key" in str(refusal(guard, signed(SHOP, clock), ADMIN_KEY))
    long = refusal(guard, signed(SHOP, clock), Need(PUB, TOPIC, "x" * 10_000_000))
    assert len(str(long)) < NAME_CHARS_MAX + 100


@pytest.mark.parametrize(("away_ms", "is_good"), [(0, True), (14, True), (-12, True), (16, False), (-16, False)])
def test_a_signature_is_good_in_every_time_zone_and_no_longer(
    away_ms: int, is_good: bool, guard: Authenticator, clock: ManualClock
) -> None:
    """Clients sign their local time; one that was overheard is worth nothing after 15 h."""
    header = signed(SHOP, clock, away_ms * HOUR_MS)
    if is_good:
        guard.admit("SendMessage", header, (ORDERS,))
    else:
        refused = refusal(guard, header, ORDERS)
        assert (refused.rule, "16.0 h away" in str(refused)) == (Rule.UNAUTHORIZED, True)


def test_the_window_can_be_tight_or_none(tmp_path: Path, clock: ManualClock) -> None:
    """As the file says."""
    tight = Authenticator(KeyFile(write_acl(tmp_path, f'signature_window = "5m"\n{ACL}'), clock), clock)
    assert refusal(tight, signed(SHOP, clock, HOUR_MS)).rule is Rule.UNAUTHORIZED
    none = Authenticator(KeyFile(write_acl(tmp_path, f'signature_window = "none"\n{ACL}'), clock), clock)
    none.admit("SendMessage", signed(SHOP, clock, -999_999 * HOUR_MS), ())


def test_rules_that_change_count_for_calls_and_for_open_streams(
    tmp_path: Path, guard: Authenticator, clock: ManualClock
) -> None:
    """A permission that is gone, a key that is gone, a secret that was exchanged."""
    key = guard.admit("Telemetry", signed(SHOP, clock), ())
    guard.recheck("Telemetry", key, (ORDERS,))
    for text, rule in (
        (ACL.replace("PUB|SUB", "SUB"), Rule.FORBIDDEN),
        (ACL.replace("[keys.shop]", "[keys.shop2]"), Rule.UNAUTHORIZED),
        (ACL.replace(SHOP.secret_key, "another"), Rule.UNAUTHORIZED),
    ):
        write_acl(tmp_path, text)
        clock.advance(1000)
        assert refusal(guard, signed(SHOP, clock), ORDERS).rule is rule
        with pytest.raises(Refused) as caught:
            guard.recheck("Telemetry", key, (ORDERS,))
        assert caught.value.rule is rule
    write_acl(tmp_path)
    clock.advance(1000)
    guard.recheck("Telemetry", key, (ORDERS,))


def test_refusals_are_logged_once_a_second_without_words_of_strangers(guard: Authenticator, clock: ManualClock) -> None:
    """A client that repeats a refused call does not fill the log; what it sent may be a secret in the wrong place."""
    swapped = Key(SHOP.secret_key, SHOP.access_key)
    with capture_logs() as said:
        for _ in range(5):
            refusal(guard, signed(swapped, clock))
        clock.advance(1000)
        refusal(guard, signed(SHOP, clock), ADMIN_KEY)
    assert [(each["event"], each["access_key"], each["unlogged"]) for each in said] == [
        ("access_refused", "", 0),
        ("access_refused", "shop", 4),
    ]
    assert SHOP.secret_key not in str(said)
