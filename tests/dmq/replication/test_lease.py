"""The lease as a pure state machine: who holds it, until when, and when it may be acquired."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest

from dmq.replication.lease import Lease, LeaseRecord, LeaseWrite

TERM_MS = 10_000


class Register:
    """The register as an object store has it."""

    def __init__(self) -> None:
        self.found: tuple[bytes, str] | None = None
        self._version = 0

    def put(self, write: LeaseWrite) -> str | None:
        """Apply a conditional write."""
        if write.etag != (self.found[1] if self.found else None):
            return None
        self._version += 1
        self.found = write.record.encode(), str(self._version)
        return self.found[1]


class Host:
    """A process whose clock has an offset of its own."""

    def __init__(self, name: str, register: Register, *, offset_ms: int = 0) -> None:
        self.lease = Lease(name, f"{name}:8081", term_ms=TERM_MS)
        self.register = register
        self.offset_ms = offset_ms

    def read(self, at_ms: int) -> None:
        """Read the register."""
        self.lease.note_read(self.register.found, at_ms + self.offset_ms)

    def acquire(self, at_ms: int, *, dead_epoch: int = -1, dead_holders: Collection[str] = ()) -> bool:
        """Read, and acquire the lease if that is allowed."""
        self.read(at_ms)
        now_ms = at_ms + self.offset_ms
        write = self.lease.plan_acquisition(now_ms, dead_epoch=dead_epoch, dead_holders=dead_holders)
        if write is not None:
            self.lease.note_answer(write, self.register.put(write), at_ms + self.offset_ms)
        return self.is_held(at_ms)

    def renewal(self, at_ms: int, *, is_bound: bool = True, is_stalled: bool = False) -> LeaseWrite | None:
        """Return the renewal that is due."""
        return self.lease.plan_renewal(at_ms + self.offset_ms, epoch=2, is_bound=is_bound, is_stalled=is_stalled)

    def renew(self, at_ms: int, *, is_bound: bool = True, is_stalled: bool = False) -> bool:
        """Renew the lease if that is due and allowed."""
        write = self.renewal(at_ms, is_bound=is_bound, is_stalled=is_stalled)
        if write is None:
            return False
        self.lease.note_answer(write, self.register.put(write), at_ms + self.offset_ms)
        return True

    def is_held(self, at_ms: int) -> bool:
        """Return True while this host holds the lease."""
        return self.lease.is_held(at_ms + self.offset_ms)

    def is_lost(self, at_ms: int) -> bool:
        """Return True if this host must stop serving."""
        return self.lease.is_lost(at_ms + self.offset_ms)


@pytest.fixture
def register() -> Register:
    """Return an absent lease."""
    return Register()


@pytest.mark.parametrize("offset_ms", [0, 3_600_000, -3_600_000, 10**12])
def test_a_standby_waits_for_the_term_by_its_own_clock(register: Register, offset_ms: int) -> None:
    """The term counts from the first sight of the last renewal. Clocks hours apart make no difference."""
    primary, standby = Host("a", register), Host("b", register, offset_ms=offset_ms)
    assert primary.acquire(0)
    assert not standby.acquire(5_000)
    assert primary.renew(5_000)
    assert not standby.acquire(6_000)
    assert not standby.acquire(15_999)
    assert not primary.is_held(15_000)
    assert primary.is_lost(15_000)
    assert standby.acquire(16_000)
    assert primary.renewal(16_000) is None


def test_a_holder_renews_in_time(register: Register) -> None:
    """A renewal is due after a quarter of the term, or at once if the epoch or the promise changed."""
    primary = Host("a", register)
    assert primary.acquire(0)
    assert primary.renew(1)
    assert not primary.renew(2_000)
    assert primary.renew(2_600)
    assert primary.renew(2_700, is_bound=False)
    assert primary.lease.record == LeaseRecord("a", "a:8081", 2, TERM_MS, 4, is_bound=False)


def test_one_of_two_standbys_acquires(register: Register) -> None:
    """The slower one is refused, and is no holder."""
    first, second = Host("b", register), Host("c", register)
    first.read(0)
    second.read(0)
    writes = [host.lease.plan_acquisition(0) for host in (first, second)]
    for host, write in zip((first, second), writes, strict=True):
        assert write is not None
        host.lease.note_answer(write, register.put(write), 0)
    second.read(1)
    assert first.is_held(1)
    assert not second.is_held(1)
    assert not second.is_lost(1)


def test_a_released_lease_is_free_at_once(register: Register) -> None:
    """A primary that ends in order does not make a standby wait, and has lost nothing."""
    primary, standby = Host("a", register), Host("b", register)
    assert primary.acquire(0)
    write = primary.lease.plan_release(1)
    assert write is not None
    primary.lease.note_answer(write, register.put(write), 1)
    assert not primary.is_held(1)
    assert not primary.is_lost(1)
    assert standby.acquire(2)


@pytest.mark.parametrize("is_in_doubt", [False, True])
def test_a_holder_stops_once_an_operator_released_its_lease(register: Register, is_in_doubt: bool) -> None:
    """It does not renew the released lease, also if a renewal of its own with the same number is in doubt."""
    primary, standby = Host("a", register), Host("b", register)
    assert primary.acquire(0)
    assert register.found is not None
    record = LeaseRecord.decode(register.found[0])
    released = replace(record, renewal=record.renewal + 1, is_released=True)
    register.put(LeaseWrite(released, register.found[1], 1))
    if is_in_doubt:
        assert primary.renewal(3_000) is not None
    primary.read(3_001)
    assert primary.is_lost(3_001)
    assert primary.renewal(6_000) is None
    assert standby.acquire(3_002)


def test_a_holder_that_was_replaced_acquires_nothing(register: Register) -> None:
    """Not even a lease that its successor has released: it reads of the loss and of the release at once."""
    primary, standby = Host("a", register), Host("b", register)
    assert primary.acquire(0)
    assert primary.renew(3_000, is_bound=False)
    assert standby.acquire(3_001, dead_epoch=2)
    assert (write := standby.lease.plan_release(3_002)) is not None
    assert register.put(write)
    assert not primary.acquire(3_003)
    assert primary.is_lost(3_003)


def test_an_unbound_holder_is_replaced_by_an_operator_alone(register: Register) -> None:
    """A holder that serves without the object store may be alive after its term: only a forced takeover replaces it."""
    primary, standby = Host("a", register), Host("b", register)
    assert primary.acquire(0)
    assert primary.renew(1, is_bound=False)
    assert not standby.acquire(2)
    assert not standby.acquire(10 * TERM_MS)
    assert not primary.is_lost(10 * TERM_MS)
    assert primary.renewal(10 * TERM_MS, is_bound=False) is not None
    assert standby.acquire(10 * TERM_MS, dead_epoch=2)
    primary.read(10 * TERM_MS + 1)
    assert primary.is_lost(10 * TERM_MS + 1)


def test_a_renewal_without_an_answer_counts_once_it_is_read(register: Register) -> None:
    """A renewal in doubt extends nothing until a read shows it, and then from the time of its plan."""
    primary = Host("a", register)
    assert primary.acquire(0)
    write = primary.renewal(3_000)
    assert write is not None
    assert primary.lease.needs_read()
    assert primary.lease.held_until_ms == TERM_MS
    register.put(write)
    primary.read(4_000)
    assert primary.lease.held_until_ms == 3_000 + TERM_MS
    assert not primary.lease.needs_read()


def test_an_older_renewal_may_land_first(register: Register) -> None:
    """Of two renewals in doubt with the same ETag, the one that landed is found, and the other is refused."""
    primary = Host("a", register)
    assert primary.acquire(0)
    older = primary.renewal(3_000)
    primary.read(4_000)
    newer = primary.renewal(4_000)
    assert older is not None
    assert newer is not None
    register.put(older)
    primary.lease.note_answer(newer, register.put(newer), 5_000)
    assert primary.is_held(5_000)
    primary.read(5_001)
    assert primary.lease.held_until_ms == 3_000 + TERM_MS
    assert primary.renew(6_000)


def test_a_promise_in_doubt_binds(register: Register) -> None:
    """A holder whose promise may have landed ends at its term, since a standby may have read it."""
    primary = Host("a", register)
    assert primary.acquire(0)
    assert primary.renew(1, is_bound=False)
    assert not primary.is_lost(TERM_MS + 1)
    assert primary.renewal(2, is_bound=True) is not None
    assert primary.is_lost(TERM_MS + 1)


def test_a_deleted_lease_is_lost_and_free(register: Register) -> None:
    """A holder whose lease disappeared stops; the lease can be acquired."""
    primary, standby = Host("a", register), Host("b", register)
    assert primary.acquire(0)
    register.found = None
    primary.read(1)
    assert primary.is_lost(1)
    assert standby.acquire(2)


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"\xff", b'{"holder": 1}'])
def test_a_damaged_lease_is_replaced_by_an_operator_alone(register: Register, data: bytes) -> None:
    """Its holder is unknown and may be alive."""
    register.found = data, "0"
    register._version = 1
    standby = Host("b", register)
    assert not standby.acquire(0)
    assert not standby.acquire(10 * TERM_MS)
    assert standby.acquire(10 * TERM_MS, dead_epoch=2)


def test_a_dead_holder_is_replaced_at_once(register: Register) -> None:
    """A holder that is known to be dead is replaced within its term, another one is not."""
    primary, successor = Host("a", register), Host("b", register)
    assert primary.acquire(0)
    assert not successor.acquire(1, dead_holders=["c"])
    assert successor.acquire(2, dead_holders=["c", "a"])
    primary.read(3)
    assert primary.is_lost(3)


def test_a_stalled_holder_renews_nothing(register: Register) -> None:
    """Its term ends and a standby takes over. It renews again if the stall ends in time, and publishes its promise."""
    primary, standby = Host("a", register), Host("b", register)
    assert primary.acquire(0)
    assert primary.renew(1, is_bound=False, is_stalled=True)
    assert primary.renew(2, is_stalled=True)
    assert not primary.renew(5_000, is_stalled=True)
    assert primary.renew(6_000)
    assert not standby.acquire(6_001)
    assert not primary.renew(15_999, is_stalled=True)
    assert primary.is_lost(16_000)
    assert standby.acquire(16_001)


def test_a_newer_record_with_more_fields_is_read() -> None:
    """Fields that this version does not know are ignored."""
    record = LeaseRecord("a", "a:8081", 7, TERM_MS, 3, is_bound=True)
    assert LeaseRecord.decode(record.encode().replace(b"{", b'{"extra": 1, ')) == record
