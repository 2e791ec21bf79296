"""Members of groups and locks of queues: who is there, who holds what, and that neither grows or lasts for ever."""

from __future__ import annotations

import pytest

from broker_adapter.contracts.errors import Overloaded
from broker_adapter.runtime.clock import ManualClock
from dmq.broker.pulling.members import LOCK_S, SILENT_S_MAX, MemberLocks, Members


def test_members_are_the_clients_heard_of_lately() -> None:
    """Sorted, of each group by itself; one that is silent or said goodbye is not among them."""
    clock = ManualClock()
    members = Members(clock)
    members.seen("g", "b")
    members.seen("g", "a")
    members.seen("h", "a")
    assert [members.of("g"), members.of("h"), members.of("none")] == [["a", "b"], ["a"], []]
    clock.advance(int(SILENT_S_MAX * 1000) - 1)
    members.seen("g", "b")
    clock.advance(1)
    assert [members.of("g"), members.of("h")] == [["b"], []]
    members.gone("b")
    members.gone("b")
    assert members.of("g") == []


def test_members_are_bounded() -> None:
    """The longest silent one gives way."""
    members = Members(ManualClock(), members_max=2)
    for client_id in ("a", "b", "a", "c"):
        members.seen("g", client_id)
    assert members.of("g") == ["a", "c"]


def test_a_queue_has_one_holder_per_group() -> None:
    """Whoever is first, until it gives it back; a queue that is named twice is held once."""
    locks = MemberLocks(ManualClock())
    assert locks.lock("g", "a", "t", [0, 1, 1]) == [0, 1]
    assert locks.lock("g", "b", "t", [1, 2]) == [2]
    assert locks.lock("h", "b", "t", [1]) == [1]
    assert locks.lock("g", "b", "u", [1]) == [1]
    locks.unlock("g", "b", "t", [0, 7])
    assert locks.lock("g", "b", "t", [0]) == []
    locks.unlock("g", "a", "t", [0])
    assert locks.lock("g", "b", "t", [0]) == [0]


def test_a_lock_ends_by_itself_unless_it_is_renewed() -> None:
    """By the monotonic clock: stepping the host's clock ends none."""
    clock = ManualClock()
    locks = MemberLocks(clock)
    locks.lock("g", "a", "t", [0, 1])
    clock.advance(int(LOCK_S * 1000) - 1)
    clock.step_to(clock.now_ms() + 10**9)
    assert locks.lock("g", "a", "t", [0]) == [0]
    assert locks.lock("g", "b", "t", [0, 1]) == []
    clock.advance(1)
    assert locks.lock("g", "b", "t", [0, 1]) == [1]


def test_a_client_that_leaves_holds_nothing() -> None:
    """Others need not wait for the end of its leases."""
    locks = MemberLocks(ManualClock())
    locks.lock("g", "a", "t", [0, 1])
    locks.lock("g", "b", "t", [2])
    locks.gone("a")
    locks.gone("a")
    assert locks.lock("g", "b", "t", [0, 1, 2]) == [0, 1, 2]
    assert locks.lock("g", "a", "t", [2]) == []


def test_locks_are_bounded() -> None:
    """Beyond it nothing is taken, and what is held can be renewed; what ended makes room."""
    clock = ManualClock()
    locks = MemberLocks(clock, locks_max=2)
    assert locks.lock("g", "a", "t", [0, 1]) == [0, 1]
    with pytest.raises(Overloaded):
        locks.lock("g", "a", "t", [1, 2])
    assert locks.lock("g", "a", "t", [0, 1]) == [0, 1]
    clock.advance(int(LOCK_S * 1000))
    assert locks.lock("g", "b", "t", [2, 3]) == [2, 3]
