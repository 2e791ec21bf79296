"""Reading the outbox of a store event by event; the exporter reads whole rows of it (``dmq.trail.export.exporter``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from dmq.errors import StoreCorrupt
from dmq.store.schema.accounting.outbox import OutboxRecord, decode_block
from dmq.store.schema.keys import Family, pack_u64, unpack_u64
from dmq.store.store import Store
from dmq.trail.events import AuditEvent, decode_event

_ROWS_PER_SCAN = 256


class TrailEvent(NamedTuple):
    """An event with what its outbox block adds."""

    record: OutboxRecord
    event: AuditEvent


def read_outbox(store: Store) -> Iterator[TrailEvent]:
    """Yield every event that is still in the outbox, oldest first.

    ``StoreCorrupt`` when some are missing in between that were not cut: sequences have no gaps.
    """
    at = store.outbox_state.first_sequence
    while True:
        found = store.scan(Family.AUDIT, pack_u64(at), b"\xff" * 9, limit=_ROWS_PER_SCAN)
        for key, value in found.rows:
            first = unpack_u64(key)
            if first > max(at, store.outbox_state.first_sequence):  # the writer may have cut rows meanwhile
                raise StoreCorrupt(f"events {at} to {first - 1} are missing from the outbox")
            for record in decode_block(key, value):
                at = record.sequence + 1
                yield TrailEvent(record, decode_event(record.event))
        if found.is_complete:
            return
