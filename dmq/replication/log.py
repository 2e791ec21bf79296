"""The replication log of a running store: a thread that writes the appended batches as segments.

Safety rests on the object store's put-if-absent. Each run opens with a segment of its own epoch at the next number. A
replaced process meets that segment with its next one, and is *fenced*: it accepts no batch any more.

A put without an answer is in doubt. The same bytes are put again under the same number until the object store has a
segment there; its nonce names the writer. An unreachable object store therefore holds the batches back and loses none.

With a direct link, a batch is answered once the member of the link or the object store has it, and segments are written
as in asynchronous mode. The member writes the batches that it has into the log if the link ends; the log accepts its
segments as its own, since both have the same batches.

With ``when_unreachable`` "local_only" the store continues alone after some seconds: batches are written locally only.
Once the segment in doubt is written, a base is made, and the log continues after it.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import Literal, NamedTuple

from broker_adapter.runtime.clock import Clock
from broker_adapter.runtime.log import LibraryLog
from dmq.errors import DmqError, ReplicaDamaged, ReplicaFenced, ReplicaForeign, StoreError, StoreFailed
from dmq.replication.following import apply, follow, last_segment, put_position, read_segment
from dmq.replication.link import FRAME_BYTES_MAX, Unstored
from dmq.replication.objects import ObjectStore, ReplicaUnavailable
from dmq.replication.segment import (
    NONCE_BYTES,
    PREFIX,
    Segment,
    SegmentHead,
    decode_segment,
    encode_batch,
    encode_segment,
    segment_name,
)
from dmq.store.engines.engine import Batch, Engine
from dmq.store.schema.cell.position import NO_CHECKSUM, Position, decode_position
from dmq.store.schema.keys import META_POSITION, Family
from dmq.store.writer.batch_log import LogMoved, LogStart

log = LibraryLog("dmq.replication")

SEGMENT_BYTES_MAX = 8 * 1024 * 1024  # before compression; one larger batch is a segment of its own
SEGMENT_BATCHES_MAX = 65_536
LOCAL_AFTER_S = 5.0  # without an answer, before a store with ``local_only`` continues alone
_RETRY_S_MIN, _RETRY_S_MAX = 0.05, 2.0
_HELD_S = 3.0  # after which new work is refused
_BASE_AGAIN_S = 0.05
_LINK_S = 0.1  # that a batch waits for the direct link alone
_FRAME_MARGIN_BYTES = 64 * 1024  # of a frame, for all but the content of its batches
_REPLACED_MS = 30_000  # after which a successor may have pruned its opening segment; below the least ``replica_keep``


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """Options of a replication log."""

    is_sync: bool
    every_s: float = 1.0  # longest time until an appended batch is sent; asynchronous mode only
    when_unreachable: Literal["hold", "local_only"] = "hold"
    lag_bytes_max: int = 64 * 1024 * 1024
    grace_s: float = 10.0  # for the last batches, while the store closes


class LogState(Enum):
    """Whether the log gets the batches."""

    FOLLOWING = "following"
    LOCAL_ONLY = "local_only"  # the log misses batches
    REJOINING = "rejoining"  # a base with the missed batches is being made; later batches wait for it


class LogStatus(NamedTuple):
    """Figures of a log; ``lag_batches`` are those that a lost machine would lose now.

    ``lag_bytes`` are those that the object store lacks.
    """

    state: LogState
    url: str
    epoch: int
    number: int  # of the last segment
    segments: int  # written by this process
    segment_bytes: int
    sent_at_ms: int
    lag_batches: int
    lag_bytes: int  # of waiting batches
    lag_s: float
    error: str  # of the last request, if it failed


class _Sent(NamedTuple):
    """Last segment that the log certainly has."""

    number: int = 0
    checksum: bytes = NO_CHECKSUM
    batch: int = 0
    time_ms: int = 0


class _Draft(NamedTuple):
    """Segment to be written, until the log has it."""

    data: bytes
    nonce: bytes
    becomes: _Sent


class ReplicationLog:
    """Implementation of ``dmq.store.writer.batch_log.BatchLog`` on an object store."""

    def __init__(
        self,
        objects: ObjectStore,
        clock: Clock,
        options: LogOptions,
        make_base: Callable[[LogStart], int],
    ) -> None:
        """``make_base`` uploads a base of the open store and returns the number of the last batch in it."""
        self._objects = objects
        self._clock = clock
        self._options = options
        self._make_base = make_base
        self._start = LogStart(0, 0, None, None)
        self._changed = threading.Condition()
        self._state = LogState.FOLLOWING
        self._epoch = 0
        self._batch = 0  # number of the last appended batch
        self._sent = _Sent()
        self._known_ms = 0  # when ``_sent`` was the end of the log; by a clock that counts suspension
        self._pending: deque[bytes] = deque()  # batches after ``_sent``; ends with the last appended batch
        self._pending_bytes = 0
        self._draft_batches = 0  # of the pending ones, in the segment that is being sent
        self._linked = 0  # last batch that the member of the direct link acknowledged
        self._is_linked = False
        self._oldest_s = 0.0  # when the first batch that is not sent was appended
        self._is_urgent = False
        self._has_moved = False  # the opening segment met one of an earlier run
        self._may_leave = True  # continue without the log, if ``when_unreachable`` allows it
        self._deadline_s: float | None = None
        self._is_closed = False
        self._failure: StoreError | None = None
        self._on_failure: Callable[[StoreError], None] = lambda _: None
        self._error = ""
        self._unreachable_s: float | None = None  # since when
        self._segments = self._segment_bytes = self._sent_at_ms = 0
        self._thread = threading.Thread(target=self._run, name="dmq-replica", daemon=True)

    # -- the store's side ---------------------------------------------------------------------------------------------

    def watch(self, on_failure: Callable[[StoreError], None]) -> None:
        self._on_failure = on_failure

    def begin(self, engine: Engine, start: LogStart) -> None:
        self._start = start
        self._has_moved = False
        self._known_ms = self._clock.boot_ms()
        self._patiently(lambda: self._recover(engine, start))
        if self._thread.ident is None:
            self._thread.start()

    def append(self, batch: Batch, *, opens: int = 0) -> None:
        data = encode_batch(batch) if self._state is not LogState.LOCAL_ONLY else b""
        with self._changed:
            if self._failure is not None:
                raise self._failure
            self._epoch = opens or self._epoch
            self._batch += 1
            number = self._batch
            if self._state is not LogState.LOCAL_ONLY:
                self._take(data or encode_batch(batch))
            if opens:
                self._await_segment(lambda: self._sent.batch >= number)
            elif self._options.is_sync:
                self._await_copy(number)
            elif len(self._pending) == 1 or self._pending_bytes >= SEGMENT_BYTES_MAX:
                self._changed.notify_all()
            if self._pending_bytes > self._options.lag_bytes_max:
                self._await_segment(lambda: self._pending_bytes <= self._options.lag_bytes_max)
            put_position(
                batch, Position(self._start.store, self._epoch, self._sent.number, number, self._sent.checksum)
            )

    def obstacle(self) -> str:
        since_s = self._unreachable_s
        if since_s is None or self._state is not LogState.FOLLOWING or self._clock.monotonic_s() - since_s < _HELD_S:
            return ""
        if (self._is_linked or not self._options.is_sync) and self._pending_bytes <= self._options.lag_bytes_max:
            return ""
        return f"the replica at {self._objects.url} cannot be reached ({self._error}): repeat it later"

    def end_soon(self) -> None:
        with self._changed:
            if self._deadline_s is None:
                self._deadline_s = self._clock.monotonic_s() + self._options.grace_s
            self._changed.notify_all()

    def close(self) -> None:
        self.end_soon()
        with self._changed:
            if self._thread.ident is not None and self._state is LogState.FOLLOWING:
                self._changed.wait_for(
                    lambda: self._sent.batch >= self._batch or self._failure is not None, timeout=self._grace_s()
                )
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(self._grace_s() + _RETRY_S_MAX)

    def bind(self, is_bound: bool) -> None:
        """Forbid or allow to continue without the log: forbidden while a standby may take over."""
        self._may_leave = not is_bound

    def refuse(self, failure: StoreError) -> None:
        """Accept no further batch: this process is no longer the primary."""
        self._fail(failure)

    def status(self) -> LogStatus:
        """Return the current figures."""
        with self._changed:
            lag = self._batch - self._covered()
            return LogStatus(
                state=self._state,
                url=self._objects.url,
                epoch=self._epoch,
                number=self._sent.number,
                segments=self._segments,
                segment_bytes=self._segment_bytes,
                sent_at_ms=self._sent_at_ms,
                lag_batches=lag,
                lag_bytes=self._pending_bytes,
                lag_s=self._clock.monotonic_s() - self._oldest_s if lag else 0.0,
                error=self._error,
            )

    def unstored(self, after: int, wait_s: float) -> Unstored | None:
        """Return batches for one frame of the direct link; see ``LinkedLog``."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended() or self._has_frame(after), timeout=wait_s)
            if self._has_ended():
                return None
            stored = self._sent.batch
            start, size = max(after, stored), 0
            batches: list[bytes] = []
            for each in range(start - stored, len(self._pending)):
                size += len(self._pending[each])
                if size > FRAME_BYTES_MAX - _FRAME_MARGIN_BYTES:
                    break
                batches.append(self._pending[each])
            return Unstored(stored, start + 1, batches, max(self._clock.now_ms(), self._sent.time_ms))

    def note_link(self, batch: int | None) -> None:
        """Note that the member of the direct link has the batches up to ``batch``; None: the link is down."""
        with self._changed:
            self._is_linked = batch is not None
            self._linked = max(self._linked, batch or 0)
            self._changed.notify_all()

    def _has_ended(self) -> bool:
        return self._failure is not None or self._deadline_s is not None

    def _has_frame(self, after: int) -> bool:
        index = max(after - self._sent.batch, 0)
        return index < len(self._pending) and len(self._pending[index]) <= FRAME_BYTES_MAX - _FRAME_MARGIN_BYTES

    def _covered(self) -> int:
        """Return the last batch that is in the log, or that the member of the direct link has."""
        return max(self._sent.batch, self._linked)

    def _await_copy(self, number: int) -> None:
        self._changed.notify_all()
        if self._is_linked:
            self._changed.wait_for(
                lambda: self._covered() >= number or not self._is_linked or self._failure is not None, timeout=_LINK_S
            )
        if self._covered() < number:
            self._await_segment(lambda: self._covered() >= number)

    def _await_segment(self, is_done: Callable[[], bool]) -> None:
        self._is_urgent = True
        self._changed.notify_all()
        self._await(is_done)

    def _take(self, data: bytes) -> None:
        if not self._pending:
            self._oldest_s = self._clock.monotonic_s()
        self._pending.append(data)
        self._pending_bytes += len(data)
        if self._state is LogState.REJOINING and self._pending_bytes > self._options.lag_bytes_max:
            self._drop_pending()  # the base that is being made comes too late

    def _drop_pending(self) -> None:
        """Forget the batches that are not in the segment that is being sent."""
        while len(self._pending) > self._draft_batches:
            self._pending_bytes -= len(self._pending.pop())
        self._state = LogState.LOCAL_ONLY

    def _grace_s(self) -> float:
        deadline_s = self._deadline_s
        return 0.0 if deadline_s is None else max(deadline_s - self._clock.monotonic_s(), 0.0)

    def _await(self, is_done: Callable[[], bool]) -> None:
        """Wait for the log while the store follows it; raise once the log is fenced, or the grace time is over."""
        while not is_done() and self._state is LogState.FOLLOWING:
            if self._failure is not None:
                raise self._failure
            if self._has_moved:
                raise LogMoved
            if self._deadline_s is not None and not self._grace_s():
                raise StoreFailed(f"the replica at {self._objects.url} did not get the last batch: {self._error}")
            self._changed.wait(None if self._deadline_s is None else self._grace_s())

    # -- opening ------------------------------------------------------------------------------------------------------

    def _recover(self, engine: Engine, start: LogStart) -> None:
        (row,) = engine.get_many(Family.META, [META_POSITION])
        position = decode_position(row) if row is not None else None
        if position is None or (position.store, position.epoch) != (start.store, start.boot):
            self._begin_log(engine, start)
            return
        self._sent = _Sent()
        if position.number:
            last = read_segment(self._objects, position.number)
            if last is None or last.checksum != position.checksum:
                why = "is missing" if last is None else "has other content than the one that this store wrote"
                raise ReplicaDamaged(f"{segment_name(position.number)} at {self._objects.url} {why}")
            self._sent = _Sent(position.number, last.checksum, last.last_batch, last.head.time_ms)
        applied = position.batch
        for segment in follow(self._objects, start.store, position.number, position.checksum):
            head = segment.head
            if head.epoch != position.epoch:  # this directory may continue as a standby only
                raise ReplicaFenced(
                    f"another daemon continued the log at {segment_name(head.number)}, with epoch {head.epoch}"
                )
            if head.first_batch > applied + 1:
                raise ReplicaDamaged(f"batches {applied + 1} to {head.first_batch - 1} are not in the log")
            applied = apply(engine, segment, applied, keeps_identity=True)
            self._sent = _Sent(head.number, segment.checksum, segment.last_batch, head.time_ms)
        engine.sync()
        self._batch = applied
        if applied > position.batch:
            log.warning("replica_tail_applied", batches=applied - position.batch, number=self._sent.number)
        if applied > self._sent.batch:
            log.warning("replica_behind_store", batches=applied - self._sent.batch, number=self._sent.number)
            self._require_base()

    def _begin_log(self, engine: Engine, start: LogStart) -> None:
        """Begin a log with a base, or without one if the store is new. Continue after the last segment, if any."""
        last = last_segment(self._objects)
        if last is not None and (last.head.store != start.store or not start.boot):
            raise ReplicaForeign(
                f"the log at {self._objects.url} is that of store {last.head.store:016x}, not of this one"
            )
        if last is not None and last.head.epoch > start.boot:
            raise ReplicaFenced(
                f"another daemon continued the log at {self._objects.url}, with epoch {last.head.epoch}"
            )
        if last is not None:
            self._sent = _Sent(last.head.number, last.checksum, last.last_batch, last.head.time_ms)
        if not start.boot:
            return
        self._batch = self._sent.batch + 1  # a number that no segment has: a restore needs the base
        batch = Batch()
        put_position(batch, Position(start.store, start.boot, self._sent.number, self._batch, self._sent.checksum))
        engine.write(batch)
        engine.sync()
        self._require_base()

    def _require_base(self) -> None:
        """Make a base with the batches that the log lacks."""
        self._make_base(self._start)
        self._sent = self._sent._replace(batch=self._batch)

    def _patiently(self, work: Callable[[], None]) -> None:
        """Repeat ``work`` until the object store is reachable."""
        retry_s = _RETRY_S_MIN
        while True:
            try:
                work()
            except ReplicaUnavailable as error:
                self._unreachable(error)
                threading.Event().wait(retry_s)
                retry_s = min(2 * retry_s, _RETRY_S_MAX)
            else:
                self._reachable()
                return

    # -- the thread that sends ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (draft := self._next()) is not None:
                try:
                    if not self._send(draft):
                        return
                except LogMoved:
                    with self._changed:
                        self._remove_sent(len(self._pending))
                        self._has_moved = True
                        self._changed.notify_all()
                    continue
                if self._state is LogState.LOCAL_ONLY and not self._rejoin():
                    return
        except DmqError as error:
            self._fail(error if isinstance(error, StoreError) else StoreFailed(str(error)))
        except Exception as error:  # noqa: BLE001 - no batch may wait for a thread that ended
            self._fail(StoreFailed(f"the replication log failed: {type(error).__name__}: {error}"))

    def _fail(self, failure: StoreError) -> None:
        try:
            self._on_failure(failure)  # before the failed writes: the owner may end their calls
        finally:
            with self._changed:
                self._failure = failure
                self._changed.notify_all()

    def _next(self) -> _Draft | None:
        """Wait for batches and return them as the next segment; None once the log is closed."""
        with self._changed:
            while not self._pending or not self._is_due():
                if self._is_closed:
                    return None
                wait_s = self._oldest_s + self._options.every_s - self._clock.monotonic_s() if self._pending else None
                self._changed.wait(wait_s)
            batches: list[bytes] = []
            size = 0
            for each in islice(self._pending, SEGMENT_BATCHES_MAX):
                size += len(each)
                if batches and size > SEGMENT_BYTES_MAX:
                    break
                batches.append(each)
            self._draft_batches = len(batches)
            self._is_urgent = len(self._pending) > len(batches)
            first_batch, number, epoch = self._batch - len(self._pending) + 1, self._sent.number + 1, self._epoch
            last_batch = first_batch + len(batches) - 1
        nonce = secrets.token_bytes(NONCE_BYTES)
        time_ms = max(self._clock.now_ms(), self._sent.time_ms)
        head = SegmentHead(self._start.store, epoch, number, first_batch, time_ms, nonce, self._sent.checksum)
        data, checksum = encode_segment(head, batches)
        return _Draft(data, nonce, _Sent(number, checksum, last_batch, time_ms))

    def _is_due(self) -> bool:
        return (
            self._is_urgent
            or self._deadline_s is not None
            or self._pending_bytes >= SEGMENT_BYTES_MAX
            or self._clock.monotonic_s() - self._oldest_s >= self._options.every_s
        )

    def _send(self, draft: _Draft) -> bool:
        """Write a segment; return False if the log was closed before. Raise ``ReplicaFenced`` if another one is there.

        The same bytes are put under the same number until the object store has an object there.
        """
        retry_s = _RETRY_S_MIN
        while (becomes := self._put(draft)) is None:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, timeout=retry_s)
                if self._is_closed and not self._grace_s():
                    return False
            retry_s = min(2 * retry_s, _RETRY_S_MAX)
        self._reachable()
        with self._changed:
            self._remove_sent(becomes.batch - self._sent.batch)
            self._is_urgent |= becomes.batch < draft.becomes.batch  # the rest of the draft may be awaited
            self._sent = becomes
            self._oldest_s = self._clock.monotonic_s()
            self._segments += 1
            self._segment_bytes += len(draft.data)
            self._sent_at_ms = self._clock.now_ms()
            self._changed.notify_all()
        return True

    def _put(self, draft: _Draft) -> _Sent | None:
        """Put a segment once; return the one that the log has under its number, None if that is in doubt."""
        try:
            is_written = self._objects.create(segment_name(draft.becomes.number), draft.data)
            becomes = draft.becomes if is_written else self._find(draft)
            if becomes is not None:
                self._require_end(becomes.number)
        except ReplicaUnavailable as error:
            self._unreachable(error)
            return None
        return becomes

    def _remove_sent(self, count: int) -> None:
        """Remove the first batches: the log has them."""
        for _ in range(count):
            self._pending_bytes -= len(self._pending.popleft())
        self._draft_batches = 0

    def _require_end(self, number: int) -> None:
        """Raise ``ReplicaFenced`` if the log continues after segment ``number``.

        A process that was stopped for long may have been replaced, and the segment that fenced it pruned.
        """
        now_ms = self._clock.boot_ms()
        if now_ms - self._known_ms >= _REPLACED_MS:
            name = segment_name(number)
            if later := self._objects.list(PREFIX, name):
                raise ReplicaFenced(f"another daemon holds {later[0]} at {self._objects.url}")
        self._known_ms = now_ms

    def _find(self, draft: _Draft) -> _Sent | None:
        """Return the segment under the draft's number if its batches are ours; None if there is no object after all."""
        name = segment_name(draft.becomes.number)
        found = self._objects.read(name)
        if found is None:
            return None
        if found[0] == draft.data:
            return draft.becomes
        segment = decode_segment(found[0], name)
        head = segment.head
        if self._has_batches(segment):
            log.info("link_segment_found", number=head.number, batches=len(segment.batches))
            return _Sent(head.number, segment.checksum, segment.last_batch, head.time_ms)
        if head.store != self._start.store:
            raise ReplicaForeign(f"the log at {self._objects.url} is written by store {head.store:016x}, too")
        if head.nonce == draft.nonce:
            raise ReplicaDamaged(f"{name} has other content than this daemon wrote")
        if not self._segments and head.epoch < self._epoch:
            raise LogMoved  # the last segment of a replaced daemon, which the opening must follow
        raise ReplicaFenced(f"another daemon holds {name} at {self._objects.url}, with epoch {head.epoch}")

    def _has_batches(self, segment: Segment) -> bool:
        """Return True if a standby wrote the segment, of batches of this run that it has by the direct link."""
        head, sent = segment.head, self._sent
        if (head.store, head.epoch, head.previous) != (self._start.store, self._epoch, sent.checksum):
            return False
        with self._changed:
            pending = list(islice(self._pending, len(segment.batches)))
        return head.first_batch == sent.batch + 1 and pending == [encode_batch(each) for each in segment.batches]

    def _unreachable(self, error: ReplicaUnavailable) -> None:
        self._error = error.reason
        now_s = self._clock.monotonic_s()
        if self._unreachable_s is None:
            self._unreachable_s = now_s
            log.warning("replica_unreachable", url=self._objects.url, error=error.reason)
        with self._changed:
            is_over = self._options.is_sync or self._pending_bytes > self._options.lag_bytes_max
            if (
                is_over
                and self._options.when_unreachable == "local_only"
                and self._may_leave
                and self._state is LogState.FOLLOWING
                and self._segments  # not before the opening segment, which is the fence
                and now_s - self._unreachable_s >= LOCAL_AFTER_S
            ):
                self._drop_pending()
                self._changed.notify_all()
                log.error("replication_suspended", url=self._objects.url, why="when_unreachable is local_only")

    def _reachable(self) -> None:
        if self._unreachable_s is not None:
            log.warning("replica_reachable", url=self._objects.url)
        self._unreachable_s, self._error = None, ""

    def _rejoin(self) -> bool:
        """Make a base with the batches that the log lacks, and follow again; return False if the log was closed."""
        while True:
            with self._changed:
                if self._is_closed or self._deadline_s is not None:
                    return False
                self._state = LogState.REJOINING
                missed = self._batch
            try:
                in_base = self._make_base(self._start)
            except ReplicaUnavailable as error:
                self._unreachable(error)
                in_base = 0
            with self._changed:
                if in_base >= missed and self._state is LogState.REJOINING:
                    self._state = LogState.FOLLOWING
                    self._sent = self._sent._replace(batch=missed)
                    break
                self._drop_pending()
                self._changed.wait_for(lambda: self._is_closed, timeout=_BASE_AGAIN_S)
        self._reachable()
        log.warning("replication_resumed", url=self._objects.url, number=self._sent.number)
        return True
