"""The writer's part of the ledger: counts of events by kind, topic and group, in the batch of the events.

Used only by the writer thread. Its cost applies to every message. Events are therefore counted by their first bytes, in
C, and a row is encoded once per batch, topic and group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from operator import itemgetter

from dmq.store.engines.engine import Batch, Engine
from dmq.store.schema.accounting.ledger import (
    HEAD_BYTES,
    Term,
    decode_ledger,
    encode_ledger,
    ledger_key,
    ledger_range,
    pack_change,
    pack_pair,
)
from dmq.store.schema.keys import META_LEDGER, Family
from dmq.store.writer.operations import Appended

_CACHED_MAX = 8_192  # rows, a kilobyte each
_STORED = int(Term.STORED)
_head_of = itemgetter(slice(HEAD_BYTES))


class LedgerRows:
    """Ledger rows that the current batch changes, with a cache of the rows of earlier batches."""

    def __init__(self, engine: Engine, kinds: Collection[int]) -> None:
        """Count the events of ``kinds``, and all of the ledger's own terms."""
        self._engine = engine
        self._is_counted = [number in kinds or number >= _STORED for number in range(256)]
        self._rows: dict[bytes, dict[int, int]] = {}  # by topic and group, packed
        self._changes: Counter[bytes] = Counter()  # by term, topic and group, packed
        self._closed: list[tuple[int, int]] = []

    def add(self, topic_id: int, group_id: int, term: int, by: int) -> None:
        """Add ``by`` to a term that is not derived from events."""
        self._changes[pack_change(term, topic_id, group_id)] += by

    def close(self, topic_id: int, group_id: int) -> None:
        """Delete the ledger of a topic with all its groups, or of one group on it, with this batch."""
        self._closed.append((topic_id, group_id))

    def put(self, batch: Batch, records: Sequence[bytes], appended: Appended) -> None:
        """Put the changed rows into the batch. ``records`` alternates record heads and events."""
        changes = self._changes
        changes.update(map(_head_of, records[1::2]))
        for (topic_id, _), growth in appended.items():
            changes[pack_change(_STORED, topic_id, 0)] += len(growth.records)
        if not changes and not self._closed:
            return
        changed: dict[bytes, list[tuple[int, int]]] = {}
        is_counted = self._is_counted
        for head, by in changes.items():
            if is_counted[head[0]] and by:
                changed.setdefault(head[1:], []).append((head[0], by))
        changes.clear()
        if self._closed:
            self._forget(batch, changed)
        self._load(changed)
        for pair, deltas in changed.items():
            row = self._rows[pair]
            for term, by in deltas:
                row[term] = row.get(term, 0) + by
            batch.puts.append((Family.META, META_LEDGER + pair, encode_ledger(row)))

    def _forget(self, batch: Batch, changed: dict[bytes, list[tuple[int, int]]]) -> None:
        """Delete closed ledgers, and drop this batch's changes of them. This is safe, since ids are never reused."""
        for topic_id, group_id in self._closed:
            if group_id:
                batch.deletes.append((Family.META, ledger_key(topic_id, group_id)))
            else:
                batch.ranges.append((Family.META, *ledger_range(topic_id)))
            begin = pack_pair(topic_id, group_id) if group_id else topic_id.to_bytes(4, "big")
            for rows in (self._rows, changed):
                for pair in [each for each in rows if each.startswith(begin)]:
                    del rows[pair]
        self._closed = []

    def _load(self, pairs: Collection[bytes]) -> None:
        if len(self._rows) > _CACHED_MAX:
            self._rows.clear()  # they are all on disk
        missing = [pair for pair in pairs if pair not in self._rows]
        if missing:
            values = self._engine.get_many(Family.META, [META_LEDGER + pair for pair in missing])
            for pair, value in zip(missing, values, strict=True):
                self._rows[pair] = decode_ledger(value) if value is not None else {}
