"""Forged files of a cluster read-back, as docs/reference/trail.md describes them, without code of the product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq


class Lies(NamedTuple):
    """A message where it lies; without an id it could not be read."""

    topic: str
    queue_id: int
    queue_offset: int
    message_id: bytes | None


class Range(NamedTuple):
    """Which part of a queue was read."""

    topic: str
    queue_id: int | None
    from_offset: int
    to_offset: int
    end_offset: int
    since_ms: int | None = 0
    why: str | None = None


def _table(path: Path, columns: Mapping[str, pa.DataType], rows: Sequence[Sequence[object]]) -> None:
    schema = pa.schema([pa.field(name, kind) for name, kind in columns.items()])
    pq.write_table(pa.Table.from_pylist([dict(zip(columns, row, strict=True)) for row in rows], schema), path)


def write_read_back(folder: Path, messages: Sequence[Lies], queues: Sequence[Range], cells: Mapping[str, int]) -> None:
    """Write the three files; all queues are those of one broker."""
    folder.mkdir(parents=True, exist_ok=True)
    text, whole = pa.string(), pa.int64()
    place: dict[str, pa.DataType] = {"topic": text, "broker": text, "queue_id": pa.int32()}
    offsets: dict[str, pa.DataType] = dict.fromkeys(("from_offset", "to_offset", "end_offset", "since_ms"), whole)
    _table(
        folder / "messages.parquet",
        {**place, "queue_offset": whole, "message_id": pa.binary()},
        [(each.topic, "broker-a", *each[1:]) for each in messages],
    )
    _table(
        folder / "queues.parquet",
        {**place, **offsets, "why": text},
        [(each.topic, None if each.queue_id is None else "broker-a", *each[1:]) for each in queues],
    )
    _table(folder / "cells.parquet", {"cell": text, "sequence": whole}, list(cells.items()))
