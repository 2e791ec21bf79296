"""Restoring a store from its replication log, at a time or at the end of the log; checking a log without a store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from dmq.errors import DmqError, ReplicaDamaged
from dmq.replication.base import Base, download, list_bases, missing_objects, newest_base, read_base
from dmq.replication.following import apply, begins_log, follow, last_segment, read_segment
from dmq.replication.objects import ObjectStore
from dmq.replication.segment import PREFIX, number_of
from dmq.store import place
from dmq.store.engines.rocks import RocksEngine

_FOREVER_MS = 2**62


class Restored(NamedTuple):
    """Result of a restore. ``time_ms`` is that of the newest segment or base in it."""

    path: Path
    store: int
    batch: int
    number: int
    segments: int
    time_ms: int
    base: str  # name of the base it began with, if any


class Checked(NamedTuple):
    """Result of a check: the log's content, and one line for each fault."""

    store: int
    bases: int
    segments: int
    first_ms: int  # earliest time that can be restored
    last_ms: int
    last_number: int
    last_batch: int
    faults: tuple[str, ...]


class _Begin(NamedTuple):
    """Point of the log from which segments are applied."""

    store: int
    number: int
    checksum: bytes | None
    batch: int
    base: Base | None


def restore(objects: ObjectStore, target: Path, at_ms: int | None = None) -> Restored:
    """Write the store as of ``at_ms`` to the directory ``target``, durable on return; None: the end of the log.

    The result is another store, as a restored backup is. Raise ``TargetTaken`` if the directory is not empty,
    ``ReplicaDamaged`` if the log does not have that time or is damaged before it.
    """
    until_ms = _FOREVER_MS if at_ms is None else at_ms
    begin = _begin(objects, until_ms)
    figures: list[Restored] = []

    def fill(database: Path) -> int:
        figures.append(fill_database(objects, database, begin, until_ms))
        return 0

    copied = place(target, f"{begin.store:016x}", fill)
    return figures[0]._replace(path=copied.path)


def fill_database(objects: ObjectStore, database: Path, begin: _Begin, until_ms: int) -> Restored:
    """Write a base and the segments after it to the new directory ``database``, durable on return."""
    time_ms = 0
    if begin.base is not None:
        download(objects, begin.base, database)
        time_ms = begin.base.time_ms
    else:
        database.mkdir(mode=0o700)
    engine = RocksEngine(database)
    batch, number, count = begin.batch, begin.number, 0
    try:
        for segment in follow(objects, begin.store, begin.number, begin.checksum):
            head = segment.head
            if head.time_ms > until_ms:
                break
            if head.first_batch > batch + 1:
                raise ReplicaDamaged(
                    f"batches {batch + 1} to {head.first_batch - 1} are only in a base, which is missing or damaged"
                )
            batch, number, time_ms = apply(engine, segment, batch), head.number, head.time_ms
            count += 1
        engine.sync()
    finally:
        engine.close()
    base = begin.base.suffix if begin.base is not None else ""
    return Restored(database, begin.store, batch, number, count, time_ms, base)


def _begin(objects: ObjectStore, until_ms: int) -> _Begin:
    """Return the newest base at or before a time, or the begin of the log."""
    base = newest_base(objects, until_ms)
    if base is not None:
        checksum = bytes.fromhex(base.checksum) if base.number else None
        return _Begin(base.store, base.number, checksum, base.batch, base)
    first = read_segment(objects, 1)
    if first is None or not begins_log(first) or first.head.time_ms > until_ms:
        listed = [each for each in objects.list(PREFIX) if number_of(each) is not None]
        bases = list_bases(objects)
        if not listed and not bases:
            raise ReplicaDamaged(f"{objects.url} has neither a base nor a segment")
        raise ReplicaDamaged(f"{objects.url} has no base at or before that time")
    return _Begin(first.head.store, 0, None, 0, None)


def check(objects: ObjectStore, show: Callable[[int], None] = lambda _: None) -> Checked:
    """Read every segment and the manifest of every base, and list the faults. Nothing is written.

    ``show`` is called with the number of each segment that was read.
    """
    faults: list[str] = []
    bases: list[Base] = []
    for name in list_bases(objects):
        try:
            bases.append(read_base(objects, name))
            faults += [
                f"{each} is missing, and base {name.suffix} needs it" for each in missing_objects(objects, bases[-1])
            ]
        except DmqError as error:
            faults.append(str(error))
    numbers = [number for each in objects.list(PREFIX) if (number := number_of(each)) is not None]
    begin = _check_begin(objects, bases, numbers, faults)
    store, batch, number, last_ms, first_ms, count = begin.store, begin.batch, begin.number, 0, 0, 0
    if begin.base is not None:
        first_ms = last_ms = begin.base.time_ms
    in_bases = {base.batch for base in bases}
    try:
        for segment in follow(objects, store, begin.number, begin.checksum):
            head = segment.head
            if head.first_batch > batch + 1 and head.first_batch - 1 not in in_bases:
                faults.append(f"batches {batch + 1} to {head.first_batch - 1} are in no segment and in no base")
            batch, number, last_ms = segment.last_batch, head.number, head.time_ms
            first_ms = first_ms or head.time_ms
            count += 1
            show(number)
    except DmqError as error:
        faults.append(str(error))
    return Checked(store, len(bases), count, first_ms, last_ms, number, batch, tuple(faults))


def _check_begin(objects: ObjectStore, bases: list[Base], numbers: list[int], faults: list[str]) -> _Begin:
    """Return the begin of the oldest restore, with a fault if there is none."""
    if bases and numbers and numbers[0] > 1:
        oldest = bases[0]
        return _Begin(oldest.store, oldest.number, bytes.fromhex(oldest.checksum), oldest.batch, oldest)
    newest = last_segment(objects) if numbers else None
    if not bases and (newest is None or numbers[0] > 1):
        faults.append(f"{objects.url} has no base" + ("" if numbers else " and no segment"))
    store = bases[0].store if bases else newest.head.store if newest is not None else 0
    return _Begin(store, numbers[0] - 1 if numbers else 0, None, bases[0].batch if bases else 0, None)
