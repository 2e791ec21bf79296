"""Taking snapshots of a running or a stopped store, and keeping a bounded number of them.

The steps for a running store:

1. A checkpoint is created next to the database: a cut between two batches of the writer, by hard links, without a copy.
2. Another process reads it and writes a hidden directory. Step 3 runs here at the same time.
3. An empty commit returns, so that the content of the checkpoint is synced. The exporter is flushed, so that the trail
   covers the snapshot.
4. The hidden directory is renamed to its number. Until then there is no snapshot.

A killed daemon may leave a checkpoint and a hidden directory. The next run removes them (``sweep``).
"""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from broker_adapter.runtime.clock import Clock
from dmq.errors import DmqError, StoreCorrupt
from dmq.store import Store
from dmq.store.files.cell import Cell
from dmq.store.files.durable import sync_directory
from dmq.store.schema.cell.files import CELL_FILE, decode_marker
from dmq.trail.snapshots.layout import MANIFEST, QueueId, encode_cursors, open_quiet, read_cut

KEPT_NEWEST = 48
KEPT_DAYS = 90  # of older ones the last of each day
_DAY_MS = 86_400_000
_CHECKPOINT = ".checkpoint-"
_DIGITS = 20


class SnapshotFailed(DmqError):
    """No snapshot was taken; the store is unchanged."""

    retriable = True


class DiskLow(SnapshotFailed):
    """The free space is too low for a snapshot."""


class SnapshotExporter(Protocol):
    """Exporter of a running store's trail (``dmq.trail.export.exporter``)."""

    @property
    def trail(self) -> Path:
        """Directory of the trail."""
        ...

    def flush(self) -> int:
        """Export all durable events; return the sequence of the last exported event. May block."""
        ...


class SnapshotResult(NamedTuple):
    """An existing snapshot. ``is_new`` is False if it existed before, since there was no event after it."""

    sequence: int
    path: Path
    entries: int
    taken_ms: int
    took_ms: float
    is_new: bool = True


class _Child(NamedTuple):
    """The snapshot process, and the file with its stderr."""

    process: subprocess.Popen[str]
    said: IO[str]


class Taker:
    """Snapshot taker of one running store. ``take`` blocks, for one thread at a time; ``cancel`` is thread-safe."""

    def __init__(self, store: Store, exporter: SnapshotExporter, data: Path) -> None:
        """Remove the remains of a killed process. ``data`` is the directory of the cell."""
        self._store = store
        self._exporter = exporter
        self._data = data
        self._is_cancelled = False
        self._child: subprocess.Popen[str] | None = None
        sweep(data, exporter.trail, store.cell_id)

    def take(self, cursors: Mapping[QueueId, int], *, is_alone: bool = False) -> SnapshotResult:
        """Take a snapshot, durable on return and covered by the trail, and remove snapshots that are not kept.

        With ``is_alone`` this process has no other work, and writes the snapshot itself, which is faster. Raise
        ``SnapshotFailed``, ``DiskLow``, or any error of the store.
        """
        store, clock = self._store, self._store.clock
        started_s = clock.monotonic_s()
        if store.is_disk_low():
            raise DiskLow("no snapshot is taken while the disk is almost full")
        taken_ms = clock.now_ms()  # earlier commits are all in the snapshot
        with _checkpoint(self._data) as checkpoint, _hidden(self._exporter.trail, store.cell_id) as hidden:
            store.checkpoint(checkpoint)
            if is_alone:
                manifest = self._write_here(checkpoint, hidden, taken_ms, cursors)
                reached = self._reach()
            else:
                with self._started(checkpoint, hidden, taken_ms, cursors) as child:
                    reached = self._reach()
                    manifest = self._written(child)
            if reached < int(manifest["sequence"]):
                raise SnapshotFailed(f"the trail was exported up to {reached} only, not to {manifest['sequence']}")
            return _published(self._exporter.trail, hidden, manifest, clock, started_s)

    def cancel(self) -> None:
        """Make ``take`` end soon without a snapshot. Later calls of ``take`` fail as well."""
        self._is_cancelled = True
        child = self._child
        if child is not None:
            child.kill()

    def _reach(self) -> int:
        self._store.commit([])
        return self._exporter.flush()

    def _write_here(
        self, checkpoint: Path, hidden: Path, taken_ms: int, cursors: Mapping[QueueId, int]
    ) -> dict[str, Any]:
        from dmq.trail.snapshots.snapshot import Cancelled, write_snapshot  # the import costs a third of a second

        engine = open_quiet(checkpoint)
        try:
            return write_snapshot(
                engine,
                hidden,
                cell=self._store.cell_id,
                taken_ms=taken_ms,
                cursors=cursors,
                is_wanted=lambda: not self._is_cancelled,
            )
        except Cancelled:
            raise SnapshotFailed("the snapshot was cancelled") from None
        finally:
            engine.close()

    @contextmanager
    def _started(
        self, checkpoint: Path, hidden: Path, taken_ms: int, cursors: Mapping[QueueId, int]
    ) -> Iterator[_Child]:
        """Run the snapshot process. It always ends with this block, and with this process."""
        command = [sys.executable, "-m", "dmq.trail.snapshots.snapshot", str(checkpoint), str(hidden)]
        command += ["--cell", self._store.cell_id, "--taken-ms", str(taken_ms), "--cursors", "-"]
        with (
            tempfile.TemporaryFile("w+", encoding="utf-8", dir=checkpoint) as said,
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True, encoding="utf-8"
            ) as child,
        ):
            assert child.stdin is not None
            self._child = child
            try:
                if self._is_cancelled:
                    child.kill()
                with suppress(BrokenPipeError):  # it is dead already, as its exit code shows
                    child.stdin.write(encode_cursors(cursors) + "\n")
                    child.stdin.flush()
                yield _Child(child, said)
            finally:
                self._child = None
                child.kill()
                with suppress(BrokenPipeError):
                    child.stdin.close()

    def _written(self, child: _Child) -> dict[str, Any]:
        assert child.process.stdout is not None
        line = child.process.stdout.read()
        code = child.process.wait()
        if self._is_cancelled:
            raise SnapshotFailed("the snapshot was cancelled")
        if code:
            child.said.seek(0)
            raise SnapshotFailed(f"the snapshot failed: {child.said.read().strip() or f'exit code {code}'}")
        manifest: dict[str, Any] = json.loads(line)
        return manifest


def snapshot_of(data: Path, trail: Path, clock: Clock, *, reached: int) -> SnapshotResult:
    """Take a snapshot of the store of a stopped process. The trail must be exported up to ``reached``.

    The store is not changed. Raise ``StoreLocked`` if a process uses the directory, ``StoreCorrupt`` if it has no
    store, ``SnapshotFailed`` if the trail does not cover the store.
    """
    from dmq.trail.snapshots.snapshot import write_snapshot

    started_s = clock.monotonic_s()
    if not (data / CELL_FILE).exists():
        raise StoreCorrupt(f"there is no store in {data}")
    cell = Cell(data)
    try:
        sweep(data, trail, cell.cell_id)
        engine = open_quiet(cell.database)
        try:
            sequence = read_cut(engine).sequence
            if sequence > reached:
                raise SnapshotFailed(f"the trail was exported up to {reached} only, not to {sequence}")
            with _hidden(trail, cell.cell_id) as hidden:
                manifest = write_snapshot(engine, hidden, cell=cell.cell_id, taken_ms=clock.now_ms())
                return _published(trail, hidden, manifest, clock, started_s)
        finally:
            engine.close()
    finally:
        cell.close()


def cell_of(data: Path) -> str:
    """Return the cell id of a directory; raise ``StoreCorrupt`` if it has no store."""
    try:
        return decode_marker((data / CELL_FILE).read_text(encoding="utf-8")).cell_id
    except (OSError, ValueError) as error:
        raise StoreCorrupt(f"there is no store in {data}") from error


# -- the snapshots of a cell -------------------------------------------------------------------------------------------


def directory_of(trail: Path, cell: str) -> Path:
    """Return the directory of a cell's snapshots."""
    return trail / "snapshots" / f"cell={cell}"


def list_snapshots(trail: Path, cell: str) -> list[tuple[Path, dict[str, Any]]]:
    """Return the snapshots of a cell with their manifests, oldest first; unreadable ones are left out."""
    found: list[tuple[Path, dict[str, Any]]] = []
    with suppress(OSError):  # no such directory, or an unreadable one, which cannot be written either
        for path in sorted(directory_of(trail, cell).iterdir()):
            if path.name.isdecimal() and len(path.name) == _DIGITS:
                with suppress(OSError, ValueError):
                    found.append((path, json.loads((path / MANIFEST).read_text(encoding="utf-8"))))
    return found


def sweep(data: Path, trail: Path, cell: str) -> None:
    """Remove checkpoints and unfinished snapshots of a dead process. The caller must own the cell.

    Errors are ignored: the next run tries again, and snapshots are not essential to a daemon.
    """
    for directory, pattern in ((data, f"{_CHECKPOINT}*"), (directory_of(trail, cell), ".*")):
        with suppress(OSError):
            for path in list(directory.glob(pattern)):
                shutil.rmtree(path, ignore_errors=True)


def not_kept(taken: Mapping[int, int], *, newest: int = KEPT_NEWEST, days: int = KEPT_DAYS) -> list[int]:
    """Return the sequences of the snapshots to remove; ``taken`` maps sequences to the times at which they were taken.

    The ``newest`` snapshots are kept. Of each earlier day (UTC), as far back as ``days``, the last snapshot is kept.
    """
    order = sorted(taken, reverse=True)
    removed: list[int] = []
    seen = {taken[sequence] // _DAY_MS for sequence in order[:newest]}
    for sequence in order[newest:]:
        day = taken[sequence] // _DAY_MS
        if day in seen or taken[order[0]] // _DAY_MS - day > days:
            removed.append(sequence)
        seen.add(day)
    return removed


def _published(
    trail: Path, hidden: Path, manifest: Mapping[str, Any], clock: Clock, started_s: float
) -> SnapshotResult:
    sequence, cell = int(manifest["sequence"]), str(manifest["cell"])
    target = directory_of(trail, cell) / f"{sequence:0{_DIGITS}}"
    is_new = not target.exists()
    if is_new:  # otherwise the same events are there, and may be in use by a reader
        hidden.rename(target)
        sync_directory(target.parent)
    else:
        manifest = json.loads((target / MANIFEST).read_text(encoding="utf-8"))
    _prune(trail, cell)
    took_ms = (clock.monotonic_s() - started_s) * 1000
    return SnapshotResult(sequence, target, int(manifest["entries"]), int(manifest["taken_ms"]), took_ms, is_new)


def _prune(trail: Path, cell: str) -> None:
    found = {
        int(manifest["sequence"]): (path, int(manifest["taken_ms"])) for path, manifest in list_snapshots(trail, cell)
    }
    for sequence in not_kept({sequence: taken_ms for sequence, (_, taken_ms) in found.items()}):
        path = found[sequence][0]
        gone = path.with_name(f".removed-{path.name}")
        with suppress(OSError):
            path.rename(gone)  # readers never see it half removed
        shutil.rmtree(gone, ignore_errors=True)


@contextmanager
def _checkpoint(data: Path) -> Iterator[Path]:
    path = data / f"{_CHECKPOINT}{secrets.token_hex(6)}"
    try:
        yield path
    finally:
        for each in (path, path.with_name(f"{path.name}.tmp")):  # RocksDB's name of an unfinished checkpoint
            shutil.rmtree(each, ignore_errors=True)


@contextmanager
def _hidden(trail: Path, cell: str) -> Iterator[Path]:
    path = directory_of(trail, cell) / f".new-{secrets.token_hex(6)}"
    try:
        yield path
    except OSError as error:
        raise SnapshotFailed(f"the snapshot cannot be written: {error}") from error
    finally:
        shutil.rmtree(path, ignore_errors=True)
