"""Real stores with flipped bits: what is found, what is saved, and what serves it afterwards."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support.clients.wire.client import WireClient, a_message
from support.forges.store.store_rig import (
    COMMITTED,
    PULLERS,
    READY,
    CellRig,
    Held,
    checked,
    files_of,
    fill,
    flip_in,
    held,
    lost_lines,
    run_cell,
)
from support.rigs.broker.rig import TOPIC, ack, receive
from support.rigs.commands.fake_admin_client import run_dmq
from support.rigs.daemon.process import Daemon

from broker_adapter.contracts.adapter import Subscription
from broker_adapter.runtime.clock import ManualClock
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.admin import admin_v1 as admin_wire
from dmq.admin.client import AdminClient
from dmq.errors import StoreCorrupt, StoreLocked
from dmq.recovery import salvage_store
from dmq.recovery.salvage.salvage import Salvaged
from dmq.store.backup import TargetTaken

pytestmark = pytest.mark.fault
FIRST_QUEUE = [f"r-{number}" for number in range(0, READY, 2)]  # what was sent to it, in order


class Made(NamedTuple):
    """Images of one store, killed: all of it in tables, all of it in the log; and what it holds."""

    tables: Path
    log: Path
    held: Held
    unfinished: dict[str, bytes]
    now_ms: int

    @property
    def dead(self) -> set[str]:
        """Those that are in a dead-letter queue as well."""
        names = [name for _, name in self.held.queued]
        return {name for name in names if names.count(name) > 1}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("stores")

    async def make(rig: CellRig) -> Made:
        unfinished = await fill(rig)
        log = rig.image(root / "log")
        rig.to_tables()
        tables = rig.image(root / "tables")
        return Made(tables, log, held(tables), unfinished, rig.clock.now_ms())

    return run_cell(root / "cell", make)


def copied(image: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(image, tmp_path / "damaged"))


def saved(made: Made, damaged: Path, *, whole: bool = False) -> tuple[Salvaged, Held]:
    """Salvage; the old store stays as it is, the new one is whole, and nothing in it was made up."""
    before = files_of(damaged)
    found = salvage_store(damaged, damaged.with_name("new"), ManualClock(made.now_ms), lambda _: None)
    assert files_of(damaged) == before
    assert not found.checked.findings.count, found.checked.findings.first
    assert not checked(found.path).findings.count
    now = held(found.path)
    assert {(name, made.held.waiting.get(name)) for name in now.waiting} <= set(made.held.waiting.items())
    assert {(name, made.held.queued.get(name)) for name in now.queued} <= set(made.held.queued.items())
    assert found.is_whole is whole, found.lost
    return found, now


def drained(path: Path, now_ms: int) -> set[str]:
    """What a group that knew the store before gets from it now, in order and acknowledged."""

    async def drain(rig: CellRig) -> set[str]:
        got: set[str] = set()
        while deliveries := await receive(rig, batch_max=32):
            assert not any(await ack(rig, *deliveries))
            got |= {each.message_id for each in deliveries}
        return got

    return run_cell(path, drain, ManualClock(now_ms))


def pulled_next(path: Path, now_ms: int) -> str:
    """The message that a group which pulls comes to next."""

    async def pull(rig: CellRig) -> str:
        at = await rig.broker.pulls.committed_offset(PULLERS, TOPIC, 0)
        assert at is not None
        found = await rig.broker.pulls.pull(Subscription(TOPIC, 0), at, batch_max=1, wait_ms=0)
        return found.messages[0].message_id

    return run_cell(path, pull, ManualClock(now_ms))


def tables_of(path: Path) -> Iterator[Path]:
    return iter(sorted((path / "rocksdb").glob("*.sst")))


def test_a_whole_store_is_whole(made: Made, tmp_path: Path) -> None:
    """Nothing is found in it, and a salvage copies all of it, rows and offsets."""
    for image in (made.tables, made.log):
        assert not checked(image).findings.count
    _, now = saved(made, copied(made.tables, tmp_path), whole=True)
    assert now == made.held


@pytest.mark.parametrize("number", range(6))
def test_a_flipped_bit_in_a_table(made: Made, tmp_path: Path, number: int) -> None:
    """Of each family: it is found, what is not in its block is saved, what is lost is told, a broker serves the rest.

    Without its record a topic has the name that its messages tell.
    """
    damaged = copied(made.tables, tmp_path)
    table = list(tables_of(damaged))[number]
    flip_in(table, 0.3)
    assert checked(damaged).findings.count["damage"]
    found, now = saved(made, damaged)
    assert "spool" not in found.error
    told = {str(line["message_id"]) for line in lost_lines(found.path) if line["kind"] == "message"}
    gone = made.held.waiting.keys() - now.waiting.keys()
    assert gone <= told
    assert found.lost_offsets == len(made.held.queued) - len(now.queued)
    assert len(gone) + found.lost_offsets <= 60  # some blocks of 16 KiB
    hit = {line["family"] for line in lost_lines(found.path) if line["kind"] == "range"}
    if not hit & {"meta", "group"}:  # else progress may be lost, and messages come again
        assert pulled_next(found.path, made.now_ms) == min(
            (name for name in now.ready if name in FIRST_QUEUE[COMMITTED:]), key=FIRST_QUEUE.index
        )
    got = drained(found.path, made.now_ms)
    assert got >= made.unfinished.keys() & now.ready - now.waiting.keys() - made.dead
    if not hit & {"meta", "group"}:
        assert got <= made.unfinished.keys()


def test_a_flipped_bit_in_the_log(made: Made, tmp_path: Path) -> None:
    """One record is lost: its stretch and the messages it names are told, the audit's gap has an event."""
    damaged = copied(made.log, tmp_path)
    (log,) = sorted((damaged / "rocksdb").glob("*.log"), key=lambda path: path.stat().st_size)[-1:]
    flip_in(log, 0.5)
    assert checked(damaged).findings.count["damage"]
    found, now = saved(made, damaged)
    lines = lost_lines(found.path)
    assert {"log", "message", "audit"} <= {line["kind"] for line in lines}
    lost = (made.held.waiting.keys() | made.held.ready) - now.waiting.keys() - now.ready
    assert lost
    untold = lost - {str(line["message_id"]) for line in lines if line["kind"] == "message"}
    assert len(untold) <= 1, "all but the one whose row was hit"
    assert drained(found.path, made.now_ms) >= made.unfinished.keys() & now.ready - now.waiting.keys() - made.dead


@pytest.mark.parametrize("seed", range(6))
def test_bits_flipped_anywhere(made: Made, tmp_path: Path, seed: int) -> None:
    """Whatever is hit, the manifest and the marker too, there is a whole new store, and nothing in it is made up."""
    rng = random.Random(seed)
    damaged = copied(rng.choice((made.tables, made.log)), tmp_path)
    files = [path for path in damaged.rglob("*") if path.is_file() and path.stat().st_size]
    for path in rng.choices(files, [path.stat().st_size for path in files], k=3):
        flip_in(path, rng.random())
    found = salvage_store(damaged, tmp_path / "new", ManualClock(made.now_ms), lambda _: None)
    assert not found.checked.findings.count, found.checked.findings.first
    now = held(found.path)
    assert {(name, made.held.waiting.get(name)) for name in now.waiting} <= set(made.held.waiting.items())
    drained(found.path, made.now_ms)


def test_a_daemon_serves_the_salvaged_store(made: Made, tmp_path: Path) -> None:
    """It starts on the new store, lists and takes messages, and its trail tells of the events that are lost."""
    damaged = copied(made.log, tmp_path)
    (log,) = sorted((damaged / "rocksdb").glob("*.log"), key=lambda path: path.stat().st_size)[-1:]
    flip_in(log, 0.3)
    _, now = saved(made, damaged)
    new = tmp_path / "new"
    assert run_dmq("audit", "export", "--data", str(new)).exit_code == 0
    (cell,) = json.loads(run_dmq("audit", "ls", "--data", str(new), "-o", "json").stdout)["cells"]
    assert cell["missing"]
    with Daemon(new) as daemon, WireClient(daemon.address) as client, AdminClient(daemon.address) as admin:
        page = admin.messages(admin_wire.ListMessagesRequest(topic="orders", state=admin_wire.QUEUED, limit=1_000))
        assert {each.message_id for each in page.messages} <= now.ready | now.waiting.keys()
        assert page.messages
        assert client.send(a_message("orders", "m-new")).status.code == wire.OK
        daemon.stop()
    assert not checked(new).findings.count


@pytest.mark.parametrize("pattern", ["rocksdb/MANIFEST-*", "rocksdb/CURRENT", "CELL"])
def test_a_lost_file_of_the_tables(made: Made, tmp_path: Path, pattern: str) -> None:
    """The loss is found; what the file said is made anew from the tables, and everything is there again."""
    damaged = copied(made.tables, tmp_path)
    for path in damaged.glob(pattern):
        path.unlink()
    try:
        assert checked(damaged).findings.count["damage"]
    except StoreCorrupt:
        assert pattern != "CELL"  # without the others nothing can be read as it lies
    _, now = saved(made, damaged, whole=True)
    assert (now.waiting, now.queued) == (made.held.waiting, made.held.queued)


KILLED = """
import os, signal, sys
from pathlib import Path
from broker_adapter.runtime.clock import SystemClock
from dmq.recovery import salvage_store

def tell(text):
    if sys.argv[3] in text:
        os.kill(os.getpid(), signal.SIGKILL)

salvage_store(Path(sys.argv[1]), Path(sys.argv[2]), SystemClock(), tell)
"""


@pytest.mark.parametrize("step", ["in queue", "reading without", "saving: ", "in group", "checking the new store"])
def test_a_killed_salvage_can_be_repeated(made: Made, tmp_path: Path, step: str) -> None:
    """A SIGKILL at any step leaves no new store and the damaged one unchanged; the next salvage saves everything."""
    damaged = copied(made.tables, tmp_path)
    flip_in(max(tables_of(damaged), key=lambda path: path.stat().st_size), 0.3)
    before = files_of(damaged)
    command = [sys.executable, "-c", KILLED, str(damaged), str(tmp_path / "new"), step]
    assert subprocess.run(command, check=False, timeout=120).returncode == -signal.SIGKILL
    assert not (tmp_path / "new").exists()
    assert files_of(damaged) == before
    found, _ = saved(made, damaged)
    assert found.lost["range"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged", "new"]


def test_invalid_input_is_refused(made: Made, tmp_path: Path) -> None:
    """A target that is full, in the store or on no disk, a store in use, a folder without one: nothing is written."""
    clock, quiet = ManualClock(made.now_ms), lambda _: None
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "file").touch()
    for target in (taken, made.tables / "inside", tmp_path / "not" / "mounted"):
        with pytest.raises(TargetTaken):
            salvage_store(made.tables, target, clock, quiet)
    assert not (tmp_path / "not").exists()
    with pytest.raises(StoreCorrupt):
        salvage_store(taken, tmp_path / "new", clock, quiet)

    async def in_use(rig: CellRig) -> None:
        with pytest.raises(StoreLocked):
            salvage_store(rig.path, tmp_path / "new", clock, quiet)

    run_cell(tmp_path / "cell", in_use)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cell", "taken"]
    assert [path.name for path in taken.iterdir()] == ["file"]
