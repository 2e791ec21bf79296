"""Token buckets against floods, and the accounts of bytes that wait: whose they are, and who makes room.

Each connection has an account for each key that calls on it. An account adds up in three pools: everybody, its
address, its key. A pool that is too full is relieved of what its largest account has waiting for its peer (requests
that are not whole, answers that are not taken), unless that is the account which asks for more: then its call is
refused. So nobody who holds less than others is refused because of them.
"""

from __future__ import annotations

import heapq
import ipaddress
from collections.abc import Callable
from typing import Final

from dmq.http2.errors import Code, ConnectionFault
from dmq.http2.limits import Rate

SHARES: Final = 4  # no address and no key holds more than one of so many parts, unless it is told otherwise
LOOPBACK: Final = "loopback"
_PREFIX_BITS: Final = 64  # of IPv6: a network that one host has

ShareOf = Callable[[str, str], int | None]


class Allowance:
    """How often a peer may still do something that costs us work and them nothing."""

    __slots__ = ("_burst", "_left", "_per_s", "_seen_s", "_what")

    def __init__(self, what: str, rate: Rate, now_s: float) -> None:
        self._what = what
        self._burst = self._left = float(rate.burst)
        self._per_s = rate.per_s
        self._seen_s = now_s

    def spend(self, now_s: float) -> None:
        """Take one; raises ConnectionFault (ENHANCE_YOUR_CALM) if there is none."""
        if not self.has_one(now_s):
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, f"too many {self._what}")

    def has_one(self, now_s: float) -> bool:
        """Take one; False if there is none."""
        if self._left < 1:
            self._left = min(self._burst, self._left + (now_s - self._seen_s) * self._per_s)
            self._seen_s = now_s
            if self._left < 1:
                return False
        self._left -= 1
        return True

    def earn(self, count: int) -> None:
        """Let the peer do it ``count`` times more, up to the burst: it has done something that brings this with it."""
        left = self._left + count
        self._left = left if left < self._burst else self._burst  # noqa: FURB136 - of every call, and min() costs more

    def refill(self) -> None:
        """Make it full again: the peer has done something of use."""
        self._left = self._burst


class Pool:
    """Bytes that wait, of all accounts of one kind together."""

    __slots__ = ("accounts", "bytes_held", "bytes_max", "kind", "name")

    def __init__(self, kind: str, name: str, bytes_max: int) -> None:
        self.kind = kind
        self.name = name
        self.bytes_held = 0
        self.bytes_max = bytes_max
        self.accounts: dict[Account, None] = {}

    def __str__(self) -> str:
        return f"{self.kind} {self.name}".rstrip()

    def relieve(self, account: Account) -> bool:
        """Have the largest account let go of what waits for its peer; False if that is ``account`` or frees nothing."""
        largest = max(self.accounts, key=_held_by, default=account)
        if largest is account or largest.bytes_held <= account.bytes_held:
            return False
        held = self.bytes_held
        largest.let_go(largest)
        return self.bytes_held < held


class Account:
    """What one connection holds for one key (or for no key): bytes of requests and answers.

    ``let_go`` ends what waits for the peer. ``ceiling`` is how full ``everyone`` may be for this account to grow.
    """

    __slots__ = ("address", "bytes_held", "ceiling", "everyone", "key", "let_go")

    def __init__(
        self,
        everyone: Pool,
        address: Pool,
        key: Pool,
        *,
        ceiling: int,
        let_go: Callable[[Account], None] = lambda _: None,
    ) -> None:
        self.everyone = everyone
        self.address = address
        self.key = key
        self.ceiling = ceiling
        self.let_go = let_go
        self.bytes_held = 0
        for pool in (everyone, address, key):
            pool.accounts[self] = None

    @classmethod
    def alone(cls, bytes_max: int) -> Account:
        """Return an account for one peer alone."""
        return cls(*(Pool(kind, "", bytes_max) for kind in ("all", "address", "key")), ceiling=bytes_max)

    def hold(self, size: int) -> None:
        """Count bytes that are kept; a negative size gives them back."""
        self.bytes_held += size
        self.everyone.bytes_held += size
        self.address.bytes_held += size
        self.key.bytes_held += size

    def crowded(self) -> Pool | None:
        """Return the pool that has no room for more from this account; None if there is room."""
        if self.address.bytes_held > self.address.bytes_max:
            return self.address
        if self.key.bytes_held > self.key.bytes_max:
            return self.key
        return self.everyone if self.everyone.bytes_held > self.ceiling else None

    def has_room(self) -> Pool | None:
        """As ``crowded``, once the largest accounts have made room, as far as they hold more than this one."""
        while (pool := self.crowded()) is not None:
            if not pool.relieve(self):
                return pool
        return None


class Accounts:
    """Opens accounts, and knows the pools. ``share_of``: what an ``address`` or a ``key`` may hold; None: a quarter."""

    def __init__(self, bytes_max: int, reserve: int, share_of: ShareOf = lambda _, __: None) -> None:
        """Nobody but operators may fill the last ``reserve`` bytes."""
        self.everyone = Pool("all", "", bytes_max)
        self._ceiling = bytes_max - reserve
        self._operators = Pool("operators", "", max(reserve, bytes_max // SHARES))
        self._keyless = Pool("no key", "", bytes_max)
        self._share_of = share_of
        self._pools: dict[tuple[str, str], Pool] = {}

    def open(self, address: str, key: str, let_go: Callable[[Account], None], *, is_operator: bool = False) -> Account:
        """Return a new account of one connection; ``close`` it with the connection."""
        keyed = self._pool("key", key) if key else self._keyless
        if is_operator:
            return Account(self.everyone, self._operators, keyed, ceiling=self.everyone.bytes_max, let_go=let_go)
        return Account(self.everyone, self._pool("address", address), keyed, ceiling=self._ceiling, let_go=let_go)

    def close(self, account: Account) -> None:
        """Forget an account that holds nothing any more."""
        for pool in (account.everyone, account.address, account.key):
            pool.accounts.pop(account, None)
            if not pool.accounts:
                self._pools.pop((pool.kind, pool.name), None)

    def held_by(self, kind: str, name: str) -> int:
        """Return how many bytes wait for an ``address`` or a ``key``."""
        pool = self._pools.get((kind, name))
        return pool.bytes_held if pool is not None else 0

    def held(self, count_max: int) -> list[tuple[str, str, int]]:
        """Return the addresses and keys that hold most, each with its kind, its name and how many bytes."""
        found = [(each.kind, each.name, each.bytes_held) for each in self._pools.values() if each.bytes_held]
        return heapq.nlargest(count_max, found, key=lambda each: each[2])

    def share_changed(self) -> None:
        """Ask ``share_of`` again."""
        for pool in self._pools.values():
            pool.bytes_max = self._share(pool.kind, pool.name)

    def _pool(self, kind: str, name: str) -> Pool:
        pool = self._pools.get((kind, name))
        if pool is None:
            pool = self._pools[kind, name] = Pool(kind, name, self._share(kind, name))
        return pool

    def _share(self, kind: str, name: str) -> int:
        share = self._share_of(kind, name)
        return min(self.everyone.bytes_max // SHARES if share is None else share, self._ceiling)


def address_of(peer: object) -> str:
    """Return what a client's address counts as, from the name of its socket's peer.

    This host is one address, ``loopback``, and so is a network of IPv6 that one host has (its first 64 bits).
    """
    if not isinstance(peer, tuple):
        return LOOPBACK  # a socket in the file system
    try:
        ip = ipaddress.ip_address(str(peer[0]).partition("%")[0])
    except ValueError:
        return str(peer[0])
    ip = getattr(ip, "ipv4_mapped", None) or ip
    if ip.is_loopback:
        return LOOPBACK
    if isinstance(ip, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((int(ip), _PREFIX_BITS), strict=False))
    return str(ip)


def _held_by(account: Account) -> int:
    return account.bytes_held


class Share:
    """What the connections of one address hold of something that is bounded for all.

    ``take`` and ``give`` are for the connections; ``Shares.of`` gives the same share to all of an address.
    """

    __slots__ = ("_all", "held", "held_max", "users")

    def __init__(self, all_of_them: Shares, held_max: int) -> None:
        self._all = all_of_them
        self.held = 0
        self.held_max = held_max
        self.users = 0

    def take(self, size: int) -> bool:
        """Hold ``size`` more; False, and nothing is held, if that is too much for the address or in all."""
        held, held_in_all = self.held + size, self._all.held + size
        if held > self.held_max or held_in_all > self._all.held_max:
            return False
        self.held = held
        self._all.held = held_in_all
        return True

    def give(self, size: int) -> None:
        """Hold ``size`` less."""
        self.held -= size
        self._all.held -= size


class Shares:
    """The shares of all addresses, and what is held in all."""

    def __init__(self, held_max: int, share_max: int) -> None:
        self.held = 0
        self.held_max = held_max
        self._share_max = share_max
        self._by_address: dict[str, Share] = {}

    def join(self, address: str) -> Share:
        """Return the share of an address for one more connection."""
        share = self._by_address.get(address)
        if share is None:
            share = self._by_address[address] = Share(self, self._share_max)
        share.users += 1
        return share

    def leave(self, address: str) -> None:
        """Count a connection less; a share without connections is forgotten."""
        share = self._by_address[address]
        share.users -= 1
        if not share.users:
            del self._by_address[address]
