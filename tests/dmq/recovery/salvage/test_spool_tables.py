"""Damage to the tables and the manifest of a spool directory: what is not damaged is saved, the rest is counted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.forges.store.spool_damage import (
    LATE_MS,
    Saved,
    copied,
    entry_of,
    flip,
    opened,
    put,
    table_of,
    take,
    the,
    uid_of,
)

from broker_adapter.runtime.clock import SystemClock
from dmq.errors import StoreCorrupt
from dmq.recovery.reading.log_repair import _fragments
from dmq.recovery.reading.look import How, Look
from dmq.recovery.reading.spool import SpooledState, SpoolLook
from dmq.recovery.salvage.spool import Missing
from dmq.store.engines.engine import Rows
from dmq.store.schema.keys import Family
from retry.sink import Death

pytestmark = pytest.mark.fault

# -- tables ------------------------------------------------------------------------------------------------------------

TABLED = [entry_of(number, size=3_000, key="k" if number % 10 == 9 else "") for number in range(120)]


@pytest.fixture(scope="module")
def tabled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 entries in tables with some five to a block, every tenth behind the others of its key, ten of them dead."""
    root = tmp_path_factory.mktemp("tabled")
    with opened(root / "live", LATE_MS) as spool:
        put(spool, TABLED)
        for held in take(spool, "orders", 10):
            spool.bury(held, Death.PERMANENT, "no good").result(10)
        path = spool.path
    with opened(root / "live"):  # what the log has goes into tables
        pass
    (root / "killed").mkdir()
    return Path(shutil.copytree(path, root / "killed" / path.name))


def state_of(directory: Path) -> dict[bytes, SpooledState]:
    with SpoolLook.strictly(directory, SystemClock()) as found:
        return {each.entry.uid: each.state for each in found.entries()}


@pytest.mark.parametrize("number", [0, 5, 30, 61, 119])
def test_a_flipped_bit_in_a_table_costs_one_block(tabled: Path, tmp_path: Path, number: int) -> None:
    """Whether it holds what waits, what is parked or the dead: a few neighbours go, all others are saved."""
    directory = copied(tabled, tmp_path / "root")
    before = state_of(directory)
    table = table_of(directory, TABLED[number].payload)
    flip(table, table.read_bytes().index(TABLED[number].payload) + 100)
    saved = Saved(directory)
    lost = saved.check(TABLED)
    assert uid_of(number) in lost
    assert len(lost) <= 8
    assert {before[uid] for uid in lost} == {before[uid_of(number)]}
    assert saved.report.dead == 10 - sum(before[uid] is SpooledState.DEAD for uid in lost)
    if before[uid_of(number)] is SpooledState.WAITING:
        assert saved.report.missing_uids == tuple(sorted(uid.hex() for uid in lost))


def test_a_good_block_between_two_damaged_ones(tabled: Path, tmp_path: Path) -> None:
    """It is found, however short the stretch is beside that of the damage before it."""
    directory = copied(tabled, tmp_path / "root")
    table = table_of(directory, TABLED[31].payload)
    content = table.read_bytes()
    for number in [*range(30, 70, 2), 82, 94]:
        if TABLED[number].payload in content:
            flip(table, content.index(TABLED[number].payload) + 50)
    saved = Saved(directory)
    lost = saved.check(TABLED)
    between = {uid_of(number) for number in range(70, 95)} - lost
    assert between, "a block between the last ones was saved"


def test_a_table_that_is_gone(tabled: Path, tmp_path: Path) -> None:
    """All it held is lost, and counted against the totals and the index."""
    directory = copied(tabled, tmp_path / "root")
    table = table_of(directory, TABLED[30].payload)
    held = {each.uid for each in TABLED if each.payload[:40] in table.read_bytes()}
    table.unlink()
    (directory / "CLOSED").unlink()
    saved = Saved(directory)
    assert saved.check(TABLED) == held


@pytest.mark.parametrize("damaged", [40, 41])
def test_rows_of_a_whole_table_are_reached_in_the_range_of_a_damaged_one(tmp_path: Path, damaged: int) -> None:
    """Two tables hold every second entry each: damage to one, older or newer, costs nothing of the other."""
    entries = [entry_of(number, size=3_000) for number in range(80)]
    path = tmp_path
    for part in (entries[::2], entries[1::2]):
        with opened(tmp_path / "live") as spool:
            put(spool, part)
            path = spool.path
    with opened(tmp_path / "live"):
        pass
    (tmp_path / "root").mkdir()
    directory = Path(shutil.copytree(path, tmp_path / "root" / path.name))
    table = table_of(directory, entries[damaged].payload)
    assert table != table_of(directory, entries[81 - damaged].payload), "they overlap"
    hit = {damaged - 20, damaged, damaged + 20}
    for number in hit:
        flip(table, table.read_bytes().index(entries[number].payload) + 100)
    lost = Saved(directory).check(entries)
    assert {uid_of(number) for number in hit} <= lost
    assert not lost & {each.uid for each in entries[1 - damaged % 2 :: 2]}
    assert len(lost) <= 3 * 6


def test_damaged_figures_cost_no_entry(tabled: Path, tmp_path: Path) -> None:
    """Totals and names lie in one block: without them the index still counts, and types get a name of their own."""
    directory = copied(tabled, tmp_path / "root")
    (table,) = [path for path in (directory / "rocksdb").glob("*.sst") if _holds_names(path)]
    flip(table, 20)
    saved = Saved(directory)
    assert saved.uids() == {each.uid for each in TABLED}
    assert {each.entry.type_name for each in saved.found} == {"unknown-type-1", "unknown-type-2"}
    assert saved.report.missing == Missing(0, 0)


def _holds_names(path: Path) -> bool:
    content = path.read_bytes()
    return b"bills" in content and TABLED[0].payload[:40] not in content and b"no good" not in content


# -- the manifest and the marker ---------------------------------------------------------------------------------------


def _flip_manifest(directory: Path) -> None:
    manifest = the(directory, "MANIFEST-*")
    flip(manifest, manifest.stat().st_size // 2)


def _cut_manifest(directory: Path) -> None:
    manifest = the(directory, "MANIFEST-*")
    os.truncate(manifest, manifest.stat().st_size // 2)


def test_a_manifest_that_was_cut_between_two_records(tmp_path: Path) -> None:
    """RocksDB takes it for a short one, and removes the tables that it does not name."""
    entries = [entry_of(number) for number in range(20)]
    with opened(tmp_path / "live") as spool:
        put(spool, entries)
        whole = spool.path
    manifest = the(whole, "MANIFEST-*")
    ends = [end for _, end, _, _, _ in _fragments(manifest.read_bytes())]
    for end in ends[3:-1:3]:
        directory = copied(whole, tmp_path / f"root-{end}")
        os.truncate(directory / "rocksdb" / manifest.name, end)
        assert Saved(directory).check(entries) == set()


def _remove_current(directory: Path) -> None:
    (directory / "rocksdb" / "CURRENT").unlink()


def _break_marker(directory: Path) -> None:
    (directory / "CELL").write_text("{", encoding="utf-8")


def _remove_marker(directory: Path) -> None:
    (directory / "CELL").unlink()


@pytest.mark.parametrize(
    "damage",
    [_flip_manifest, _cut_manifest, _remove_current, _break_marker, _remove_marker],
    ids=lambda each: each.__name__,
)
def test_without_a_manifest_or_a_marker_nothing_is_lost(
    tabled: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """Entries lie in tables and logs; what names these is made anew."""
    directory = copied(tabled, tmp_path / "root")
    damage(directory)
    assert Saved(directory).check(TABLED) == set()


def test_a_look_at_a_damaged_directory_reports_skipped_rows(tabled: Path, tmp_path: Path) -> None:
    """As ``ls`` and ``export`` read it: all but the block, and where that is."""
    directory = copied(tabled, tmp_path / "root")
    table = table_of(directory, TABLED[30].payload)
    flip(table, table.read_bytes().index(TABLED[30].payload) + 100)
    with SpoolLook.opened(directory, SystemClock()) as found:
        count = len(list(found.entries()))
        (hole,) = found.holes
        assert len(TABLED) - 8 <= count < len(TABLED)
        assert str(directory) in hole.error
        assert ".work" not in hole.error


class _Striped:
    """Rows 0 to 399; those of some blocks cannot be read."""

    def __init__(self, damaged: list[range]) -> None:
        self._damaged = damaged

    def get_many(self, family: Family, wanted: Sequence[bytes]) -> list[bytes | None]:
        return [None for _ in wanted]

    def scan(self, family: Family, start: bytes, stop: bytes, *, limit: int, bytes_max: int = 0) -> Rows:
        rows: list[tuple[bytes, bytes]] = []
        if family is not Family.TIMELINE:
            return Rows(rows, True)
        for number in range(400):
            key = number.to_bytes(16, "big")
            if start <= key < stop:
                if len(rows) == limit:
                    return Rows(rows, False)
                if any(number in each for each in self._damaged):
                    raise StoreCorrupt("a damaged block")
                rows.append((key, b""))
        return Rows(rows, True)


@pytest.mark.parametrize(
    "damaged",
    [
        [range(110), range(125, 300)],  # no power of two lies in the good block between them
        [range(1), range(2, 3), range(399, 400)],
        [range(50, 90), range(91, 200), range(203, 399)],
        [range(400)],
    ],
)
def test_no_good_block_is_passed_over(tmp_path: Path, damaged: list[range]) -> None:
    """However short it is beside the damage in front of it."""
    found = Look(tmp_path, tmp_path, _Striped(damaged), How.STRICT)
    numbers = [int.from_bytes(key, "big") for key, _ in found.rows(Family.TIMELINE)]
    assert numbers == [number for number in range(400) if not any(number in each for each in damaged)]
    assert len(found.holes) == len(damaged)
