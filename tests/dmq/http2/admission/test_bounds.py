"""Bytes that wait: whose they are, who is refused, and who has to let go for others."""

from __future__ import annotations

import pytest

from dmq.http2.admission.bounds import LOOPBACK, Account, Accounts, address_of

KIB = 1024


class Holder:
    """A connection that holds what it is told, all of it waiting for its peer unless ``is_busy``."""

    def __init__(self, accounts: Accounts, address: str, key: str = "", *, is_operator: bool = False) -> None:
        self.account = accounts.open(address, key, self._let_go, is_operator=is_operator)
        self.is_busy = False
        self.has_let_go = False

    def _let_go(self, account: Account) -> None:
        self.has_let_go = True
        if not self.is_busy:
            account.hold(-account.bytes_held)

    def asks(self, size: int) -> bool:
        """Hold more; give it back if there is no room. Say whether there was."""
        self.account.hold(size)
        if self.account.has_room() is None:
            return True
        self.account.hold(-size)
        return False


def test_a_client_below_its_share_always_finds_room() -> None:
    """Danger: five connections with unfinished requests hold everything, for ever."""
    accounts = Accounts(1024 * KIB, 64 * KIB, lambda _, __: 1024 * KIB)
    hogs = [Holder(accounts, LOOPBACK) for _ in range(5)]
    for _ in range(100):
        for hog in hogs:
            hog.asks(16 * KIB)
    honest = Holder(accounts, LOOPBACK)
    assert all(honest.asks(KIB) for _ in range(100))
    assert not honest.has_let_go
    assert accounts.everyone.bytes_held <= 960 * KIB


def test_no_address_and_no_key_holds_more_than_a_quarter() -> None:
    """However many connections it has; others do not notice."""
    accounts = Accounts(1024 * KIB, 64 * KIB)
    of_address = [Holder(accounts, "10.0.0.1") for _ in range(8)]
    of_key = [Holder(accounts, f"10.0.1.{n}", "shop") for n in range(8)]
    for _ in range(40):
        for holder in (*of_address, *of_key):
            holder.asks(8 * KIB)
    assert accounts.held_by("address", "10.0.0.1") <= 256 * KIB
    assert accounts.held_by("key", "shop") <= 256 * KIB
    other = Holder(accounts, "10.0.0.2", "other")
    assert other.asks(200 * KIB)


def test_the_reserve_is_for_operators_only() -> None:
    """Nobody else fills it, however busy they are."""
    accounts = Accounts(1024 * KIB, 64 * KIB, lambda _, __: 1024 * KIB)
    busy = [Holder(accounts, LOOPBACK) for _ in range(4)]
    for holder in busy:
        holder.is_busy = True
        assert holder.asks(240 * KIB)
    assert not Holder(accounts, LOOPBACK).asks(KIB)
    operator = Holder(accounts, LOOPBACK, is_operator=True)
    assert operator.asks(60 * KIB)


def test_the_largest_does_not_make_room_for_itself() -> None:
    """Its own call is refused; it loses nothing that it has."""
    accounts = Accounts(1024 * KIB, 0, lambda _, __: 1024 * KIB)
    small, large = Holder(accounts, LOOPBACK), Holder(accounts, LOOPBACK)
    assert small.asks(400 * KIB)
    assert large.asks(600 * KIB)
    assert not large.asks(100 * KIB)
    assert not small.has_let_go
    assert not large.has_let_go


def test_unused_pools_are_forgotten() -> None:
    """A million addresses, one after the other."""
    accounts = Accounts(1024 * KIB, 0)
    for number in range(1000):
        holder = Holder(accounts, f"10.0.{number // 256}.{number % 256}", f"key{number}")
        holder.asks(10)
        holder.account.hold(-10)
        accounts.close(holder.account)
    assert not accounts._pools
    assert not accounts.everyone.accounts


def test_a_share_that_changes_counts_at_once() -> None:
    """For connections that are there."""
    shares = {("address", "10.0.0.1"): 100 * KIB}
    accounts = Accounts(1024 * KIB, 0, lambda kind, name: shares.get((kind, name)))
    holder = Holder(accounts, "10.0.0.1")
    assert not holder.asks(150 * KIB)
    shares["address", "10.0.0.1"] = 200 * KIB
    accounts.share_changed()
    assert holder.asks(150 * KIB)


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        (("127.0.0.1", 5), LOOPBACK),
        (("127.8.9.1", 5), LOOPBACK),
        (("::1", 5, 0, 0), LOOPBACK),
        (("::ffff:127.0.0.1", 5, 0, 0), LOOPBACK),
        ("", LOOPBACK),
        (("10.1.2.3", 5), "10.1.2.3"),
        (("::ffff:10.1.2.3", 5, 0, 0), "10.1.2.3"),
        (("2001:db8:1:2:3:4:5:6", 5, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 5, 0, 0), "fe80::/64"),
    ],
)
def test_addresses_that_count_as_one(peer: object, address: str) -> None:
    """The host itself, without the port; of IPv6 what one host is given."""
    assert address_of(peer) == address
