"""Files of a made-up trail: events with their manifest, in the format of docs/reference/trail.md."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

CELL = "bench"
Column: TypeAlias = "pa.Array[Any]"  # generic for type checkers only


def _schema(**types: pa.DataType) -> pa.Schema:
    return pa.schema([pa.field(name, kind) for name, kind in types.items()])


EVENT_SCHEMA = _schema(
    sequence=pa.int64(),
    boot=pa.int32(),
    kind=pa.string(),
    at_ms=pa.int64(),
    topic=pa.string(),
    group=pa.string(),
    queue_id=pa.int32(),
    queue_offset=pa.int64(),
    attempt=pa.int32(),
    due_ms=pa.int64(),
    detail=pa.int64(),
    entry=pa.int64(),
    message_id=pa.binary(),
).with_metadata({"rockdmq.trail_version": "1"})
_DICTIONARY: Any = ["kind", "topic", "group"]  # the stubs of pyarrow know a bool only


QUEUES_SCHEMA = _schema(
    topic=pa.string(),
    group=pa.string(),
    queue_id=pa.int32(),
    first_offset=pa.int64(),
    end_offset=pa.int64(),
)
PROGRESS_SCHEMA = _schema(
    group=pa.string(),
    topic=pa.string(),
    queue_id=pa.int32(),
    floor=pa.int64(),
    done=pa.list_(pa.int64()),
    hidden=pa.list_(pa.int64()),
    cursor=pa.int64(),
)


class Writer:
    """Writes files of events and their manifest."""

    def __init__(self, trail: Path) -> None:
        self._trail = trail
        self.sequence = 0
        self.bytes = 0
        trail.mkdir(parents=True)

    def add(self, columns: dict[str, Column], at_ms: int | None = None) -> None:
        """Write a file of rows of one hour."""
        rows = len(columns["kind"])
        first, last = self.sequence + 1, self.sequence + rows
        numbers = {
            "sequence": pa.array(np.arange(first, last + 1)),
            "boot": pa.array(np.ones(rows, np.int32)),
        }
        table = pa.table(numbers | columns, schema=EVENT_SCHEMA)
        first_ms, last_ms = columns["at_ms"][0].as_py(), columns["at_ms"][rows - 1].as_py()
        at = datetime.fromtimestamp((at_ms or first_ms) / 1000, UTC)
        date = at.strftime("%Y-%m-%d")
        path = self._trail / "events" / f"cell={CELL}" / f"date={date}" / f"hour={at:%H}"
        path.mkdir(parents=True, exist_ok=True)
        path /= f"{first:020}-{last:020}.parquet"
        pq.write_table(table, path, compression="zstd", use_dictionary=_DICTIONARY)
        line = {
            "version": 1,
            "path": path.relative_to(self._trail).as_posix(),
            "cell": CELL,
            "first_sequence": first,
            "last_sequence": last,
            "rows": rows,
            "first_at_ms": first_ms,
            "last_at_ms": last_ms,
            **sum_of(path),
        }
        manifest = self._trail / "manifest" / f"cell={CELL}" / f"{date}.jsonl"
        manifest.parent.mkdir(parents=True, exist_ok=True)
        with manifest.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.sequence = last
        self.bytes += path.stat().st_size

    def close(self, end_ms: int) -> None:
        """Write the last sign of life, and what the cell is."""
        names = [name for name in EVENT_SCHEMA.names if name not in {"sequence", "boot"}]
        row: dict[str, Any] = dict.fromkeys(names) | {"kind": "HEARTBEAT", "at_ms": end_ms, "attempt": 0}
        self.add({name: pa.array([row[name]], EVENT_SCHEMA.field(name).type) for name in names})
        path = self._trail / "cells" / f"{CELL}.json"
        path.parent.mkdir()
        about = {"version": 1, "cell": CELL, "role": "daemon", "host": "bench", "retired_sequence": 0}
        path.write_text(json.dumps(about) + "\n", encoding="utf-8")


def sum_of(path: Path) -> dict[str, Any]:
    """Return size and checksum of a file, as manifests have them."""
    content = path.read_bytes()
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
