"""A disk that runs out, and one that fails: new messages stop in time, and what was acknowledged stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.rigs.faults.disk_shim import Shim
from support.rigs.faults.mounts import small_disk
from support.rigs.store.driver import row, row_key, run_driver

from broker_adapter.runtime.clock import SystemClock
from dmq.store.schema.keys import Family
from dmq.store.store import Store

pytestmark = pytest.mark.integration
_MIB = 1024 * 1024


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    path = tmp_path / "disk"
    path.mkdir()
    return path


def test_below_the_low_water_mark_only_sends_stop(disk: Path) -> None:
    """Sends are to be refused, acks go on; the ballast gives them room when even theirs runs out, and comes back."""
    ran = run_driver("run_low", disk, before=small_disk(disk, 64 * _MIB))
    assert [json.loads(line) for line in ran.stdout.splitlines()] == [
        # is_disk_low, has_ballast, the file is there
        ["plenty", False, True, True],
        ["low", True, True, True],
        ["nearly full", True, False, False],
        ["room was given back", True],
        ["room again", False, True, True],
    ], ran.stderr


def test_acknowledgements_go_on_for_as_long_as_the_ballast_lasts_and_then_wait(disk: Path) -> None:
    """Nobody sends, nobody asks for the status: the writer itself looks, and waits for room instead of dying."""
    ran = run_driver("run_acks", disk, before=small_disk(disk, 64 * _MIB))
    assert ran.stdout, ran.stderr
    said = json.loads(ran.stdout.splitlines()[-1])
    assert said == {"many": True, "waited": True, "heard": 0, "lost": 0}, ran.stdout


def test_a_store_is_opened_on_a_full_disk_with_its_ballast(disk: Path) -> None:
    """The log is written into tables when a store is opened: the room for that is the ballast's."""
    ran = run_driver("run_start", disk, str(16 * _MIB), before=small_disk(disk, 64 * _MIB))
    assert ran.stdout, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1]) == ["opened", 0, False], ran.stdout


def test_without_any_room_the_start_gives_the_next_step(disk: Path) -> None:
    """One line: no room, and what then; not damage, and not a fault that nobody knows."""
    ran = run_driver("run_start", disk, "0", before=small_disk(disk, 64 * _MIB))
    name, text = json.loads(ran.stdout.splitlines()[-1])
    assert name == "StoreFull", ran.stdout
    assert "free space on that file system" in text


@pytest.mark.parametrize("value_bytes", [300, 100_000])
def test_a_full_disk_is_fail_stop_and_loses_nothing_acknowledged(disk: Path, value_bytes: int) -> None:
    """ENOSPC under the writer: the caller hears of it, so does ``on_failure``, once; with room again all is there."""
    ran = run_driver("run_full", disk, str(value_bytes), before=small_disk(disk, 32 * _MIB))
    assert ran.stdout, ran.stderr
    assert json.loads(ran.stdout) == {
        "acknowledged": True,
        "error": "StoreFailed",
        "later": "StoreFailed",
        "heard": 1,
        "lost": 0,
        "was_closed": False,
    }


def test_a_sync_that_failed_is_never_tried_again(tmp_path: Path) -> None:
    """After EIO the kernel may have dropped the pages: a second sync that succeeds would be a lie. On close too."""
    shim = Shim(tmp_path)
    ran = run_driver("fail_syncs", tmp_path / "cell", "20", environment=shim.environment)
    assert ran.stdout, ran.stderr
    assert json.loads(ran.stdout) == {"raised": ["StoreFailed"] * 3, "heard": ["StoreBroken"]}
    done, _, failed = shim.syncs().partition("f")
    assert len(done) >= 20
    assert failed == ""
    store = Store.open(tmp_path / "cell", SystemClock())
    assert not store.recovery.was_closed
    assert store.get_many(Family.GROUP, [row_key(number) for number in range(20)]) == [
        row(number) for number in range(20)
    ]
    store.close()
