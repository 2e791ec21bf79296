"""A directory that cannot be used says why in one line, and never looks like an empty one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from support.rigs.faults.mounts import read_only
from support.rigs.store.driver import batch_of, command, run_driver
from support.rigs.store.rows import END, all_rows, append, packed_id, schedule

from broker_adapter.runtime.clock import SystemClock
from dmq.errors import FormatUnsupported, StoreCorrupt, StoreError, StoreFailed, StoreLocked, StoreReadOnly
from dmq.store.engines.rocks import RocksEngine
from dmq.store.files.cell import Cell
from dmq.store.schema.keys import FORMAT_VERSION, Family
from dmq.store.store import Store, StoreOptions

pytestmark = pytest.mark.integration
OPTIONS = StoreOptions(ballast_bytes=0)
FAR_MS = 4_000_000_000_000


def open_store(path: Path) -> Store:
    return Store.open(path, SystemClock(), OPTIONS)


@pytest.fixture
def cell(tmp_path: Path) -> Path:
    """A directory whose store was used and closed in order; every family has rows in tables."""
    path = tmp_path / "cell"
    store = open_store(path)
    store.commit([append(1), schedule(2, FAR_MS)])
    store.close()
    return path


def refused(path: Path, error: type[StoreError]) -> str:
    """Open, expect ``error`` in one line of reasonable length, twice: the refusal must not change the answer."""
    said, kept = [], []
    for _ in range(2):
        with pytest.raises(error) as caught:
            open_store(path)
        assert type(caught.value) is error
        kept.append(caught.value)  # with all that its frames know: nothing may be closed by the garbage collector
        said.append(str(caught.value))
        assert said[-1]
        assert "\n" not in said[-1]
    assert said[0] == said[1]
    return said[0]


def test_a_cell_keeps_its_id_and_its_rows(cell: Path) -> None:
    """Opened again, it is the same one; the marker is written once."""
    marker = (cell / "CELL").read_bytes()
    first = open_store(cell)
    cell_id = first.cell_id
    first.close()
    again = open_store(cell)
    assert again.cell_id == cell_id == json.loads(marker)["cell_id"]
    assert again.commit([append(1)])[0].repeated
    again.close()
    assert (cell / "CELL").read_bytes() == marker


def test_another_process_holds_the_lock(tmp_path: Path) -> None:
    """Refused at once, with the pid to look for; as soon as it ends, even by SIGKILL, the directory is free."""
    holder = subprocess.Popen(
        command("hold", tmp_path / "cell"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        said = refused(tmp_path / "cell", StoreLocked)
        assert str(holder.pid) in said
        assert str(tmp_path / "cell") in said
        holder.kill()
    open_store(tmp_path / "cell").close()


def test_this_process_holds_the_lock(cell: Path) -> None:
    """A second store in one process is refused as well, and does not let go of the first one's lock."""
    first = open_store(cell)
    for _ in range(2):
        with pytest.raises(StoreLocked, match=str(os.getpid())):
            open_store(cell)
    first.commit([append(5)])
    first.close()
    open_store(cell).close()


@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, 10**6])
def test_a_newer_marker_is_refused(cell: Path, version: int) -> None:
    """Before the database is touched: a newer format may not even be RocksDB."""
    files = sorted(path.name for path in (cell / "rocksdb").iterdir())
    (cell / "CELL").write_text(json.dumps({"format_version": version, "cell_id": "x"}), encoding="utf-8")
    assert str(version) in refused(cell, FormatUnsupported)
    assert sorted(path.name for path in (cell / "rocksdb").iterdir()) == files


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"7", b"null", b'{"format_version": 1}', b'{"format_version": "x", "cell_id": 1}', b"\xff\xfe"],
)
def test_an_unreadable_marker_is_damage(cell: Path, text: bytes) -> None:
    """Whatever stands there instead."""
    (cell / "CELL").write_bytes(text)
    assert "CELL" in refused(cell, StoreCorrupt)


def test_a_marker_that_is_a_directory_is_damage(cell: Path) -> None:
    """An error of the file system is one of ours."""
    (cell / "CELL").unlink()
    (cell / "CELL").mkdir()
    assert "CELL" in refused(cell, StoreCorrupt)


def remove_database(cell: Path) -> None:
    for path in (cell / "rocksdb").iterdir():
        path.unlink()
    (cell / "rocksdb").rmdir()


def remove(pattern: str) -> Callable[[Path], None]:
    def act(cell: Path) -> None:
        found = sorted((cell / "rocksdb").glob(pattern))
        assert found, pattern
        found[0].unlink()

    return act


def empty(pattern: str) -> Callable[[Path], None]:
    def act(cell: Path) -> None:
        for path in (cell / "rocksdb").glob(pattern):
            path.write_bytes(b"")

    return act


def cut(pattern: str) -> Callable[[Path], None]:
    def act(cell: Path) -> None:
        path = max((cell / "rocksdb").glob(pattern), key=lambda path: path.stat().st_size)
        os.truncate(path, path.stat().st_size // 2)

    return act


@pytest.mark.parametrize(
    "harm",
    [remove_database, remove("CURRENT"), remove("MANIFEST-*"), remove("*.sst"), empty("CURRENT"), empty("MANIFEST-*"),
     empty("*.sst"), cut("MANIFEST-*"), cut("*.sst")],
    ids=["no database", "no CURRENT", "no MANIFEST", "no table", "empty CURRENT", "empty MANIFEST", "empty tables",
         "half a MANIFEST", "half a table"],
)  # fmt: skip
def test_a_missing_or_cut_file_is_damage(cell: Path, harm: Callable[[Path], None]) -> None:
    """After a clean close. It must not be repaired by making a new database, and not be opened with less in it."""
    harm(cell)
    files = sorted(path.name for path in cell.iterdir())
    refused(cell, StoreCorrupt)
    assert sorted(path.name for path in cell.iterdir()) == files


def test_a_clean_end_is_remembered_until_the_next_opening(cell: Path) -> None:
    """What the files looked like is checked once; a store that is open, or was killed, has no such memory."""
    assert set(json.loads((cell / "CLOSED").read_text(encoding="utf-8"))["files"]) == {
        path.name for path in (cell / "rocksdb").iterdir() if path.suffix == ".sst" or path.name[:4] in {"CURR", "MANI"}
    }
    store = open_store(cell)
    assert not (cell / "CLOSED").exists()
    store.close()
    assert (cell / "CLOSED").exists()
    (cell / "CLOSED").write_bytes(b"{")
    assert "CLOSED" in refused(cell, StoreCorrupt)


def test_logs_may_be_missing_after_a_clean_close(cell: Path) -> None:
    """A clean close leaves nothing in them: everything is in tables."""
    for log in (cell / "rocksdb").glob("*.log"):
        assert log.stat().st_size == 0
        log.unlink()
    store = open_store(cell)
    assert [state is not None for state in (store.find(7, packed_id(1)), store.find(7, packed_id(2)))] == [True, True]
    assert len(all_rows(store, Family.TIMELINE)) == 1
    store.close()


def test_a_crash_before_the_marker_was_written_opens(tmp_path: Path) -> None:
    """The database was made, the process died, the marker is missing: it opens, and gets its marker."""
    path = tmp_path / "cell"
    store = open_store(path)
    store.commit([append(1)])
    store.close()
    (path / "CELL").unlink()
    (path / "CELL.part").write_bytes(b"{")
    again = open_store(path)
    assert again.commit([append(1)])[0].repeated
    again.close()
    assert json.loads((path / "CELL").read_text(encoding="utf-8"))["cell_id"] == again.cell_id


def test_a_crash_in_the_middle_of_making_the_database_opens(tmp_path: Path) -> None:
    """A database with no rows yet, or just its folder: nothing was accepted, so nothing can be missing."""
    (tmp_path / "one" / "rocksdb").mkdir(parents=True)
    store = open_store(tmp_path / "one")
    assert store.recovery.is_new
    store.close()
    (tmp_path / "two").mkdir()
    RocksEngine(tmp_path / "two" / "rocksdb").close()
    store = open_store(tmp_path / "two")
    assert store.recovery.is_new
    store.close()


def test_a_foreign_database_is_refused(tmp_path: Path) -> None:
    """Rows without our figures are not an empty store."""
    engine = RocksEngine(tmp_path / "cell" / "rocksdb")
    engine.write(batch_of(1))
    engine.close()
    refused(tmp_path / "cell", StoreCorrupt)
    assert not (tmp_path / "cell" / "CELL").exists()


def test_the_path_is_a_file(tmp_path: Path) -> None:
    """Or lies in one: the path is said."""
    (tmp_path / "file").write_bytes(b"precious")
    assert str(tmp_path / "file") in refused(tmp_path / "file", StoreFailed)
    assert str(tmp_path / "file") in refused(tmp_path / "file" / "inside", StoreFailed)
    assert (tmp_path / "file").read_bytes() == b"precious"


def test_a_read_only_directory(cell: Path) -> None:
    """Refused in a line that says so, whoever runs it: as root permissions would prove nothing."""
    ran = run_driver("hold", cell, before=read_only(cell))
    assert ran.returncode != 0
    assert ran.stdout == ""
    assert ran.stderr.splitlines()[-1].startswith(f"{StoreReadOnly.__module__}.StoreReadOnly: {cell}")


def test_a_read_only_database(cell: Path) -> None:
    """The directory can be written, what is in it cannot."""
    ran = run_driver("hold", cell, before=read_only(cell / "rocksdb"))
    assert ran.stdout == ""
    assert ran.stderr.splitlines()[-1].startswith(f"{StoreReadOnly.__module__}.StoreReadOnly: ")


def test_a_new_directory_outlives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each directory that was made is an entry of the one above it, which is synced before anything is accepted."""
    synced: list[Path] = []
    fsync = os.fsync

    def watch(handle: int) -> None:
        synced.append(Path(f"/proc/self/fd/{handle}").readlink())
        fsync(handle)

    monkeypatch.setattr(os, "fsync", watch)
    Store.open(tmp_path / "var" / "lib" / "dmq", SystemClock(), StoreOptions()).close()
    assert {tmp_path, tmp_path / "var", tmp_path / "var" / "lib"} <= set(synced)
    synced.clear()
    Store.open(tmp_path / "var" / "lib" / "dmq", SystemClock(), StoreOptions()).close()
    assert tmp_path / "var" / "lib" not in synced


def test_a_refusal_releases_the_directory(cell: Path) -> None:
    """Whoever mends the files can lock it: neither our lock nor RocksDB's is held by a store that did not open."""
    remove("*.sst")(cell)
    refused(cell, StoreCorrupt)
    for name in ("CELL", "CLOSED"):
        (cell / name).unlink()
    Cell(cell).close()
    for _ in range(2):
        with pytest.raises(StoreCorrupt):
            RocksEngine(cell / "rocksdb")


def test_a_marker_that_cannot_be_written_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening fails as a whole: the database and the lock are let go, and the next try is the first."""

    def fail(_: Cell) -> None:
        raise OSError(28, "No space left on device")

    before = set(threading.enumerate())
    with monkeypatch.context() as patched:
        patched.setattr(Cell, "mark_created", fail)
        with pytest.raises(StoreFailed, match="No space left"):
            open_store(tmp_path / "cell")
    assert set(threading.enumerate()) <= before
    store = open_store(tmp_path / "cell")
    assert store.scan(Family.QUEUE, b"", END, limit=1).rows == []
    store.close()


def test_earlier_holders_of_the_directory_are_dead(tmp_path: Path) -> None:
    """Each process finds those before it. A copy has none, since its processes may live; nor has a damaged file."""
    original, copy = tmp_path / "original", tmp_path / "copy"

    def add(path: Path, holder: str) -> list[str]:
        with closing(Cell(path)) as cell:
            return cell.add_holder(holder)

    assert [add(original, each) for each in "abc"] == [[], ["a"], ["a", "b"]]
    assert add(original, "d" * 20)[-1] == "c"
    assert [len(add(original, "e")) for _ in range(9)][-1] == 8
    shutil.copytree(original, copy)
    assert add(copy, "f") == []
    (original / "HOLDERS").write_text("{", encoding="utf-8")
    assert [add(original, each) for each in "gh"] == [[], ["g"]]
