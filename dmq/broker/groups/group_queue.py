"""Progress of one group on one queue: a pure state machine that gets the time as an argument and returns ops.

Offsets below ``floor`` are finished. Above it, one bitmap per chunk of 1024 offsets marks finished offsets. ``cursor``
is the next offset not yet handed out in this run. ``_ready`` holds offsets below the cursor to deliver next: returned
ones, and parked ones whose turn has come. ``leases`` holds leased messages that are not finished.
``dmq.store.schema.topics.group`` defines the rows: floor, chunks and exceptions. All rows hold absolute values.

An exception row is a durable lease or, with visible_at_ms 0, a returned message. For a returned message, the attempt is
the next one. The epoch is that of the last delivery. A lease expires by the boot clock, which cannot be set. When a run
loads a lease row, the lease gets its remaining time by the wall clock, at most its original duration.

Messages of a message group are delivered in order (``dmq.broker.groups.message_groups``). The message group of an
offset is unknown until the message is read, so a selected offset is *unread* until it is admitted.

A plain lease is in memory only. After a restart its message is delivered again, and the old handle stays valid until
then. Renewals, and all changes that count an attempt, are rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.runtime.clock import Moment
from dmq.broker.groups.message_groups import MessageOrder, Remembered
from dmq.broker.handles import ReceiptHandle
from dmq.store.schema.accounting.ledger import Term
from dmq.store.schema.keys import Family, pack_u64, unpack_u64
from dmq.store.schema.messages.record import QueuedMessage
from dmq.store.schema.topics.group import (
    CHUNK_BYTES,
    CHUNK_OFFSETS,
    SUSPENDED,
    ExceptionRow,
    GroupKind,
    decode_exception,
    encode_hidden,
    encode_returned,
    pack_group_key,
    unpack_group_row,
)
from dmq.store.writer.operations import Delete, Op, Put, Tally
from dmq.tracing import TracedDelivery

LEASES_MAX = 10_000
ATTEMPT_MAX = 0xFFFF  # maximum of the 16-bit field in the row
PARKED_MAX = 100_000  # at this bound, no new messages of the queue are read until some parked ones are handed out
REMEMBERED_MAX = 4_000_000  # parked and returned messages of all queues, some 150 to 250 bytes each
REMEMBERED_SHARE = 32  # at that bound, a queue reads new messages only below this count of its own
_MOVED_KEPT = 4096

_NO_TIME = Moment(0, 0)
# Plain integers: comparison with enum members costs more for each row.
_FLOOR, _CHUNK, _EXCEPTION = int(GroupKind.FLOOR), int(GroupKind.CHUNK), int(GroupKind.EXCEPTION)
_FULL = b"\xff" * CHUNK_BYTES


class Returned(NamedTuple):
    """Delivery state of a returned message."""

    attempt: int = 1  # the next one
    epoch: int = 0  # of the last delivery
    first_failed_at_ms: int = 0


_FIRST = Returned()


@dataclass(slots=True)
class DeliveryLease:
    """One delivery that is not finished. ``message_id`` is empty until the message is read."""

    epoch: int
    attempt: int  # in this queue
    ends_ms: int  # by the boot clock
    handle: str = ""  # as issued in this run
    message_id: bytes = b""
    attempts_before: int = 0  # made before the message reached this queue
    since_ms: int = 0  # when the message first became visible to its group
    not_after_ms: int = 0  # expiry of the message, set by its sender; 0: it does not expire
    first_failed_at_ms: int = 0
    is_push: bool = False
    renew_for: str = ""
    renew_until_ms: int = 0  # by the boot clock
    is_suspended: bool = False  # its next delivery does not count as an attempt
    is_returning: bool = False  # its end is decided and under commit
    is_coming_back: bool = False  # that end makes its message available again at once
    is_changed: bool = False  # its consumer received it and changed its end, or failed
    has_reason: bool = False  # its row has the reason of the preceding failure
    traced: TracedDelivery | None = None  # only while spans are exported

    @property
    def attempts(self) -> int:
        """Number of deliveries of the message to its group, including this one; at most ``ATTEMPT_MAX``."""
        attempts = self.attempts_before + self.attempt
        return attempts if attempts < ATTEMPT_MAX else ATTEMPT_MAX  # noqa: FURB136 - of every message

    def know(self, message: QueuedMessage) -> None:
        """Copy the fields of the read message that later decide its outcome."""
        self.message_id = message.message_id
        self.attempts_before = message.attempts_so_far
        self.since_ms = message.since_ms
        self.not_after_ms = 0 if message.is_dead else message.not_after_ms


class GroupQueue:
    """State of one (group, topic, queue)."""

    def __init__(self, group_id: int, topic_id: int, queue_id: int) -> None:
        self.group_id = group_id
        self.topic_id = topic_id
        self.queue_id = queue_id
        self.end = 0  # offset after the last durable message known to the broker
        self.floor = 0
        self.cursor = 0
        self.leases: dict[int, DeliveryLease] = {}
        self._ready: list[int] = []
        self._returned: dict[int, Returned] = {}
        self._unread: set[int] = set()  # selected, perhaps put back, and not admitted yet
        self._moved: dict[int, None] = {}  # offsets that left as copies in this run, oldest first
        self.order = MessageOrder()
        self.beside: Sequence[
            GroupQueue
        ] = ()  # queues that may hold the same message groups: the lane, or for a lane the topic's queues
        self._rows: set[int] = set()  # offsets that have an exception row
        self._owed: list[Op] = []  # committed with the next rows
        self._chunks: dict[int, bytearray] = {}

    def load(self, rows: Sequence[tuple[bytes, bytes]], now: Moment = _NO_TIME) -> None:
        """Restore the state from the group's rows at ``now``; durable leases become leases again.

        A caller that only reads finished offsets may omit ``now``.
        """
        for key, value in rows:
            kind, number = unpack_group_row(key)
            if kind == _FLOOR:
                self.floor = unpack_u64(value)
            elif kind == _CHUNK:
                self._chunks[number] = bytearray(value)
        self._raise_floor()
        self.cursor = self.floor
        for key, value in rows:
            kind, offset = unpack_group_row(key)
            if kind != _EXCEPTION or self.is_finished(offset):
                continue
            row = decode_exception(value)
            self._rows.add(offset)
            if row.visible_at_ms:
                self.leases[offset] = DeliveryLease(
                    row.epoch,
                    row.attempt,
                    now.boot_ms + row.left_ms(now.wall_ms),
                    first_failed_at_ms=row.first_failed_at_ms,
                    is_suspended=row.is_suspended,
                    has_reason=bool(row.failure),
                )
                if row.message_group:
                    self.order.hold(offset, row.message_group, row.epoch)
            else:
                self._remember(offset, Returned(row.attempt, row.epoch, row.first_failed_at_ms))

    def start_at(self, offset: int) -> list[Op]:
        """Start a new group at ``offset``."""
        return [*self._floor_at(offset), self._tally(Term.QUEUES, 1), self._tally(Term.BEFORE, offset)]

    def go_on_at(self, offset: int, end: int) -> list[Op]:
        """Move a group to ``offset``. Precondition: all offsets below ``end`` are finished and none above it."""
        owed, self._owed = self._owed, []
        return [*owed, *self._floor_at(offset), self._tally(Term.BEFORE, offset - end)]

    def _floor_at(self, offset: int) -> list[Op]:
        self.floor = self.cursor = offset
        return [Put(Family.GROUP, self._key(_FLOOR, 0), pack_u64(offset))]

    def _tally(self, term: Term, by: int) -> Tally:
        return Tally(self.topic_id, self.group_id, term, by)

    def skip_to(self, begin: int) -> list[Op]:
        """Finish all offsets below ``begin`` after their removal; return the ops, or none if nothing changes.

        Call ``release`` for offsets of message groups once the ops are durable.
        """
        if begin <= self.floor:
            return []
        finished = self.finished_count
        self.floor = begin
        for offset in [each for each in self.leases if each < begin]:
            del self.leases[offset]
        for offset in [each for each in self._returned if each < begin]:
            self._forget(offset)
        self._unread = {offset for offset in self._unread if offset >= begin}
        gone = [offset for offset in self._rows if offset < begin]
        self._rows.difference_update(gone)
        dropped = [number for number in self._chunks if (number + 1) * CHUNK_OFFSETS <= begin]
        for number in dropped:
            del self._chunks[number]
        dropped += self._raise_floor()
        self.cursor = max(self.cursor, self.floor)
        skipped = self.finished_count - finished
        return [
            *([self._tally(Term.SKIPPED, skipped)] if skipped else []),
            Put(Family.GROUP, self._key(_FLOOR, 0), pack_u64(self.floor)),
            *(Delete(Family.GROUP, self._key(_CHUNK, number)) for number in dropped),
            *(Delete(Family.GROUP, self._key(_EXCEPTION, offset)) for offset in gone),
        ]

    def skip_later(self, begin: int) -> None:
        """As ``skip_to``, for callers that do not write: its ops are committed with the next rows, if there are any."""
        self._owed += self.skip_to(begin)

    def is_finished(self, offset: int) -> bool:
        """Return True if the group is done with an offset."""
        if offset < self.floor:
            return True
        chunk = self._chunks.get(offset // CHUNK_OFFSETS)
        return chunk is not None and bool(chunk[offset % CHUNK_OFFSETS >> 3] >> (offset & 7) & 1)

    @property
    def finished_count(self) -> int:
        """Number of finished offsets."""
        above = ((number * CHUNK_OFFSETS, chunk) for number, chunk in self._chunks.items())
        # The chunk that contains the floor may have bits for all or some offsets below it, which count already.
        return self.floor + sum(
            (int.from_bytes(chunk, "little") >> max(0, self.floor - first)).bit_count() for first, chunk in above
        )

    @property
    def available_max(self) -> int:
        """Upper bound of the number of messages that ``take`` can return."""
        return self.end - self.cursor + len(self._ready)

    def has_available(self) -> bool:
        """Return True if ``take`` would return an offset."""
        leases, ready = self.leases, self._ready
        # Fast path: a receive checks all queues of its topic, more than once, and most of them are empty.
        if (self.cursor >= self.end and not ready) or len(leases) >= LEASES_MAX:
            return False
        while ready and (ready[0] in leases or self.is_finished(ready[0])):
            heappop(ready)
        if ready:
            return True
        parked = self.order.parked_count
        # With no lease, no event makes progress later: messages returned before a restart are at or after the cursor.
        is_full = self.order.everywhere.total >= REMEMBERED_MAX and bool(leases)
        if parked >= PARKED_MAX or (is_full and parked + len(self._returned) >= REMEMBERED_SHARE):
            return False
        cursor, end = self.cursor, self.end
        while cursor < end and (cursor in leases or self.is_finished(cursor)):
            cursor += 1
        self.cursor = cursor
        return cursor < end

    def take(self, limit: int) -> list[tuple[int, Returned]]:
        """Return up to ``limit`` offsets to read, returned ones first. The caller calls ``lease`` and then ``admit``
        for each.
        """
        if not self.has_available():
            return []
        limit = min(limit, LEASES_MAX - len(self.leases))
        chosen: dict[int, None] = {}
        while len(chosen) < limit and self.has_available():
            if self._ready:
                chosen[heappop(self._ready)] = None
            else:
                first = self.cursor
                self.cursor = until = self._until(first, first + limit - len(chosen))
                chosen.update(dict.fromkeys(range(first, until)))
        self._unread.update(chosen)
        returned = self._returned
        return [(offset, returned.get(offset, _FIRST)) for offset in chosen]

    def _until(self, first: int, stop: int) -> int:
        """Return the end of the run of new, available offsets that starts at ``first``; at most ``stop``."""
        stop = min(stop, self.end)
        until = first + 1
        while until < stop and until not in self.leases and not self.is_finished(until):
            until += 1
        return until

    def admit(self, offset: int, message_group: str, *, first_epoch: int, run_max: int) -> bool:
        """Return True if a read offset may be handed out now. Otherwise its lease is removed, and it becomes ready
        later.

        Call it in ascending order of offsets, with the first epoch of the receive.
        """
        self._unread.discard(offset)
        if not message_group:
            return True
        if any(other < offset for other in self._unread):  # selected by another receive that was cancelled
            self._unread.add(offset)
            self.give_back(offset)
            return False
        epoch = self.leases[offset].epoch
        if any(other.order.is_out(message_group) for other in self.beside):
            self.order.park(offset, message_group)
        elif self.order.admit(offset, message_group, epoch, first_epoch=first_epoch, run_max=run_max):
            return True
        del self.leases[offset]
        return False

    def give_back(self, offset: int) -> None:
        """Undo ``take`` or ``lease`` for an offset that is not handed out.

        The offset stays unread unless an earlier scan found its message group. In that case the message order decides
        when it is ready.
        """
        if self.order.is_grouped(offset):
            self._unread.discard(offset)
        self.leases.pop(offset, None)
        self._offer(offset)

    def _offer(self, offset: int) -> None:
        self._ready_are(self.order.came_back(offset) if self.order.is_grouped(offset) else (offset,))

    def _ready_are(self, offsets: Iterable[int]) -> None:
        for offset in offsets:
            if offset < self.cursor:  # otherwise the cursor reaches it in order
                heappush(self._ready, offset)

    def lease(self, offset: int, lease: DeliveryLease) -> None:
        """Store the lease of an offset."""
        self.leases[offset] = lease

    def check(self, receipt: ReceiptHandle) -> bool:
        """Return True if the handle is valid, False if the message is already finished.

        Raise ``Refused(RECEIPT_HANDLE)`` if the handle is stale.
        """
        offset = receipt.queue_offset
        lease = self.leases.get(offset)
        if lease is not None:  # a leased message is not finished
            is_good = lease.epoch == receipt.epoch
        elif self.is_finished(offset):
            if offset in self._moved:
                raise Refused(Rule.RECEIPT_HANDLE, "the message was returned and will be delivered again", value=offset)
            return False
        else:  # expired, or from before a restart: valid until the next delivery of the message
            is_good = offset < self.end and receipt.epoch >= self._returned.get(offset, _FIRST).epoch
        if not is_good:
            raise Refused(Rule.RECEIPT_HANDLE, "the message has been delivered again", value=offset)
        return True

    def finish(self, offsets: Iterable[int]) -> list[Op]:
        """Mark offsets finished and return the ops; call ``release`` for each offset once they are durable."""
        ops, self._owed = self._owed, []
        changed: dict[int, bytearray] = {}
        for offset in offsets:
            self.leases.pop(offset, None)
            self._forget(offset)
            self._unread.discard(offset)
            number, at = divmod(offset, CHUNK_OFFSETS)
            chunk = self._chunks.get(number)
            if chunk is None:
                chunk = self._chunks[number] = bytearray(CHUNK_BYTES)
            chunk[at >> 3] |= 1 << (at & 7)
            changed[number] = chunk
            if offset in self._rows:
                self._rows.discard(offset)
                ops.append(Delete(Family.GROUP, self._key(_EXCEPTION, offset)))
        dropped = self._raise_floor()
        for number, chunk in changed.items():
            if number not in dropped:
                ops.append(Put(Family.GROUP, self._key(_CHUNK, number), bytes(chunk)))
        if dropped:
            ops.append(Put(Family.GROUP, self._key(_FLOOR, 0), pack_u64(self.floor)))
            ops += [Delete(Family.GROUP, self._key(_CHUNK, each)) for each in dropped]
        return ops

    def next_attempt(self, offset: int) -> int:
        """Return the attempt number of the next delivery of an offset in this queue."""
        return self._returned.get(offset, _FIRST).attempt

    def release(self, offset: int) -> None:
        """Make messages ready that were parked because of an unfinished offset.

        Call it only once the finish is durable. Otherwise a crash would deliver the message again, after its
        successors.
        """
        message_group = self.order.group_of(offset)
        if not message_group:
            return
        self._ready_are(self.order.finished(offset))
        if not self.order.is_out(message_group):
            for other in self.beside:
                other._ready_are(other.order.ready(message_group))

    def leave(self, offset: int) -> list[Op]:
        """Finish an offset whose message continues as a copy; its handle is refused from now on."""
        self._moved[offset] = None
        if len(self._moved) > _MOVED_KEPT:
            del self._moved[next(iter(self._moved))]
        return self.finish((offset,))

    def leased(self, receipt: ReceiptHandle, message_group: str) -> DeliveryLease:
        """Return the lease of a valid handle; recreate it if it ended or dates from before a restart."""
        offset = receipt.queue_offset
        lease = self.leases.get(offset)
        if lease is None:
            self._unread.discard(offset)
            lease = self.leases[offset] = DeliveryLease(
                receipt.epoch,
                receipt.attempt,
                0,
                first_failed_at_ms=self._returned.get(offset, _FIRST).first_failed_at_ms,
                is_push=receipt.is_push,
            )
            if message_group:
                self.order.hold(offset, message_group, receipt.epoch)
        return lease

    def hide(
        self,
        offset: int,
        lease: DeliveryLease,
        now: Moment,
        for_ms: int,
        *,
        is_suspended: bool = False,
        message_group: str = "",
        failure: bytes = b"",
    ) -> list[Op]:
        """Make a leased message visible again ``for_ms`` milliseconds after ``now``; the lease is durable from now on.

        ``failure`` is the encoded reason of the preceding failure, if known.
        """
        lease.ends_ms = now.boot_ms + for_ms
        lease.renew_for = ""  # an explicit duration ends automatic renewal
        lease.is_suspended = is_suspended
        lease.is_returning = lease.is_coming_back = False
        lease.is_changed = True
        lease.has_reason = bool(failure)
        self._rows.add(offset)
        now_ms, flags = now.wall_ms, SUSPENDED * is_suspended
        until_ms, first_ms = now_ms + for_ms, lease.first_failed_at_ms
        row = encode_hidden(lease.attempt, until_ms, lease.epoch, first_ms, flags, now_ms, message_group, failure)
        return [Put(Family.GROUP, self._key(_EXCEPTION, offset), row)]

    def has_row(self, offset: int) -> bool:
        """Return True if an offset has an exception row."""
        return offset in self._rows

    def plan_return(
        self, offset: int, lease: DeliveryLease, now_ms: int, before: ExceptionRow | None = None
    ) -> tuple[int, list[Op]]:
        """Return the next attempt number of a returned message, and the ops. ``before`` as in ``encode_returned``.

        Call ``come_back`` once the ops are durable.
        """
        attempt = lease.attempt if lease.is_suspended else min(lease.attempt + 1, ATTEMPT_MAX)
        if not lease.is_suspended and not lease.first_failed_at_ms:
            lease.first_failed_at_ms = now_ms
        lease.is_returning = lease.is_coming_back = True
        self._rows.add(offset)
        row = encode_returned(attempt, lease.epoch, lease.first_failed_at_ms, before)
        return attempt, [Put(Family.GROUP, self._key(_EXCEPTION, offset), row)]

    def come_back(self, offset: int, lease: DeliveryLease, attempt: int) -> bool:
        """Make a message available again; return False if it was finished or hidden again in the meantime."""
        if self.leases.get(offset) is not lease or not lease.is_returning:
            return False
        del self.leases[offset]
        self._remember(offset, Returned(attempt, lease.epoch, lease.first_failed_at_ms))
        self._offer(offset)
        return True

    def _remember(self, offset: int, returned: Returned) -> None:
        self.order.everywhere.total += offset not in self._returned
        self._returned[offset] = returned

    def _forget(self, offset: int) -> None:
        if self._returned.pop(offset, None) is not None:
            self.order.everywhere.total -= 1

    def count_apart(self) -> None:
        """Remove this unused queue from the shared count of remembered messages."""
        self.order.everywhere.total -= self.order.parked_count + len(self._returned)
        self.order.everywhere = Remembered()

    def _raise_floor(self) -> list[int]:
        """Move the floor over finished offsets; return the numbers of chunks that are no longer needed."""
        dropped: list[int] = []
        while True:
            number = self.floor // CHUNK_OFFSETS
            chunk = self._chunks.get(number)
            if chunk is None:
                return dropped
            if chunk == _FULL and self.floor % CHUNK_OFFSETS == 0:
                self.floor += CHUNK_OFFSETS
            else:
                while self.floor // CHUNK_OFFSETS == number and self.is_finished(self.floor):
                    self.floor += 1
            if self.floor // CHUNK_OFFSETS == number:
                return dropped
            del self._chunks[number]
            dropped.append(number)

    def exception_key(self, offset: int) -> bytes:
        """Return the key of the exception row of an offset."""
        return self._key(_EXCEPTION, offset)

    def _key(self, kind: int, number: int) -> bytes:
        return pack_group_key(self.group_id, self.topic_id, self.queue_id, kind, number)
