"""When leases end: what a goodbye looks at."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from support.models.costs.unread import UnreadList

from broker_adapter.runtime.clock import ManualClock
from dmq.broker.deliveries import lease_expiry as leases
from dmq.broker.groups.group_queue import DeliveryLease
from dmq.broker.groups.lease_timers import CLIENT_GONE_INVISIBLE_MS, LeaseEnds


class Counting(dict[int, DeliveryLease]):
    """Leases by offset, and how often one was looked for."""

    looks = 0

    def get(self, offset: int, default: Any = None) -> Any:  # noqa: ANN401 - as that of a dict
        self.looks += 1
        return super().get(offset, default)


def test_a_goodbye_looks_at_the_leases_of_its_client_only() -> None:
    """Danger: each goodbye of whomever looked at every lease there was, 27 ms for 200,000."""

    async def scenario() -> None:
        ends, queue = LeaseEnds(ManualClock()), SimpleNamespace(leases=Counting())

        def watch(offset: int, client_id: str) -> DeliveryLease:
            lease = queue.leases[offset] = DeliveryLease(offset, 1, 60_000, renew_for=client_id)
            ends.watch(queue, offset, lease)  # type: ignore[arg-type]  # all that is looked at of a queue
            return lease

        others = [watch(offset, "other" if offset % 2 else "") for offset in range(100)]
        own = watch(100, "leaves")
        ends.client_seen("stranger")
        ends.client_gone("stranger")
        assert queue.leases.looks == 0
        ends.client_gone("leaves")
        assert queue.leases.looks == 1
        assert own.ends_ms == CLIENT_GONE_INVISIBLE_MS
        assert {each.ends_ms for each in others} == {60_000}

    asyncio.run(scenario())


def test_an_unregistration_visits_no_receives_of_others() -> None:
    """Danger: each goodbye of a client that had been seen went through all receives, as often as it liked.

    The second goodbye of one that had much finds nothing any more, and all of it ends, a part at a time.
    """

    async def scenario() -> None:
        clock = ManualClock()
        ends, queue = LeaseEnds(clock), SimpleNamespace(leases=Counting())
        for offset in range(2_000):
            queue.leases[offset] = DeliveryLease(offset, 1, 60_000, renew_for="leaves")
        places = [(queue, offset, lease) for offset, lease in queue.leases.items()]
        ends.watch_together(places)  # type: ignore[arg-type]
        ends._timers._heap = UnreadList(ends._timers._heap)
        for _ in range(2):
            ends.client_seen("leaves")
            ends.client_gone("leaves")
        assert queue.leases.looks == len(places)
        clock.advance(CLIENT_GONE_INVISIBLE_MS)
        for left in (2_000, 500, 0):
            assert left == sum(not lease.is_returning for _, _, lease in places)
            ends.pop(1_500)
        clock.advance(60_000)
        assert not ends.pop(1_500)
        assert not ends._renewed
        assert ends._timers.size == 0

    asyncio.run(scenario())


def test_leases_end_after_any_earlier_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Danger: an unexpected error, and no lease ended any more."""
    monkeypatch.setattr(leases, "_FAULT_PAUSE_S", 0.0)

    async def scenario() -> None:
        again, errors = asyncio.Event(), [LookupError("unexpected")]

        async def expire() -> int:
            if errors:
                raise errors.pop()
            again.set()
            return 0

        task = SimpleNamespace(expire=expire, _ends=SimpleNamespace(wait=asyncio.Event().wait))
        running = asyncio.ensure_future(leases.Leases._run(task))  # type: ignore[arg-type]  # all that it needs
        await asyncio.wait_for(again.wait(), 30)
        running.cancel()

    asyncio.run(scenario())
