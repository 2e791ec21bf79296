"""What one key and one address may have, and how that is told, set and kept."""

from __future__ import annotations

import asyncio

import pytest

from broker_adapter.contracts.errors import Refused
from broker_adapter.contracts.limits import TOPICS_MAX
from broker_adapter.runtime.clock import ManualClock
from dmq.acl.gate import holders_of
from dmq.acl.quotas import ADDRESS, KEY, Holder, OverQuota, Quota, QuotaBounds, Quotas, default_of
from dmq.acl.rules import AccessKey
from dmq.admin import admin_v1 as wire
from dmq.admin.operations.objects import QuotaCalls
from dmq.http2 import LOOPBACK, Admission

SHOP, BARE = Holder(KEY, "shop"), Holder(KEY, "bare")
HERE, THERE = Holder(ADDRESS, LOOPBACK), Holder(ADDRESS, "10.0.0.7")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def quotas(clock: ManualClock) -> Quotas:
    return Quotas(clock)


def test_a_call_counts_for_its_key_and_its_address(quotas: Quotas) -> None:
    """Whichever has no room refuses it; then it counts for neither."""
    quotas.change(SHOP, Quota.STREAMS, 2)
    call = holders_of(Admission(address="10.0.0.7", key="shop"))
    assert call == (SHOP, THERE)
    quotas.take(Quota.STREAMS, call)
    quotas.take(Quota.STREAMS, (SHOP, HERE))
    with pytest.raises(OverQuota, match=r"quota streams of key shop: 2 in use \(limit 2\)"):
        quotas.take(Quota.STREAMS, call)
    assert (quotas.used(Quota.STREAMS, SHOP), quotas.used(Quota.STREAMS, THERE)) == (2, 1)
    quotas.free(Quota.STREAMS, call)
    assert (quotas.used(Quota.STREAMS, SHOP), quotas.used(Quota.STREAMS, THERE)) == (1, 0)
    quotas.take(Quota.STREAMS, call)


def test_defaults_leave_a_part_to_others() -> None:
    """This host has what there is but for the operators' part, others a quarter, a key without rules a few."""
    bounds = QuotaBounds()
    assert default_of(Quota.STREAMS, HERE, bounds) == 9_500
    assert default_of(Quota.STREAMS, THERE, bounds) == default_of(Quota.STREAMS, SHOP, bounds) == 2_500
    assert default_of(Quota.TOPICS, HERE, bounds) == TOPICS_MAX - 500
    assert default_of(Quota.STREAMS, BARE, bounds, has_rules=False) == 4
    for quota in Quota:
        limit, here = default_of(quota, THERE, bounds), default_of(quota, HERE, bounds)
        assert limit is None or (here is not None and limit <= here)


def test_a_key_without_rules_has_a_few(quotas: Quotas) -> None:
    """Until it is given one."""
    quotas.judge(AccessKey(name="bare", secret=b"x"))
    for _ in range(4):
        quotas.take(Quota.STREAMS, (BARE,))
    with pytest.raises(OverQuota, match="limit 4"):
        quotas.take(Quota.STREAMS, (BARE,))
    quotas.judge(AccessKey(name="bare", secret=b"x", is_admin=True))
    quotas.take(Quota.STREAMS, (BARE,))


def test_names_are_made_at_a_rate(quotas: Quotas, clock: ManualClock) -> None:
    """Danger: one client makes all 10,000 topics in two seconds."""
    for number in range(600):
        quotas.make(Quota.TOPICS, (THERE,), f"t{number}")
    with pytest.raises(OverQuota, match=r"quota new_per_min of address 10\.0\.0\.7"):
        quotas.make(Quota.TOPICS, (THERE,), "one more")
    clock.advance(1_000)
    for number in range(10):
        quotas.make(Quota.TOPICS, (THERE,), f"u{number}")
    with pytest.raises(OverQuota):
        quotas.make(Quota.GROUPS, (THERE,), "g")


def test_names_that_are_gone_do_not_count(clock: ManualClock) -> None:
    """A topic that was removed makes room for another, a second later: who asks all the time has nobody look for it."""
    there, looks = {"a", "b"}, list[str]()

    def is_known(_: Quota, name: str) -> bool:
        looks.append(name)
        return name in there

    quotas = Quotas(clock, is_known=is_known)
    quotas.change(SHOP, Quota.TOPICS, 2)
    for name in ("a", "b"):
        quotas.make(Quota.TOPICS, (SHOP,), name)
    with pytest.raises(OverQuota, match=r"quota topics of key shop: 2 in use \(limit 2\)"):
        quotas.about_to_make(Quota.TOPICS, (SHOP,), "c")
    quotas.about_to_make(Quota.TOPICS, (SHOP,), "a")  # it is there
    there.discard("a")
    looks.clear()
    for _ in range(5):
        with pytest.raises(OverQuota):
            quotas.make(Quota.TOPICS, (SHOP,), "c")
    assert not looks
    clock.advance(1_000)
    quotas.make(Quota.TOPICS, (SHOP,), "c")


def test_sends_a_second_count_messages(quotas: Quotas, clock: ManualClock) -> None:
    """A call larger than a second's worth is served when nothing was spent, and is paid for."""
    quotas.change(SHOP, Quota.SENDS_PER_S, 10)
    assert quotas.limits_sends  # which nobody asks for every send else
    assert not Quotas(clock).limits_sends
    quotas.spend(Quota.SENDS_PER_S, (SHOP, THERE), 30)
    with pytest.raises(OverQuota, match=r"sends_per_s of key shop: 10 in use \(limit 10\)"):
        quotas.spend(Quota.SENDS_PER_S, (SHOP,), 1)
    clock.advance(2_500)
    quotas.spend(Quota.SENDS_PER_S, (SHOP,), 5)


def test_limits_are_kept(quotas: Quotas, clock: ManualClock) -> None:
    """What is written is read again; going back to the default is kept too."""
    quotas.change(SHOP, Quota.STREAMS, 7)
    quotas.change(THERE, Quota.BYTES, 1000)
    kept = quotas.change(THERE, Quota.POLLS, 3)
    again = Quotas(clock, None, kept)
    assert again.limit(Quota.STREAMS, SHOP) == 7
    assert again.limit(Quota.BYTES, THERE) == 1000
    kept = again.change(SHOP, Quota.STREAMS, None)
    assert Quotas(clock, None, kept).limit(Quota.STREAMS, SHOP) == 2_500
    with pytest.raises(ValueError, match="unknown version"):
        Quotas(clock, None, b"\x02[]")


def test_many_addresses_leave_nothing_behind(quotas: Quotas) -> None:
    """Streams that come and go, from a million places."""
    for number in range(30_000):
        holder = Holder(ADDRESS, f"10.{number}")
        quotas.take(Quota.STREAMS, (holder,))
        quotas.free(Quota.STREAMS, (holder,))
    assert len(quotas._uses) <= 20_000


def test_operators_show_and_set(quotas: Quotas) -> None:
    """Each change counts at once and is kept; what is wrong is refused."""
    kept: list[bytes] = []
    told: list[int] = []
    quotas.on_change = lambda: told.append(1)

    async def keep(encoded: bytes) -> None:
        kept.append(encoded)

    calls = QuotaCalls(quotas, keep)

    async def scenario() -> None:
        request = wire.SetQuotaRequest(kind="address", name="::ffff:10.0.0.7", quota="polls", limit=5)
        answer = await calls.set_quota(request)
        assert (answer.quota.name, answer.quota.limit, answer.quota.is_set) == ("10.0.0.7", 5, True)
        quotas.take(Quota.POLLS, (THERE,))
        (row,) = (await calls.list_quotas(wire.ListQuotasRequest())).quotas
        assert (row.kind, row.name, row.quota, row.used, row.limit) == ("address", "10.0.0.7", "polls", 1, 5)
        answer = await calls.set_quota(wire.SetQuotaRequest(kind="address", name="10.0.0.7", quota="polls"))
        assert (answer.quota.limit, answer.quota.is_set) == (2_500, False)
        for kind, name, quota in (
            ("key", "a,b", "polls"),
            ("address", "nowhere", "polls"),
            ("client", "a", "polls"),
            ("key", "a", "wishes"),
        ):
            with pytest.raises(Refused):
                await calls.set_quota(wire.SetQuotaRequest(kind=kind, name=name, quota=quota, limit=1))

    asyncio.run(scenario())
    assert len(kept) == len(told) == 2
