"""Counts of pending entries by scope and minute of delivery, of pending bytes by scope, and of held entries by topic.

The figures are absolute, in the batch that changes them. The figures by scope and by topic are also all in memory, so
reading them costs no row. Opening reads one row for each scope with pending entries.

Bytes are counted from the first opening by a build that counts them. Entries pending before that are recognised by
their sequence, and never count. So opening reads no entries. If the last run did not count bytes (the head names an
earlier run), counting starts again from zero.
"""

from __future__ import annotations

from collections.abc import Iterable

from dmq.store.engines.engine import Batch, Engine
from dmq.store.schema import keys
from dmq.store.schema.accounting.counts import BUCKET_MS, HOUR_MS, due_in, pack_hour, unpack_hour
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
    """Figures that the current batch changes, and the figures of earlier batches; counts by minute are cached.

    ``pending``, ``sizes`` and ``held`` may be copied by any thread. They include the batch that is being written.
    """

    def __init__(self, engine: Engine, bytes_since: int = 0) -> None:
        """Read figures from ``engine``. The bytes of entries up to the sequence ``bytes_since`` are not counted."""
        self._engine = engine
        self._bytes_since = bytes_since
        self.pending = _read(engine, keys.META_TOTAL)  # entries, by scope
        self.sizes = _read(engine, keys.META_BYTES)  # bytes, by scope
        self.held = _read(engine, keys.META_HELD)  # entries, by topic
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
        if scope not in self._watched:  # summed once, then kept up to date by ``add``
            self._watched[scope] = sum(by for (each, _), by in self._deltas.items() if each == scope)
        count = self.pending.get(scope, 0) + self._watched[scope]
        return count, max(0, self.sizes.get(scope, 0) + self._grown.get(scope, 0))

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
        for topic_id, by in self._held.items():
            _set(batch, self.held, topic_id, held_key(topic_id), self.held.get(topic_id, 0) + by)
        if not self._deltas:
            return
        totals: dict[int, int] = {}
        hours: dict[_Hour, list[_Delta]] = {}
        for (scope, bucket), by in self._deltas.items():
            totals[scope] = totals.get(scope, 0) + by
            hours.setdefault((scope, bucket // _MINUTES), []).append((bucket % _MINUTES, by))
        self._load(hours)
        for scope, by in totals.items():
            _set(batch, self.pending, scope, total_key(scope), self.pending.get(scope, 0) + by)
        for scope, by in self._grown.items():
            _set(batch, self.sizes, scope, bytes_key(scope), max(0, self.sizes.get(scope, 0) + by))
        for hour, deltas in hours.items():
            minutes = self._hours[hour]
            for minute, by in deltas:
                minutes[minute] += by
            if any(minutes):
                batch.puts.append((Family.META, hour_key(*hour), pack_hour(minutes)))
            else:
                batch.deletes.append((Family.META, hour_key(*hour)))

    def _load(self, hours: Iterable[_Hour]) -> None:
        if len(self._hours) > _CACHED_MAX:
            self._hours.clear()  # they are all on disk
        missing = [each for each in hours if each not in self._hours]
        rows = self._engine.get_many(Family.META, [hour_key(*each) for each in missing]) if missing else ()
        for hour, value in zip(missing, rows, strict=True):
            self._hours[hour] = list(unpack_hour(value)) if value is not None else [0] * _MINUTES


def _read(engine: Engine, kind: bytes) -> dict[int, int]:
    found = engine.scan(Family.META, *keys.meta_range(kind), limit=2**31)
    return {keys.meta_id(key): unpack_u64(value) for key, value in found.rows}


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


def _set(batch: Batch, figures: dict[int, int], figure_id: int, key: bytes, figure: int) -> None:
    if figure:
        figures[figure_id] = figure
        batch.puts.append((Family.META, key, pack_u64(figure)))
    else:
        figures.pop(figure_id, None)
        batch.deletes.append((Family.META, key))
