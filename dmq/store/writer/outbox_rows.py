"""The writer's side of the audit outbox: it numbers events, keeps the bound, and removes what was exported.

Like the assembler it belongs to the writer thread. Its figures are absolute and ride in the batch that changes them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from dmq.store.engines.engine import Batch, Engine
from dmq.store.schema import keys, outbox
from dmq.store.schema.keys import Family, pack_u64
from dmq.store.writer.operations import DropOutbox, HoldOutbox, SkipOutbox

_ROWS_CUT = 16
_HELD_SHARE = 1.5  # of its bound, what the outbox may grow to while it is being exported
_NA = outbox.NOT_APPLICABLE


class OutboxRows:
    """What the assembler asks to bring events into the outbox, and out of it."""

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
        self.state = self._after = state  # with what is being written
        self.synced_end = state.next_sequence  # what opening found was synced by it
        self._held = 0

    def begin(self) -> None:
        """Begin with a batch."""
        self._after = self.state

    def synced(self) -> None:
        """The batch is written, and synced if that is asked for."""
        self.synced_end = self.state.next_sequence

    def hold(self, op: HoldOutbox) -> None:
        """Do as the op says."""
        self._held = op.below

    def drop(self, op: DropOutbox, batch: Batch) -> None:
        """Do as the op says."""
        self._held = 0
        state = self._after
        first = bisect_left(op.starts, state.first_sequence)  # what lies before it was cut meanwhile
        if first < len(op.starts):
            freed = op.total_bytes[-1] - (op.total_bytes[first - 1] if first else 0)
            batch.ranges.append((Family.AUDIT, pack_u64(state.first_sequence), pack_u64(op.below)))
            self._after = state._replace(first_sequence=op.below, stored_bytes=state.stored_bytes - freed)

    def skip(self, op: SkipOutbox, batch: Batch) -> None:
        """Do as the op says."""
        state = self._after
        if op.to > state.next_sequence:
            batch.ranges.append((Family.AUDIT, pack_u64(0), pack_u64(op.to)))
            self._after = state._replace(first_sequence=op.to, next_sequence=op.to, stored_bytes=0)

    def put(self, batch: Batch, records: list[bytes], at_ms: int) -> None:
        """Add the batch's row, which ``records`` make, and the figures."""
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
        """What is being exported stays, or a gap would be told where there is none; but an export may hang."""
        return state.first_sequence >= self._held or state.stored_bytes > _HELD_SHARE * self._bytes_max

    def _cut(self, state: outbox.OutboxState, batch: Batch, records: list[bytes]) -> outbox.OutboxState:
        """Drop the oldest rows to keep the bound, and leave an event that says which events are missing."""
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
