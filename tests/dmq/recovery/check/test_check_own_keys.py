"""Own keys in the store of a stopped daemon: what does not belong together is found, and made anew from what waits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from support.forges.messages.own_keys import keyed, waiting_under_keys
from support.forges.store.store_rig import CellRig, checked, killed_cell, run_cell
from support.rigs.broker.rig import TOPIC, ids, receive
from support.rigs.store.rows import all_rows

from broker_adapter.contracts.message import pack_id
from broker_adapter.runtime.clock import ManualClock
from dmq.broker.delayed.changes import ChangeOutcome, Meant
from dmq.recovery import salvage_store
from dmq.store.engines.engine import Batch
from dmq.store.engines.rocks import RocksEngine
from dmq.store.schema import keys
from dmq.store.schema.keys import Family
from dmq.store.schema.messages.index import encode_index_waiting
from dmq.store.schema.messages.own_keys import row_of

pytestmark = pytest.mark.integration
NOW = 1_700_000_000_000
Damage = Callable[[RocksEngine, Batch], None]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A killed store: a pending message under each of two keys, a replaced one, and a cancelled one under a third."""

    async def make(rig: CellRig) -> None:
        at_ms = rig.clock.now_ms() + 1_000
        sent = ("a", "x"), ("b", "x"), ("c", "y"), ("e", "z")
        await rig.broker.send([keyed(each, at_ms, key=key) for each, key in sent])
        await rig.broker.delayed.cancel(TOPIC, [Meant(pack_id("e"))])

    return killed_cell(tmp_path_factory.mktemp("keys"), make, ManualClock(NOW))


def without_rows(_: RocksEngine, batch: Batch) -> None:
    """No key leads anywhere."""
    batch.ranges.append((Family.META, *keys.meta_range(keys.META_OWN_KEY)))


def without_entry(engine: RocksEngine, batch: Batch) -> None:
    """One that waited is gone, and nobody said so to its key."""
    key, _ = all_rows(engine, Family.TIMELINE)[0]
    index_key = all_rows(engine, Family.INDEX)[0][0]
    batch.deletes += [(Family.TIMELINE, key), (Family.INDEX, index_key)]


def twice(engine: RocksEngine, batch: Batch) -> None:
    """What was replaced waits again: a table that is lost had deleted it."""
    _, value = next(row for row in all_rows(engine, Family.TIMELINE) if row_of(row[1]).endswith(b"x"))
    ghost = value.replace(b"\0b", b"\0a")
    batch.puts += [
        (Family.TIMELINE, keys.pack_timeline_key(NOW + 900, 1), ghost),
        (
            Family.INDEX,
            keys.pack_index_prefix(0, keys.meta_id(row_of(value))) + b"\0a",
            encode_index_waiting(1, NOW + 900),
        ),
    ]


def damaged(whole: Path, target: Path, damage: Damage | None) -> Path:
    """A copy, damaged."""
    path = Path(shutil.copytree(whole, target))
    engine = RocksEngine(path / "rocksdb")
    with closing(engine):
        batch = Batch()
        if damage is not None:
            damage(engine, batch)
        engine.write(batch)
        engine.sync()
    return path


@pytest.mark.parametrize(
    ("damage", "texts"),
    [
        (None, []),
        (without_rows, ["message b has the own key 'x', which does not lead to it", "message c has the own key 'y'"]),
        (without_entry, ["leads to message b, which does not wait"]),
        (twice, ["message a has the own key 'x', which does not lead to it"]),
    ],
)
def test_a_check_finds_inconsistent_rows(whole: Path, tmp_path: Path, damage: Damage | None, texts: list[str]) -> None:
    """Whichever of the two is wrong; a store that is whole has nothing."""
    found = checked(damaged(whole, tmp_path / "store", damage)).findings
    said = found.first.get("key", [])
    assert len(said) == len(texts)
    for text in texts:
        assert any(text in each for each in said), said
    assert bool(found.count) is (damage is not None)


@pytest.mark.parametrize(("damage", "keyed_ids"), [(without_rows, "bc"), (without_entry, "c"), (twice, "ac")])
def test_a_salvage_rebuilds_the_keys(whole: Path, tmp_path: Path, damage: Damage, keyed_ids: str) -> None:
    """The new store is clean; of two with one key both come, and only one of them can be replaced."""
    target = tmp_path / "new"
    salvaged = salvage_store(damaged(whole, tmp_path / "store", damage), target, ManualClock(NOW), lambda _: None)
    assert not salvaged.checked.findings.count

    async def look(rig: CellRig) -> None:
        assert sorted(waiting_under_keys(rig.store).values()) == list(keyed_ids)
        await rig.broker.send([keyed("d", NOW + 1_000, key="y")])
        await rig.pass_ms(1_000)
        came = set(ids(await receive(rig)))
        assert came == {*keyed_ids, "d"} - {"c"} | ({"b"} if damage is twice else set())
        assert waiting_under_keys(rig.store) == {}
        assert not rig.failures

    run_cell(target, look, ManualClock(NOW))


def test_a_salvage_forgets_the_last_holder_of_a_key(whole: Path, tmp_path: Path) -> None:
    """A lost table may hold a later holder: a change by a free key is unknown, one by the id is still answered."""
    target = tmp_path / "new"
    salvage_store(damaged(whole, tmp_path / "store", None), target, ManualClock(NOW), lambda _: None)

    async def outcomes(rig: CellRig) -> list[tuple[bytes, ChangeOutcome]]:
        delayed = rig.broker.delayed
        ((message_id, (by_key, _)),) = await delayed.by_key(TOPIC, ["z"], lambda meant: delayed.cancel(TOPIC, meant))
        ((by_id, _),) = await delayed.cancel(TOPIC, [Meant(pack_id("e"))])
        return [(message_id, by_key), (pack_id("e"), by_id)]

    e = pack_id("e")
    assert run_cell(target, outcomes, ManualClock(NOW)) == [(b"", ChangeOutcome.UNKNOWN), (e, ChangeOutcome.CANCELLED)]
    assert run_cell(tmp_path / "store", outcomes, ManualClock(NOW)) == [(e, ChangeOutcome.CANCELLED)] * 2
