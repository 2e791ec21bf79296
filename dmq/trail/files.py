"""Files of events. A kill at any point leaves a complete file or none. Also reads files back for recovery."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dmq.store.files.durable import make_directory, sync_directory, sync_file
from dmq.trail.columns import COLUMNS_MIN, SCHEMA, TRAIL_VERSION
from dmq.trail.manifest import HOUR_MS, Layout, Listed, digest, file_name, sequences_of

_ROW_GROUP = 131_072
_REPEATING = ["kind", "topic", "group", "boot", "queue_id", "attempt"]


def write_events(layout: Layout, batches: list[pa.RecordBatch]) -> Listed:
    """Write one file of events, durable on return, and return its line for the manifest.

    The events must be without gaps and of one hour. Raise ``OSError`` if the file cannot be written; nothing is left
    then.
    """
    table = pa.Table.from_batches(batches).unify_dictionaries()
    first, last = table["sequence"][0].as_py(), table["sequence"][-1].as_py()
    first_at_ms, last_at_ms = table["at_ms"][0].as_py(), table["at_ms"][-1].as_py()
    directory = layout.hour(first_at_ms)
    make_directory(directory)
    path = directory / file_name(first, last)
    part = path.with_name(path.name + ".tmp")
    try:
        # Without the Arrow schema, so that readers get plain text columns and not their dictionary encoding.
        with pq.ParquetWriter(
            str(part),
            table.schema,
            compression="zstd",
            use_dictionary=_REPEATING,  # type: ignore[arg-type]  # the stubs know only bool
            store_schema=False,
        ) as writer:
            writer.write_table(table, row_group_size=_ROW_GROUP)
            writer.add_key_value_metadata({"rockdmq.trail_version": TRAIL_VERSION})
        sync_file(part)
        os.replace(part, path)  # noqa: PTH105 - the one step that makes it part of the trail
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync_directory(directory)
    return _listed(layout, path, first, last, first_at_ms, last_at_ms)


def verify_events(layout: Layout, path: Path, first: int, last: int) -> Listed:
    """Read a file that no manifest lists and return its line.

    Raise ``ValueError`` if it is incomplete, or contradicts its name.
    """
    try:
        file = pq.ParquetFile(path)
        table = file.read()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    version = (file.schema_arrow.metadata or {}).get(b"rockdmq.trail_version", b"").decode()
    names = table.schema.names
    if version != TRAIL_VERSION or len(names) < COLUMNS_MIN or names != SCHEMA.names[: len(names)]:
        raise ValueError(f"{path} is not an event file of version {TRAIL_VERSION}")
    sequences, at_ms = table["sequence"].to_numpy(), table["at_ms"].to_numpy()
    if not np.array_equal(sequences, np.arange(first, last + 1)):
        raise ValueError(f"{path} does not hold the events {first} to {last}")
    hours = {layout.hour(int(each) * HOUR_MS) for each in np.unique(at_ms // HOUR_MS)}
    if hours != {path.parent}:
        raise ValueError(f"{path} holds events of other hours")
    return _listed(layout, path, first, last, int(at_ms[0]), int(at_ms[-1]))


class Committed:
    """Commit time and run of the events of a cell's trail. Reads one file at a time."""

    def __init__(self, layout: Layout) -> None:
        self._spans = [
            (span, path)
            for path in layout.events.glob("date=*/hour=*/*.parquet")
            if path.name[0] not in "._" and (span := sequences_of(path.name)) is not None
        ]
        self._span, self._known = (1, 0), np.empty((0, 2), dtype=np.int64)

    def at(self, sequence: int) -> tuple[int, int] | None:
        """Return the run and the commit time of an event; ``None`` if no readable file has it."""
        first, last = self._span
        if not first <= sequence <= last:
            found = next((each for each in self._spans if each[0][0] <= sequence <= each[0][1]), None)
            if found is None:
                return None
            try:
                table = pq.read_table(found[1], columns=["boot", "at_ms"], partitioning=None)
                known = np.stack([table[name].to_numpy() for name in ("boot", "at_ms")], axis=1)
            except (pa.ArrowException, OSError, KeyError):
                return None
            first, last = found[0]
            if len(known) != last + 1 - first:
                return None
            self._span, self._known = (first, last), known
        boot, at_ms = self._known[sequence - first]
        return int(boot), int(at_ms)


def _listed(layout: Layout, path: Path, first: int, last: int, first_at_ms: int, last_at_ms: int) -> Listed:
    return Listed(
        path=layout.relative(path),
        cell=layout.cell,
        first_sequence=first,
        last_sequence=last,
        rows=last - first + 1,
        first_at_ms=first_at_ms,
        last_at_ms=last_at_ms,
        bytes=path.stat().st_size,
        sha256=digest(path),
    )
