"""Loss report of a salvage: one JSON object per line, in a file of the new store.

{"kind": "range",   "family", "first", "end", "error"}       unreadable block between two keys, in hex
{"kind": "log",     "log", "at", "bytes"}                    damaged part of the write-ahead log
{"kind": "row",     "family", "key", "error"}                row that cannot be decoded
{"kind": "message", "topic", "message_id", "was"}            lost: pending or queued; in a log record: perhaps saved
{"kind": "offsets", "topic", "queue_id", "first", "end", "is_certain"}   of a queue; not certain: its begin is lost
{"kind": "moved",   "topic", "queue_id", "first", "end", "to"}   saved, under other offsets
{"kind": "name",    "id", "name"}                            topic or group whose record is lost, and its new name
{"kind": "schedule", "name", "error"}                        not saved; or saved, but paused, as its entry is lost
{"kind": "audit",   "first", "end"}                          events of the audit trail, by sequence
{"kind": "twice",   "message_id"}                            older state of an entry that was saved too
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Self

LOST_FILE = "LOST.jsonl"


class LossReport:
    """Writer of the report file. The file is durable once it is closed."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")
        self.count: Counter[str] = Counter()  # lines by kind
        self.offsets = 0  # number of lost queue offsets

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def tell(self, kind: str, **facts: object) -> None:
        """Write one line."""
        self.count[kind] += 1
        self._file.write(json.dumps({"kind": kind, **facts}) + "\n")
