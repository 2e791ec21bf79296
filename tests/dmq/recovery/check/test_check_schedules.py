"""Schedules in the store of a stopped daemon: what does not belong together is found, what is whole saved."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

import pytest
from support.forges.messages.schedules import add, check_rows, occurrences, tick
from support.forges.store.store_rig import CellRig, checked, killed_cell, lost_lines, run_cell
from support.rigs.broker.rig import TOPIC
from support.rigs.store.rows import all_rows

from broker_adapter.runtime.clock import ManualClock
from dmq.recovery import salvage_store
from dmq.store.engines.engine import Batch
from dmq.store.engines.rocks import RocksEngine
from dmq.store.schema.keys import Family
from dmq.store.schema.messages.record import is_recurring
from dmq.store.schema.messages.recurring import Phase, schedule_keys

pytestmark = pytest.mark.integration
NOW = 1_700_000_000_000


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A killed store with a schedule that waits, one that is paused and one that has ended."""

    async def make(rig: CellRig) -> None:
        await add(rig, "waits")
        await add(rig, "paused", message_group="g")
        await add(rig, "ended", count=1)
        await tick(rig, 3)
        await rig.broker.schedules.pause("paused")

    return killed_cell(tmp_path_factory.mktemp("schedules"), make)


def damaged(whole: Path, target: Path, *gone: bytes) -> Path:
    """A copy without some rows: of the meta family by their keys, ``b""`` for the entry of the timeline."""
    path = Path(shutil.copytree(whole, target))
    engine = RocksEngine(path / "rocksdb")
    with closing(engine):
        batch = Batch()
        for key in gone:
            if key:
                batch.deletes.append((Family.META, key))
            else:
                batch.deletes += [
                    (Family.TIMELINE, row) for row, value in all_rows(engine, Family.TIMELINE) if is_recurring(value)
                ]
        engine.write(batch)
        engine.sync()
    return path


ROWS = schedule_keys("waits")


@pytest.mark.parametrize(
    ("gone", "texts"),
    [
        ((), []),
        ((b"",), ["is waiting, and has no entry"]),
        ((ROWS[0],), ["'waits' is not whole"]),
        ((ROWS[1],), ["'waits' is not whole"]),
        (ROWS, ["'waits' has an entry, and is not there"]),
        ((schedule_keys("ended")[2],), ["'ended' is not whole"]),
    ],
)
def test_a_check_finds_inconsistent_rows(
    whole: Path, tmp_path: Path, gone: tuple[bytes, ...], texts: list[str]
) -> None:
    """By the name of the schedule; one that is whole is clean."""
    found = checked(damaged(whole, tmp_path / "store", *gone))
    said = [text for text in found.findings.first.get("row", []) if "schedule" in text]
    assert len(said) == len(texts)
    for text in texts:
        assert any(text in each for each in said), said
    assert bool(found.findings.count) is bool(gone)


@pytest.mark.parametrize("gone", [(), (b"",), (ROWS[0],), (ROWS[1],), (ROWS[2],)])
def test_a_salvage_saves_sound_rows(whole: Path, tmp_path: Path, gone: tuple[bytes, ...]) -> None:
    """The new store is clean, and goes on: one that lost its entry is paused and says why; a part is no schedule."""
    target = tmp_path / "new"
    salvaged = salvage_store(damaged(whole, tmp_path / "store", *gone), target, ManualClock(NOW), lambda _: None)
    assert not salvaged.checked.findings.count
    lost = [line for line in lost_lines(target) if line["kind"] == "schedule"]
    assert [line["name"] for line in lost] == (["waits"] if gone else [])

    async def look(rig: CellRig) -> None:
        phases = {"paused": Phase.PAUSED, "ended": Phase.ENDED}
        if not gone:
            phases["waits"] = Phase.WAITING
        elif gone == (b"",):
            phases["waits"] = Phase.PAUSED
        assert check_rows(rig) == phases
        if gone == (b"",):
            assert "its entry was lost" in (await rig.broker.schedules.show("waits")).progress.why
            await rig.broker.schedules.resume("waits")
        await tick(rig, 2)
        numbers = [number for number, _ in occurrences(rig, "waits", TOPIC)]
        assert numbers == ([1, 2, 3, 4, 5] if "waits" in phases else [1, 2, 3])
        assert not rig.failures

    run_cell(target, look, ManualClock(NOW + 3_000))
