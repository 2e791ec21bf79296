"""No message of a group is forgotten: each has a lease with a timer, or a receive can take it, or it waits its turn.

Check it while nothing is under way: no receive reads, and no unit is under commit.
"""

from __future__ import annotations

from collections import defaultdict

from broker_adapter.leasing.leases import MemberLeases
from dmq.broker.broker import EmbeddedBroker
from dmq.broker.groups.lease_timers import LeaseEnds
from dmq.broker.groups.subscription import SubscribedQueue
from dmq.cluster.retries_here import RetriesHere


def assert_progress(broker: EmbeddedBroker) -> None:
    """Fail if a message of any group, or a waiting receive, waits for an event that does not come."""
    timers = _timers(broker.lease_ends)
    for found in broker.subscriptions.all():
        for queue in found.all_queues:
            for offset, lease in queue.leases.items():
                assert not lease.is_returning, (offset, lease)
                assert lease.ends_ms in timers[queue, offset, lease.epoch], (offset, lease)
            _assert_order(queue)
        for queue_id, waiting in found._waiters.items():
            assert not found.has_available(queue_id) or any(each.done() for each in waiting.values()), queue_id


def _timers(ends: LeaseEnds) -> dict[tuple[SubscribedQueue, int, int], list[int]]:
    """Times of the timers of each lease. A timer that expires before the end of its lease has no effect."""
    timers = defaultdict[tuple[SubscribedQueue, int, int], list[int]](list)
    for ends_ms, _, _, watched in ends._timers._heap:
        for place in watched.places:
            timers[place].append(ends_ms)
    return timers


def _assert_order(queue: SubscribedQueue) -> None:
    """Messages before the cursor are finished, leased, ready or parked.

    A parked one waits for one of its message group that is leased or ready, perhaps in the retry lane or a queue that
    the lane delays.
    """
    ready, parked = set(queue._ready), set[int]()
    for message_group, line in queue.order._lines.items():
        parked |= set(line.parked)
        assert line.out.keys() <= queue.leases.keys(), (message_group, line)
        together = queue.subscription.all_queues if queue.beside else [queue]
        assert any(each.order.is_out(message_group) or _has_next(each, message_group) for each in together), line
    for offset in range(queue.floor, queue.cursor):
        assert queue.is_finished(offset) or offset in {*queue.leases, *ready, *parked}, offset
    assert all(each in ready or each >= queue.cursor for each in queue._unread), queue._unread


def _has_next(queue: SubscribedQueue, message_group: str) -> bool:
    """Return True if a receive can take the first parked message of a message group."""
    return any(each in queue._ready or each >= queue.cursor for each in queue.order.ready(message_group)[:1])


def assert_member_progress(leases: MemberLeases) -> None:
    """As ``assert_progress``, for the pulled messages of a member."""
    timers = {(held, ends_ms) for ends_ms, _, _, held in leases._timers._heap}
    waiting = {held for each in (*leases._waiting.values(), *leases._behind.values()) for held in each}
    for held in [held for by_offset in leases._held.values() for held in by_offset.values()]:
        assert held.is_leaving or held in waiting or (held.is_leased and (held, held.ends_ms) in timers), held.received
        assert not held.is_leased or held.is_leaving or (held, held.ends_ms) in timers, held.received


def assert_taken_progress(here: RetriesHere) -> None:
    """As ``assert_progress``, for the remembered deliveries of a cluster."""
    timers = {(handle, ends_ms) for ends_ms, _, _, handle in here._timers._heap}
    for handle, held in here._held.items():
        assert (handle, held.ends_ms) in timers, handle
