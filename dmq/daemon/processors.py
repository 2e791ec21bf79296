"""Number of usable processors: from the affinity of the process, and the quotas of its control groups."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

_OWN_GROUPS: Final = Path("/proc/self/cgroup")
_MOUNT: Final = Path("/sys/fs/cgroup")


def processors(own_groups: Path = _OWN_GROUPS, mount: Path = _MOUNT) -> int:
    """Return the number of whole processors that this process may use, at least 1.

    ``own_groups`` names its control groups, which are below ``mount`` on Linux, in versions 1 and 2.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([count, *_quotas(own_groups, mount)]))


def _quotas(own_groups: Path, mount: Path) -> Iterator[int]:
    """Yield the whole processors that each control group of this process, or a parent of it, allows."""
    with suppress(OSError):
        for line in own_groups.read_text(encoding="utf-8").splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0" and not controllers:
                yield from _along(mount, path, _quota_2)
            elif "cpu" in controllers.split(","):
                yield from _along(mount / "cpu", path, _quota_1)


def _along(root: Path, path: str, quota_of: Callable[[Path], tuple[int, int]]) -> Iterator[int]:
    """Yield the quotas on the path from a group to the root. A container may see its own group as the root."""
    for group in (Path(path.lstrip("/")), *Path(path.lstrip("/")).parents):
        with suppress(OSError, ValueError):  # missing, or without a quota
            quota_us, period_us = quota_of(root / group)
            if quota_us > 0 and period_us > 0:
                yield quota_us // period_us


def _quota_2(group: Path) -> tuple[int, int]:
    quota_us, period_us = (group / "cpu.max").read_text().split()
    return int(quota_us), int(period_us)  # "max" is not a number


def _quota_1(group: Path) -> tuple[int, int]:
    return int((group / "cpu.cfs_quota_us").read_text()), int((group / "cpu.cfs_period_us").read_text())
