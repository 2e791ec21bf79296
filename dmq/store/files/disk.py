"""Free space: sends stop while there is still room to finish accepted messages.

Below the low-water mark new messages are refused; acks, deliveries and deletes continue. A ballast file reserves space
for these. It is deleted when their space runs low, before a write needs it and before a store is opened on a full disk.
It is created again once there is plenty of space. Without ballast or space the writer holds its units back
(``has_room``), so that RocksDB never meets a full disk. These units get no answer and are not lost.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from broker_adapter.runtime.log import LibraryLog

_MIB = 1024 * 1024
LOW_WATER_SHARE = 0.05
LOW_WATER_BYTES_MIN = 32 * _MIB
LOW_WATER_BYTES_MAX = 1024 * _MIB
START_BYTES = 8 * _MIB  # in addition to the log, which is written into tables when a store is opened

log = LibraryLog("dmq.store")


class DiskState(NamedTuple):
    """State of the file system at one check."""

    free_bytes: int
    low_water_bytes: int
    is_low: bool
    has_ballast: bool


class DiskGuard:
    """Monitor of one directory's file system. ``check`` costs microseconds: the writer calls it with every batch."""

    def __init__(
        self, directory: Path, *, low_water_bytes: int | None, ballast_bytes: int, full_bytes: int = 0
    ) -> None:
        """Measure the free space. ``has_room`` refuses batches near ``full_bytes`` of free space; 0 disables that."""
        self._directory = directory
        self._ballast = directory / "BALLAST"
        self._ballast_bytes = ballast_bytes
        self._full_bytes = full_bytes
        if low_water_bytes is None:
            found = os.statvfs(directory)
            share = int(found.f_blocks * found.f_frsize * LOW_WATER_SHARE)
            low_water_bytes = min(max(share, LOW_WATER_BYTES_MIN), LOW_WATER_BYTES_MAX)
        self._low_water_bytes = low_water_bytes
        # Without a low-water mark the ballast still needs a threshold for its release.
        self._release_below = max(low_water_bytes // 4, ballast_bytes // 4)
        self._has_ballast = self._ballast.exists()
        self._was_full = False
        free = self._free()  # no ballast is made here: opening needs the room first
        self.state = DiskState(free, low_water_bytes, free < low_water_bytes, self._has_ballast)

    def check(self) -> DiskState:
        """Measure the free space, delete or create the ballast accordingly, and return the state."""
        free = self._free()
        if self._has_ballast and free < self._release_below:
            free = self._release(free)
        elif not self._has_ballast and self._ballast_bytes and free > 2 * self._low_water_bytes + self._plenty():
            self._has_ballast = self._make_ballast()
        self.state = DiskState(free, self._low_water_bytes, free < self._low_water_bytes, self._has_ballast)
        return self.state

    def make_room_to_open(self, log_bytes: int) -> None:
        """Delete the ballast if recovery of ``log_bytes`` of log needs its space."""
        free = self._free()
        if self._has_ballast and free < log_bytes + START_BYTES:
            self._release(free)

    def has_room(self, batch_bytes: int) -> bool:
        """Measure the free space; return True if a batch of about ``batch_bytes`` will not fill the disk."""
        free = self.check().free_bytes
        is_full = free < self._full_bytes + 2 * batch_bytes and self._full_bytes > 0
        if is_full != self._was_full:
            self._was_full = is_full
            tell = log.error if is_full else log.info
            tell(
                "disk_full_writes_wait" if is_full else "disk_space_available",
                free_bytes=free,
                ballast=self._has_ballast,
            )
        return not is_full

    def _free(self) -> int:
        found = os.statvfs(self._directory)
        return found.f_bavail * found.f_frsize

    def _plenty(self) -> int:
        return self._ballast_bytes + self._release_below - self._low_water_bytes // 4

    def _release(self, free: int) -> int:
        self._ballast.unlink(missing_ok=True)
        self._has_ballast = False
        log.warning("ballast_released", free_bytes=free, ballast_bytes=self._ballast_bytes)
        return self._free()

    def _make_ballast(self) -> bool:
        try:
            with self._ballast.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, self._ballast_bytes)
        except OSError:
            self._ballast.unlink(missing_ok=True)
            return False
        return True
