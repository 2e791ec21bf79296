"""Free space: sends stop while there is still room to finish what was accepted.

Below the low-water mark new messages are refused; acks, deliveries and deletes go on. A ballast file is kept for them:
it is given back to the file system when even their room runs out, and made again once there is plenty.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_MIB = 1024 * 1024
LOW_WATER_SHARE = 0.05
LOW_WATER_BYTES_MIN = 32 * _MIB
LOW_WATER_BYTES_MAX = 1024 * _MIB


class DiskState(NamedTuple):
    """One look at the file system."""

    free_bytes: int
    low_water_bytes: int
    is_low: bool
    has_ballast: bool


class DiskGuard:
    """Watches the file system of one directory. ``check`` is cheap enough to be called for every batch."""

    def __init__(self, directory: Path, *, low_water_bytes: int | None, ballast_bytes: int) -> None:
        self._directory = directory
        self._ballast = directory / "BALLAST"
        self._ballast_bytes = ballast_bytes
        if low_water_bytes is None:
            found = os.statvfs(directory)
            share = int(found.f_blocks * found.f_frsize * LOW_WATER_SHARE)
            low_water_bytes = min(max(share, LOW_WATER_BYTES_MIN), LOW_WATER_BYTES_MAX)
        self._low_water_bytes = low_water_bytes
        self._has_ballast = self._ballast.exists()
        self.state = self.check()

    def check(self) -> DiskState:
        """Look at the file system, let the ballast go or make it again, and return the state."""
        found = os.statvfs(self._directory)
        free = found.f_bavail * found.f_frsize
        if self._has_ballast and free < self._low_water_bytes // 4:
            self._ballast.unlink(missing_ok=True)
            self._has_ballast = False
        elif not self._has_ballast and self._ballast_bytes and free > 2 * self._low_water_bytes + self._ballast_bytes:
            self._has_ballast = self._make_ballast()
        self.state = DiskState(free, self._low_water_bytes, free < self._low_water_bytes, self._has_ballast)
        return self.state

    def _make_ballast(self) -> bool:
        try:
            with self._ballast.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, self._ballast_bytes)
        except OSError:
            self._ballast.unlink(missing_ok=True)
            return False
        return True
