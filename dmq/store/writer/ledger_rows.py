"""The writer's side of the ledger: events counted by kind, topic and group, in the batch that has them.

Like the assembler it belongs to the writer thread. What it costs is paid for every message: events are counted by what
they begin with, in C, and a row is made once per batch and (topic, group).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from operator import itemgetter

from dmq.store.engines.engine import Batch, Engine
from dmq.store.schema.keys import META_LEDGER, Family
from dmq.store.schema.ledger import (
    HEAD_BYTES,
    Term,
    decode_ledger,
    encode_ledger,
    ledger_key,
    ledger_range,
    pack_change,
    pack_pair,
)
from dmq.store.writer.operations import Appended

_CACHED_MAX = 8_192  # rows, a kilobyte each
_STORED = int(Term.STORED)
_head_of = itemgetter(slice(HEAD_BYTES))


class LedgerRows:
    """The rows a batch changes, and those of the last batches, which need not be read again."""

    def __init__(self, engine: Engine, kinds: Collection[int]) -> None:
        """``kinds`` are the kinds of events that are counted; all terms of the ledger's own are."""
        self._engine = engine
        self._is_counted = [number in kinds or number >= _STORED for number in range(256)]
        self._rows: dict[bytes, dict[int, int]] = {}  # by topic and group, packed
        self._changes: Counter[bytes] = Counter()  # by term, topic and group, packed
        self._closed: list[tuple[int, int]] = []

    def add(self, topic_id: int, group_id: int, term: int, by: int) -> None:
        """Note a change of a term that no event tells."""
        self._changes[pack_change(term, topic_id, group_id)] += by

    def close(self, topic_id: int, group_id: int) -> None:
        """Forget a topic with all its groups, or what it has for one of them."""
        self._closed.append((topic_id, group_id))

    def put(self, batch: Batch, records: Sequence[bytes], appended: Appended) -> None:
        """Put the rows that a batch changes into it; every other one of ``records`` is an event."""
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
        """Drop what was closed, and what this batch still tells of it: ids are never used again."""
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
