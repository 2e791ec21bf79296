"""Convert a store that no process changes to a snapshot, a directory of Parquet (docs/reference/trail.md).

    python -m dmq.trail.snapshots.snapshot CHECKPOINT OUT --cell CELL --taken-ms MS [--cursors FILE]

does it in its own process with low priority, so that the daemon's interpreter stays free. It prints the manifest on one
line of stdout, or one line on stderr and exits with 1. With ``--cursors -`` it reads the cursors from one line of its
stdin. It then exits at the end of its stdin, because the requesting process is dead.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dmq.errors import StoreError
from dmq.runtime.background import die_with_parent, end_with_stdin
from dmq.store.engines.engine import Engine
from dmq.store.files.durable import make_directory, sync_directory
from dmq.store.schema.keys import META_SPOOL_TOTAL, Family, meta_range
from dmq.trail.snapshots.layout import MANIFEST, QueueId, decode_cursors, open_quiet, read_cut, read_names
from dmq.trail.snapshots.rows import ENTRIES, PROGRESS, QUEUES, entries, progress, queues

VERSION = 1
_TRAIL_VERSION = {b"rockdmq.trail_version": b"1"}
_ROWS_PER_GROUP = 65_536
_BYTES_PER_HASH = 1024 * 1024
_NICE = 10


class Cancelled(Exception):
    """The snapshot is no longer wanted."""


def write_snapshot(
    engine: Engine,
    out: Path,
    *,
    cell: str,
    taken_ms: int,
    cursors: Mapping[QueueId, int] | None = None,
    is_wanted: Callable[[], bool] = lambda: True,
) -> dict[str, object]:
    """Write the content of ``engine`` to ``out``, a new directory, synced on return; return the manifest.

    The store must not change meanwhile. Memory does not grow with its content. Raise ``StoreCorrupt``, ``OSError``, or
    ``Cancelled`` once ``is_wanted``, which is called between two chunks, returns False.
    """
    cut = read_cut(engine)
    names = read_names(engine)
    is_spool = bool(engine.scan(Family.META, *meta_range(META_SPOOL_TOTAL), limit=1).rows)
    make_directory(out.parent)
    out.mkdir()
    tables: Sequence[tuple[str, pa.Schema, Iterable[pa.RecordBatch]]] = (
        ("entries", ENTRIES, entries(engine, names, done=cut.done)),
        ("progress", PROGRESS, progress(engine, names, cursors or {})),
        ("queues", QUEUES, queues(engine, names, is_spool=is_spool)),
    )
    manifest: dict[str, object] = {
        "version": VERSION,
        "cell": cell,
        "sequence": cut.sequence,
        "boot": cut.boot,
        "taken_ms": taken_ms,
    }
    files: dict[str, object] = {}
    for name, schema, batches in tables:
        path = out / f"{name}.parquet"
        manifest[name] = _write_table(path, schema, batches, is_wanted)
        files[path.name] = {"sha256": _hash_synced(path), "bytes": path.stat().st_size}
    manifest["files"] = files
    with (out / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(manifest, file)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(out)
    return manifest


def _write_table(
    path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch], is_wanted: Callable[[], bool]
) -> int:
    """Write one table in row groups of a bounded size; return its number of rows."""
    rows = 0
    held: list[pa.RecordBatch] = []
    held_rows = 0
    dictionaries: Any = [each.name for each in schema if pa.types.is_string(each.type)]
    with pq.ParquetWriter(
        path, schema.with_metadata(_TRAIL_VERSION), compression="zstd", use_dictionary=dictionaries
    ) as writer:
        for batch in batches:
            if not is_wanted():
                raise Cancelled
            held.append(batch)
            held_rows += batch.num_rows
            rows += batch.num_rows
            if held_rows >= _ROWS_PER_GROUP:
                writer.write_table(pa.Table.from_batches(held))
                held, held_rows = [], 0
        if held_rows:
            writer.write_table(pa.Table.from_batches(held))
    return rows


def _hash_synced(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb+") as file:
        while piece := file.read(_BYTES_PER_HASH):
            digest.update(piece)
        os.fsync(file.fileno())
    return digest.hexdigest()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m dmq.trail.snapshots.snapshot", description="Write a snapshot of a store."
    )
    parser.add_argument("checkpoint", type=Path, help="a RocksDB database that nobody changes")
    parser.add_argument("out", type=Path, help="the directory to make")
    parser.add_argument("--cell", required=True)
    parser.add_argument("--taken-ms", type=int, required=True)
    parser.add_argument("--cursors", default="", metavar="FILE", help="JSON; -: the first line of stdin")
    given = parser.parse_args(arguments)
    os.nice(_NICE)
    try:
        cursors = _read_cursors(given.cursors)
        engine = open_quiet(given.checkpoint)
        try:
            manifest = write_snapshot(engine, given.out, cell=given.cell, taken_ms=given.taken_ms, cursors=cursors)
        finally:
            engine.close()
    except (StoreError, OSError, ValueError, pa.ArrowException) as error:
        sys.stderr.write(f"{' '.join(str(error).split())}\n")
        return 1
    sys.stdout.write(f"{json.dumps(manifest)}\n")
    return 0


def _read_cursors(source: str) -> dict[QueueId, int]:
    if source == "-":
        line = sys.stdin.readline()
        die_with_parent()
        end_with_stdin()
        return decode_cursors(line)
    return decode_cursors(Path(source).read_text(encoding="utf-8")) if source else {}


if __name__ == "__main__":
    sys.exit(main())
