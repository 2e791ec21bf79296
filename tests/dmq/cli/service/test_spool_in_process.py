"""``dmq spool`` as a process, beside processes that use the spool."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.rigs.daemon.process import run_command

from broker_adapter.runtime.clock import SystemClock
from dmq.producer_store.spool import Spool, SpoolOptions
from retry.sink import Entry

pytestmark = pytest.mark.integration
HEAVY = ("rich", "rocksdict", "structlog", "google.protobuf", "grpc")
ROOT = Path(__file__).parents[4]

PRODUCER = """
import sys, time
from dmq.producer_store.spool import Spool, SpoolOptions
from retry.sink import Entry
spool = Spool(sys.argv[1], options=SpoolOptions(adopt_every_s=0))
number = 0
while True:
    done = []
    for _ in range(20):
        uid = number.to_bytes(16, "big")
        entry = Entry(type_name="orders", uid=uid, payload=b"%d" % number, created_at_ms=1, due_at_ms=1 + number)
        done.append(spool.put(entry))
        number += 1
    for each in done:
        each.result()
    print(number, flush=True)
"""


def dmq(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return run_command("spool", *arguments, env=env, cwd=ROOT, timeout_s=60)


@pytest.fixture
def producer(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that spools without end, and says how far it is."""
    with subprocess.Popen(
        [sys.executable, "-c", PRODUCER, str(tmp_path / "spool")], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        yield process
        process.kill()


def said(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


@contextmanager
def drained(process: subprocess.Popen[str]) -> Iterator[None]:
    """Read on what a process says, so that it never waits for us; at the end it is killed, and all is read."""
    reader = threading.Thread(target=lambda: [None for _ in process.stdout or ()])
    reader.start()
    try:
        yield
    finally:
        process.kill()
        reader.join()  # before its file is closed


@pytest.mark.parametrize("command", ["ls", "show", "stats", "check", "salvage", "requeue", "export", "adopt"])
def test_help_loads_nothing_heavy(command: str) -> None:
    """That is what keeps it quick."""
    code = (
        "import sys; from dmq.cli import main; code = main(sys.argv[1:]);"
        f"print([name for name in {HEAVY!r} if name in sys.modules], code, file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, "spool", command, "--help"],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
        cwd=ROOT,
    )
    assert result.stderr == "[] 0\n"


def test_a_live_spool_is_looked_at_whole(tmp_path: Path, producer: subprocess.Popen[str]) -> None:
    """While a process writes as fast as it can: every look is of one instant, and it never notices."""
    root = str(tmp_path / "spool")
    said(producer)
    last = 0
    with drained(producer):
        for _ in range(2):
            result = dmq("check", "--root", root, "-o", "json")
            assert (result.returncode, result.stderr) == (0, ""), result.stdout
            (found,) = json.loads(result.stdout)
            assert found["waiting"] >= last
            last = found["waiting"]
            listed = dmq("ls", "--root", root, "-o", "id", "--limit", "10000000").stdout.split()
            numbers = sorted(int(uid, 16) for uid in listed)  # what is overdue already has no order of its own
            assert numbers == list(range(len(numbers))), "without a gap"
            assert len(listed) >= last
            last = len(listed)
        (found,) = json.loads(dmq("stats", "--root", root, "-o", "json").stdout)
        assert found["state"] == f"pid {producer.pid}"
        assert producer.poll() is None
        refused = dmq("salvage", found["directory"], "--root", root, "--yes")
    assert (refused.returncode, refused.stdout) == (6, "")
    assert refused.stderr.endswith(f"is in use by another process (pid {producer.pid})\n")
    assert not list((tmp_path / "spool").glob(".work-*"))


def test_a_killed_producer_and_a_flipped_bit(tmp_path: Path, producer: subprocess.Popen[str]) -> None:
    """All that it said is kept, but what lies in the damaged record; that is what the report counts."""
    root = tmp_path / "spool"
    count = max(said(producer) for _ in range(10))
    producer.kill()
    producer.wait(10)
    listed = dmq("ls", "--root", str(root), "-o", "id", "--limit", "10000000")
    assert listed.returncode == 0
    before = set(listed.stdout.split())
    assert len(before) >= count
    (directory,) = root.glob("spool-*")
    log = max(directory.glob("rocksdb/*.log"), key=lambda path: path.stat().st_size)
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 4
    log.write_bytes(content)
    checked = dmq("check", "--root", str(root))
    assert checked.returncode == 4
    assert "NOT whole" in checked.stdout
    partly = dmq("export", "--root", str(root))
    assert partly.returncode == 4
    salvaged = dmq("salvage", "--root", str(root), "--yes", "-o", "json")
    assert (salvaged.returncode, "not everything could be saved" in salvaged.stderr) == (4, True)
    (report,) = json.loads(salvaged.stdout)
    after = set(dmq("ls", "--root", str(root), "-o", "id", "--limit", "10000000").stdout.split())
    lost = len(before - after)
    assert after < before
    assert report["missing"] == {"at_least": lost, "at_most": lost}
    assert {json.loads(line)["uid"] for line in partly.stdout.splitlines()} == after
    assert json.loads((root / f"{Path(report['kept_in']).name}.json").read_text(encoding="utf-8")) == report
    assert dmq("check", "--root", str(root)).returncode == 0


def test_directories_of_dead_processes_become_one(tmp_path: Path) -> None:
    """As after a restart with fewer workers; the one that lives keeps its own."""
    options = SpoolOptions(adopt_every_s=0)
    spools = [Spool(tmp_path / "spool", options=options) for _ in range(4)]
    for number in range(40):
        uid = number.to_bytes(16, "big")
        entry = Entry(type_name="orders", uid=uid, payload=b"x", created_at_ms=1, due_at_ms=SystemClock().now_ms())
        spools[number % 4].put(entry).result(10)
    for spool in spools[1:]:
        spool.close()
    try:
        result = dmq("adopt", "--root", str(tmp_path / "spool"), "--yes", "-o", "json")
        assert result.returncode == 0, result.stderr
        found = json.loads(result.stdout)
        assert (found["entries"], len(found["adopted"])) == (20, 2)
        assert found["left_alone"] == [f"{spools[0].path.name} is in use by pid {os.getpid()}"]
        assert len(list((tmp_path / "spool").glob("spool-*"))) == 2
        listed = dmq("ls", "--root", str(tmp_path / "spool"), "-o", "id").stdout.split()
        assert sorted(int(uid, 16) for uid in listed) == list(range(40))
    finally:
        spools[0].close()


def test_a_list_of_many_takes_constant_memory(tmp_path: Path) -> None:
    """Bodies of 48 MB are listed in far less than that, and a reader that leaves is no traceback."""
    with Spool(tmp_path / "spool", options=SpoolOptions(adopt_every_s=0, durability="process")) as spool:
        done = []
        for number in range(3_000):
            uid = number.to_bytes(16, "big")
            entry = Entry(type_name="o", uid=uid, payload=os.urandom(16_384), created_at_ms=1, due_at_ms=number + 1)
            done.append(spool.put(entry))
            if number % 200 == 199:
                for each in done:
                    each.result(20)
    with Spool(tmp_path / "spool", options=SpoolOptions(adopt_every_s=0)):
        pass  # what the log has goes into tables
    code = (
        "import resource, sys; from dmq.cli import main; main(sys.argv[1:]);"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)"
    )

    def peak(*arguments: str) -> tuple[int, int]:
        result = subprocess.run(
            [sys.executable, "-c", code, "spool", *arguments, "--root", str(tmp_path / "spool")],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            cwd=ROOT,
        )
        return int(result.stderr.splitlines()[-1]) // 1024, result.stdout.count("\n")

    few, _ = peak("ls", "-o", "jsonl", "--limit", "1")
    many, lines = peak("ls", "-o", "jsonl", "--limit", "100000")
    assert lines == 3_000
    assert many < few + 32, f"{few} MB for one, {many} MB for all"


def test_files_of_a_killed_command_are_removed(tmp_path: Path) -> None:
    """By the next one; what a living one works in stays."""
    root = tmp_path / "spool"
    with Spool(root, options=SpoolOptions(adopt_every_s=0)):
        pass
    code = (
        "import sys, time; from pathlib import Path; from dmq.producer_store.directories.copies import workplace\n"
        "with workplace(Path(sys.argv[1])) as path: print(path, flush=True); time.sleep(100)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(root)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        assert dmq("ls", "--root", str(root)).returncode == 0
        assert left.is_dir()
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    assert left.is_dir()
    assert dmq("ls", "--root", str(root)).returncode == 0
    assert not left.exists()
