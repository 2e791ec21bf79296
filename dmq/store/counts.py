"""How many entries wait, by scope and minute of delivery: absolute figures, in the batch that changes them."""

from __future__ import annotations

from collections.abc import Iterable

from dmq.store.engine import Engine
from dmq.store.keys import bucket_key, pack_u64, total_key, unpack_u64
from dmq.store.ops import Batch, Family

BUCKET_MS = 60_000
_CACHED_MAX = 65_536
_TOTAL = -1  # in place of a bucket

_Count = tuple[int, int]  # scope, and bucket


class Counts:
    """The figures a batch changes, and those of the last batches, which need not be read again."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[_Count, int] = {}
        self._deltas: dict[_Count, int] = {}

    def begin(self) -> None:
        """Start a batch."""
        self._deltas = {}

    def add(self, scope: int, deliver_at_ms: int, by: int) -> None:
        """Note that ``by`` more entries of ``scope`` are due then."""
        deltas = self._deltas
        bucket = (scope, deliver_at_ms // BUCKET_MS)
        deltas[bucket] = deltas.get(bucket, 0) + by

    def put(self, batch: Batch) -> None:
        """Put the new figures into the batch; what counts nothing any more has no row."""
        deltas = self._deltas
        if not deltas:
            return
        for (scope, _), by in list(deltas.items()):
            deltas[scope, _TOTAL] = deltas.get((scope, _TOTAL), 0) + by
        known = self._known
        if len(known) > _CACHED_MAX:
            known.clear()  # they are all on disk
        self._load(each for each in deltas if each not in known)
        for each, by in deltas.items():
            count = known[each] = known[each] + by
            row = _row(each)
            if count:
                batch.puts.append((Family.META, row, pack_u64(count)))
            else:
                batch.deletes.append((Family.META, row))

    def _load(self, missing: Iterable[_Count]) -> None:
        wanted = list(missing)
        if wanted:
            rows = self._engine.get_many(Family.META, [_row(each) for each in wanted])
            for each, value in zip(wanted, rows, strict=True):
                self._known[each] = unpack_u64(value) if value is not None else 0


def _row(each: _Count) -> bytes:
    scope, bucket = each
    return total_key(scope) if bucket == _TOTAL else bucket_key(scope, bucket)
