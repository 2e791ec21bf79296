"""Token buckets against floods, and accounts of buffered bytes with their eviction.

Each connection has one account for each key that it uses. An account is the member of three pools: all connections, its
address, and its key. If a pool is over its limit, its largest account releases the bytes that wait for its peer:
incomplete requests and unread answers. If the largest account is the one that needs more bytes, its call is refused
instead. So a small account is never refused because of larger ones.
"""

from __future__ import annotations

import heapq
import ipaddress
from collections.abc import Callable
from typing import Final

from dmq.http2.admission.limits import Rate
from dmq.http2.errors import Code, ConnectionFault

SHARES: Final = 4  # an address or a key holds at most 1/SHARES, unless it has its own limit
LOOPBACK: Final = "loopback"
_PREFIX_BITS: Final = 64  # of IPv6: a network assigned to one host

ShareOf = Callable[[str, str], int | None]


class Allowance:
    """A token bucket for an action that is expensive for the server and cheap for the peer."""

    __slots__ = ("_burst", "_left", "_per_s", "_seen_s", "_what")

    def __init__(self, what: str, rate: Rate, now_s: float) -> None:
        self._what = what
        self._burst = self._left = float(rate.burst)
        self._per_s = rate.per_s
        self._seen_s = now_s

    def spend(self, now_s: float) -> None:
        """Use one token; raise ConnectionFault (ENHANCE_YOUR_CALM) if none is left."""
        if not self.has_one(now_s):
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, f"too many {self._what}")

    def has_one(self, now_s: float) -> bool:
        """Use one token; return False if none is left."""
        if self._left < 1:
            self._left = min(self._burst, self._left + (now_s - self._seen_s) * self._per_s)
            self._seen_s = now_s
            if self._left < 1:
                return False
        self._left -= 1
        return True

    def earn(self, count: int) -> None:
        """Add ``count`` tokens, up to the burst, for the frames that a useful action of the peer entails."""
        left = self._left + count
        self._left = left if left < self._burst else self._burst  # noqa: FURB136 - of every call, and min() costs more

    def refill(self) -> None:
        """Refill the bucket after a useful action of the peer."""
        self._left = self._burst


class Pool:
    """Buffered bytes of all accounts in one group."""

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
        """Make the largest account release bytes that wait for its peer; False if it is ``account`` or frees none."""
        largest = max(self.accounts, key=_held_by, default=account)
        if largest is account or largest.bytes_held <= account.bytes_held:
            return False
        held = self.bytes_held
        largest.let_go(largest)
        return self.bytes_held < held


class Account:
    """The buffered bytes of requests and answers that one connection holds for one key (or without a key).

    ``let_go`` ends calls that wait for the peer. The account may grow while ``everyone`` holds at most ``ceiling``
    bytes.
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
        """Return an account with pools of its own."""
        return cls(*(Pool(kind, "", bytes_max) for kind in ("all", "address", "key")), ceiling=bytes_max)

    def hold(self, size: int) -> None:
        """Count buffered bytes; a negative size releases them."""
        self.bytes_held += size
        self.everyone.bytes_held += size
        self.address.bytes_held += size
        self.key.bytes_held += size

    def crowded(self) -> Pool | None:
        """Return the pool that is over its limit for this account; None if there is room."""
        if self.address.bytes_held > self.address.bytes_max:
            return self.address
        if self.key.bytes_held > self.key.bytes_max:
            return self.key
        return self.everyone if self.everyone.bytes_held > self.ceiling else None

    def has_room(self) -> Pool | None:
        """Return as ``crowded`` does, after evicting larger accounts while that frees bytes."""
        while (pool := self.crowded()) is not None:
            if not pool.relieve(self):
                return pool
        return None


class Accounts:
    """All accounts and their pools. ``share_of`` returns the limit of an ``address`` or a ``key``; None means a
    quarter.
    """

    def __init__(self, bytes_max: int, reserve: int, share_of: ShareOf = lambda _, __: None) -> None:
        """Only operators may use the last ``reserve`` bytes."""
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
        """Remove an account that holds no bytes."""
        for pool in (account.everyone, account.address, account.key):
            pool.accounts.pop(account, None)
            if not pool.accounts:
                self._pools.pop((pool.kind, pool.name), None)

    def held_by(self, kind: str, name: str) -> int:
        """Return the number of bytes buffered for an ``address`` or a ``key``."""
        pool = self._pools.get((kind, name))
        return pool.bytes_held if pool is not None else 0

    def held(self, count_max: int) -> list[tuple[str, str, int]]:
        """Return the addresses and keys with the most buffered bytes, as (kind, name, bytes)."""
        found = [(each.kind, each.name, each.bytes_held) for each in self._pools.values() if each.bytes_held]
        return heapq.nlargest(count_max, found, key=lambda each: each[2])

    def share_changed(self) -> None:
        """Apply changed limits of ``share_of`` to the existing pools."""
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
    """Return the address under which a client is counted, from the peer name of its socket.

    All addresses of this host count as one, ``loopback``. An IPv6 network of 64 bits counts as one, because one host
    can use all of it.
    """
    if not isinstance(peer, tuple):
        return LOOPBACK  # a Unix socket
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
    """The part of a global bound that the connections of one address hold.

    Connections call ``take`` and ``give``. ``Shares.join`` returns the same share to all connections of an address.
    """

    __slots__ = ("_all", "held", "held_max", "users")

    def __init__(self, all_of_them: Shares, held_max: int) -> None:
        self._all = all_of_them
        self.held = 0
        self.held_max = held_max
        self.users = 0

    def take(self, size: int) -> bool:
        """Hold ``size`` more; return False and hold nothing if that exceeds the bound of the address or the total."""
        held, held_in_all = self.held + size, self._all.held + size
        if held > self.held_max or held_in_all > self._all.held_max:
            return False
        self.held = held
        self._all.held = held_in_all
        return True

    def give(self, size: int) -> None:
        """Release ``size``."""
        self.held -= size
        self._all.held -= size


class Shares:
    """The shares of all addresses, and their total."""

    def __init__(self, held_max: int, share_max: int) -> None:
        self.held = 0
        self.held_max = held_max
        self._share_max = share_max
        self._by_address: dict[str, Share] = {}

    def join(self, address: str) -> Share:
        """Return the share of an address and count one more connection on it."""
        share = self._by_address.get(address)
        if share is None:
            share = self._by_address[address] = Share(self, self._share_max)
        share.users += 1
        return share

    def leave(self, address: str) -> None:
        """Count one connection less; drop a share without connections."""
        share = self._by_address[address]
        share.users -= 1
        if not share.users:
            del self._by_address[address]
