"""How many entries wait, by scope and minute of delivery, and how many each topic holds.

Absolute figures, in the batch that changes them.
"""

from __future__ import annotations

from collections.abc import Iterable

from dmq.store.engine import Engine
from dmq.store.ops import Batch
from dmq.store.schema import keys
from dmq.store.schema.counts import BUCKET_MS, HOUR_MS, pack_hour, unpack_hour
from dmq.store.schema.keys import Family, held_key, hour_key, pack_u64, total_key, unpack_u64

_MINUTES = HOUR_MS // BUCKET_MS
_CACHED_MAX = 8_192  # half a kilobyte each

_Hour = tuple[int, int]  # scope, and number of the hour
_Delta = tuple[int, int]  # minute of the hour, and by how many


class Counts:
    """The figures a batch changes, and those of the last batches, which need not be read again."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._totals: dict[int, int] = {}  # by scope
        self._hours: dict[_Hour, list[int]] = {}
        self._deltas: dict[tuple[int, int], int] = {}  # by scope and minute
        self._held: dict[int, int] = {}  # changes, by topic

    def begin(self) -> None:
        """Start a batch."""
        self._deltas = {}
        self._held = {}

    def add(self, scope: int, deliver_at_ms: int, by: int) -> None:
        """Note that ``by`` more entries of ``scope`` are due then."""
        deltas = self._deltas
        bucket = (scope, deliver_at_ms // BUCKET_MS)
        deltas[bucket] = deltas.get(bucket, 0) + by

    def hold(self, topic_id: int, by: int) -> None:
        """Note that a topic holds ``by`` more entries."""
        self._held[topic_id] = self._held.get(topic_id, 0) + by

    def put(self, batch: Batch) -> None:
        """Put the new figures into the batch; what counts nothing any more has no row."""
        if self._held:
            rows = [held_key(topic_id) for topic_id in self._held]
            for by, row, value in zip(self._held.values(), rows, self._engine.get_many(Family.META, rows), strict=True):
                held = (unpack_u64(value) if value is not None else 0) + by
                _set(batch, row, pack_u64(held) if held else None)
        if not self._deltas:
            return
        totals: dict[int, int] = {}
        hours: dict[_Hour, list[_Delta]] = {}
        for (scope, bucket), by in self._deltas.items():
            totals[scope] = totals.get(scope, 0) + by
            hours.setdefault((scope, bucket // _MINUTES), []).append((bucket % _MINUTES, by))
        self._load(totals, hours)
        for scope, by in totals.items():
            total = self._totals[scope] = self._totals[scope] + by
            _set(batch, total_key(scope), pack_u64(total) if total else None)
        for hour, deltas in hours.items():
            minutes = self._hours[hour]
            for minute, by in deltas:
                minutes[minute] += by
            _set(batch, hour_key(*hour), pack_hour(minutes) if any(minutes) else None)

    def _load(self, scopes: Iterable[int], hours: Iterable[_Hour]) -> None:
        if len(self._hours) + len(self._totals) > _CACHED_MAX:
            self._hours.clear()  # they are all on disk
            self._totals.clear()
        missing = [each for each in scopes if each not in self._totals]
        missing_hours = [each for each in hours if each not in self._hours]
        if missing or missing_hours:
            wanted = [*map(total_key, missing), *(hour_key(*each) for each in missing_hours)]
            rows = self._engine.get_many(Family.META, wanted)
            for scope, value in zip(missing, rows, strict=False):
                self._totals[scope] = unpack_u64(value) if value is not None else 0
            for hour, value in zip(missing_hours, rows[len(missing) :], strict=True):
                self._hours[hour] = list(unpack_hour(value)) if value is not None else [0] * _MINUTES


def put_hours_of_format_1(engine: Engine, batch: Batch) -> None:
    """Put what a store of format 1 counted in a row per minute into rows of hours."""
    hours: dict[bytes, list[int]] = {}
    for key, value in engine.scan(Family.META, *keys.meta_range(keys.META_MINUTE), limit=2**31).rows:
        minute = keys.hour_of(key)
        hour = hour_key(keys.meta_id(key), minute // _MINUTES)
        hours.setdefault(hour, [0] * _MINUTES)[minute % _MINUTES] = unpack_u64(value)
        batch.deletes.append((Family.META, key))
    batch.puts += [(Family.META, hour, pack_hour(minutes)) for hour, minutes in hours.items()]


def _set(batch: Batch, key: bytes, value: bytes | None) -> None:
    if value is None:
        batch.deletes.append((Family.META, key))
    else:
        batch.puts.append((Family.META, key, value))
