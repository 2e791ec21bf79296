"""Quotas of one access key, and of one client address: topics, groups, streams, polls, sends, bytes ...

A call counts for its key, if it has one, and for its address; its client id is irrelevant. The default limits are high
enough for the clients of a sidecar: see ``default_of``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from broker_adapter.contracts.errors import Overloaded
from broker_adapter.contracts.limits import GROUPS_MAX, SUBSCRIPTIONS_MAX, TOPICS_MAX
from broker_adapter.runtime.clock import Clock
from dmq.acl.rules import AccessKey
from dmq.http2 import LOOPBACK
from dmq.runtime.token_bucket import TokenBucket, refilled, spent
from dmq.store.schema.operators.limits import Limit, decode_limits, encode_limits

KEY: Final = "key"
ADDRESS: Final = "address"
LIMIT_MAX: Final = 2**40
SET_MAX: Final = 10_000  # configured limits; each has a few bytes in memory and in the single row of the store
RESERVE_PART: Final = 8  # operators and health checks on this host have this fraction of the buffered bytes
_LOOK_AGAIN_S: Final = 1.0  # between two existence checks of thousands of names
_HOLDERS_KEPT: Final = 20_000
_OPERATORS_PART: Final = 20  # operators have a twentieth of this host's share
_STRANGERS_PART: Final = 4


class Quota(StrEnum):
    """The limited resources. The first four count existing objects that were created since the start of the daemon."""

    TOPICS = "topics"
    GROUPS = "groups"
    SCHEDULES = "schedules"
    SUBSCRIPTIONS = "subscriptions"  # pairs of a group and a topic that it receives from, named by ``pair_name``
    NEW_PER_MIN = "new_per_min"  # topics and groups together
    STREAMS = "streams"  # telemetry streams
    WATCHES = "watches"  # watches of the health service, and streams of reflection
    POLLS = "polls"  # receives and pulls that wait
    SENDS_PER_S = "sends_per_s"  # messages, not calls
    BYTES = "bytes"  # of requests and answers that wait


RATES_S: Final[Mapping[Quota, int]] = {Quota.NEW_PER_MIN: 60, Quota.SENDS_PER_S: 1}


class Holder(NamedTuple):
    """The key or address that a resource counts for: ``key shop``, ``address 10.0.0.7``, ``address loopback``."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaBounds:
    """Limits of all holders together; the defaults of one holder are fractions of them."""

    streams: int = 10_000
    polls: int = 10_000
    watches: int = 1024
    schedules: int = 10_000
    bytes_held: int = 256 * 1024 * 1024
    bytes_reserve: int = 32 * 1024 * 1024


def default_of(quota: Quota, holder: Holder, bounds: QuotaBounds, *, has_rules: bool = True) -> int | None:
    """Return the limit that applies if none is set; None if there is none.

    All clients of a sidecar come from this host, which counts as one address. Its limit is the whole bound without the
    operators' part. A remote address and a key have a quarter. A key without any rule has a minimum.
    """
    if quota is Quota.SENDS_PER_S:
        return None
    if not has_rules:
        return {Quota.BYTES: 1024 * 1024}.get(quota, 4)
    is_here = holder == (ADDRESS, LOOPBACK)
    if quota is Quota.NEW_PER_MIN:
        return 2000 if is_here else 600
    if quota is Quota.BYTES:
        return bounds.bytes_held - bounds.bytes_reserve if is_here else bounds.bytes_held // _STRANGERS_PART
    whole = {
        Quota.TOPICS: TOPICS_MAX,
        Quota.GROUPS: GROUPS_MAX,
        Quota.SCHEDULES: bounds.schedules,
        Quota.SUBSCRIPTIONS: SUBSCRIPTIONS_MAX,
        Quota.STREAMS: bounds.streams,
        Quota.WATCHES: bounds.watches,
        Quota.POLLS: bounds.polls,
    }[quota]
    return max(1, whole - whole // _OPERATORS_PART if is_here else whole // _STRANGERS_PART)


class OverQuota(Overloaded):
    """A holder has reached a quota; the text names the quota, the value and the limit."""

    def __init__(self, quota: Quota, holder: Holder, *, used: int, limit: int) -> None:
        super().__init__(f"quota {quota.value} of {holder}: {used} in use", limit=limit)


@dataclass(slots=True)
class _Use:
    """The resources in use by one holder."""

    held: dict[Quota, int] = field(default_factory=dict)
    names: dict[Quota, set[str]] = field(default_factory=dict)
    looked_s: dict[Quota, float] = field(default_factory=dict)  # time of the last existence check of the names
    left: dict[Quota, TokenBucket] = field(default_factory=dict)  # rates only


def pair_name(group: str, topic: str) -> str:
    """Return the name of a subscription in quotas: neither of its parts contains a slash."""
    return f"{group}/{topic}"


class QuotaUse(NamedTuple):
    """A row of the operators' report."""

    holder: Holder
    quota: Quota
    used: int
    limit: int | None
    is_set: bool


class Quotas:
    """Counters of the holders' resources; refuses use above the limits. The event loop owns it.

    All calls of one holder count together: those of a key from every address, those of an address with every key.
    ``bytes_of`` and ``on_change`` are set by the owner of the byte accounts.
    """

    def __init__(
        self,
        clock: Clock,
        bounds: QuotaBounds | None = None,
        limits: bytes = b"",
        *,
        is_known: Callable[[Quota, str], bool] = lambda _, __: True,
    ) -> None:
        """``limits`` is a result of ``encoded``; ``is_known`` returns True if a created object still exists.

        Raises ValueError if ``limits`` cannot be decoded.
        """
        self.bounds = bounds or QuotaBounds()
        self._clock = self.clock = clock
        self._set = dict(_decoded(limits)) if limits else {}
        self._uses: dict[Holder, _Use] = {}
        self._ruleless: set[str] = set()  # keys
        self.bytes_of: Callable[[Holder], int] = lambda _: 0
        self.on_change: Callable[[], None] = lambda: None
        self.is_known = is_known
        self.limits_sends = self._has_send_limits()

    # -- what counts ---------------------------------------------------------------------------------------------------

    def judge(self, key: AccessKey) -> None:
        """Record whether a key has any rule."""
        if key.is_admin or key.role or key.rules:
            self._ruleless.discard(key.name)
        elif len(self._ruleless) < _HOLDERS_KEPT:
            self._ruleless.add(key.name)

    def limit(self, quota: Quota, holder: Holder) -> int | None:
        """Return the effective limit."""
        found = self._set.get((holder, quota))
        if found is not None:
            return found
        has_rules = holder.kind != KEY or holder.name not in self._ruleless
        return default_of(quota, holder, self.bounds, has_rules=has_rules)

    def take(self, quota: Quota, holders: tuple[Holder, ...]) -> None:
        """Count one more held resource, to be released by ``free``. Raises OverQuota without counting it."""
        for holder in holders:
            used, limit = self._use(holder).held.get(quota, 0), self.limit(quota, holder)
            if limit is not None and used >= limit:
                raise OverQuota(quota, holder, used=used, limit=limit)
        for holder in holders:
            held = self._use(holder).held
            held[quota] = held.get(quota, 0) + 1

    def free(self, quota: Quota, holders: tuple[Holder, ...]) -> None:
        """Count one less."""
        for holder in holders:
            held = self._use(holder).held
            held[quota] -= 1
            if not held[quota]:
                del held[quota]

    def spend(self, quota: Quota, holders: tuple[Holder, ...], count: int = 1) -> None:
        """Use ``count`` tokens of a rate. Raises OverQuota without using any.

        The bucket holds the tokens of one period. A call with a larger count needs a full bucket and leaves a debt.
        """
        now_s, period_s = self._clock.monotonic_s(), RATES_S[quota]
        paid: list[tuple[_Use, TokenBucket]] = []
        for holder in holders:
            limit = self.limit(quota, holder)
            if limit is None:
                continue
            use = self._use(holder)
            left = spent(refilled(use.left.get(quota), limit, now_s, period_s), limit, count)
            if left is None:
                raise OverQuota(quota, holder, used=limit, limit=limit)
            paid.append((use, left))
        for use, left in paid:
            use.left[quota] = left

    def make(self, quota: Quota, holders: tuple[Holder, ...], name: str) -> None:
        """Count an object before its creation. Raises OverQuota, up to a second after another object was removed."""
        for holder in holders:
            names, limit = self._use(holder).names.setdefault(quota, set()), self.limit(quota, holder)
            if limit is not None and len(names) >= limit and name not in names:
                self._look_again(self._use(holder), quota)
                if len(names) >= limit:
                    raise OverQuota(quota, holder, used=len(names), limit=limit)
        if quota in {Quota.TOPICS, Quota.GROUPS}:
            self.spend(Quota.NEW_PER_MIN, holders)
        for holder in holders:
            self._use(holder).names[quota].add(name)

    def _look_again(self, use: _Use, quota: Quota) -> None:
        """Drop names of removed objects; rate-limited, because every call above the limit triggers it."""
        now_s, names = self._clock.monotonic_s(), use.names[quota]
        if now_s < use.looked_s.get(quota, -_LOOK_AGAIN_S) + _LOOK_AGAIN_S:
            return
        use.looked_s[quota] = now_s
        names.intersection_update([name for name in names if self.is_known(quota, name)])

    def about_to_make(self, quota: Quota, holders: tuple[Holder, ...], name: str) -> None:
        """Count as ``make`` does, if the object that a call uses does not exist yet."""
        if not self.is_known(quota, name):
            self.make(quota, holders, name)

    # -- operators -----------------------------------------------------------------------------------------------------

    def change(self, holder: Holder, quota: Quota, limit: int | None) -> bytes:
        """Set a limit, or restore the default with None; effective at once. Return the encoded limits to store."""
        if limit is None:
            self._set.pop((holder, quota), None)
        elif (holder, quota) not in self._set and len(self._set) >= SET_MAX:
            raise Overloaded("limits that are set", limit=SET_MAX)
        else:
            self._set[holder, quota] = limit
        self.limits_sends = self._has_send_limits()
        self.on_change()
        return self.encoded()

    def read(self, limits: bytes) -> None:
        """Replace all limits by those that another instance's ``encoded`` returned."""
        self._set = dict(_decoded(limits)) if limits else {}
        self.limits_sends = self._has_send_limits()
        self.on_change()

    def encoded(self) -> bytes:
        """Return the configured limits, to be stored."""
        return encode_limits(Limit(*holder, quota.value, limit) for (holder, quota), limit in sorted(self._set.items()))

    def rows(self) -> Iterator[QuotaUse]:
        """Yield the use and limit of each holder with either, ordered by holder and quota."""
        for holder in sorted({*self._uses, *(holder for holder, _ in self._set)}):
            for quota in Quota:
                used, is_set = self.used(quota, holder), (holder, quota) in self._set
                if used or is_set:
                    yield QuotaUse(holder, quota, used, self.limit(quota, holder), is_set)

    def used(self, quota: Quota, holder: Holder) -> int:
        """Return the amount of a quota that a holder has in use."""
        use = self._uses.get(holder)
        if quota is Quota.BYTES:
            return self.bytes_of(holder)
        if use is None:
            return 0
        if quota in RATES_S:
            left, limit = use.left.get(quota), self.limit(quota, holder)
            if left is None or limit is None:
                return 0
            return max(0, round(limit - refilled(left, limit, self._clock.monotonic_s(), RATES_S[quota]).left))
        return len(use.names.get(quota, ())) or use.held.get(quota, 0)

    def _use(self, holder: Holder) -> _Use:
        use = self._uses.get(holder)
        if use is None:
            if len(self._uses) >= _HOLDERS_KEPT:  # a full bucket carries no information
                self._uses = {who: use for who, use in self._uses.items() if use.held or use.names}
            use = self._uses[holder] = _Use()
        return use

    def _has_send_limits(self) -> bool:
        return any(quota is Quota.SENDS_PER_S for _, quota in self._set)


def _decoded(kept: bytes) -> Iterator[tuple[tuple[Holder, Quota], int]]:
    known = {each.value for each in Quota}
    for kind, name, quota, limit in decode_limits(kept):
        if quota in known:  # unknown quotas come from a later version
            yield (Holder(kind, name), Quota(quota)), limit
