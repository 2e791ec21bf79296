"""The writer's part of the audit outbox: it numbers events, keeps the size bound, and removes exported rows.

Used only by the writer thread. Its figures are absolute and are written in the batch that changes them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from dmq.store.engines.engine import Batch, Engine
from dmq.store.schema import keys
from dmq.store.schema.accounting import outbox
from dmq.store.schema.keys import Family, pack_u64
from dmq.store.writer.operations import DropOutbox, HoldOutbox, SkipOutbox

_ROWS_CUT = 16
_HELD_SHARE = 1.5  # maximum size of the outbox during an export, as a multiple of its bound
_NA = outbox.NOT_APPLICABLE


class OutboxRows:
    """Audit outbox of the assembler: adds, protects and removes rows of events."""

    def __init__(
        self,
        engine: Engine,
        boot: int,
        state: outbox.OutboxState,
        *,
        bytes_max: int,
        gap_event: Callable[[int, int], bytes],
    ) -> None:
        self._engine = engine
        self._boot = boot
        self._bytes_max = bytes_max
        self._gap_event = gap_event
        self.state = self._after = state  # figures including the batch being written
        self.synced_end = state.next_sequence  # opening has synced the existing events
        self._held = 0

    def begin(self) -> None:
        """Start a batch from the last figures."""
        self._after = self.state

    def synced(self) -> None:
        """Mark the written batch as durable, to the configured degree, so that its events may be exported."""
        self.synced_end = self.state.next_sequence

    def hold(self, op: HoldOutbox) -> None:
        """Execute ``HoldOutbox``."""
        self._held = op.below

    def drop(self, op: DropOutbox, batch: Batch) -> None:
        """Execute ``DropOutbox``."""
        self._held = 0
        state = self._after
        first = bisect_left(op.starts, state.first_sequence)  # earlier rows were cut meanwhile
        if first < len(op.starts):
            freed = op.total_bytes[-1] - (op.total_bytes[first - 1] if first else 0)
            batch.ranges.append((Family.AUDIT, pack_u64(state.first_sequence), pack_u64(op.below)))
            self._after = state._replace(first_sequence=op.below, stored_bytes=state.stored_bytes - freed)

    def skip(self, op: SkipOutbox, batch: Batch) -> None:
        """Execute ``SkipOutbox``."""
        state = self._after
        if op.to > state.next_sequence:
            batch.ranges.append((Family.AUDIT, pack_u64(0), pack_u64(op.to)))
            self._after = state._replace(first_sequence=op.to, next_sequence=op.to, stored_bytes=0)

    def put(self, batch: Batch, records: list[bytes], at_ms: int) -> None:
        """Put the row of the batch's ``records`` and the new figures into the batch; cut old rows beyond the bound."""
        state = self._after
        if state.stored_bytes > self._bytes_max and self._may_cut(state):
            state = self._cut(state, batch, records)
        if records:
            count = len(records) // 2
            block = outbox.encode_block(self._boot, at_ms, count, records)
            batch.puts.append((Family.AUDIT, pack_u64(state.next_sequence), block))
            state = state._replace(
                next_sequence=state.next_sequence + count, stored_bytes=state.stored_bytes + len(block)
            )
        if state is not self.state:
            self.state = state
            batch.puts.append((Family.META, keys.META_OUTBOX, outbox.encode_state(state)))

    def _may_cut(self, state: outbox.OutboxState) -> bool:
        """Return True if the oldest rows may be cut.

        Rows under export are kept, since cutting them would report a gap that does not exist. As an export may hang,
        this ends at 1.5 times the bound.
        """
        return state.first_sequence >= self._held or state.stored_bytes > _HELD_SHARE * self._bytes_max

    def _cut(self, state: outbox.OutboxState, batch: Batch, records: list[bytes]) -> outbox.OutboxState:
        """Drop the oldest rows to keep the bound, and add an event that names the missing events."""
        found = self._engine.scan(
            Family.AUDIT, pack_u64(state.first_sequence), pack_u64(state.next_sequence), limit=_ROWS_CUT
        )
        if not found.rows:
            return state
        last_key, last_value = found.rows[-1]
        first_left = int.from_bytes(last_key, "big") + outbox.block_count(last_value)
        batch.deletes += [(Family.AUDIT, key) for key, _ in found.rows]
        count = first_left - state.first_sequence
        event = self._gap_event(state.first_sequence, count)
        records += (outbox.pack_record_head(len(event), _NA, _NA), event)
        freed = sum(len(value) for _, value in found.rows)
        return state._replace(
            first_sequence=first_left, stored_bytes=state.stored_bytes - freed, lost=state.lost + count
        )
