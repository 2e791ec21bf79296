"""Who may read what a daemon keeps: its own user, unless it was told otherwise; and whose files a backup takes."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from support.rigs.daemon.process import Daemon

from broker_adapter.runtime.clock import SystemClock
from dmq.errors import StoreFull
from dmq.store.backup import TargetTaken, back_up, back_up_stopped
from dmq.store.store import Store

pytestmark = pytest.mark.integration


def modes(root: Path) -> set[tuple[bool, int]]:
    """Whether it is a directory, and its mode, of all there is."""
    return {(each.is_dir(), stat.S_IMODE(each.stat().st_mode)) for each in (root, *root.rglob("*"))}


def test_files_of_a_daemon_are_private(tmp_path: Path) -> None:
    """Also where the directory was open before, which is said once."""
    data = tmp_path / "data"
    data.mkdir(mode=0o755)
    data.chmod(0o755)
    with Daemon(data) as daemon:
        assert daemon.event("directory_mode_restricted")["path"] == str(data)
        daemon.stop()
    assert modes(data) <= {(True, 0o700), (False, 0o600)}


def test_a_trail_may_be_read_by_a_group(tmp_path: Path) -> None:
    """The trail and the way to it; the store stays closed."""
    data = tmp_path / "data"
    with Daemon(data, env={**os.environ, "DMQ_TRAIL_MODE": "group"}) as daemon:
        daemon.stop()
    assert modes(data / "trail") == {(True, 0o750), (False, 0o640)}
    assert stat.S_IMODE(data.stat().st_mode) == 0o710
    assert stat.S_IMODE((data / "rocksdb").stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to somebody else")
def test_a_volume_of_another_owner_is_accepted_as_it_is(tmp_path: Path) -> None:
    """As Kubernetes gives one: its root belongs to root and the group of the pod, and holds lost+found."""
    data = tmp_path / "data"
    (data / "lost+found").mkdir(parents=True)
    (data / "lost+found").chmod(0o700)
    for each in (data, data / "lost+found"):
        os.chown(each, 65534, -1)
    data.chmod(0o2775)
    with Daemon(data, prefix=["setpriv", "--bounding-set=-all", "--inh-caps=-all"]) as daemon:
        daemon.stop()
        daemon.restart()
        assert not daemon.events("directory_mode_restricted")
        assert not daemon.events("store_copy_detected")
        daemon.stop()
    assert stat.S_IMODE(data.stat().st_mode) == 0o2775
    assert {each.name for each in data.iterdir() if stat.S_IMODE(each.stat().st_mode) & 0o077} == set()


@pytest.mark.parametrize("kind", ["directory", "file", "link"])
def test_a_backup_takes_no_foreign_part(tmp_path: Path, kind: str) -> None:
    """What lies under its working name and was not made by a backup is named, and stays as it is."""
    Store.open(tmp_path / "cell", SystemClock()).close()
    part = tmp_path / ".copy.part"
    mine = tmp_path / "mine"
    (mine / "rocksdb").mkdir(parents=True)
    (mine / "rocksdb" / "precious").write_text("1", encoding="ascii")
    if kind == "directory":
        mine.rename(part)
    elif kind == "link":
        part.symlink_to(mine)
    else:
        part.write_text("precious", encoding="ascii")
    before = sorted(str(each) for each in tmp_path.rglob("*"))
    with pytest.raises(TargetTaken, match="is not an unfinished backup"):
        back_up_stopped(tmp_path / "cell", tmp_path / "copy")
    assert sorted(str(each) for each in tmp_path.rglob("*")) == before


def test_a_backup_is_its_owners(tmp_path: Path) -> None:
    """The directory is closed, so what lies in it is, whatever the process that made it allows others."""
    Store.open(tmp_path / "cell", SystemClock()).close()
    back_up_stopped(tmp_path / "cell", tmp_path / "copy")
    assert stat.S_IMODE((tmp_path / "copy").stat().st_mode) == 0o700


def test_other_writers_leave_the_last_room_to_acknowledgements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the low-water mark a backup to the same file system is refused, and the trail waits."""
    store = Store.open(tmp_path / "cell", SystemClock())
    try:
        monkeypatch.setattr(store, "is_disk_low", lambda: True)
        with pytest.raises(StoreFull, match="low-water mark"):
            back_up(store, tmp_path / "cell", tmp_path / "copy")
        assert store.keeps_room_from(tmp_path / "trail" / "not there yet")
        assert not store.keeps_room_from(Path("/proc/self"))
        monkeypatch.setattr(store, "is_disk_low", lambda: False)
        back_up(store, tmp_path / "cell", tmp_path / "copy")
    finally:
        store.close()
