"""How many processes a daemon has: the processors that it may use decide, as its affinity and control groups say."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from dmq.daemon.server import fronts
from dmq.daemon.server.fronts import FRONTS_MAX, fronts_of, processors

_OF_SERVICE = "0::/system.slice/dmq.service\n"
_V1 = "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/system.slice/docker.service\n"


@pytest.fixture(autouse=True)
def _eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with eight processors, whatever it has."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


def _processors(folder: Path, own_groups: str | None, files: Mapping[str, str]) -> int:
    """Lay out control groups as Linux shows them, and count."""
    listed = folder / "cgroup"
    if own_groups is not None:
        listed.write_text(own_groups)
    mount = folder / "mount"
    for name, text in files.items():
        file = mount / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return processors(listed, mount)


def _v1(group: str, quota_us: str) -> dict[str, str]:
    return {f"cpu/{group}cpu.cfs_quota_us": f"{quota_us}\n", f"cpu/{group}cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("own_groups", "files", "count"),
    [
        (_OF_SERVICE, {"system.slice/dmq.service/cpu.max": "200000 100000\n"}, 2),
        (
            _OF_SERVICE,
            {"system.slice/cpu.max": "300000 100000\n", "system.slice/dmq.service/cpu.max": "max 100000\n"},
            3,
        ),
        (_OF_SERVICE, {"system.slice/cpu.max": "100000 50000\n", "system.slice/dmq.service/cpu.max": "50 10\n"}, 2),
        ("0::/\n", {"cpu.max": "400000 100000\n"}, 4),
        ("0::/../../elsewhere\n", {"cpu.max": "400000 100000\n"}, 4),
        (_V1, _v1("docker/abc/", "300000"), 3),
        (_V1, _v1("", "500000"), 5),
        (_V1, _v1("docker/abc/", "-1"), 8),
        (_V1, {"cpu.max": "100000 100000\n"}, 1),
    ],
    ids=["own", "above", "the-least", "container", "outside", "v1", "v1-container", "v1-none", "both-mounted"],
)
def test_the_quota_of_each_group_around_counts(
    tmp_path: Path, own_groups: str, files: Mapping[str, str], count: int
) -> None:
    """Its own, that of a slice above it, and a container's, which is the root for who is in it; versions 1 and 2."""
    assert _processors(tmp_path, own_groups, files) == count


@pytest.mark.parametrize(
    ("own_groups", "files"),
    [(None, {}), (_OF_SERVICE, {}), (_OF_SERVICE, {"cpu.max": "nonsense\n"}), (_OF_SERVICE, {"cpu.max": "0 0\n"})],
    ids=["no-groups", "no-quota", "unreadable", "nothing"],
)
def test_without_a_quota_the_affinity_counts(
    tmp_path: Path, own_groups: str | None, files: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be read is no bound, and a process that is bound to three processors has three."""
    assert _processors(tmp_path, own_groups, files) == 8
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 5, 7}, raising=False)
    assert _processors(tmp_path, own_groups, files) == 3


def test_a_part_of_a_processor_is_one_and_parts_do_not_count(tmp_path: Path) -> None:
    """Half a processor is one; two and a half are two."""
    assert _processors(tmp_path, "0::/\n", {"cpu.max": "50000 100000\n"}) == 1
    assert _processors(tmp_path, "0::/\n", {"cpu.max": "250000 100000\n"}) == 2


@pytest.mark.parametrize(("count", "wanted"), [(1, 0), (2, 2), (3, 3), (4, 4), (64, FRONTS_MAX)])
def test_auto_is_a_front_for_each_processor(monkeypatch: pytest.MonkeyPatch, count: int, wanted: int) -> None:
    """Up to a bound, and on one processor no front at all; what is said is done on any machine."""
    monkeypatch.setattr(fronts, "processors", lambda: count)
    assert fronts_of("auto") == wanted
    assert [fronts_of(said) for said in (1, 2, 64)] == [0, 2, 64]
