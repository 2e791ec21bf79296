"""Assembly of ops into one atomic batch. Runs only in the writer thread, so it needs no locks.

Only the writer assigns sequences, timeline keys, queue offsets and audit sequences. Only the writer decides whether a
message id is known. All figures are absolute values in the batch that changes them, so a crash leaves them correct.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import ClassVar, NamedTuple

from dmq.errors import MessageIdTaken, OverBound
from dmq.store.engines.engine import Batch, Engine, queue_end
from dmq.store.files.steady_clock import SteadyClock
from dmq.store.schema import keys
from dmq.store.schema.accounting import outbox
from dmq.store.schema.accounting.outbox import pack_record_head
from dmq.store.schema.cell.clock import encode_clock
from dmq.store.schema.keys import Family, half_body_key, pack_index_prefix, pack_queue_key, pack_timeline_key, pack_u64
from dmq.store.schema.messages.index import (
    EntryState,
    Receipt,
    decode_index,
    encode_index_absorbed,
    encode_index_finished,
    encode_index_waiting,
    encode_index_withdrawn,
)
from dmq.store.schema.messages.own_keys import KeyHolder, decode_key_holder, encode_key_holder, last_holder_suffix
from dmq.store.schema.messages.record import waiting_bytes, whole_half_bytes
from dmq.store.writer.counts import Counts
from dmq.store.writer.ledger_rows import LedgerRows
from dmq.store.writer.marks import Marks
from dmq.store.writer.operations import (
    NO_RECEIPT,
    Append,
    Appended,
    AppendedRange,
    Bound,
    CloseLedger,
    Delete,
    Done,
    DropOutbox,
    Emit,
    HandOver,
    Hold,
    HoldOutbox,
    IfKnown,
    IndexBuilt,
    IndexMessages,
    IndexProperties,
    Occurrence,
    Op,
    Put,
    Recur,
    Reschedule,
    Restore,
    Schedule,
    SkipOutbox,
    Tally,
    UnderKey,
    Withdraw,
    scheduled_times,
)
from dmq.store.writer.outbox_rows import OutboxRows
from dmq.store.writer.property_rows import PropertyRows

_WITHDRAWN_KEPT = 10_000
_KEEP_CLOCK_MS = 5_000  # how often the clock row is stored, with a batch that is written anyway
_REFUSE, _WRITE = IfKnown.REFUSE, IfKnown.WRITE
_READ = frozenset((HandOver, Reschedule, Recur, Hold))  # ops on entries that the reader has read
_ANSWERS = frozenset((Schedule, Append, Withdraw, Done)) | _READ  # may be skipped, as their receipts show
_NA = outbox.NOT_APPLICABLE
_TIMELINE, _INDEX, _QUEUE = int(Family.TIMELINE), int(Family.INDEX), int(Family.QUEUE)  # faster than enum members
_WAITING, _QUEUED, _DELIVERED = EntryState.WAITING, EntryState.QUEUED, EntryState.DELIVERED
_QUEUED_NUMBER, _DELIVERED_NUMBER = int(_QUEUED), int(_DELIVERED)
_HELD_BYTE = keys.HELD_BEGIN[0]
_WAITING_PREFIX = keys.WAITING_GENERATION.to_bytes(4, "big")


Refusal = OverBound | MessageIdTaken | None  # reason to refuse a unit; ``None``: it would not be whole


class RecoveredFigures(NamedTuple):
    """Figures of the meta family from which the writer continues."""

    boot: int
    sequence: int  # last one assigned
    done: int
    generation: int  # of finished index rows
    generation_age_ms: int  # while the store was open
    outbox: outbox.OutboxState


class Assembler:
    """Builder of batches, with the current figures that they carry."""

    def __init__(
        self,
        engine: Engine,
        marks: Marks,
        clock: SteadyClock,
        recovered: RecoveredFigures,
        *,
        idempotency_window_ms: int,
        outbox_bytes_max: int,
        gap_event: Callable[[int, int], bytes],
        ledger_kinds: Collection[int] = (),
        bytes_since: int = 0,
    ) -> None:
        """Continue from ``recovered``.

        ``ledger_kinds`` are the event kinds that the ledger counts; if empty, no ledger is kept. ``bytes_since`` is
        passed to ``Counts``.
        """
        self._engine = engine
        self._marks = marks
        self._clock = clock
        self._window_ms = idempotency_window_ms
        self._sequence = recovered.sequence
        self._done = recovered.done
        self._generation = recovered.generation
        # By the boot clock, which cannot be set, so that no clock step makes the store forget an id early.
        self._generation_began_ms = clock.boot_ms() - recovered.generation_age_ms
        self._clock_kept_ms = clock.boot_ms()
        self.outbox = OutboxRows(
            engine, recovered.boot, recovered.outbox, bytes_max=outbox_bytes_max, gap_event=gap_event
        )
        self._tails: dict[tuple[int, int], int] = {}
        self.counts = Counts(engine, bytes_since)
        self._ledger = LedgerRows(engine, ledger_kinds) if ledger_kinds else None
        self._properties = PropertyRows.load(engine)  # None, and no cost for a message, while no property is indexed
        # Keys withdrawn while the reader may already have read them; see ``_withdraw``.
        self._withdrawn: set[bytes] = set()
        # Of the batch being assembled:
        self._batch = Batch()
        self._now_ms = 0
        self._decided_ms = 0  # when the entries handed over in this batch were found to be due
        self._floor_ms = 0
        self._known: dict[bytes, Receipt] = {}
        self._twins: dict[int, int] = {}  # of scopes of topics with half messages
        self._unmixed: set[int] = set()  # scopes of topics without half messages
        self._is_mixed = False  # whether this batch accepts messages in a scope with a twin
        self._waiting: dict[bytes, bytes | None] = {}  # index rows of entries that may be withdrawn or moved
        self._holders: dict[bytes, KeyHolder | None] = {}  # by the row key of each own key in use
        self._rows: dict[tuple[Family, bytes], bytes | None] = {}
        self._gone: set[tuple[int, bytes]] = set()  # the first ``_gone_count`` deletes
        self._gone_count = 0
        self._records: list[bytes] = []
        self._appended: Appended = {}
        self._generation_prefix = b""

    @property
    def sequence(self) -> int:
        """Last assigned sequence."""
        return self._sequence

    def generations(self) -> tuple[int, int, int]:
        """Return the index generations that may have a message id.

        They are waiting, and finished in this window or the previous one.
        """
        return keys.WAITING_GENERATION, self._generation, self._generation - 1

    def assemble(self, units: Sequence[Sequence[Op]]) -> tuple[Batch, list[list[Receipt] | Refusal], Appended]:
        """Return the batch, the receipts or the refusal of each unit, and the appended range of each queue.

        A unit is refused if it would not be whole, exceeds a bound, or reuses a message id. The batch has nothing of a
        refused unit.
        """
        batch = self._batch = Batch()
        self._now_ms, self._decided_ms = self._clock.now_ms(), 0
        self._rows, self._records, self._appended = {}, [], {}
        self._gone, self._gone_count = set(), 0
        if self._properties is not None:
            self._properties.begin(self._rows, batch)
            for unit in units:
                if unit and type(unit[0]) is IndexMessages:
                    self._properties.stored(unit[0])
        self.counts.begin()
        self.outbox.begin()
        first_sequence = self._sequence + 1
        if len(self._withdrawn) > _WITHDRAWN_KEPT:
            claimed, held = keys.timeline_key(self._marks.high()), self._marks.held_range()
            # The reader cannot have read the others.
            self._withdrawn = {key for key in self._withdrawn if key < claimed or held[0] <= key < held[1]}
        self._rotate_generation()
        self._generation_prefix = self._generation.to_bytes(4, "big")
        self._known = self._look_up(units)
        self._waiting = self._look_up_withdrawn(units)
        self._holders = self._look_up_holders(units)
        self._reserve(units, first_sequence)

        handlers = self._HANDLERS
        receipts: list[list[Receipt] | Refusal] = []
        for unit in units:
            refusal: Refusal = None
            if self._is_mixed:
                refusal = self._taken(unit)
            is_refused = refusal is not None
            if not is_refused and len(unit) > 1:
                is_refused = not self._is_whole(unit) or (refusal := self._over(unit)) is not None
            receipts.append(refusal if is_refused else [handlers[type(op)](self, op) for op in unit])

        puts = batch.puts
        for (family, key), value in self._rows.items():
            if value is None:
                batch.deletes.append((family, key))
            else:
                puts.append((family, key, value))
        self.counts.put(batch)
        if self._ledger is not None:
            self._ledger.put(batch, self._records, self._appended)
        self.outbox.put(batch, self._records, max(self._now_ms, self._decided_ms))
        if self._sequence >= first_sequence:
            puts.append((Family.META, keys.META_SEQUENCE, pack_u64(self._sequence)))
        return batch, receipts, self._appended

    def _taken(self, unit: Sequence[Op]) -> MessageIdTaken | None:
        """Return the refusal of a unit that reuses a known id of its topic, or ``None``.

        A half message must not reuse the id of another message, or the reverse.
        """
        for op in unit:
            if (type(op) is Schedule or type(op) is Append) and op.if_known is not _WRITE:
                twin = self._twins.get(op.scope)
                if twin is None or pack_index_prefix(0, op.scope) + op.message_id in self._known:
                    continue
                if pack_index_prefix(0, twin) + op.message_id in self._known:
                    return MessageIdTaken(op.message_id, by_half=twin > op.scope)
        return None

    def _is_whole(self, unit: Sequence[Op]) -> bool:
        """Return True if the unit skips no op that its other ops may rely on. Changes nothing."""
        kinds = set(map(type, unit))
        if kinds <= _ANSWERS or kinds.isdisjoint(_ANSWERS):
            return True
        here: set[bytes] = set()  # ids that the unit accepts, and keys that it withdraws
        for op in unit:
            kind = type(op)
            if kind is Schedule or kind is Append:
                if op.if_known is _REFUSE:  # type: ignore[union-attr]
                    name = pack_index_prefix(0, op.scope) + op.message_id  # type: ignore[union-attr]
                    if name in self._known or name in here:
                        return False
                    here.add(name)
            elif kind is Withdraw:
                if op.if_gone is _REFUSE:  # type: ignore[union-attr]
                    if op.key in here or self._found(op) is None:  # type: ignore[union-attr,arg-type]
                        return False
                    here.add(op.key)  # type: ignore[union-attr]
            elif kind in _READ and self._is_passed_over(op):  # type: ignore[arg-type]
                return False
        return True

    def _over(self, unit: Sequence[Op]) -> OverBound | None:
        """Return the refusal of a unit that exceeds one of its bounds, which are its last ops. Changes nothing."""
        for op in reversed(unit):
            if type(op) is not Bound:
                return None
            if (over := self._over_bound(unit, op)) is not None:
                return over
        return None

    def _over_bound(self, unit: Sequence[Op], bound: Bound) -> OverBound | None:
        scope = bound.scopes[0]
        new: set[bytes] = set()
        under: dict[bytes, int | None] = {}  # bytes of the unit's pending message under each own key
        count = size = 0
        for op in unit:
            if (type(op) is not Schedule and type(op) is not Append) or op.scope not in bound.scopes:
                continue
            id_key = pack_index_prefix(0, op.scope) + op.message_id
            if id_key in new or id_key in self._known:
                continue
            new.add(id_key)
            more = waiting_bytes(op.record) if type(op) is Schedule else None
            if op.under is not None:
                row = op.under.row
                holder = self._holders[row]
                there = under.get(row, holder.size if holder is not None else None)
                if there is not None and op.under.keeps_first:
                    continue
                if there is not None:
                    count, size = count - 1, size - there
                under[row] = more
            if more is not None:
                count, size = count + 1, size + more
        if bound.is_closed and new:
            return OverBound(scope, "closed", waiting=0, more=len(new), limit=0, next_due_ms=None)
        if count <= 0 and size <= 0:
            return None
        figures = [self.counts.waiting(each) for each in bound.scopes]
        waiting, waiting_size = sum(each[0] for each in figures), sum(each[1] for each in figures)
        for what, there, more, limit in (
            ("entries", waiting, count, bound.count_max),
            ("bytes", waiting_size, size, bound.bytes_max),
        ):
            if limit is not None and more > 0 and there + more > limit:
                due_ms = self.counts.next_due_ms(scope, self._now_ms)
                return OverBound(scope, what, waiting=there, more=more, limit=limit, next_due_ms=due_ms)
        return None

    def _is_passed_over(self, op: Reschedule | Recur | HandOver | Hold) -> bool:
        """Return True if the entry of a reader's op is gone and the op may not be skipped."""
        if type(op) is HandOver or type(op) is Hold:
            return op.key in self._withdrawn
        if type(op) is Reschedule and op.if_gone is not _REFUSE:
            return False
        return self._found(op) is None  # type: ignore[arg-type]

    # -- ops ----------------------------------------------------------------------------------------------------------

    def _schedule(self, op: Schedule) -> Receipt:
        scope, message_id, deliver_at_ms, record, event, _, if_known, half_body, under = op
        id_key = pack_index_prefix(0, scope) + message_id  # generation 0: waiting
        known = self._known.get(id_key)
        if known is not None and if_known is not _WRITE:
            return known._replace(repeated=True)
        if under is not None and (absorbed := self._make_way(under, id_key)) is not None:
            return absorbed
        sequence = self._sequence = self._sequence + 1
        key_ms = deliver_at_ms if deliver_at_ms > self._floor_ms else self._floor_ms  # noqa: FURB136 - hot
        puts = self._batch.puts
        if under is not None:
            self._waits(key_ms, sequence, id_key, record)
            self._hold_key(under.row, KeyHolder(sequence, deliver_at_ms, len(record), message_id))
        else:
            puts.append((_TIMELINE, pack_timeline_key(key_ms, sequence), record))
            puts.append((_INDEX, id_key, encode_index_waiting(sequence, key_ms)))
        if half_body:
            puts.append((_TIMELINE, half_body_key(sequence), half_body))
        if self._properties is not None:
            self._properties.waits(scope, sequence, message_id, record, half_body)
        self.counts.add(scope, deliver_at_ms, 1)
        if size := waiting_bytes(record):
            self.counts.grow(scope, sequence, size)
        if event:
            self._records += (pack_record_head(len(event), sequence, _NA), event)
        receipt = self._known[id_key] = Receipt(_WAITING, sequence, -1, -1, key_ms, False)
        return receipt

    def _append(self, op: Append) -> Receipt:
        scope, message_id, topic_id, queue_id, record, event, if_known, under = op
        id_key = pack_index_prefix(0, scope) + message_id
        known = self._known.get(id_key)
        if known is not None and if_known is not _WRITE:
            return known._replace(repeated=True)
        if under is not None and (absorbed := self._make_way(under, id_key)) is not None:
            return absorbed
        sequence = self._sequence = self._sequence + 1
        offset = self._place(topic_id, queue_id, record)
        value = encode_index_finished(_QUEUED_NUMBER, sequence, self._now_ms, queue_id, offset)
        self._batch.puts.append((_INDEX, self._generation_prefix + id_key[4:], value))
        self._records += (pack_record_head(len(event), sequence, offset), event)
        receipt = self._known[id_key] = Receipt(_QUEUED, sequence, queue_id, offset, self._now_ms, False)
        return receipt

    def _hand_over(self, op: HandOver) -> Receipt:
        key, scope, message_id, deliver_at_ms, topic_id, queue_id, record, event, size, is_half, own_key = op
        if key in self._withdrawn:
            return NO_RECEIPT
        suffix = scope.to_bytes(4, "big") + message_id
        sequence = int.from_bytes(key[8:], "big")
        offset = self._place(topic_id, queue_id, record)
        batch = self._batch
        delete = batch.deletes.append
        delete((_TIMELINE, key))
        delete((_INDEX, _WAITING_PREFIX + suffix))
        if self._properties is not None:
            self._properties.handed_over(scope, sequence, topic_id, record)
        if is_half:
            delete((_TIMELINE, half_body_key(sequence)))
        if own_key:
            self._free_key(own_key, sequence, message_id)
        value = encode_index_finished(_DELIVERED_NUMBER, sequence, self._now_ms, queue_id, offset)
        batch.puts.append((_INDEX, self._generation_prefix + suffix, value))
        self.counts.add(scope, deliver_at_ms, -1)
        self.counts.grow(scope, sequence, -size)
        if key[0] >= _HELD_BYTE:
            self.counts.hold(scope, -1)
        self._records += (pack_record_head(len(event), sequence, offset), event)
        return Receipt(_DELIVERED, sequence, queue_id, offset, self._now_ms, False)

    def _withdraw(self, op: Withdraw) -> Receipt:
        """Delete a waiting entry unless it is gone.

        The reader may have read the row before this batch is written, and hand it over later. ``_withdrawn`` then has
        the key. The reader's turn ends with ``Done``; rows that it reads later no longer include this one.
        """
        waiting = self._found(op)
        if waiting is None:
            return NO_RECEIPT
        id_key = _WAITING_PREFIX + op.scope.to_bytes(4, "big") + op.message_id
        batch = self._batch
        if self._properties is not None:
            self._properties.withdrawn(op.scope, op.key)
        for row in ((Family.TIMELINE, op.key), (Family.INDEX, id_key)):
            self._rows.pop(row, None)  # set earlier in this batch
            batch.deletes.append(row)
        if op.own_key:
            self._free_key(op.own_key, waiting.sequence, op.message_id)
        self.counts.add(op.scope, op.deliver_at_ms, -1)
        if op.size:
            self.counts.grow(op.scope, waiting.sequence, -op.size)
        if op.key[0] >= _HELD_BYTE:
            self.counts.hold(op.scope, -1)
        self._withdrawn.add(op.key)
        self._known.pop(id_key, None)
        if op.is_remembered:
            value = encode_index_withdrawn(waiting.sequence, self._now_ms, op.outcome)
            batch.puts.append((_INDEX, self._generation_prefix + id_key[4:], value))
            self._known[id_key] = decode_index(value)
        if op.event:
            self._records += (pack_record_head(len(op.event), waiting.sequence, _NA), op.event)
        for other in op.instead:
            if type(other) is Append or type(other) is Schedule:
                other = other._replace(if_known=_WRITE)  # noqa: PLW2901
            told = self._HANDLERS[type(other)](self, other)
            if type(other) is Append and told.state is _QUEUED:  # links the audit event of the append to the entry
                self._records[-2] = pack_record_head(len(other.event), waiting.sequence, told.queue_offset)
        return Receipt(EntryState.WITHDRAWN, waiting.sequence, -1, -1, self._now_ms, False)

    def _found(self, op: Withdraw | Reschedule | Recur) -> Receipt | None:
        """Return the receipt of the entry that the op withdraws or moves; ``None`` if it no longer waits there."""
        value = self._waiting[_WAITING_PREFIX + op.scope.to_bytes(4, "big") + op.message_id]
        waiting = decode_index(value) if value is not None else NO_RECEIPT
        is_there = waiting.state is _WAITING and pack_timeline_key(waiting.at_ms, waiting.sequence) == op.key
        return waiting if is_there and not self._is_gone(op.key) else None

    def _reschedule(self, op: Reschedule) -> Receipt:
        key, scope, message_id, due_ms, deliver_at_ms, record, event, half_body, _, by_reader, own_key, also = op
        if (waiting := self._found(op)) is None:
            return NO_RECEIPT
        if also is not None:
            self._put(also)
        if deliver_at_ms == due_ms and not by_reader:
            return waiting._replace(repeated=False)
        sequence = waiting.sequence
        # Not in the cursor's own millisecond: there only new sequences are certain to be after the cursor.
        key_ms = self._free_ms(key, max(deliver_at_ms, self._floor_ms + 1))
        if not by_reader:
            self._withdrawn.add(key)
        self._batch.deletes.append((_TIMELINE, key))
        self._waits(key_ms, sequence, pack_index_prefix(0, scope) + message_id, record)
        if own_key:
            self._hold_key(own_key, KeyHolder(sequence, deliver_at_ms, len(record), message_id))
        if half_body:
            self._batch.puts.append((_TIMELINE, half_body_key(sequence), half_body))
            self.counts.grow(scope, sequence, waiting_bytes(record) - whole_half_bytes(half_body))
        self.counts.add(scope, due_ms, -1)
        self.counts.add(scope, deliver_at_ms, 1)
        if key[0] >= _HELD_BYTE:
            self.counts.hold(scope, -1)
        if event:
            self._records += (pack_record_head(len(event), sequence, _NA), event)
        return Receipt(_WAITING, sequence, -1, -1, key_ms, False)

    def _recur(self, op: Recur) -> Receipt:
        key, scope, message_id, due_ms, topic_id, occurrences, progress, deliver_at_ms, record, event = op
        if self._found(op) is None:
            return NO_RECEIPT
        for each in occurrences:
            self._occur(topic_id, each, int.from_bytes(key[8:], "big"))
        self._put(progress)
        if record:
            return self._reschedule(Reschedule(key, scope, message_id, due_ms, deliver_at_ms, record, event))
        return self._withdraw(Withdraw(key, scope, message_id, due_ms, 0, event=event))  # a schedule counts no bytes

    def _occur(self, topic_id: int, each: Occurrence, schedule: int) -> None:
        sequence = self._sequence = self._sequence + 1
        offset = self._place(topic_id, each.queue_id, each.record)
        value = encode_index_finished(_DELIVERED_NUMBER, sequence, self._now_ms, each.queue_id, offset)
        id_key = self._generation_prefix + topic_id.to_bytes(4, "big") + each.message_id
        self._batch.puts.append((_INDEX, id_key, value))
        for number, place, event in (
            (sequence, _NA, each.accepted),
            (sequence, offset, each.delivered),
            (schedule, _NA, each.occurred),
        ):
            self._records += (pack_record_head(len(event), number, place), event)

    def _waits(self, key_ms: int, sequence: int, id_key: bytes, record: bytes) -> None:
        """Set the timeline and index rows of an entry, replaceable by later ops of this batch."""
        row = self._waiting[id_key] = encode_index_waiting(sequence, key_ms)
        self._rows[Family.TIMELINE, pack_timeline_key(key_ms, sequence)] = record
        self._rows[Family.INDEX, id_key] = row

    def _hold_key(self, row: bytes, holder: KeyHolder) -> None:
        """Record the pending message under an own key.

        This batch's row of the last holder is dropped, since the pending message takes precedence over it.
        """
        self._holders[row] = holder
        self._rows[Family.META, row] = encode_key_holder(holder)
        self._rows.pop((Family.INDEX, self._generation_prefix + last_holder_suffix(row)), None)

    def _free_key(self, row: bytes, sequence: int, message_id: bytes) -> None:
        """Free an own key. Its last holder is remembered as long as the end of that message."""
        self._holders[row] = None
        self._rows[Family.META, row] = None
        last = encode_index_absorbed(sequence, self._now_ms, message_id)
        self._rows[Family.INDEX, self._generation_prefix + last_holder_suffix(row)] = last

    def _make_way(self, under: UnderKey, id_key: bytes) -> Receipt | None:
        """Apply an own key's rule to the message that is pending under it, if any.

        Either withdraw that message and return ``None``, or return the receipt of the new message, which is absorbed.
        The prefix of ``id_key`` has the scope of both messages; its rest is the id of the new one.
        """
        holder = self._holders[under.row]
        if holder is None:
            return None
        sequence, due_ms, size, message_id = holder
        value = self._waiting[id_key[:8] + message_id]
        waiting = decode_index(value) if value is not None else NO_RECEIPT
        if waiting.state is not _WAITING or waiting.sequence != sequence:
            return None  # a stale row, which an undamaged store never has
        key, event = waiting.key, under.event(due_ms, message_id)
        if not under.keeps_first:
            scope = int.from_bytes(id_key[4:8], "big")
            place = key, scope, message_id, due_ms, size
            gone = Withdraw(*place, (), event, True, EntryState.REPLACED, own_key=under.row)
            self._withdraw(gone)
            return None
        absorbed = encode_index_absorbed(sequence, self._now_ms, message_id)
        self._batch.puts.append((_INDEX, self._generation_prefix + id_key[4:], absorbed))
        self._records += (pack_record_head(len(event), sequence, _NA), event)
        receipt = self._known[id_key] = decode_index(absorbed)._replace(repeated=False)
        return receipt

    def _free_ms(self, key: bytes, key_ms: int) -> int:
        """Return the first time, from ``key_ms`` on, under which the entry stored at ``key`` may be stored again.

        Its own key is excluded. A batch applies deletes before puts, so another op's delete of that key would have no
        effect.

        A withdrawn key that the reader may have read already is excluded as well, since ``_withdrawn`` must keep it. A
        withdrawn key that the reader cannot have read is reused, and the reader will read the new row there.
        """
        sequence, claimed = int.from_bytes(key[8:], "big"), keys.timeline_key(self._marks.high())
        while (found := pack_timeline_key(key_ms, sequence)) == key or (found in self._withdrawn and found < claimed):
            key_ms += 1
        self._withdrawn.discard(found)
        return key_ms

    def _hold(self, op: Hold) -> Receipt:
        key, scope, message_id, record = op
        if key in self._withdrawn:
            return NO_RECEIPT
        mark = keys.held_mark(scope, int.from_bytes(key, "big"))
        key_ms, sequence = mark >> 64, keys.sequence_of(mark)
        self._batch.deletes.append((_TIMELINE, key))
        id_key = pack_index_prefix(0, scope) + message_id
        if id_key in self._waiting:
            self._waits(key_ms, sequence, id_key, record)
        else:
            index_row = (_INDEX, id_key, encode_index_waiting(sequence, key_ms))
            self._batch.puts += ((_TIMELINE, keys.timeline_key(mark), record), index_row)
        self.counts.hold(scope, 1)
        return Receipt(_WAITING, sequence, -1, -1, key_ms, False)

    def _restore(self, op: Restore) -> Receipt:
        key, scope, message_id, deliver_at_ms, record, half_body, own_key = op
        key_ms, sequence = keys.unpack_timeline_key(key)
        self._sequence = max(self._sequence, sequence)
        if own_key:
            self._hold_key(own_key, KeyHolder(sequence, deliver_at_ms, len(record), message_id))
        index_row = (_INDEX, pack_index_prefix(0, scope) + message_id, encode_index_waiting(sequence, key_ms))
        self._batch.puts += ((_TIMELINE, key, record), index_row)
        if half_body:
            self._batch.puts.append((_TIMELINE, half_body_key(sequence), half_body))
        if self._properties is not None:
            self._properties.waits(scope, sequence, message_id, record, half_body)
        self.counts.add(scope, deliver_at_ms, 1)
        if size := waiting_bytes(record):
            self.counts.grow(scope, sequence, size)
        if keys.is_held_key(key):
            self.counts.hold(scope, 1)
        return Receipt(_WAITING, sequence, -1, -1, key_ms, False)

    def _is_gone(self, key: bytes) -> bool:
        """Return True if this batch deletes the timeline row ``key``. Each delete enters the lookup set only once."""
        deletes = self._batch.deletes
        self._gone.update(deletes[self._gone_count :])
        self._gone_count = len(deletes)
        return (_TIMELINE, key) in self._gone

    def _done_op(self, op: Done) -> Receipt:
        self._withdrawn.clear()
        self._decided_ms = max(self._decided_ms, op.decided_ms)
        mark = min(op.mark, self._marks.low())
        if mark != self._done:
            self._put_done(mark)
        return NO_RECEIPT

    def _put(self, op: Put) -> Receipt:
        if self._properties is not None and op.family is Family.QUEUE:
            self._properties.replaced(op.key, op.value)
        self._rows[op.family, op.key] = op.value
        return NO_RECEIPT

    def _delete(self, op: Delete) -> Receipt:
        if op.stop:
            if self._properties is not None:
                self._properties.range_deleted(op.family, op.key, op.stop)
            self._batch.ranges.append((op.family, op.key, op.stop))
        else:
            self._rows[op.family, op.key] = None
        return NO_RECEIPT

    def _emit(self, op: Emit) -> Receipt:
        offset = op.queue_offset if op.queue_offset >= 0 else _NA
        self._records += (pack_record_head(len(op.event), _NA, offset), op.event)
        return NO_RECEIPT

    def _tally(self, op: Tally) -> Receipt:
        if self._ledger is not None:
            self._ledger.add(*op)
        return NO_RECEIPT

    def _bound(self, _op: Bound) -> Receipt:
        return NO_RECEIPT  # checked before the unit was executed

    def _index_properties(self, op: IndexProperties) -> Receipt:
        if self._properties is None and op.names:
            self._properties = PropertyRows(self._engine)
            self._properties.begin(self._rows, self._batch)
        if self._properties is not None:
            self._properties.index(op.topic_id, op.names, self._batch)
        return NO_RECEIPT

    def _index_messages(self, _op: IndexMessages) -> Receipt:
        return NO_RECEIPT  # done at the beginning of the batch

    def _index_built(self, op: IndexBuilt) -> Receipt:
        if self._properties is not None:
            self._properties.built(op)
        return NO_RECEIPT

    def _close_ledger(self, op: CloseLedger) -> Receipt:
        if self._ledger is not None:
            self._ledger.close(*op)
        return NO_RECEIPT

    def _hold_outbox(self, op: HoldOutbox) -> Receipt:
        self.outbox.hold(op)
        return NO_RECEIPT

    def _drop_outbox(self, op: DropOutbox) -> Receipt:
        self.outbox.drop(op, self._batch)
        return NO_RECEIPT

    def _skip_outbox(self, op: SkipOutbox) -> Receipt:
        self.outbox.skip(op, self._batch)
        return NO_RECEIPT

    _HANDLERS: ClassVar[dict[type, Callable[..., Receipt]]] = {
        Schedule: _schedule,
        Append: _append,
        HandOver: _hand_over,
        Withdraw: _withdraw,
        Reschedule: _reschedule,
        Recur: _recur,
        Hold: _hold,
        Restore: _restore,
        Done: _done_op,
        Put: _put,
        Delete: _delete,
        Emit: _emit,
        Tally: _tally,
        Bound: _bound,
        IndexProperties: _index_properties,
        IndexMessages: _index_messages,
        IndexBuilt: _index_built,
        CloseLedger: _close_ledger,
        HoldOutbox: _hold_outbox,
        DropOutbox: _drop_outbox,
        SkipOutbox: _skip_outbox,
    }

    # -- parts of a batch ---------------------------------------------------------------------------------------------

    def _place(self, topic_id: int, queue_id: int, record: bytes) -> int:
        queue = (topic_id, queue_id)
        offset = self._tails.get(queue)
        if offset is None:
            offset = queue_end(self._engine, topic_id, queue_id)
        self._batch.puts.append((_QUEUE, pack_queue_key(topic_id, queue_id, offset), record))
        self._tails[queue] = offset + 1
        if self._properties is not None:
            self._properties.queued(topic_id, queue_id, offset, record)
        grown = self._appended.get(queue)
        if grown is None:
            self._appended[queue] = AppendedRange(offset, [record])
        else:
            grown.records.append(record)
        return offset

    def _reserve(self, units: Sequence[Sequence[Op]], first_sequence: int) -> None:
        times, keeps_sequence = scheduled_times(units)
        if not times:
            return
        first_sequence = 0 if keeps_sequence else first_sequence
        self._floor_ms, lowered = self._marks.reserve(min(times), self._now_ms, first_sequence)
        if lowered is not None and lowered < self._done:
            self._put_done(lowered)

    def _put_done(self, mark: int) -> None:
        self._done = mark
        self._rows[Family.META, keys.META_DONE] = keys.timeline_key(mark)

    def _look_up(self, units: Sequence[Sequence[Op]]) -> dict[bytes, Receipt]:
        """Return the receipts of the message ids in these units that are known already, by index key."""
        accepted = [
            (op.scope, op.message_id)
            for unit in units
            for op in unit
            if ((type(op) is Schedule and not op.is_new) or type(op) is Append) and op.if_known is not _WRITE
        ]
        self._is_mixed = False
        if not accepted:
            return {}
        suffixes = [scope.to_bytes(4, "big") + message_id for scope, message_id in accepted]
        twins = self._find_twins({scope for scope, _ in accepted})
        if twins:
            self._is_mixed = True
            suffixes += [twins[scope].to_bytes(4, "big") + each for scope, each in accepted if scope in twins]
        known: dict[bytes, Receipt] = {}
        prefixes = [number.to_bytes(4, "big") for number in self.generations()]
        wanted = [prefix + suffix for prefix in prefixes for suffix in suffixes]
        values = self._engine.get_many(Family.INDEX, wanted)
        if values.count(None) == len(values):  # as a rule
            return {}
        for wanted_key, value in zip(wanted, values, strict=True):
            if value is not None:
                known[b"\0\0\0\0" + wanted_key[4:]] = decode_index(value)
        return known

    def _find_twins(self, scopes: set[int]) -> dict[int, int]:
        """Return the twins of scopes with half messages in their topic: an id is then looked up in both scopes.

        Whether a topic has half messages is read only once per run, with three seeks.
        """
        for scope in scopes:
            if (topic_id := keys.twin_scope(scope)) < scope:
                self._unmixed.discard(topic_id)
                self._twins[scope], self._twins[topic_id] = topic_id, scope
        for scope in scopes - self._unmixed - self._twins.keys():
            half = keys.twin_scope(scope)
            ranges = [(pack_index_prefix(each, half), pack_index_prefix(each, half + 1)) for each in self.generations()]
            if any(self._engine.scan(Family.INDEX, *each, limit=1).rows for each in ranges):
                self._twins[half], self._twins[scope] = scope, half
            else:
                self._unmixed.add(scope)
        return {scope: self._twins[scope] for scope in scopes if scope in self._twins} if self._twins else {}

    def _look_up_withdrawn(self, units: Sequence[Sequence[Op]]) -> dict[bytes, bytes | None]:
        """Return the index rows of the entries that these units withdraw or move."""
        wanted = [
            _WAITING_PREFIX + op.scope.to_bytes(4, "big") + op.message_id
            for unit in units
            for op in unit
            if type(op) is Withdraw or type(op) is Reschedule or type(op) is Recur
        ]
        return dict(zip(wanted, self._engine.get_many(Family.INDEX, wanted), strict=True)) if wanted else {}

    def _look_up_holders(self, units: Sequence[Sequence[Op]]) -> dict[bytes, KeyHolder | None]:
        """Return the pending messages under the own keys used by these units, and load their index rows."""
        asked: list[bytes] = []
        for unit in units:
            for op in unit:
                if type(op) is Schedule or type(op) is Append:
                    if op.under is not None:
                        asked.append(op.under.row)
                elif type(op) is Withdraw and op.instead:
                    accepted = [each for each in op.instead if type(each) is Schedule or type(each) is Append]
                    asked += [each.under.row for each in accepted if each.under is not None]
        if not asked:
            return {}
        values = self._engine.get_many(Family.META, asked)
        found = {row: decode_key_holder(value) if value else None for row, value in zip(asked, values, strict=True)}
        holders = ((keys.meta_id(row), each.message_id) for row, each in found.items() if each is not None)
        wanted = [pack_index_prefix(0, scope) + message_id for scope, message_id in holders]
        wanted = [each for each in wanted if each not in self._waiting]
        self._waiting.update(zip(wanted, self._engine.get_many(Family.INDEX, wanted), strict=True))
        return found

    def _rotate_generation(self) -> None:
        """Start a new generation once per window; drop generations that ended more than one window ago.

        Generations are dropped by one range delete. The age of the current one is stored every few seconds, so a kill
        prolongs its life by at most that interval.
        """
        boot_ms = self._clock.boot_ms()
        is_over = boot_ms - self._generation_began_ms >= self._window_ms
        if not is_over and boot_ms - self._clock_kept_ms < _KEEP_CLOCK_MS:
            return
        if is_over:
            self._generation += 1
            self._batch.ranges.append((Family.INDEX, *keys.generation_range(1, self._generation - 1)))
            self._generation_began_ms = boot_ms
        self._keep_clock()

    def _keep_clock(self) -> None:
        """Add the clock state and the age of the generation to the current batch."""
        self._clock_kept_ms = boot_ms = self._clock.boot_ms()
        age_ms = boot_ms - self._generation_began_ms
        self._rows[Family.META, keys.META_GENERATION] = keys.pack_pair(self._generation, age_ms)
        if (row := self._clock.row()) is not None:
            self._rows[Family.META, keys.META_CLOCK] = encode_clock(row)
