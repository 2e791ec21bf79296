"""Backups: whole or not there, of a store that runs and of one that is stopped; and what serves them."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest
from support.clients.wire.client import WireClient, a_message
from support.forges.store.store_rig import checked, files_of, held
from support.rigs.daemon.process import Daemon, run_command
from support.rigs.store.rows import all_rows, schedule

from broker_adapter.runtime.clock import SystemClock
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.admin.client import AdminClient, CallRefused
from dmq.errors import StoreCorrupt, StoreFailed, StoreLocked
from dmq.store import backup as backups
from dmq.store.backup import TargetTaken, back_up, back_up_stopped
from dmq.store.schema.keys import Family
from dmq.store.store import Store, StoreOptions

pytestmark = pytest.mark.integration
PATIENCE_S = 20.0
FAR_MS = 4_000_000_000_000
OPTIONS = StoreOptions(ballast_bytes=0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An open store with a thousand entries that wait."""
    made = Store.open(tmp_path / "cell", SystemClock(), OPTIONS)
    made.commit([schedule(number, FAR_MS) for number in range(1_000)])
    yield made
    made.close()


def opened(path: Path) -> int:
    """How many entries a store holds, opened as a daemon does."""
    copy = Store.open(path, SystemClock(), OPTIONS)
    try:
        return sum(copy.pending().values())
    finally:
        copy.close()


class Sending:
    """Sends all the time, every second message delayed; remembers what was answered OK. Use it as a context."""

    def __init__(self, daemon: Daemon) -> None:
        self.acked: list[str] = []
        self._address = daemon.address
        self._news = threading.Condition()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def more(self, count: int) -> set[str]:
        """Wait for so many more; return the ids of all so far."""
        with self._news:
            reached = len(self.acked) + count
            assert self._news.wait_for(lambda: len(self.acked) >= reached, PATIENCE_S)
            return set(self.acked)

    def _run(self) -> None:
        with WireClient(self._address) as client:
            for number in itertools.takewhile(lambda _: not self._is_over.is_set(), itertools.count()):
                name = f"m-{number}"
                message = a_message("orders", name, deliver_at_ms=FAR_MS if number % 2 else 0)
                if client.send(message).status.code == wire.OK:
                    with self._news:
                        self.acked.append(name)
                        self._news.notify()


def test_a_running_daemon_is_copied_with_all_it_acknowledged(data: Path, tmp_path: Path) -> None:
    """Under load, several times; each copy is whole, has all that was answered before it, and a daemon serves it."""
    before: list[set[str]] = []
    with Daemon(data) as daemon, AdminClient(daemon.address) as admin, Sending(daemon) as load:
        for number in range(3):
            before.append(load.more(50))
            answer = admin.back_up(str(tmp_path / f"copy-{number}"))
            assert (answer.folder, answer.linked_bytes > 0) == (str(tmp_path / f"copy-{number}"), True)
    for number, known in enumerate(before):
        path = tmp_path / f"copy-{number}"
        assert not checked(path).findings.count, checked(path).findings.first
        found = held(path)
        assert known <= found.waiting.keys() | found.ready
    with Daemon(tmp_path / "copy-2") as copy, WireClient(copy.address) as client:
        ready = sorted(held(tmp_path / "copy-2").ready)
        got = client.drain("orders", "workers", len(ready))
        assert sorted(each.message_id for each in got) == ready
    assert not list(data.glob(".*"))


def test_the_command_copies_and_refuses(data: Path, tmp_path: Path) -> None:
    """Of the running daemon and of the stopped one; a folder that holds something, or lies in the store, is refused."""
    target = tmp_path / "copy"
    with Daemon(data) as daemon:
        with WireClient(daemon.address) as client:
            client.send(a_message("orders", "m-1", deliver_at_ms=FAR_MS))
        done = run_command("-a", daemon.address, "store", "backup", str(target), "-o", "json")
        assert (done.returncode, json.loads(done.stdout)["folder"]) == (0, str(target))
        again = run_command("-a", daemon.address, "store", "backup", str(target))
        assert (again.returncode, again.stderr.count("\n")) == (1, 1)
        assert "not empty" in again.stderr
        assert run_command("store", "backup", str(tmp_path / "other"), "--data", str(data)).returncode == 6
        with AdminClient(daemon.address) as admin:
            for folder in ("relative", str(data / "inside"), "", str(tmp_path / "CELL" / "\0")):
                with pytest.raises(CallRefused):
                    admin.back_up(folder)
        daemon.stop()
    before = files_of(data)
    (tmp_path / "empty").mkdir()
    for name in ("stopped", "empty"):
        assert run_command("store", "backup", str(tmp_path / name), "--data", str(data)).returncode == 0
        assert list(held(tmp_path / name).waiting) == ["m-1"]
    assert files_of(data) == before
    assert run_command("store", "backup", str(tmp_path / "x"), "--data", str(tmp_path)).returncode == 3
    assert not (tmp_path / "x").exists()


def test_a_copy_shares_nothing_that_changes(store: Store, tmp_path: Path) -> None:
    """What happens to the store afterwards is nothing to the copy, and the other way round."""
    copied = back_up(store, tmp_path / "cell", tmp_path / "copy")
    assert 0 < copied.linked_bytes < copied.size_bytes
    store.commit([schedule(number, FAR_MS) for number in range(1_000, 1_500)])
    assert opened(tmp_path / "copy") == 1_000
    assert sum(store.pending().values()) == 1_500
    shutil.rmtree(tmp_path / "copy")
    assert len(all_rows(store, Family.TIMELINE)) == 1_500


def test_where_links_cannot_be_tables_are_copied(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on another file system: the copy stands alone."""

    def refuse(self: Path, target: Path) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    copied = back_up(store, tmp_path / "cell", tmp_path / "copy")
    assert copied.linked_bytes == 0
    assert all(each.stat().st_nlink == 1 for each in (tmp_path / "copy" / "rocksdb").iterdir())
    assert opened(tmp_path / "copy") == 1_000


@pytest.mark.parametrize("step", ["fill", "mark_created", "rename"])
def test_a_kill_in_the_middle_leaves_no_copy(store: Store, tmp_path: Path, step: str) -> None:
    """Whenever it comes, nothing has the name of the copy; the next backup is whole and leaves nothing else behind."""
    target = tmp_path / "copies" / "copy"
    target.parent.mkdir()
    store.close()
    code = (
        "import os, sys, signal\n"
        "from pathlib import Path\n"
        "from dmq.store import backup\nfrom dmq.store.files import cell\n"
        "def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)\n"
        f"step = {step!r}\n"
        "if step == 'fill': backup.shutil.copyfile = die\n"
        "elif step == 'mark_created': cell.Cell.mark_created = die\n"
        "else: Path.rename = die\n"
        "backup.back_up_stopped(Path(sys.argv[1]), Path(sys.argv[2]))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "cell"), str(target)], check=False, capture_output=True, text=True
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert [path.name for path in target.parent.iterdir()] == [".copy.part"]
    back_up_stopped(tmp_path / "cell", target)
    assert [path.name for path in target.parent.iterdir()] == ["copy"]
    assert opened(target) == 1_000


def test_a_copy_that_lost_a_file_is_refused(store: Store, tmp_path: Path) -> None:
    """It knows the sizes of its files, so one that was cut or left out on the way elsewhere does not go unseen."""
    back_up(store, tmp_path / "cell", tmp_path / "copy")
    table = next((tmp_path / "copy" / "rocksdb").glob("*.sst"))
    os.truncate(shutil.copyfile(table, tmp_path / "short"), 100)
    (tmp_path / "short").replace(table)
    with pytest.raises(StoreCorrupt, match="changed since it was closed"):
        opened(tmp_path / "copy")


def test_invalid_input_is_refused(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file, a full folder, a place in the store or on no disk, a store in use, a copy given up: nothing is left."""
    data = tmp_path / "cell"
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for target in (tmp_path / "file", tmp_path / "link", tmp_path, data / "copy", data):
        with pytest.raises(TargetTaken):
            back_up(store, data, target)
    with pytest.raises(TargetTaken, match="mount its disk, or create the folder"):
        back_up(store, data, tmp_path / "not" / "mounted" / "copy")
    with pytest.raises(StoreLocked):
        back_up_stopped(data, tmp_path / "copy")
    with pytest.raises(StoreFailed, match="cancelled"):
        back_up(store, data, tmp_path / "copy", is_wanted=lambda: False)
    inner = backups._copy_database

    def while_another(*arguments: object) -> int:
        with pytest.raises(StoreLocked):
            back_up(store, data, tmp_path / "copy")
        monkeypatch.setattr(backups, "_copy_database", inner)
        return inner(*arguments)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr(backups, "_copy_database", while_another)
    back_up(store, data, tmp_path / "copy")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cell", "copy", "file", "link"]
    assert not list(data.glob(".*"))
