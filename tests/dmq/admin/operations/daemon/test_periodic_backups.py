"""Backups that a daemon makes by itself: when, which are kept, and what failures, kills and clocks leave of them."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import psutil
import pytest
from support.clients.wire.client import WireClient, a_message
from support.forges.store.store_rig import held
from support.rigs.daemon.process import Daemon, run_command

from broker_adapter.runtime.clock import ManualClock
from dmq.admin.client import AdminClient
from dmq.admin.operations.daemon import backups as admin_backups
from dmq.admin.operations.daemon.backups import Backups
from dmq.admin.operations.daemon.periodic_backups import AGAIN_MS, BackupRule, PeriodicBackups, due_ms
from dmq.errors import DmqError, StoreCorrupt, StoreFull
from dmq.recovery import check_store
from dmq.recovery.backups.folder import BackupFolder
from dmq.store.backup import back_up
from dmq.store.store import Store, StoreOptions

pytestmark = pytest.mark.integration

HOUR_MS, DAY_MS, PATIENCE_S = 3_600_000, 86_400_000, 60.0
OPTIONS = StoreOptions(ballast_bytes=0)
SIX_HOURS = BackupRule(6 * HOUR_MS)
AT_THREE = BackupRule(0, "0 3 * * *", "Europe/Berlin")


class Made:
    """A store, its folder of backups, and what makes them; time passes when it is told to."""

    def __init__(self, root: Path, rule: BackupRule = SIX_HOURS, count: int = 3) -> None:
        self.root, self.rule, self.count = root, rule, count
        self.path = root / "backups"
        self.path.mkdir(exist_ok=True)
        self.clock = ManualClock()
        self.store = Store.open(root / "cell", self.clock, OPTIONS)

    async def open(self) -> PeriodicBackups:
        """Begin a run of the daemon."""
        backups = Backups(self.store, self.root / "cell")
        folder = BackupFolder(self.path, self.store.identity.number)
        self.folder, self.periodic = folder, PeriodicBackups(self.store, backups, self.rule, folder, self.count)
        await self.periodic.open()
        return self.periodic

    async def look(self, times: int = 3) -> list[int]:
        """Look as often; return the numbers of the backups that there are."""
        for _ in range(times):
            await self.periodic.look()
        return self.numbers()

    async def pass_by(self, ms: int) -> list[int]:
        """Let time pass, and look."""
        self.clock.advance(ms)
        return await self.look()

    def numbers(self) -> list[int]:
        return [each.number for each in self.folder.kept()]


@pytest.fixture(autouse=True)
def in_this_process() -> Iterator[None]:
    """Backups are looked through here: another process takes long to start. The daemon's test has one."""

    def look_through(_: BackupFolder, target: Path) -> None:
        if check_store(target, lambda _: None).findings.count:
            raise StoreCorrupt("the new backup is incomplete and was removed")

    with patch.object(BackupFolder, "_look_through", look_through):
        yield


def run(tmp_path: Path, scenario: Callable[[Made], Awaitable[None]], rule: BackupRule = SIX_HOURS) -> None:
    made = Made(tmp_path, rule)

    async def play() -> None:
        await made.open()
        await scenario(made)

    try:
        asyncio.run(play())
    finally:
        made.store.close()


def test_when_one_is_due() -> None:
    """At once without any; so long after the last one, or at the first time of the expression that follows it."""
    now_ms = 1_700_000_000_000  # 14 November 2023, 22:13 UTC
    assert due_ms(SIX_HOURS, 0, now_ms) == due_ms(AT_THREE, 0, now_ms) == now_ms
    assert due_ms(SIX_HOURS, now_ms - HOUR_MS, now_ms) == now_ms + 5 * HOUR_MS
    at_two_utc = 1_700_013_600_000
    assert due_ms(AT_THREE, now_ms, now_ms) == at_two_utc
    assert due_ms(AT_THREE, now_ms - 3 * DAY_MS, now_ms) == at_two_utc - 3 * DAY_MS
    assert due_ms(BackupRule(0, "0 0 30 2 *"), now_ms, now_ms) is None
    assert (str(SIX_HOURS), str(AT_THREE)) == ("every 6h", "0 3 * * * Europe/Berlin")


@pytest.mark.parametrize("rule", [SIX_HOURS, AT_THREE], ids=str)
def test_each_comes_once_at_its_time(tmp_path: Path, rule: BackupRule) -> None:
    """The first at once, the next when it is due and not before, one for all that was missed, and so many are kept."""

    async def scenario(made: Made) -> None:
        assert await made.look() == [1]
        due = due_ms(rule, made.periodic.last_ms, made.clock.now_ms())
        assert due is not None
        assert made.periodic.status().next_at_ms == due
        assert await made.pass_by(due - made.clock.now_ms() - 1) == [1]
        assert await made.pass_by(1) == [1, 2]
        await made.open()  # a restart changes nothing
        assert await made.look() == [1, 2]
        made.clock.advance(5 * DAY_MS)  # the daemon is down
        await made.open()
        assert await made.look() == [1, 2, 3]
        assert await made.pass_by(DAY_MS) == [2, 3, 4]
        status = made.periodic.status()
        assert (status.last_folder, status.rule, status.error) == (str(made.folder.kept()[-1].path), str(rule), "")
        assert status.last_bytes > 0

    run(tmp_path, scenario, rule)


def test_only_messages_of_this_store_are_removed(tmp_path: Path) -> None:
    """Not one by hand, one of another store, one that was renamed or is served, a file or a link of such a name."""

    async def scenario(made: Made) -> None:
        await made.look()
        back_up(made.store, tmp_path / "cell", made.path / "by-hand")
        (first,) = made.folder.kept()
        others = ["by-hand", "notes.txt"]
        (made.path / "notes.txt").write_text("mine")
        no_time = first.path.name.replace("-000001-", "-000010-")[: -len("20230101T000000Z")] + "20239999T999999Z"
        for name in (f"dmq-{1:016x}-000001-20230101T000000Z", f"{first.path.name}.keep", no_time):
            shutil.copytree(first.path, made.path / name)
            others.append(name)
        link, file, served = (first.path.name.replace("-000001-", f"-{n:06d}-") for n in (7, 8, 9))
        (made.path / link).symlink_to(first.path)
        (made.path / file).write_text("")
        shutil.copytree(first.path, made.path / served)
        Store.open(made.path / served, made.clock, OPTIONS).close()
        for _ in range(5):
            await made.pass_by(6 * HOUR_MS)
        assert made.numbers() == [4, 5, 6]
        kept = {each.path.name for each in made.folder.kept()}
        assert {each.name for each in made.path.iterdir()} == {*others, link, file, served, *kept}

    run(tmp_path, scenario)


def test_files_of_a_killed_run_are_gone_after_the_start(tmp_path: Path) -> None:
    """One too many, killed before it was removed; and one not looked through, in which somebody goes on writing."""

    async def scenario(made: Made) -> None:
        for _ in range(3):
            await made.pass_by(6 * HOUR_MS)
        oldest, newest = made.folder.kept()[0].path, made.folder.kept()[-1].path
        one_more = newest.name.replace("-000003-", "-000004-")
        shutil.copytree(newest, made.path / one_more)
        shutil.copytree(newest, made.path / f"{one_more}.unverified")

        def one_file_stays(path: Path, **_: object) -> None:
            shutil.rmtree(path / "db")

        with patch("dmq.recovery.backups.folder.shutil", Mock(rmtree=one_file_stays)):
            await made.open()
        assert not oldest.exists()
        assert all(each.name.endswith((".removing", "Z")) for each in made.path.iterdir())
        await made.open()
        assert made.numbers() == [2, 3, 4]
        assert len(list(made.path.iterdir())) == 3

    run(tmp_path, scenario)


def test_the_check_of_a_backup_ends_with_its_process() -> None:
    """A daemon that goes leaves nobody behind who works in the folder of backups."""
    code = "import time; from dmq.runtime.background import end_with_stdin; end_with_stdin(); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as child:
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(60) == 1


_PARENT = """
import subprocess, sys, time
code = "import time, dmq.runtime.background as b; b.die_with_parent(); print(1, flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has it")
def test_a_process_dies_with_its_killed_parent() -> None:
    """Whatever the child is at: with one that had to notice by itself, a busy machine took seconds."""
    with subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        until_s = time.monotonic() + PATIENCE_S
        while psutil.pid_exists(child.pid) and child.status() != psutil.STATUS_ZOMBIE:  # nobody may be there to reap it
            assert time.monotonic() < until_s
            time.sleep(0.02)


def test_a_copy_of_the_store_leaves_the_others_backups_alone(tmp_path: Path) -> None:
    """A backup that is restored and served counts from one in the same folder, and removes nothing of the other."""

    async def scenario(made: Made) -> None:
        for _ in range(3):
            await made.pass_by(6 * HOUR_MS)
        shutil.copytree(made.folder.kept()[-1].path, tmp_path / "restored" / "cell")
        (tmp_path / "restored" / "backups").symlink_to(made.path)
        copy = Made(tmp_path / "restored", count=1)
        try:
            await copy.open()
            for _ in range(3):
                await copy.pass_by(6 * HOUR_MS)
            assert copy.numbers() == [3]
        finally:
            copy.store.close()
        assert made.numbers() == [1, 2, 3]

    run(tmp_path, scenario)


def test_a_clock_that_steps_makes_no_storm(tmp_path: Path) -> None:
    """Back and forth by days, also while the daemon is down: a backup more at most for each step, then as before."""

    async def scenario(made: Made) -> None:
        await made.look()
        highest = 1
        for step_ms in (-3 * DAY_MS, 5 * HOUR_MS, -DAY_MS, 9 * HOUR_MS, -HOUR_MS):
            for is_down in (False, True):
                made.clock.step_to(made.clock.now_ms() + step_ms)
                if is_down:
                    await made.open()
                found = await made.look(20)
                assert found[-1] <= highest + 1
                highest = found[-1]
        for _ in range(3):
            found = await made.pass_by(6 * HOUR_MS)
            assert found[-1] == highest + 1
            highest += 1

    run(tmp_path, scenario)


def failing(error: Exception) -> Any:  # noqa: ANN401
    """Have the copy fail."""

    def fail(*_: object, **__: object) -> None:
        raise error

    return patch.object(admin_backups, "back_up", fail)


def test_a_failure_removes_nothing_and_is_reported(tmp_path: Path) -> None:
    """A full disk: all older ones stay, status says why, it is tried again in ten minutes and not all the time."""

    async def scenario(made: Made) -> None:
        for _ in range(3):
            await made.pass_by(6 * HOUR_MS)
        with failing(StoreFull("no room")):
            made.clock.advance(6 * HOUR_MS)
            assert await made.look() == [1, 2, 3]
            status = made.periodic.status()
            assert (status.error, status.failed_at_ms) == ("the backup failed: no room", made.clock.now_ms())
            assert status.next_at_ms == made.clock.now_ms() + AGAIN_MS
            assert status.last_folder.endswith(made.folder.kept()[-1].path.name)
        assert await made.pass_by(AGAIN_MS - 1) == [1, 2, 3]
        assert await made.pass_by(1) == [2, 3, 4]
        assert not made.periodic.status().error

    run(tmp_path, scenario)


def test_one_that_is_not_whole_does_not_count(tmp_path: Path) -> None:
    """It is removed, said, and what it would have replaced stays."""

    async def scenario(made: Made) -> None:
        for _ in range(3):
            await made.pass_by(6 * HOUR_MS)
        damaged = StoreCorrupt("row: it makes no sense")
        with patch.object(BackupFolder, "_look_through", side_effect=damaged):
            assert await made.pass_by(6 * HOUR_MS) == [1, 2, 3]
        assert "makes no sense" in made.periodic.status().error
        assert len(list(made.path.iterdir())) == 3

    run(tmp_path, scenario)


def test_files_left_by_a_kill_are_swept_and_never_count(tmp_path: Path) -> None:
    """A copy, one that nobody looked through, one half removed; others' leftovers stay.

    So is one that comes back behind the start, as of who looked through it and outlived a killed daemon for a moment.
    """

    async def scenario(made: Made) -> None:
        await made.look()
        (first,) = made.folder.kept()
        name = first.path.name.replace("-000001-", "-000002-")
        for left in (f".{name}.unverified.part", f"{name}.unverified", f".{name}.removing"):
            shutil.copytree(first.path, made.path / left)
        shutil.copytree(first.path, made.path / ".by-hand.part")
        assert made.numbers() == [1]
        await made.open()
        assert sorted(each.name for each in made.path.iterdir()) == [".by-hand.part", first.path.name]
        (made.path / f"{name}.unverified").mkdir()
        assert await made.pass_by(6 * HOUR_MS) == [1, 2]
        assert len(list(made.path.iterdir())) == 3

    run(tmp_path, scenario)


def test_a_disk_that_is_not_mounted_gets_nothing(tmp_path: Path) -> None:
    """A folder that is missing at the start is refused, and not made; one that goes later is not made either."""
    with pytest.raises(DmqError, match="does not exist: mount its disk"):
        BackupFolder(tmp_path / "missing", 1)
    assert not (tmp_path / "missing").exists()

    async def scenario(made: Made) -> None:
        await made.look()
        made.folder._device += 1
        await made.pass_by(6 * HOUR_MS)
        assert "is the disk of the backups mounted?" in made.periodic.status().error
        made.folder._device -= 1
        made.path.rename(tmp_path / "away")
        await made.periodic.look()
        made.clock.advance(AGAIN_MS)
        await made.periodic.look()
        assert made.periodic.status().error
        assert not made.path.exists()
        (tmp_path / "away").rename(made.path)
        assert await made.pass_by(AGAIN_MS) == [1, 2]

    run(tmp_path, scenario)


def test_a_daemon_makes_and_shows_them(data: Path, tmp_path: Path) -> None:
    """The first at once, seen in status and metrics, checked by another process; it can be served."""
    folder = tmp_path / "backups"
    env = {"DMQ_BACKUP_EVERY": "1h", "DMQ_BACKUP_DIR": str(folder)}
    refused = run_command("serve", "--data", str(data), env=env)
    assert (refused.returncode != 0, folder.exists()) == (True, False)
    assert f"backup_dir {folder} does not exist" in refused.stderr
    folder.mkdir()
    with Daemon(data, metrics="127.0.0.1:0", env={**os.environ, **env}) as daemon:
        until_s = time.monotonic() + PATIENCE_S
        with AdminClient(daemon.address) as admin:
            while not (found := admin.status().backups).last_at_ms:
                assert not found.error
                assert time.monotonic() < until_s
                time.sleep(0.05)
            with urllib.request.urlopen(f"http://{admin.status().metrics_listen}/metrics") as answer:
                metric = re.search(r"^dmq_last_backup_timestamp_seconds (\S+)$", answer.read().decode(), re.MULTILINE)
            assert metric is not None
            assert float(metric[1]) == found.last_at_ms / 1000
        assert found.next_at_ms == found.last_at_ms + HOUR_MS
        shown = run_command("-a", daemon.address, "status")
        assert re.search(r"backups +last .* next .*; every 1h, 7 kept", " ".join(shown.stdout.split()))
        (path,) = folder.iterdir()
        assert found.last_folder == str(path)
        assert daemon.event("backup_created")["folder"] == str(path)
    assert held(path) is not None
    with Daemon(path) as copy, WireClient(copy.address) as client:
        client.send(a_message("orders", "m-1"))
