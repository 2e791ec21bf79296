"""Reports of audits in a folder: each in a folder of its own.

A report is complete once it has its summary, which ``spark_audit`` writes last.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from dmq.errors import DmqError

SUMMARY: Final = "summary.json"
PAGE: Final = "report.html"
SUMMARY_BYTES_MAX: Final = 1024 * 1024
PAGE_BYTES_MAX: Final = 16 * 1024 * 1024
_FOLDERS_MAX: Final = 10_000


class ReportUnreadable(DmqError):
    """A file of a report cannot be read, with the reason."""


class FoundReport(NamedTuple):
    """A complete report. It has changed if it is not equal to the one found before."""

    written_ns: int
    inode: int
    size_bytes: int  # of its summary
    folder: Path

    @property
    def written_ms(self) -> int:
        """Time of its completion."""
        return self.written_ns // 1_000_000


def newest_report(folder: Path) -> FoundReport | None:
    """Return the newest report in a folder or in one of its subfolders, or None if there is none."""
    return max(_reports(folder), default=None)


def read_bounded(path: Path, bytes_max: int) -> bytes:
    """Return the content of a file. Raise ``ReportUnreadable`` if it is larger, or not a file that can be read.

    A file that is replaced meanwhile is read as it was before.
    """
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ReportUnreadable(f"{path} is not a regular file")
            found = file.read(bytes_max + 1)
    except OSError as error:
        raise ReportUnreadable(f"{path} cannot be read: {error.strerror}") from error
    if len(found) > bytes_max:
        raise ReportUnreadable(f"{path} has {status.st_size:,} bytes, and at most {bytes_max:,} are read")
    return found


def _reports(folder: Path) -> Iterator[FoundReport]:
    with suppress(OSError), os.scandir(folder) as entries:
        for each in (folder, *(Path(entry.path) for entry in islice(entries, _FOLDERS_MAX))):
            with suppress(OSError):
                status = (each / SUMMARY).stat()
                yield FoundReport(status.st_mtime_ns, status.st_ino, status.st_size, each)
