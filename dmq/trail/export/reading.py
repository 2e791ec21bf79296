"""Events of a trail in a directory of this machine, read back: some kinds of them, some columns, file by file."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from dmq.trail.manifest import sequences_of


class EventsOf(NamedTuple):
    """What one file of a cell has of what was asked for: a list for each column."""

    cell: str
    columns: dict[str, list[Any]]


def read_events(trail: Path, kinds: Collection[str], columns: Sequence[str]) -> Iterator[EventsOf]:
    """Give events of ``kinds``; ``ValueError`` names a file that cannot be read. What lies twice comes twice."""
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
