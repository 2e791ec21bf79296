"""The single writer: commits many units as one batch with one WAL sync, then answers all of their callers at once.

The batch size adapts itself: while one sync runs, the next batch fills. A storage error is fail-stop. The failed batch
and all queued units fail as *in doubt*, no more units are accepted, and no sync is ever retried.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from broker_adapter.runtime.clock import Clock, SystemClock
from dmq.errors import (
    MessageIdTaken,
    OverBound,
    StoreBusy,
    StoreClosed,
    StoreError,
    StoreFailed,
    StoreForked,
    UnitRefused,
)
from dmq.store.engines.engine import Engine
from dmq.store.schema.messages.index import Receipt
from dmq.store.writer.assemble import Assembler
from dmq.store.writer.batch_log import BatchLog
from dmq.store.writer.marks import Marks
from dmq.store.writer.operations import Append, Appended, HandOver, Hold, Op, Recur, Reschedule, Schedule, Withdraw

OPS_PER_BATCH_MAX = 4096
BYTES_PER_BATCH_MAX = 8 * 1024 * 1024  # half of the log's buffer, see ``dmq.store.engines.rocks``
_OP_BYTES = 256  # of rows, index and event in addition to a message
_LOOK_FOR_ROOM_S = 0.2
STALL_S = 3.0  # a longer batch is reported as a stalled disk
# Of the time that the replication log took for a batch: the longest wait for its callers, and the steps of the wait.
_RETURN_SHARE, _RETURN_STEPS = 0.5, 16
_RETURN_S_MAX = 0.025
_SLOW_LOG_S = 0.002  # below it, a wait costs more than it saves
_DISK_CLOCK = SystemClock()  # a disk does not follow the clock that a test sets
_TOGETHER, _TOGETHER_BYTES = 256, 1024 * 1024  # rough bounds of a shared unit: batches take whole units


class Unit:
    """Ops of one caller and, once settled, their receipts or the error.

    ``settle`` is called with the unit in the writer's thread, once the ops are durable or failed. It must be short.
    """

    __slots__ = ("error", "ops", "receipts", "settle", "size_bytes")
    is_direct: ClassVar[bool] = True  # settled in the writer's thread

    def __init__(self, ops: Sequence[Op], settle: Callable[[Unit], None] = lambda _: None) -> None:
        self.ops = ops
        self.settle = settle
        self.receipts: list[Receipt] = []
        self.error: StoreError | None = None
        size = 0
        for op in ops:
            kind = type(op)
            if kind is Append or kind is Schedule or kind is HandOver or kind is Reschedule or kind is Hold:
                size += len(op.record)  # type: ignore[union-attr]  # the kinds that carry a message
                if kind is Schedule:
                    size += len(op.half_body)  # type: ignore[union-attr]
            elif kind is Withdraw:
                for other in op.instead:  # type: ignore[union-attr]
                    size += len(other.record) if type(other) is Append or type(other) is Schedule else 0
            elif kind is Recur:
                for each in op.occurrences:  # type: ignore[union-attr]
                    size += len(each.record)
        self.size_bytes = size


class LoopUnit(Unit):
    """Unit submitted on the attached loop's thread, and settled there. Its ``settle`` may raise errors."""

    __slots__ = ()
    is_direct = False


OnStored = Callable[[Receipt | None, StoreError | None], None]


class SingleSendBatch(LoopUnit):
    """Single sends of several callers in one unit, since a unit for each would cost a tenth of the send."""

    __slots__ = ("callbacks", "messages")

    def __init__(self) -> None:
        self.messages: list[Schedule | Append] = []
        self.callbacks: list[OnStored] = []
        super().__init__(self.messages, self._settle_all)

    @staticmethod
    def _settle_all(unit: Unit) -> None:
        assert isinstance(unit, SingleSendBatch)
        receipts: Sequence[Receipt | None] = unit.receipts or [None] * len(unit.callbacks)
        failed: Exception | None = None
        for on_stored, receipt in zip(unit.callbacks, receipts, strict=True):
            try:
                on_stored(receipt, unit.error)
            except Exception as error:  # noqa: BLE001 - one caller's answer, and no other's
                failed = error
        if failed is not None:
            raise failed


@dataclass(slots=True)
class CommitStats:
    """Totals since the store was opened."""

    batches: int = 0
    ops: int = 0
    bytes: int = 0
    sync_s: float = 0.0


class Writer:
    """Thread that assembles, writes and syncs batches. It is the only writer to the engine."""

    def __init__(
        self,
        engine: Engine,
        assembler: Assembler,
        marks: Marks,
        clock: Clock,
        *,
        is_synced: bool,
        pending_ops_max: int,
        pending_bytes_max: int,
        on_failure: Callable[[StoreError], None],
        has_room: Callable[[int], bool] = lambda _: True,
        batch_log: BatchLog | None = None,
    ) -> None:
        self._engine = engine
        self._batch_log = batch_log
        self._assembler = assembler
        self._marks = marks
        self._clock = clock
        self._is_synced = is_synced
        self._pending_ops_max = pending_ops_max
        self._pending_bytes_max = pending_bytes_max
        self.loop: asyncio.AbstractEventLoop | None = None
        self._on_appended: Callable[[Appended], None] = lambda _: None
        self._on_failure = on_failure
        self._has_room = has_room
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._pending: list[Unit] = []
        self._pending_ops = 0
        self._pending_bytes = 0
        self._taken_bytes = 0  # approximate disk space of the current batch
        self._direct_pending = 0
        self._gathered: list[Unit] = []  # by the loop, since its turn began
        self._gathered_ops = 0
        self._gathered_bytes = 0
        self._is_settling = False
        self._log_s = 0.0  # that the replication log took for the last batch
        self._answered_s = 0.0  # time of its answers
        self._answered_ops = 0
        self._left_ops = 0  # that were pending at that time
        self._is_closing = False
        self._failure: StoreError | None = None
        self._began_s: float | None = None  # start of the current batch
        self.stats = CommitStats()
        self.observe: Callable[[int, int, float, float], None] | None = None
        self._thread = threading.Thread(target=self._run, name="dmq-commit", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def attach(self, loop: asyncio.AbstractEventLoop, on_appended: Callable[[Appended], None]) -> None:
        """Settle loop units on ``loop``, with one wake-up per batch. ``on_appended`` is called before them."""
        self.loop, self._on_appended = loop, on_appended

    @property
    def failure(self) -> StoreError | None:
        """Error that made the writer stop accepting units, or ``None``."""
        return self._failure

    @property
    def stalled_s(self) -> float:
        """Seconds since the current batch was started, or 0 while that is below ``STALL_S``."""
        began_s = self._began_s
        took_s = _DISK_CLOCK.monotonic_s() - began_s if began_s is not None else 0.0
        return took_s if took_s >= STALL_S else 0.0

    @property
    def pending_ops(self) -> int:
        """Number of ops queued for the writer."""
        return self._pending_ops + self._gathered_ops

    def send(self, op: Schedule | Append, on_stored: OnStored) -> None:
        """Add a message that arrives alone to the single sends of this turn of the loop.

        Must be called on the loop's thread, where ``on_stored`` is called. Raises the same errors as ``submit``.
        """
        size = len(op.record)
        self._admit(1, size)
        gathered = self._gathered
        batch = gathered[-1] if gathered else None
        if (
            type(batch) is not SingleSendBatch
            or batch.size_bytes > _TOGETHER_BYTES
            or len(batch.callbacks) >= _TOGETHER
        ):
            batch = SingleSendBatch()
            self._gather(batch)
        batch.messages.append(op)
        batch.callbacks.append(on_stored)
        batch.size_bytes += size
        self._gathered_ops += 1
        self._gathered_bytes += size

    def submit(self, unit: Unit, *, is_urgent: bool = False) -> None:
        """Queue ``unit``. Raise ``StoreBusy`` beyond the bounds; raise ``StoreFailed`` or ``StoreClosed`` permanently.

        The bounds do not apply to urgent units (acks, hand-overs), since these free space. Their number is limited by
        their waiting callers. Loop units that are not urgent are queued together at the end of the loop's turn.
        """
        if not (unit.is_direct or is_urgent):
            self._admit(len(unit.ops), unit.size_bytes)
            self._gather(unit)
            self._gathered_ops += len(unit.ops)
            self._gathered_bytes += unit.size_bytes
            return
        if os.getpid() != self._pid:
            raise self._refusal()
        if not unit.is_direct:
            self._queue_gathered()  # keeps the order: units gathered earlier are committed first
        with self._lock:  # costs a third of entering the condition
            self._admit(len(unit.ops), unit.size_bytes, is_urgent=is_urgent)
            self._queue([unit], len(unit.ops), unit.size_bytes)

    def _admit(self, ops: int, size: int, *, is_urgent: bool = False) -> None:
        if self._failure is not None or self._is_closing:
            raise self._refusal()
        if (
            not is_urgent
            and (self._pending or self._gathered)
            and (
                self._pending_ops + self._gathered_ops + ops > self._pending_ops_max
                or self._pending_bytes + self._gathered_bytes + size > self._pending_bytes_max
            )
        ):
            raise StoreBusy(f"{self.pending_ops} operations wait to be written")

    def _gather(self, unit: Unit) -> None:
        """Add a unit, without the lock, to those that are queued at the end of this turn of the loop."""
        if not self._gathered:
            assert self.loop is not None, "attach a loop first"
            self.loop.call_soon(self._queue_gathered)
        self._gathered.append(unit)

    def _queue_gathered(self) -> None:
        """Queue the gathered units, with one lock and one wake-up for all of them."""
        if not self._gathered:
            return
        units, self._gathered = self._gathered, []
        ops, self._gathered_ops = self._gathered_ops, 0
        size, self._gathered_bytes = self._gathered_bytes, 0
        is_refused = os.getpid() != self._pid  # the lock may have been held by a thread that does not exist here
        if not is_refused:
            with self._lock:
                is_refused = self._failure is not None or self._is_closing
                if not is_refused:
                    self._queue(units, ops, size)
        if is_refused:
            for unit in units:
                unit.error = self._refusal()
            self._settle_later(units, {})

    def _queue(self, units: list[Unit], ops: int, size: int) -> None:
        is_direct = units[0].is_direct  # a direct unit comes alone
        has_returned = self._log_s >= _SLOW_LOG_S and self._pending_ops + ops >= self._expected_ops()
        if is_direct or not self._pending or has_returned:
            self._wake.notify()
        self._pending += units
        self._pending_ops += ops
        self._pending_bytes += size
        self._direct_pending += is_direct

    def _refusal(self) -> StoreError:
        if os.getpid() != self._pid:
            return StoreForked("the store belongs to the process that opened it; open stores in a new process")
        if self._failure is not None:
            refusal = StoreFailed(str(self._failure))
            refusal.__cause__ = self._failure
            return refusal
        return StoreClosed("the store is closed")

    def _settle_later(self, units: list[Unit], appended: Appended) -> bool:
        """Settle ``units`` on the loop. Return False if there is nothing to do or no loop left to do it."""
        if self.loop is None or not (appended or units):
            return False
        try:
            self.loop.call_soon_threadsafe(self._settle_on_loop, units, appended)
        except RuntimeError:  # the loop is closed: it has no waiting callers, and the batch stays written
            return False
        return True

    def _settle_on_loop(self, units: list[Unit], appended: Appended) -> None:
        try:
            if appended:
                self._on_appended(appended)
        finally:  # callers get their answers even if the listener raises
            for unit in units:
                try:
                    unit.settle(unit)
                except Exception as error:  # noqa: BLE001 - one caller's answer, and no other's
                    assert self.loop is not None
                    self.loop.call_exception_handler({"message": "a caller was not told", "exception": error})
            self._end_settling()

    def _end_settling(self) -> None:
        """Note that the loop has settled all units of the last batch; see ``_take``."""
        with self._wake:
            self._is_settling = False
            if self._pending:
                self._wake.notify()

    def close(self) -> None:
        """Commit the accepted units, then end the thread."""
        if os.getpid() != self._pid:
            return  # the thread does not exist in this child, and may have held the lock
        self._queue_gathered()
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while units := self._take():
            try:
                self._began_s = _DISK_CLOCK.monotonic_s()
                self._await_room()
                appended = self._commit(units)
            except Exception as error:  # noqa: BLE001 - whatever it was: nothing may be acknowledged after it
                self._fail(units, error)
                return
            finally:
                self._began_s = None
            self._marks.release()
            self._settle(units, appended)

    def _await_room(self) -> None:
        """Delay a batch while the disk has no room for it. Its units get no answer, and are neither in doubt nor lost.

        Writing it would fill the disk, and such an error ends the run. Closing does not wait for room.
        """
        while not self._has_room(self._taken_bytes):
            with self._wake:
                if self._wake.wait_for(lambda: self._is_closing, _LOOK_FOR_ROOM_S):
                    return
            self._began_s = _DISK_CLOCK.monotonic_s()  # a full disk is not a stalled one

    def _take(self) -> list[Unit]:
        """Return the units of the next batch; empty when closing.

        A loop that has not yet delivered the answers of the last batch is busy with calls that will submit more units.
        Writing these one by one would cost a batch each, so the writer waits for them. It does not wait if threads such
        as the scheduler wait directly for their units.
        """
        with self._wake:
            while not self._is_closing and (not self._pending or (self._is_settling and not self._direct_pending)):
                self._wake.wait()
            self._await_return()
            ops = size = count = 0
            for unit in self._pending:
                if count and (ops + len(unit.ops) > OPS_PER_BATCH_MAX or size + unit.size_bytes > BYTES_PER_BATCH_MAX):
                    break
                ops += len(unit.ops)
                size += unit.size_bytes
                count += 1
            self._taken_bytes = size + _OP_BYTES * ops
            units = self._pending[:count]
            del self._pending[:count]
            self._pending_ops -= ops
            self._pending_bytes -= size
            self._direct_pending -= sum(unit.is_direct for unit in units)
            return units

    def _expected_ops(self) -> int:
        return self._answered_ops + self._left_ops

    def _await_return(self) -> None:
        """Wait for the callers of the last batch: most send again shortly after their answers. The lock is held.

        A slow replication log otherwise divides the callers into two groups, and each group waits for the put of the
        other one: a caller waits for two puts, and a put has half of the callers. The wait ends as soon as operations
        arrive no faster than twice the rate during the put. Callers that do not wait for answers are thus not delayed.
        """
        if self._log_s < _SLOW_LOG_S:
            return
        until_s = self._answered_s + min(_RETURN_SHARE * self._log_s, _RETURN_S_MAX)
        least = max(1, 2 * self._left_ops / _RETURN_STEPS)
        while (left_s := until_s - _DISK_CLOCK.monotonic_s()) > 0:
            before = self._pending_ops
            if self._wake.wait_for(
                lambda: self._is_closing or self._pending_ops >= self._expected_ops(),
                min(left_s, self._log_s / _RETURN_STEPS),
            ):
                return
            if self._pending_ops - before < least:
                return

    def _commit(self, units: list[Unit]) -> Appended:
        started_s = self._clock.monotonic_s()
        batch, receipts, appended = self._assembler.assemble([unit.ops for unit in units])
        if self._batch_log is not None:
            self._began_s = None  # a replication log that waits is not a stalled disk
            given_s = _DISK_CLOCK.monotonic_s()
            self._batch_log.append(batch)
            self._began_s = _DISK_CLOCK.monotonic_s()
            self._log_s = self._began_s - given_s
        self._engine.write(batch)
        written_s = self._clock.monotonic_s()
        if self._is_synced:
            self._engine.sync()
        else:
            self._engine.flush()
        self._assembler.outbox.synced()
        ended_s = self._clock.monotonic_s()
        ops = size = 0
        for unit, answer in zip(units, receipts, strict=True):
            if answer is None:
                unit.error = UnitRefused(f"a part of a unit of {len(unit.ops)} operations was done before: see IfKnown")
            elif isinstance(answer, OverBound | MessageIdTaken):
                unit.error = answer
            else:
                unit.receipts = answer
            ops += len(unit.ops)
            size += unit.size_bytes
        stats = self.stats
        stats.batches += 1
        stats.ops += ops
        stats.bytes += size
        stats.sync_s += ended_s - written_s
        if self.observe is not None:
            self.observe(ops, size, ended_s - started_s, ended_s - written_s)
        return appended

    def _settle(self, units: list[Unit], appended: Appended) -> None:
        if self._batch_log is not None:
            with self._lock:
                self._answered_ops, self._left_ops = sum(len(unit.ops) for unit in units), self._pending_ops
                self._answered_s = _DISK_CLOCK.monotonic_s()
        for unit in units:
            if unit.is_direct:
                unit.settle(unit)
        waiting = [unit for unit in units if not unit.is_direct]
        with self._wake:
            self._is_settling = bool(waiting)
        if not self._settle_later(waiting, appended):
            self._end_settling()

    def _fail(self, units: list[Unit], error: Exception) -> None:
        failure = error if isinstance(error, StoreError) else StoreFailed(f"{type(error).__name__}: {error}")
        failure.__cause__ = error if failure is not error else error.__cause__
        with self._wake:
            self._failure = failure
            units = units + self._pending
            self._pending = []
        for unit in units:
            unit.error = StoreFailed(f"the write is in doubt: {failure}")
            unit.error.__cause__ = failure
        try:
            self._on_failure(failure)  # before the callers: the owner may end their calls
        finally:
            self._settle(units, {})
            self._marks.close()
