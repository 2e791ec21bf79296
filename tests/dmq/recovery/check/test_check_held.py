"""A store with held messages: it passes its check, is saved whole by a salvage, and a snapshot calls them held."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.forges.store.store_rig import CellRig, checked, held, killed_cell, run_cell
from support.rigs.broker.rig import TOPIC, an_envelope

from broker_adapter.runtime.clock import ManualClock
from dmq.broker.topics.settings import FlowChange
from dmq.recovery import salvage_store
from dmq.store.engines.engine import Batch
from dmq.store.engines.rocks import RocksEngine
from dmq.store.schema import keys
from dmq.store.schema.keys import Family, pack_u64
from dmq.trail.snapshots.layout import open_quiet, read_names
from dmq.trail.snapshots.rows import HELD, entries

pytestmark = pytest.mark.integration
COUNT = 5


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    async def make(rig: CellRig) -> None:
        due_ms = rig.clock.now_ms() + 1_000
        await rig.broker.send([an_envelope(f"m-{number}", deliver_at_ms=due_ms) for number in range(COUNT)])
        await rig.broker.send([an_envelope("later", deliver_at_ms=due_ms + 3_600_000)])
        await rig.broker.operator.set_topic(TOPIC, flow=FlowChange(is_paused=True))
        await rig.pass_ms(60_000)
        assert sum(rig.store.held().values()) == COUNT

    return killed_cell(tmp_path_factory.mktemp("held"), make)


def test_a_store_that_holds_passes_its_check(made: Path) -> None:
    """What is held is an entry of the timeline like any other."""
    found = checked(made)
    assert not found.findings.count, found.findings.first
    assert found.totals["timeline: delayed"].rows == COUNT + 1


def test_a_wrong_figure_is_found(made: Path, tmp_path: Path) -> None:
    """The count of what a topic holds, and a row among those of another topic."""
    path = Path(shutil.copytree(made, tmp_path / "store"))
    engine = RocksEngine(path / "rocksdb")
    ((key, _),) = engine.scan(Family.META, *keys.meta_range(keys.META_HELD), limit=2).rows
    batch = Batch()
    batch.puts.append((Family.META, key, pack_u64(7)))
    engine.write(batch)
    engine.close()
    assert set(checked(path).findings.count) == {"figure"}


def test_a_salvage_saves_held_messages(made: Path, tmp_path: Path) -> None:
    """Under the same keys, counted anew; the new store passes its check."""
    saved = salvage_store(made, tmp_path / "new", ManualClock(), lambda _: None)
    assert saved.is_whole
    assert not saved.checked.findings.count
    assert held(tmp_path / "new").waiting == held(made).waiting
    assert saved.checked.totals["meta: count"] == checked(made).totals["meta: count"]


def test_a_restored_store_continues(made: Path, tmp_path: Path) -> None:
    """It is paused as it was, and delivers what it holds once it is resumed."""
    path = Path(shutil.copytree(made, tmp_path / "store"))

    clock = ManualClock()
    clock.advance(120_000)

    async def resume(rig: CellRig) -> None:
        await rig.settle()
        assert sum(rig.store.held().values()) == COUNT
        await rig.broker.operator.set_topic(TOPIC, flow=FlowChange(is_paused=False))
        for _ in range(10):
            await rig.pass_ms(100)
        assert not rig.store.held()

    run_cell(path, resume, clock)
    assert len(held(path).queued) == COUNT


def test_a_snapshot_contains_held_messages(made: Path) -> None:
    """So that an audit calls it pending, and not overdue."""
    engine = open_quiet(made / "rocksdb")
    rows = [row for batch in entries(engine, read_names(engine), done=0) for row in batch.to_pylist()]
    engine.close()
    assert sorted(row["kind"] for row in rows) == ["DELAYED", *[HELD] * COUNT]
    assert not any(row["is_stranded"] for row in rows)
