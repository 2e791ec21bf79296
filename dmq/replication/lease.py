"""The lease: one register that names the primary. It decides when a standby takes over; the log decides about writes.

A holder renews the register before its term ends. Others measure by their own clock how long the ETag has not changed;
clocks of two hosts are never compared. A holder that could not renew within the term stops serving, if its record
promises that; a standby takes over after the term of such a record alone. The clock counts suspension: a host that
slept holds nothing.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, fields

from broker_adapter.runtime.clock import Clock
from broker_adapter.runtime.log import LibraryLog
from dmq.replication.objects import ObjectStore, ReplicaUnavailable

__all__ = ["LEASE", "Lease", "LeaseKeeper", "LeaseRecord", "LeaseWrite"]

log = LibraryLog("dmq.replication")

LEASE = "lease"
_RENEWALS = 4  # attempts within one term
_POLLS = 10  # reads of an observer within one term
_RETRY_S = 0.2
_STALLED = "a write to the local disk takes longer than the term"


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """Content of the register. Each write of a holder has another ``renewal``, so that no two contents are equal."""

    holder: str  # random id of a process
    address: str  # for people
    epoch: int  # of the holder's log, or the next one until it is open
    term_ms: int
    renewal: int
    is_bound: bool  # the holder stops serving when its term ends without a renewal
    is_released: bool = False

    def encode(self) -> bytes:
        """Return the record as readable JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> LeaseRecord:
        """Return the record; a damaged or newer one has an unknown holder, which only an operator replaces."""
        try:
            known = json.loads(data)
            record = cls(**{field.name: known[field.name] for field in fields(cls)})
        except (ValueError, KeyError, TypeError):
            return cls("unknown", "", 0, 0, 0, is_bound=False)
        return record


@dataclass(frozen=True, slots=True)
class LeaseWrite:
    """One conditional write of the register, planned at ``at_ms``."""

    record: LeaseRecord
    etag: str | None
    at_ms: int


class Lease:
    """One process's view of the lease. Pure: the caller reads and writes the register, and passes the time.

    Times are milliseconds of a clock of this process that never steps and counts suspension.
    """

    def __init__(self, holder: str, address: str, *, term_ms: int) -> None:
        self.holder = holder
        self.record: LeaseRecord | None = None
        self.held_until_ms: int | None = None  # None: not the holder
        self._address = address
        self.term_ms = term_ms
        self._etag: str | None = None
        self._changed_ms: int | None = None  # first sight of the ETag; None: unknown
        self._in_doubt: dict[int, LeaseWrite] = {}  # writes that may land yet, by renewal
        self._renewal = 0
        self._renewed_ms = 0
        self._has_held = False

    def is_held(self, now_ms: int) -> bool:
        """Return True while this process is the holder and its term has not ended."""
        return self.held_until_ms is not None and now_ms < self.held_until_ms

    def is_lost(self, now_ms: int) -> bool:
        """Return True if this process was the holder and must stop serving.

        Another process is the holder, or the term of a bound holder has ended.
        """
        if not self._has_held:
            return False
        return self.held_until_ms is None or (now_ms >= self.held_until_ms and self._may_be_bound())

    def is_free(self, now_ms: int) -> bool:
        """Return True if the lease may be acquired: absent, released, or not renewed for its term by a bound holder."""
        if self._changed_ms is None:
            return False
        record = self.record
        if record is None or record.is_released:
            return True
        return record.is_bound and now_ms - self._changed_ms >= record.term_ms

    def needs_read(self) -> bool:
        """Return True if the register is unknown, or a write is in doubt."""
        return self._changed_ms is None or bool(self._in_doubt)

    def note_read(self, found: tuple[bytes, str] | None, now_ms: int) -> None:
        """Note the answer of a read, at the time of the answer."""
        record, etag = (LeaseRecord.decode(found[0]), found[1]) if found else (None, None)
        if self._changed_ms is None or etag != self._etag:
            self._changed_ms = now_ms
        is_same = etag == self._etag
        self.record, self._etag = record, etag
        write = self._in_doubt.get(record.renewal) if record is not None else None
        if write is not None and write.record == record:
            self._accept(write)
        elif record is None or record.holder != self.holder or record.is_released:  # by an operator
            self.held_until_ms = None
        if not is_same:  # all older writes are refused from now on
            self._in_doubt.clear()

    def plan_renewal(self, now_ms: int, *, epoch: int, is_bound: bool, is_stalled: bool = False) -> LeaseWrite | None:
        """Return the next write of the holder, or None if it is not due.

        A holder with a store that ``is_stalled`` renews nothing. It only publishes a changed epoch or promise.
        """
        record = self.record
        if record is None or self.held_until_ms is None or self.is_lost(now_ms):
            return None
        is_current = (record.epoch, record.is_bound) == (epoch, is_bound)
        if is_current and (is_stalled or now_ms - self._renewed_ms < self.term_ms // _RENEWALS):
            return None
        return self._plan(now_ms, epoch=epoch, is_bound=is_bound)

    def plan_acquisition(
        self, now_ms: int, *, dead_epoch: int = -1, dead_holders: Collection[str] = ()
    ) -> LeaseWrite | None:
        """Return the write that acquires the lease, or None if it is not free.

        A holder with ``dead_epoch`` or an earlier one is certainly dead, and is replaced. Each acquisition has a later
        epoch, so a process that took over meanwhile is not. ``dead_holders`` are dead as well. A process that lost the
        lease does not acquire it again: its log has an older epoch.
        """
        if self._changed_ms is None or self.is_lost(now_ms):
            return None
        epoch, holder = (0, "") if self.record is None else (self.record.epoch, self.record.holder)
        if epoch > dead_epoch and holder not in dead_holders and not self.is_free(now_ms):
            return None
        return self._plan(now_ms, epoch=epoch + 1, is_bound=True)

    def plan_release(self, now_ms: int) -> LeaseWrite | None:
        """Give up the lease, and return the write that others may see; None if this process is not the holder."""
        if self.record is None or self.held_until_ms is None or self.is_lost(now_ms):
            return None
        self.held_until_ms, self._has_held = None, False  # now: the answer may be late
        return self._plan(now_ms, epoch=self.record.epoch, is_bound=True, is_released=True)

    def note_answer(self, write: LeaseWrite, etag: str | None, now_ms: int) -> None:
        """Note the answer of a write; None if another write was faster. Without an answer, read."""
        if etag is None:
            self._changed_ms = None
            return
        self._in_doubt.clear()
        self.record, self._etag, self._changed_ms = write.record, etag, now_ms
        self._accept(write)

    def _plan(self, now_ms: int, *, epoch: int, is_bound: bool, is_released: bool = False) -> LeaseWrite:
        self._renewal += 1
        record = LeaseRecord(
            self.holder, self._address, epoch, self.term_ms, self._renewal, is_bound=is_bound, is_released=is_released
        )
        write = self._in_doubt[self._renewal] = LeaseWrite(record, self._etag, now_ms)
        return write

    def _accept(self, write: LeaseWrite) -> None:
        """Hold the lease from the time of the plan: others saw the write later."""
        self._renewed_ms = write.at_ms
        self._has_held = not write.record.is_released
        self.held_until_ms = write.at_ms + write.record.term_ms if self._has_held else None

    def _may_be_bound(self) -> bool:
        record = self.record
        return (record is not None and record.is_bound) or any(each.record.is_bound for each in self._in_doubt.values())


class LeaseKeeper:
    """Threads that keep a ``Lease``: one reads and writes the register, one notices the end of the term.

    ``on_lost`` is called once, from one of them, with the reason. It returns at once, and does not call the keeper.
    """

    def __init__(self, objects: ObjectStore, clock: Clock, lease: Lease, on_lost: Callable[[str], None]) -> None:
        """``objects`` should time out well within the term."""
        self._objects = objects
        self._clock = clock
        self._lease = lease
        self._on_lost = on_lost
        self._changed = threading.Condition()  # guards all below, and the lease
        self._is_wanted = False
        self._dead_epoch = -1
        self._dead_holders: Collection[str] = ()
        self._stalled_s: Callable[[], float] = lambda: 0.0
        self._is_stalled = False
        self._epoch = 0
        self._is_bound = True
        self._is_closed = self._is_reported = False
        self._error = ""
        self._poll_s = lease.term_ms / 1000 / _POLLS
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._keep, "dmq-lease"), (self._watch, "dmq-lease-end"))
        ]

    def start(self) -> None:
        """Begin to observe the lease."""
        for thread in self._threads:
            thread.start()

    def acquire(self, *, dead_epoch: int = -1, dead_holders: Collection[str] = ()) -> None:
        """Acquire the lease as soon as it is free, or its holder is dead: see ``Lease.plan_acquisition``."""
        with self._changed:
            self._is_wanted, self._dead_epoch, self._dead_holders = True, dead_epoch, dead_holders
            self._changed.notify_all()

    def depend_on(self, stalled_s: Callable[[], float]) -> None:
        """Renew the lease only while no write of the store has taken the term or longer: see ``Store.stalled_s``.

        Otherwise a primary with a stalled disk would keep its standby waiting.
        """
        with self._changed:
            self._stalled_s = stalled_s

    @property
    def has_declined(self) -> bool:
        """Return True after ``decline``, until ``acquire``."""
        return not self._is_wanted

    def decline(self) -> None:
        """Release the lease, and leave it to others until ``acquire``."""
        with self._changed:
            self._is_wanted = False
            self._changed.notify_all()

    def wait_held(self, timeout_s: float) -> bool:
        """Return True once this process is the holder, False after the timeout."""
        with self._changed:
            return self._changed.wait_for(self._is_held, timeout_s)

    def is_held(self) -> bool:
        """Return True while this process is the holder."""
        with self._changed:
            return self._is_held()

    def record(self) -> LeaseRecord | None:
        """Return the last record that was read or written; None if there is none."""
        with self._changed:
            return self._lease.record

    def hold(self, epoch: int, *, is_bound: bool) -> None:
        """Publish the epoch of the log with the next renewal, and whether the holder stops at the end of its term."""
        with self._changed:
            self._epoch, self._is_bound = epoch, is_bound
            self._changed.notify_all()

    def wait_published(self, *, is_bound: bool, timeout_s: float) -> bool:
        """Return True once the register has the last ``hold``, False after the timeout."""

        def is_published() -> bool:
            record = self._lease.record
            return record is not None and record.holder == self._lease.holder and record.is_bound == is_bound

        with self._changed:
            return self._changed.wait_for(is_published, timeout_s)

    def close(self) -> None:
        """Release the lease if it is held, so that a standby need not wait for the end of the term."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        with self._changed:
            write = self._lease.plan_release(self._clock.boot_ms())
        if write is not None:
            self._attempt(lambda: self._write(write))

    def _is_held(self) -> bool:
        return self._lease.is_held(self._clock.boot_ms())

    def _keep(self) -> None:
        while not self._is_closed:
            is_reached = self._attempt(self._step)
            with self._changed:
                self._report_loss()
                if not self._is_closed:
                    self._changed.wait(self._poll_s if is_reached else min(self._poll_s, _RETRY_S))

    def _step(self) -> None:
        """Read the register unless this process knows it, and write it if a write is due."""
        with self._changed:
            is_read = self._lease.needs_read() or not self._is_held()
        if is_read:
            found = self._objects.read(LEASE)
            with self._changed:
                self._lease.note_read(found, self._clock.boot_ms())
                self._changed.notify_all()
        with self._changed:
            write = self._due()
        if write is not None:
            self._write(write)

    def _due(self) -> LeaseWrite | None:
        now_ms = self._clock.boot_ms()
        if self._lease.held_until_ms is not None and (record := self._lease.record) is not None:
            if not self._is_wanted:
                return self._lease.plan_release(now_ms)
            epoch, is_stalled = self._epoch or record.epoch, self._note_stall()
            return self._lease.plan_renewal(now_ms, epoch=epoch, is_bound=self._is_bound, is_stalled=is_stalled)
        if self._is_wanted and not self._is_reported:
            return self._lease.plan_acquisition(now_ms, dead_epoch=self._dead_epoch, dead_holders=self._dead_holders)
        return None

    def _note_stall(self) -> bool:
        stalled_s = self._stalled_s()
        is_stalled = stalled_s * 1000 >= self._lease.term_ms
        if is_stalled and not self._is_stalled and self._is_bound:
            log.error("lease_not_renewed", url=self._objects.url, why=_STALLED, seconds=round(stalled_s, 1))
        self._is_stalled = is_stalled
        return is_stalled

    def _write(self, write: LeaseWrite) -> None:
        etag = self._objects.replace(LEASE, write.record.encode(), write.etag)
        with self._changed:
            self._lease.note_answer(write, etag, self._clock.boot_ms())
            self._changed.notify_all()

    def _attempt(self, work: Callable[[], None]) -> bool:
        """Return False if the object store is unavailable; the first time it is logged."""
        try:
            work()
        except ReplicaUnavailable as failed:
            if not self._error:
                log.warning("lease_unreachable", url=self._objects.url, error=failed.reason)
            self._error = failed.reason
            return False
        self._error = ""
        return True

    def _watch(self) -> None:
        """Notice the end of the term while the other thread waits for the object store."""
        with self._changed:
            while not self._is_closed:
                self._report_loss()
                until_ms = self._lease.held_until_ms
                left_s = None if until_ms is None else (until_ms - self._clock.boot_ms()) / 1000
                self._changed.wait(self._poll_s if left_s is None or left_s <= 0 else left_s)

    def _report_loss(self) -> None:
        if self._is_reported or not self._lease.is_lost(self._clock.boot_ms()):
            return
        self._is_reported = True
        record = self._lease.record
        if self._lease.held_until_ms is None and record is not None and record.is_released:
            reason = "an operator released the lease"
        elif self._lease.held_until_ms is None and record is not None:
            reason = f"another process holds the lease: {record.address or record.holder}"
        else:
            why = _STALLED if self._is_stalled else self._error
            reason = "the lease was not renewed within its term" + (f": {why}" if why else "")
        self._on_lost(reason)
