"""History of one message: its rows in the files of a trail, their description, and its outcomes."""

from __future__ import annotations

from spark_audit.report.message import words
from spark_audit.report.message.files import (
    EventsFile,
    FileGap,
    MessageSnapshot,
    Row,
    TrailFiles,
    packed_forms,
    unpacked,
)
from spark_audit.report.message.verdict import Judge, MessageOutcome

__all__ = [
    "EventsFile",
    "FileGap",
    "Judge",
    "MessageOutcome",
    "MessageSnapshot",
    "Row",
    "TrailFiles",
    "packed_forms",
    "unpacked",
    "words",
]
