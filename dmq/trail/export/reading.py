"""Reader of a trail in a local directory: selected kinds of events and columns, file by file."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from dmq.trail.manifest import sequences_of


class EventsOf(NamedTuple):
    """Selected events of one file of a cell: a list per column."""

    cell: str
    columns: dict[str, list[Any]]


def read_events(trail: Path, kinds: Collection[str], columns: Sequence[str]) -> Iterator[EventsOf]:
    """Yield the events of ``kinds``, file by file. An event that is stored twice is yielded twice.

    Raise ``ValueError``, with the file's path, for an unreadable file.
    """
    for path in sorted((trail / "events").glob("cell=*/date=*/hour=*/*.parquet")):
        if sequences_of(path.name) is None:
            continue
        try:
            table = pq.read_table(path, columns=list(columns), filters=[("kind", "in", list(kinds))], partitioning=None)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from error
        if table.num_rows:
            cell = path.parts[-4].partition("=")[2]
            yield EventsOf(cell, {name: table.column(name).to_pylist() for name in columns})
