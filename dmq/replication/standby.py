"""Directory of a standby: it follows the log without serving, until it is promoted.

The marker file of the directory is rewritten when it becomes a standby, and again when it is promoted; the identity row
names the marker only after the promotion. A standby's directory that is opened alone is therefore another store.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from typing import NamedTuple

from broker_adapter.runtime.clock import Clock
from broker_adapter.runtime.log import LibraryLog
from dmq.errors import ReplicaDamaged, ReplicaFenced, ReplicaForeign, StartRefused
from dmq.replication.base import download, newest_base
from dmq.replication.following import SegmentMissing, apply, follow, last_segment, put_position, read_segment
from dmq.replication.link import ReceivedBatch, ReceivedBatches, following
from dmq.replication.objects import ObjectStore
from dmq.replication.segment import Segment, SegmentHead, decode_batch
from dmq.store.engines.engine import Batch
from dmq.store.engines.rocks import RocksEngine, RocksOptions
from dmq.store.files.cell import Cell
from dmq.store.files.durable import sync_directory
from dmq.store.schema.cell.identity import Identity, StorePlace, decode_identity, encode_identity
from dmq.store.schema.cell.position import NO_CHECKSUM, Position, decode_position
from dmq.store.schema.keys import META_BOOT, META_IDENTITY, META_POSITION, Family, unpack_u64

log = LibraryLog("dmq.replication")

CELL = "cell"
_CHECK_S = 60.0  # between two looks that search for missing segments
AHEAD_MS_MAX = 5_000  # of this host's wall clock before the primary's
_COMPARED_MIN = 3  # segments that show a clock: the put of one may take long
_PART = "rocksdb.part"
_FOREVER_MS = 2**62


class DirectoryState(NamedTuple):
    """Store of a directory, as the log sees it. ``position`` is None if the last run wrote no log."""

    identity: Identity
    is_original: bool  # it is the directory that the identity names, and no copy or standby of it
    boot: int
    position: Position | None


class _Moved(Exception):
    """The log does not continue the directory: ``is_diverged`` if the directory has batches that the log lacks."""

    def __init__(self, reason: str, *, is_diverged: bool) -> None:
        super().__init__(reason)
        self.is_diverged = is_diverged


def read_directory(cell: Cell) -> DirectoryState | None:
    """Return the state of a locked directory; None if it has no database."""
    if not (cell.database / "CURRENT").exists():
        return None
    engine = RocksEngine(cell.database, RocksOptions(is_read_only=True))
    try:
        identity, boot, row = engine.get_many(Family.META, [META_IDENTITY, META_BOOT, META_POSITION])
    finally:
        engine.close()
    if identity is None or boot is None:
        return None
    found, position = decode_identity(identity), decode_position(row) if row is not None else None
    run = unpack_u64(boot)
    if position is not None and (position.store, position.epoch) != (found.number, run):
        position = None
    place = cell.place()
    is_original = not cell.is_copy and found.place == place and place != StorePlace()
    return DirectoryState(found, is_original, run, position)


class Standby:
    """Standby in a locked directory. Not thread-safe."""

    def __init__(self, objects: ObjectStore, cell: Cell, clock: Clock, received: ReceivedBatches | None = None) -> None:
        """``received`` are the batches that came by the direct link. They are applied once the log has them."""
        self._objects = objects
        self._received = received
        self._clock = clock
        self._is_live = False  # the last look reached the end of the log
        self._ahead_ms = 2**62  # of this clock before the primary's, at most
        self._compared = 0  # segments that show it
        self._cell = cell
        self._engine: RocksEngine | None = None
        self._position = Position(0, 0, 0, 0, NO_CHECKSUM)
        self._checked_s: float | None = None  # when the last segment and the listing of the log were compared
        self._was_primary = False  # the database may have batches that the log lacks
        self.own_nonces = set[bytes]()  # of segments with batches of the direct link, which the primary sent before
        self.written_ms = 0  # when the last applied segment was written; 0: none was applied

    @property
    def position(self) -> Position:
        """Position after the last applied batch."""
        return self._position

    def catch_up(self, *, is_last: bool = False) -> int:
        """Apply the new segments, durable on return, and return their number.

        At times, and for the last look, the end of the log is also compared with its listing.

        A directory without a database, or with one that the log does not continue, begins with the newest base. A
        database that has batches that the log lacks, or may have some, is kept under another name.
        """
        if self._engine is None:
            self._open()
        if is_last:
            self._checked_s = None
        try:
            return self._apply()
        except _Moved as moved:
            self._set_aside(moved)
            self._open()
            return self._apply()

    def promote(self, epoch: int | None = None, is_held: Callable[[], bool] = lambda: True) -> None:
        """Apply the rest of the log, and make the directory the original one of the store. It is closed after that.

        Raise ``StartRefused`` if the clock of this host is ahead of the primary's: it would deliver early. Raise
        ``ReplicaFenced`` if the log continues after ``epoch``, and unless the lease ``is_held`` after the last look:
        the log may have segments of a successor.
        """
        self._catch_up_last(epoch, is_held)
        if self._compared >= _COMPARED_MIN and self._ahead_ms > AHEAD_MS_MAX:
            raise StartRefused(
                f"the clock of this host is {self._ahead_ms / 1000:.1f} s ahead of the primary's (limit "
                f"{AHEAD_MS_MAX / 1000:.0f} s), and messages would be early; correct it, then start again"
            )
        engine, cell = self._engine, self._cell
        assert engine is not None
        (row,) = engine.get_many(Family.META, [META_IDENTITY])
        assert row is not None
        cell.cell_id = published_cell(self._objects) or cell.cell_id
        cell.rewrite_marker()
        batch = Batch()
        identity = decode_identity(row)._replace(place=cell.place())
        batch.puts.append((Family.META, META_IDENTITY, encode_identity(identity)))
        engine.write(batch)
        engine.sync()
        self.close()

    def _catch_up_last(self, epoch: int | None, is_held: Callable[[], bool]) -> None:
        self.catch_up(is_last=True)
        if not is_held():
            raise ReplicaFenced("the lease ended before this standby was promoted")
        if epoch is not None and self._position.epoch != epoch:
            found = self._position.epoch
            raise ReplicaFenced(f"another daemon continued the log at {self._objects.url}, with epoch {found}")

    def close(self) -> None:
        """Close the database; the directory stays locked."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def _open(self) -> None:
        cell = self._cell
        cell.mark_opened()
        self._checked_s = None
        state = read_directory(cell)
        self._was_primary = state is not None and state.is_original
        if state is None:
            self._fill()
        cell.rewrite_marker()
        engine = self._engine = RocksEngine(cell.database)
        identity, boot, row = engine.get_many(Family.META, [META_IDENTITY, META_BOOT, META_POSITION])
        assert identity is not None
        if row is not None:
            self._position = decode_position(row)
        is_valid = row is not None and boot is not None and self._position.epoch == unpack_u64(boot)
        if not is_valid or self._position.store != decode_identity(identity).number:
            raise ReplicaForeign(f"the store in {cell.path} has no position in the log at {self._objects.url}")

    def _fill(self) -> None:
        """Write the newest base, or the first segment of a log without one, to the directory."""
        part = self._cell.path / _PART
        shutil.rmtree(part, ignore_errors=True)
        base = newest_base(self._objects, _FOREVER_MS)
        if base is not None:
            download(self._objects, base, part)
        else:
            first = read_segment(self._objects, 1)
            if first is None or first.head.first_batch != 1:
                raise ReplicaDamaged(f"{self._objects.url} has no base")
            part.mkdir(mode=0o700)
            engine = RocksEngine(part)
            try:
                apply(engine, first, 0)
                engine.sync()
            finally:
                engine.close()
        shutil.rmtree(self._cell.database, ignore_errors=True)
        part.rename(self._cell.database)
        sync_directory(self._cell.path)

    def _apply(self) -> int:
        engine, position = self._engine, self._position
        assert engine is not None
        now_s = self._clock.monotonic_s()
        has_check = self._checked_s is None or now_s - self._checked_s >= _CHECK_S
        if position.number and has_check:
            last = read_segment(self._objects, position.number)
            if last is not None and last.checksum != position.checksum:
                raise _Moved("another store wrote its last segment", is_diverged=True)
            if last is None and last_segment(self._objects) is not None:
                raise _Moved("its last segment was pruned", is_diverged=self._was_primary)
        count = 0
        was_live, self._is_live = self._is_live, False
        for segment in self._follow(has_check=has_check):
            head = segment.head
            if self._received is not None and head.epoch != position.epoch:
                self._keep_tail(self._received, head)
            if head.epoch != position.epoch and head.first_batch <= position.batch:
                raise _Moved(f"the log continues at batch {head.first_batch}", is_diverged=True)
            if head.first_batch > position.batch + 1:
                raise _Moved(f"the log continues at batch {head.first_batch}", is_diverged=False)
            batch = apply(engine, segment, position.batch)
            self._position = position = Position(head.store, head.epoch, head.number, batch, segment.checksum)
            if was_live and not count and head.nonce not in self.own_nonces:  # written since the last look
                self._ahead_ms = min(self._ahead_ms, self._clock.now_ms() - head.time_ms)
                self._compared += 1
            count, self.written_ms = count + 1, head.time_ms
        engine.sync()
        self._is_live, self._was_primary = True, False
        self._checked_s = now_s if has_check else self._checked_s
        return count

    def _keep_tail(self, received: ReceivedBatches, head: SegmentHead) -> None:
        """Keep the received batches without which the log continues, as a diverged store, and forget all earlier ones.

        Batches before the first one of the log are in a base.
        """
        position, cell, engine = self._position, self._cell, self._engine
        assert engine is not None
        last = received.last(position.store, position.epoch)
        if last >= max(head.first_batch, position.batch + 1):
            try:
                batches = list(following(received.after(*position[:2], position.batch), position.batch))
            except ReplicaDamaged as damaged:
                log.error("link_batches_lost", path=str(cell.path), error=str(damaged))  # noqa: TRY400
                batches = []
            self._keep(batches, engine)
        received.drop_before(position.store, head.epoch)

    def _keep(self, batches: list[ReceivedBatch], engine: RocksEngine) -> None:
        """Keep a copy of the database with these batches."""
        if not batches:
            return
        position, path = self._position, self._cell.path
        kept = path / f"diverged-{position.epoch}-{batches[-1].number}"
        shutil.rmtree(kept, ignore_errors=True)
        engine.sync()
        engine.checkpoint(kept)
        copy = RocksEngine(kept)
        try:
            for each in batches:
                batch = decode_batch(each.data)
                put_position(batch, position._replace(batch=each.number))
                copy.write(batch)
            copy.sync()
        finally:
            copy.close()
        sync_directory(path)
        why = "the log continues without batches of the direct link"
        log.error("replica_diverged", kept=str(kept), batch=batches[-1].number, why=why)

    def _follow(self, *, has_check: bool) -> Iterator[Segment]:
        """Yield the new segments. The next ones may have been pruned: a newer base has them."""
        position = self._position
        try:
            yield from follow(self._objects, position.store, position.number, position.checksum, has_listing=has_check)
        except SegmentMissing as missing:
            base = newest_base(self._objects, _FOREVER_MS)
            if base is None or base.number < missing.number:
                raise
            raise _Moved("its next segments were pruned", is_diverged=self._was_primary) from missing

    def _set_aside(self, moved: _Moved) -> None:
        self.close()
        position, cell = self._position, self._cell
        cell.remove_marker()
        log.warning("standby_rebased", path=str(cell.path), batch=position.batch, why=str(moved))
        if not moved.is_diverged:
            shutil.rmtree(cell.database)
            return
        kept = cell.path / f"diverged-{position.epoch}-{position.batch}"
        shutil.rmtree(kept, ignore_errors=True)
        cell.database.rename(kept)
        sync_directory(cell.path)
        log.error("replica_diverged", kept=str(kept), batch=position.batch, why=str(moved))


def publish_cell(objects: ObjectStore, cell_id: str) -> None:
    """Write the id of the primary's cell to the object store: a takeover keeps it, so the trail stays that of one cell.

    The first primary of a log decides.
    """
    objects.create(CELL, json.dumps({"cell": cell_id}).encode())


def published_cell(objects: ObjectStore) -> str:
    """Return the id of the primary's cell; empty if none is published yet."""
    found = objects.read(CELL)
    try:
        return str(json.loads(found[0])["cell"]) if found is not None else ""
    except (ValueError, KeyError, TypeError) as error:
        raise ReplicaDamaged(f"{CELL} at {objects.url} cannot be read: {error}") from error
