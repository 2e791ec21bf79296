"""How many processors this process may use: its affinity says so, and the quotas of its control groups."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

_OWN_GROUPS: Final = Path("/proc/self/cgroup")
_MOUNT: Final = Path("/sys/fs/cgroup")


def processors(own_groups: Path = _OWN_GROUPS, mount: Path = _MOUNT) -> int:
    """Return how many whole processors there are for this process, at least 1.

    ``own_groups`` names its control groups, and below ``mount`` these are: Linux has them, in versions 1 and 2.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([count, *_quotas(own_groups, mount)]))


def _quotas(own_groups: Path, mount: Path) -> Iterator[int]:
    """Give the whole processors that each group allows which has this process, or has a group that has it."""
    with suppress(OSError):
        for line in own_groups.read_text(encoding="utf-8").splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0" and not controllers:
                yield from _along(mount, path, _quota_2)
            elif "cpu" in controllers.split(","):
                yield from _along(mount / "cpu", path, _quota_1)


def _along(root: Path, path: str, quota_of: Callable[[Path], tuple[int, int]]) -> Iterator[int]:
    """Give the quotas on the way from a group to the root. A container may see its own group as the root."""
    for group in (Path(path.lstrip("/")), *Path(path.lstrip("/")).parents):
        with suppress(OSError, ValueError):  # it is not there, or has no quota
            quota_us, period_us = quota_of(root / group)
            if quota_us > 0 and period_us > 0:
                yield quota_us // period_us


def _quota_2(group: Path) -> tuple[int, int]:
    quota_us, period_us = (group / "cpu.max").read_text().split()
    return int(quota_us), int(period_us)  # which "max" is not


def _quota_1(group: Path) -> tuple[int, int]:
    return int((group / "cpu.cfs_quota_us").read_text()), int((group / "cpu.cfs_period_us").read_text())
