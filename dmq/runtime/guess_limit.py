"""Limit of refused credentials, of each client address and of all together, against guessing of secrets.

An attempt counts before its check, so parallel attempts are counted as well. Above the limit credentials are refused
without a check. The limit of an address has no effect on other addresses. The limit of all addresses has no effect on
this host, and on addresses with right credentials before. So an attacker locks out at most its own address, or,
with many addresses, those that were never right.

Credentials that were right from an address are not limited there.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from typing import Final, NamedTuple, TypeVar

from broker_adapter.runtime.clock import Clock
from dmq.runtime.token_bucket import TokenBucket, refilled, spent, wait_s

PLACES_MAX: Final = 10_000
RIGHT_MAX: Final = 10_000
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_PREFIX_BITS: Final = 64  # of an IPv6 address: a host may use all addresses of its network


class GuessRate(NamedTuple):
    """Refused credentials per ``period_s``, of one address and in all."""

    per_address: int
    in_all: int
    period_s: float


CALLS: Final = GuessRate(per_address=100, in_all=1_000, period_s=60.0)  # of programs, not of people


class GuessLimit:
    """Counters of refused credentials, with bounded memory: the address that was used least recently is forgotten."""

    def __init__(self, rate: GuessRate, clock: Clock) -> None:
        self._rate = rate
        self._clock = clock
        self._places: OrderedDict[str, TokenBucket] = OrderedDict()
        self._all: TokenBucket | None = None
        self._right: OrderedDict[tuple[str, str], None] = OrderedDict()  # places and credentials
        self._right_places: OrderedDict[str, None] = OrderedDict()

    def admit(self, address: str, credentials: str = "") -> float:
        """Count an attempt and return 0, or return the seconds until the next one may be checked.

        ``credentials`` identify those that may be remembered as right; empty: none.
        """
        place = place_of(address)
        if (place, credentials) in self._right:
            self._right.move_to_end((place, credentials))
            return 0.0
        rate, now_s = self._rate, self._clock.monotonic_s()
        own = refilled(self._places.get(place), rate.per_address, now_s, rate.period_s)
        left = spent(own, rate.per_address, 1)
        if left is None:
            return wait_s(own, rate.per_address, 1, rate.period_s)
        if self._counts_in_all(place):
            common = refilled(self._all, rate.in_all, now_s, rate.period_s)
            common_left = spent(common, rate.in_all, 1)
            if common_left is None:
                return wait_s(common, rate.in_all, 1, rate.period_s)
            self._all = common_left
        _keep(self._places, place, left, PLACES_MAX)
        return 0.0

    def wait_s(self, address: str, credentials: Callable[[], str]) -> float:
        """Return the seconds until the next attempt may be checked; 0 at once. Nothing is counted.

        ``credentials`` is only called above a limit.
        """
        place, rate = place_of(address), self._rate
        own, common = self._places.get(place), self._all
        if (own is None or own.left >= 1) and (common is None or common.left >= 1):
            return 0.0
        now_s = self._clock.monotonic_s()
        left_s = wait_s(refilled(own, rate.per_address, now_s, rate.period_s), rate.per_address, 1, rate.period_s)
        if self._counts_in_all(place):
            both = refilled(common, rate.in_all, now_s, rate.period_s)
            left_s = max(left_s, wait_s(both, rate.in_all, 1, rate.period_s))
        return left_s if left_s and (place, credentials()) not in self._right else 0.0

    def not_refused(self, address: str, credentials: str = "") -> None:
        """Forget an attempt that ``admit`` counted: its credentials were not refused."""
        rate, place = self._rate, place_of(address)
        left = self._places.get(place)
        if left is None or (place, credentials) in self._right:
            return
        self._places[place] = left._replace(left=min(float(rate.per_address), left.left + 1))
        if self._all is not None and self._counts_in_all(place):
            self._all = self._all._replace(left=min(float(rate.in_all), self._all.left + 1))

    def right(self, address: str, credentials: str = "") -> None:
        """Note that credentials were right. They are not limited from now on, unless ``credentials`` is empty."""
        place = place_of(address)
        if (place, credentials) in self._right:
            return
        self.not_refused(address, credentials)
        _keep(self._right_places, place, None, RIGHT_MAX)
        if credentials:
            _keep(self._right, (place, credentials), None, RIGHT_MAX)

    def _counts_in_all(self, place: str) -> bool:
        return place not in self._right_places and not _is_here(place)


@lru_cache(maxsize=4096)
def place_of(address: str) -> str:
    """Return the part of an address that counts: IPv4 as a whole, the network of IPv6, other texts unchanged."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    if found.is_loopback:
        return str(found)
    return str(ipaddress.ip_network((found, _PREFIX_BITS), strict=False))


def _is_here(place: str) -> bool:
    try:
        return ipaddress.ip_address(place).is_loopback
    except ValueError:
        return False


def _keep(kept: OrderedDict[_Key, _Value], key: _Key, value: _Value, count_max: int) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > count_max:
        kept.popitem(last=False)
