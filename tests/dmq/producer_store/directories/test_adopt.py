"""Processes that share a root and die: what was acknowledged is taken over, whole, once and in order."""

from __future__ import annotations

import random
import shutil
import subprocess
import threading
from collections import defaultdict
from pathlib import Path

import pytest
from support.effort import EFFORT, SEED
from support.rigs.producer.spool import PATIENCE_S, QUIET, an_entry, recount
from support.rigs.producer.spool_driver import adopt_in_steps, command, lines, numbers, run, take_all
from support.rigs.store.rows import copy_at_rest

from broker_adapter.runtime.clock import SystemClock
from dmq.producer_store.directories import adopt
from dmq.producer_store.directories.root import Root
from dmq.producer_store.spool import Spool
from dmq.store.store import StoreOptions

pytestmark = pytest.mark.fault
PROCESSES = 8
KILLS = 8 * EFFORT
ENTRIES = 22
LANES = [[number for number in range(ENTRIES) if number % 4 == lane] for lane in (1, 2, 3)]


class Fleet:
    """Processes under one root, and everything they ever said."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._root = root
        self._folder = folder
        self._living: list[tuple[subprocess.Popen[bytes], Path]] = []
        self.outputs: list[Path] = []
        for _ in range(PROCESSES):
            self.start()

    def start(self) -> None:
        """Start one more."""
        first = (len(self.outputs) + 1) * 10**6
        output = self._folder / f"{first}.out"
        with output.open("wb") as file, output.with_suffix(".log").open("wb") as log:
            process = subprocess.Popen(
                command("share", self._root, f"{first},3"), stdin=subprocess.PIPE, stdout=file, stderr=log
            )
        self._living.append((process, output))
        self.outputs.append(output)

    def kill(self, which: int) -> None:
        """SIGKILL."""
        process, _ = self._living.pop(which)
        process.kill()
        process.communicate(timeout=PATIENCE_S)

    def end(self) -> None:
        """Let those that live end in order."""
        for process, output in self._living:
            process.communicate(timeout=60)
            assert process.returncode == 0, output.with_suffix(".log").read_text(errors="replace")[-4000:]

    def said(self) -> list[list[object]]:
        """All lines; of one that was cut off by a kill nothing is known."""
        return [line for output in self.outputs for line in lines(output.read_text(errors="replace"))]


@pytest.mark.timeout(120 + 5 * KILLS)
def test_processes_that_are_killed_lose_nothing(tmp_path: Path) -> None:
    """Eight share a root; each put that was answered is taken in the end, keys keep their order, no directory stays."""
    print(f"DMQ_TEST_SEED={SEED}")
    rng = random.Random(SEED)
    root = tmp_path / "root"
    fleet = Fleet(root, tmp_path)
    for _ in range(KILLS):
        threading.Event().wait(rng.uniform(0.1, 0.8))
        for _ in range(rng.choice((1, 1, 2))):
            fleet.kill(rng.randrange(PROCESSES - 1))
            fleet.start()
    fleet.end()
    with Spool(root, options=QUIET) as spool:
        spool._adopter.adopt()
        assert [path.name for path in root.glob("spool-*")] == [spool.path.name]
        assert not spool.damaged
        rest: list[tuple[str, int]] = []
        while taken := spool.take("orders", 100, 1.0):
            rest += [(held.entry.key, int.from_bytes(held.entry.uid, "big")) for held in taken]
            for each in [spool.finish(held) for held in taken]:
                each.result(PATIENCE_S)
        assert spool.stats().waiting == spool.stats().held == 0
        assert recount(spool.entries).waiting == {}
    said = fleet.said()
    put = {line[1] for line in said if line[0] == "put"}
    told = sorted((line[3], line[2], line[1]) for line in said if line[0] == "took")
    took = [(str(key), int(str(number))) for _, key, number in told] + rest
    print(f"{len(put)} put, {len(took)} taken, {len(rest)} of them in the end, {len(fleet.outputs)} processes")
    assert put
    assert put - {number for _, number in took} == set()
    first_seen: dict[str, list[int]] = defaultdict(list)
    for key, number in dict.fromkeys(took):
        if key:
            first_seen[key].append(number)
    assert [key for key, seen in first_seen.items() if seen != sorted(seen)] == []


@pytest.fixture(scope="module")
def orphan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with the directory of a process that was killed: entries of three keys, of none, and dead ones."""
    root = tmp_path_factory.mktemp("orphan") / "root"
    run("fill", root, str(ENTRIES))
    assert len(list(root.glob("spool-*"))) == 1
    return root


def check_all_there(root: Path) -> None:
    """Everything comes, once, in the order of its key, from one directory."""
    with Spool(root, options=QUIET) as spool:
        spool._adopter.adopt()
        assert [path.name for path in root.glob("spool-*")] == [spool.path.name]
        counted = recount(spool.entries)
        assert sorted(counted.waiting) == list(range(ENTRIES))
        assert sorted(counted.dead) == list(range(10**6, 10**6 + 5))
        assert counted.totals["orders"] == spool.entries.totals[spool.entries.names.topics["orders"].topic_id]
        taken: list[int] = []
        while len(taken) < ENTRIES:
            found = spool.take("orders", 100, PATIENCE_S)
            taken += numbers(found)
            for each in [spool.finish(held) for held in found]:
                each.result(PATIENCE_S)
        assert sorted(taken) == list(range(ENTRIES))
        for lane in LANES:
            assert [number for number in taken if number in lane] == lane
        assert not any(spool.has_waiting("orders", key) for key in "abc")
        assert spool.stats().waiting == 0
        assert len(spool.dead("orders")) == 5


@pytest.fixture
def both(orphan: Path, tmp_path: Path) -> Path:
    """A root with that directory, and an empty one that a process would make its own."""
    with Spool(tmp_path / "spare", options=QUIET) as spare:
        own = spare.path
    shutil.copytree(orphan, tmp_path / "root")
    own.rename(tmp_path / "root" / "spool-0")
    return tmp_path / "root"


def test_a_kill_at_any_step_of_an_adoption_repeats_and_loses_nothing(both: Path, tmp_path: Path) -> None:
    """Before and after each commit here, each delete there, and the removal: whoever comes next has it all, once.

    What a kill would leave at each step is copied while one adoption goes on.
    """
    copies: list[Path] = []

    def copy() -> None:
        copies.append(tmp_path / f"step-{len(copies)}")
        copy_at_rest(both, copies[-1])

    with Spool(both, options=QUIET) as spool:
        assert spool.path.name == "spool-0"
        assert adopt_in_steps(spool, copy) == ENTRIES + 5
    assert len(copies) >= 20
    with Spool(tmp_path / "other", options=QUIET) as spare:
        own = spare.path
    for each in copies:
        shutil.copytree(each, tmp_path / "again")
        shutil.copytree(
            own, tmp_path / "again" / "spool--"
        )  # made its own by who comes next: the adopter is an orphan too
        check_all_there(tmp_path / "again")
        shutil.rmtree(tmp_path / "again")
        check_all_there(each)


def test_adopters_that_die_again_and_again_lose_nothing(orphan: Path, tmp_path: Path) -> None:
    """The heir of an adopter goes on with what that one had begun, however often it is killed itself."""
    print(f"DMQ_TEST_SEED={SEED}")
    rng = random.Random(SEED)
    for attempt in range(EFFORT):
        root = tmp_path / f"root-{attempt}"
        shutil.copytree(orphan, root)
        for number in range(6):
            if rng.random() < 0.5:
                name = f"spool-{rng.choice('0f')}{attempt}{number}"  # before, or behind, the others
                with Spool(tmp_path / name, options=QUIET) as spare:
                    path = spare.path
                shutil.copytree(path, root / name)
            run("adopt_and_die", root, str(rng.randrange(1, 9)))
        check_all_there(root)


def test_a_directory_in_use_is_never_touched(tmp_path: Path) -> None:
    """Another spool under the same root finds nothing to adopt, and opens a directory of its own."""
    with Spool(tmp_path, options=QUIET) as first, Spool(tmp_path, options=QUIET) as second:
        assert first.path != second.path
        first.put(an_entry()).result(PATIENCE_S)
        assert second._adopter.adopt() == 0
        assert Root.adopter_of(first.path) is None
        assert len(first.take("orders", 9, PATIENCE_S)) == 1
        assert not second.take("orders", 9, 0.1)


def test_a_directory_being_removed_is_never_adopted(both: Path) -> None:
    """Who opens a spool between the end of an adoption and the removal gets a directory that stays."""
    opened: list[Spool] = []
    thread = threading.Thread(target=lambda: opened.append(Spool(both, options=QUIET)))
    rename = Path.rename

    def rename_late(self: Path, target: Path) -> Path:
        thread.start()
        thread.join(0.5)  # it would be in time, if it could
        return rename(self, target)

    with pytest.MonkeyPatch.context() as patch, Spool(both, options=QUIET) as spool:
        patch.setattr(Path, "rename", rename_late)
        assert spool._adopter.adopt() == ENTRIES + 5
        thread.join(PATIENCE_S)
        assert opened[0].path.is_dir()
        opened[0].put(an_entry()).result(PATIENCE_S)
        opened[0].close()
        assert opened[0].path.is_dir()


def test_a_half_empty_directory_is_nobodys_own(orphan: Path, tmp_path: Path) -> None:
    """What is being moved is left to its adopter while that one is there, and is everybody's once it is not."""
    root = tmp_path / "root"
    shutil.copytree(orphan, root)
    (path,) = root.glob("spool-*")
    (root / "spool-z").mkdir()
    (path / "ADOPTER").write_text("spool-z", encoding="utf-8")
    own = root / "spool-own"
    looks = Root(root, SystemClock(), StoreOptions())
    chosen, entries = looks.open_own()
    assert chosen == root / "spool-z"
    entries.store.close()
    ((adopter, entries),) = looks.orphans(own, lambda: True)
    assert adopter == root / "spool-z"
    assert Root.adopter_of(adopter) == own.name
    looks.remove(adopter, entries, own)
    assert Root.adopter_of(path) == own.name, "the heir inherits"
    ((heritage, entries),) = looks.orphans(own, lambda: True)
    assert heritage == path
    entries.store.close()
    assert list(looks.orphans(root / "spool-else", lambda: True)) != [], "its adopter was never there"


def test_an_orphan_that_is_damaged_stands_in_nobodys_way(both: Path) -> None:
    """Others are taken over; it stays, and is named."""
    (path,) = (each for each in both.glob("spool-*") if each.name != "spool-0")
    bad = both / "spool-1"  # looked at first
    shutil.copytree(path, bad)
    path.rename(both / "spool-2")
    (log,) = (bad / "rocksdb").glob("*.log")
    damaged = bytearray(log.read_bytes())
    damaged[len(damaged) // 2] ^= 0xFF
    log.write_bytes(damaged)
    with Spool(both, options=QUIET) as spool:
        assert spool._adopter.adopt() == ENTRIES + 5
        assert [each.path for each in spool.damaged_directories] == [bad]
        assert sorted(take_all(spool, idle_s=0.3)) == list(range(ENTRIES))
    assert log.read_bytes() == damaged, "left alone"


def test_an_adopted_directory_is_in_the_figures_of_both(both: Path) -> None:
    """After each unit the figures of the directory that is emptied equal its rows, as do the adopter's."""
    with Spool(both, options=QUIET) as spool:
        looks: list[int] = []
        settle = adopt._Move._settle

        def settle_and_look(move: adopt._Move) -> None:
            settle(move)
            for entries in (move._own, move._other):
                with entries.lock:
                    counted = recount(entries).totals
                    assert {
                        name: entries.totals[topic.topic_id]
                        for name, topic in entries.names.topics.items()
                        if topic.topic_id in entries.totals
                    } == counted
            looks.append(spool.stats().waiting)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(adopt, "_PER_UNIT", 4)
            patch.setattr(adopt._Move, "_settle", settle_and_look)
            spool._adopter.adopt()
        assert len(looks) > 3
        assert numbers(spool.take("orders", 1, PATIENCE_S)) == [0]
