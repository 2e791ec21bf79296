"""Export side of the outbox rows: reading in order, and grouping into files. Uses no numpy and no Parquet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from dmq.store import Store
from dmq.store.schema.accounting.outbox import block_head
from dmq.store.schema.keys import Family, pack_u64
from dmq.store.writer.operations import DropOutbox
from dmq.trail.manifest import HOUR_MS

# A scan runs Python code for each row. This many take some tenths of a millisecond, which bounds the wait for the GIL.
_ROWS_PER_SCAN = 256
_BYTES_PER_SCAN = 1024 * 1024
_EVENTS_PER_CHUNK = 16_384


class Row(NamedTuple):
    """Outbox row with its decoded head."""

    first_sequence: int
    events: int
    boot: int
    at_ms: int
    value: bytes

    @property
    def end(self) -> int:
        """Sequence after its last event."""
        return self.first_sequence + self.events


def read_rows(store: Store, start: int, end: int, *, events_max: int, breathe: Callable[[], None]) -> list[Row]:
    """Return the rows from sequence ``start`` to ``end``: at most ``events_max`` events, but at least one row.

    ``breathe`` is called between scans, and may raise.
    """
    rows: list[Row] = []
    total = 0
    while start < end:
        found = store.scan(
            Family.AUDIT, pack_u64(start), pack_u64(end), limit=_ROWS_PER_SCAN, bytes_max=_BYTES_PER_SCAN
        )
        for key, value in found.rows:
            boot, at_ms, events = block_head(value)
            if rows and total + events > events_max:
                return rows
            row = Row(int.from_bytes(key, "big"), events, boot, at_ms, value)
            rows.append(row)
            total += events
            start = row.end
        if found.is_complete:
            break
        breathe()
    return rows


def files_of(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Yield the rows of each file: of one hour, without a gap."""
    first = 0
    for place in range(1, len(rows)):
        before, row = rows[place - 1], rows[place]
        if row.first_sequence != before.end or row.at_ms // HOUR_MS != before.at_ms // HOUR_MS:
            yield list(rows[first:place])
            first = place
    if rows:
        yield list(rows[first:])


def chunks_of(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Yield rows in chunks that are small enough to be converted quickly."""
    chunk: list[Row] = []
    total = 0
    for row in rows:
        if chunk and total + row.events > _EVENTS_PER_CHUNK:
            yield chunk
            chunk, total = [], 0
        chunk.append(row)
        total += row.events
    if chunk:
        yield chunk


def drop_of(rows: Sequence[Row]) -> DropOutbox:
    """Return the op that removes all rows up to the end of these exported rows."""
    return DropOutbox(
        rows[-1].end,
        [row.first_sequence for row in rows],
        list(accumulate(len(row.value) for row in rows)),
    )
