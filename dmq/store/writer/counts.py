"""Counts of pending entries by scope and minute of delivery, of pending bytes by scope, and of held entries by topic.

The figures are absolute, in the batch that changes them.

Bytes are counted from the first opening by a build that counts them. Entries pending before that are recognised by
their sequence, and never count. So opening reads no entries. If the last run did not count bytes (the head names an
earlier run), counting starts again from zero.
"""

from __future__ import annotations

from collections.abc import Iterable

from dmq.store.engines.engine import Batch, Engine
from dmq.store.schema import keys
from dmq.store.schema.counts import BUCKET_MS, HOUR_MS, due_in, pack_hour, unpack_hour
from dmq.store.schema.keys import (
    Family,
    bytes_key,
    held_key,
    hour_key,
    hour_range,
    pack_pair,
    pack_u64,
    total_key,
    unpack_pair,
    unpack_u64,
)

_MINUTES = HOUR_MS // BUCKET_MS
_CACHED_MAX = 8_192  # half a kilobyte each

_Hour = tuple[int, int]  # scope, and number of the hour
_Delta = tuple[int, int]  # minute of the hour, and change of its count


class Counts:
    """Figures that the current batch changes, with a cache of the figures of earlier batches."""

    def __init__(self, engine: Engine, bytes_since: int = 0) -> None:
        """Read figures from ``engine``. The bytes of entries up to the sequence ``bytes_since`` are not counted."""
        self._engine = engine
        self._bytes_since = bytes_since
        self._totals: dict[int, int] = {}  # by scope
        self._bytes: dict[int, int] = {}  # by scope, for the same scopes as the totals
        self._hours: dict[_Hour, list[int]] = {}
        self._deltas: dict[tuple[int, int], int] = {}  # by scope and minute
        self._grown: dict[int, int] = {}  # bytes, by scope
        self._watched: dict[int, int] = {}  # changes by scope, only of scopes passed to ``waiting``
        self._held: dict[int, int] = {}  # changes, by topic

    def begin(self) -> None:
        """Start a batch."""
        self._deltas = {}
        self._grown = {}
        self._watched = {}
        self._held = {}

    def add(self, scope: int, deliver_at_ms: int, by: int) -> None:
        """Add ``by`` to the pending entries of ``scope`` that are due at ``deliver_at_ms``."""
        deltas = self._deltas
        bucket = (scope, deliver_at_ms // BUCKET_MS)
        deltas[bucket] = deltas.get(bucket, 0) + by
        if scope in self._watched:
            self._watched[scope] += by

    def grow(self, scope: int, sequence: int, by: int) -> None:
        """Add ``by`` to the pending bytes of ``scope`` for the entry with this sequence."""
        if sequence > self._bytes_since:
            self._grown[scope] = self._grown.get(scope, 0) + by

    def waiting(self, scope: int) -> tuple[int, int]:
        """Return the pending entries of ``scope`` and their bytes, with the changes of the current batch so far."""
        self._load((scope,), ())
        if scope not in self._watched:  # summed once, then kept up to date by ``add``
            self._watched[scope] = sum(by for (each, _), by in self._deltas.items() if each == scope)
        count = self._totals[scope] + self._watched[scope]
        return count, max(0, self._bytes[scope] + self._grown.get(scope, 0))

    def next_due_ms(self, scope: int, now_ms: int) -> int | None:
        """Return the end of the first minute after ``now_ms`` with a due entry of ``scope``, or ``None``.

        Only committed rows are read.
        """
        rows = self._engine.scan(Family.META, *hour_range(scope, now_ms // HOUR_MS, 2**40), limit=2).rows
        return next((each.until_ms for row in rows for each in due_in(*row) if each.until_ms > now_ms), None)

    def hold(self, topic_id: int, by: int) -> None:
        """Add ``by`` to the held entries of a topic."""
        self._held[topic_id] = self._held.get(topic_id, 0) + by

    def put(self, batch: Batch) -> None:
        """Put the new figures into the batch; the row of a figure that is now 0 is deleted."""
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
        for scope, by in self._grown.items():
            size = self._bytes[scope] = max(0, self._bytes[scope] + by)
            _set(batch, bytes_key(scope), pack_u64(size) if size else None)
        for hour, deltas in hours.items():
            minutes = self._hours[hour]
            for minute, by in deltas:
                minutes[minute] += by
            _set(batch, hour_key(*hour), pack_hour(minutes) if any(minutes) else None)

    def _load(self, scopes: Iterable[int], hours: Iterable[_Hour]) -> None:
        if len(self._hours) + len(self._totals) > _CACHED_MAX:
            self._hours.clear()  # they are all on disk
            self._totals.clear()
            self._bytes.clear()
        missing = [each for each in scopes if each not in self._totals]
        missing_hours = [each for each in hours if each not in self._hours]
        if missing or missing_hours:
            wanted = [*map(total_key, missing), *map(bytes_key, missing), *(hour_key(*each) for each in missing_hours)]
            rows = self._engine.get_many(Family.META, wanted)
            for number, scope in enumerate(missing):
                total, size = rows[number], rows[len(missing) + number]
                self._totals[scope] = unpack_u64(total) if total is not None else 0
                self._bytes[scope] = unpack_u64(size) if size is not None else 0
            for hour, value in zip(missing_hours, rows[2 * len(missing) :], strict=True):
                self._hours[hour] = list(unpack_hour(value)) if value is not None else [0] * _MINUTES


def begin_bytes(engine: Engine, batch: Batch, *, run: int, sequence: int) -> int:
    """Record in the first batch of ``run`` that it counts bytes; return the last sequence that is not counted."""
    (value,) = engine.get_many(Family.META, [keys.META_BYTES_HEAD])
    last, since = unpack_pair(value) if value is not None else (-1, sequence)
    if last != run - 1:
        since = sequence
        if value is not None:
            batch.ranges.append((Family.META, *keys.meta_range(keys.META_BYTES)))
    batch.puts.append((Family.META, keys.META_BYTES_HEAD, pack_pair(run, since)))
    return since


def put_hours_of_format_1(engine: Engine, batch: Batch) -> None:
    """Convert the rows per minute of a format 1 store into rows per hour."""
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
