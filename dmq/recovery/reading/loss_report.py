"""What a salvage could not save, one JSON object a line, in a file of the new store.

{"kind": "range",   "family", "first", "end", "error"}       keys, in hex, between which a block cannot be read
{"kind": "log",     "log", "at", "bytes"}                    a stretch of the write-ahead log
{"kind": "row",     "family", "key", "error"}                a row that makes no sense
{"kind": "message", "topic", "message_id", "was"}            waited, or lay in a queue; of the log: perhaps saved
{"kind": "offsets", "topic", "queue_id", "first", "end", "is_certain"}   of a queue; not certain: its begin is lost
{"kind": "moved",   "topic", "queue_id", "first", "end", "to"}   saved, under other offsets
{"kind": "name",    "id", "name"}                            a topic or a group whose record is lost, and its new name
{"kind": "schedule", "name", "error"}                        not saved; or saved, but paused, as its entry is lost
{"kind": "audit",   "first", "end"}                          events of the audit trail, by sequence
{"kind": "twice",   "message_id"}                            an older state of an entry that was saved as well
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Self

LOST_FILE = "LOST.jsonl"


class Lost:
    """The file. Durable once it is closed."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")
        self.count: Counter[str] = Counter()  # lines by kind
        self.offsets = 0  # lost, of queues

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
