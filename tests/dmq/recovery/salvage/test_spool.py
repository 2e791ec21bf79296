"""Damage to the log of a spool directory: one bad byte costs one record, and what is lost is counted."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from support.forges.store.spool_damage import (
    LATE_MS,
    QUIET,
    UNIT_BYTES,
    Later,
    Saved,
    copied,
    entry_of,
    files_of,
    flip,
    image,
    opened,
    put,
    take,
    the,
    uid_of,
)

from broker_adapter.runtime.clock import SystemClock
from dmq.errors import StoreCorrupt, StoreLocked
from dmq.producer_store.spool import Spool
from dmq.recovery.reading.log_repair import clean_logs
from dmq.recovery.reading.look import How
from dmq.recovery.reading.spool import SpooledState
from dmq.recovery.salvage.spool import Missing, salvage_spool
from dmq.store.engines.wal import BLOCK_BYTES, check_logs
from dmq.store.schema.keys import Family

pytestmark = pytest.mark.fault

# -- the log -----------------------------------------------------------------------------------------------------------

LOGGED = [entry_of(number, key=f"k{number % 4}" if number % 2 else "") for number in range(200)]


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 entries, all in one log, a record each."""
    root = tmp_path_factory.mktemp("logged")
    with opened(root / "live") as spool:
        put(spool, LOGGED)
        return image(spool, root / "killed")


@pytest.mark.parametrize("place", [0.0, 0.02, 0.03, 0.21, 0.4999, 0.5, 0.77, 0.9, 0.97, 0.9999])
def test_a_flipped_bit_in_the_log_costs_one_record(logged: Path, tmp_path: Path, place: float) -> None:
    """Wherever it is, also in the first record and in the last: at most one entry."""
    directory = copied(logged, tmp_path / "root")
    log = the(directory, "*.log")
    flip(log, int(log.stat().st_size * place))
    saved = Saved(directory)
    lost = saved.check(LOGGED)
    assert len(lost) <= 1
    assert saved.report.missing_uids in {(), tuple(uid.hex() for uid in lost)}, "() where its own lengths are damaged"
    assert saved.report.opened == How.WITHOUT_DAMAGED_RECORDS


@pytest.mark.parametrize("which", range(3))
def test_a_lost_entry_is_never_named_by_a_damaged_uid(logged: Path, tmp_path: Path, which: int) -> None:
    """A record has the uid in several places; where they differ, nobody is named, and one is counted as missing."""
    directory = copied(logged, tmp_path / "root")
    log = the(directory, "*.log")
    content, uid = log.read_bytes(), uid_of(150)
    places = [at for at in range(len(content)) if content.startswith(uid, at)]
    flip(log, places[which] + 11)
    saved = Saved(directory)
    assert saved.check(LOGGED) == {uid}
    assert saved.report.missing_uids in {(), (uid.hex(),)}


@pytest.mark.parametrize("at", range(50, 1_500, 59))
def test_a_flipped_bit_near_the_names_of_types_costs_one_entry(logged: Path, tmp_path: Path, at: int) -> None:
    """And at most the name of one type: it is guessed from the damaged record that has it, or made up."""
    directory = copied(logged, tmp_path / "root")
    flip(the(directory, "*.log"), at)
    saved = Saved(directory)
    lost = saved.lost(LOGGED, made_up={*saved.report.guessed_types, *saved.report.unknown_types})
    missing = saved.report.missing
    assert missing.at_least <= len(lost) <= 1
    assert missing.at_most is None or len(lost) <= missing.at_most


@pytest.mark.parametrize("seed", range(8))
def test_many_flipped_bits_in_the_log(logged: Path, tmp_path: Path, seed: int) -> None:
    """As many entries as bits at most; the count is exact, or a range that holds the truth."""
    rng = random.Random(seed)
    directory = copied(logged, tmp_path / "root")
    log = the(directory, "*.log")
    flips = rng.randint(2, 12)
    for _ in range(flips):
        flip(log, rng.randrange(2_000, log.stat().st_size), 1 << rng.randrange(8))
    saved = Saved(directory)
    lost = {each.uid for each in LOGGED} - saved.uids()
    missing = saved.report.missing
    assert len(saved.found) == len(saved.uids())
    assert len(lost) <= flips
    assert missing.at_least <= len(lost)
    assert missing.at_most is None or len(lost) <= missing.at_most


def test_order_of_a_key_outlives_the_loss_of_one_of_it(logged: Path, tmp_path: Path) -> None:
    """What is parked goes on behind its head, without the one that is gone."""
    directory = copied(logged, tmp_path / "root")
    log = the(directory, "*.log")
    flip(log, log.read_bytes().index(LOGGED[101].payload) + 5)
    saved = Saved(directory)
    assert saved.check(LOGGED) == {uid_of(101)}
    for type_name, key in (("orders", "k1"), ("bills", "k1"), ("orders", "k3")):
        lane = [each for each in saved.found if (each.entry.type_name, each.entry.key) == (type_name, key)]
        order = [each.entry.uid for each in lane]
        assert order == sorted(order)
        assert [each.state for each in lane].count(SpooledState.WAITING) == 1


def test_the_parked_take_the_place_of_a_lost_head(logged: Path, tmp_path: Path) -> None:
    """A key whose first entry is lost goes on with the next."""
    directory = copied(logged, tmp_path / "root")
    log = the(directory, "*.log")
    flip(log, log.read_bytes().index(LOGGED[3].payload) + 5)
    saved = Saved(directory)
    assert saved.check(LOGGED) == {uid_of(3)}
    lane = [each for each in saved.found if (each.entry.type_name, each.entry.key) == ("bills", "k3")]
    order = [each.entry.uid for each in lane]
    assert (order[0], lane[0].state) == (uid_of(15), SpooledState.WAITING)
    assert order == sorted(order)


def test_the_name_of_a_type_is_read_from_the_damaged_record_that_made_it(logged: Path, tmp_path: Path) -> None:
    """Without it no handler would fit; that it is a guess is said."""
    directory = copied(logged, tmp_path / "root")
    log = the(directory, "*.log")
    flip(log, log.read_bytes().index(LOGGED[0].payload) + 5)
    saved = Saved(directory)
    assert saved.check(LOGGED) == {uid_of(0)}
    assert saved.report.guessed_types == ("bills",)


def test_a_record_of_many_blocks(tmp_path: Path) -> None:
    """A bit in any of its parts costs the record, and neither neighbour."""
    entries = [entry_of(0), entry_of(1, size=UNIT_BYTES), entry_of(2)]
    with opened(tmp_path / "live") as spool:
        put(spool, entries)
        whole = image(spool, tmp_path / "killed")
    content = the(whole, "*.log").read_bytes()
    start = content.index(entries[1].payload[:1000])
    for number, at in enumerate((start, start + 2 * BLOCK_BYTES, start + UNIT_BYTES - 1)):
        directory = copied(whole, tmp_path / f"root-{number}")
        flip(the(directory, "*.log"), at)
        assert Saved(directory).check(entries) == {uid_of(1)}


def test_a_log_that_was_cut_before_another_one(tmp_path: Path) -> None:
    """Records follow in the next log, so this is no kill: what the tear took is counted by the gap it leaves."""
    entries = [entry_of(number) for number in range(60)]
    with opened(tmp_path / "live") as spool:
        put(spool, entries[:30])
        audit = spool.entries.store._engine._dicts[Family.AUDIT]  # type: ignore[attr-defined]
        audit.put(b"\xff" * 8, b"something to flush")
        audit.flush(True)  # another log begins, while the other families still need this one
        audit.delete(b"\xff" * 8)
        put(spool, entries[30:])
        directory = image(spool, tmp_path / "root")
    older, _ = sorted((path for path in (directory / "rocksdb").glob("*.log") if path.stat().st_size), key=str)
    os.truncate(older, older.stat().st_size - 100)
    with pytest.raises(StoreCorrupt):
        check_logs(directory / "rocksdb")
    saved = Saved(directory)
    lost = {each.uid for each in entries} - saved.uids()
    assert lost == {uid_of(29)}
    assert saved.report.missing == Missing(1, 1)


def test_an_entry_whose_end_is_lost_is_sent_again(tmp_path: Path) -> None:
    """The record of a finish is damaged: the entry is there again, nothing is missing, and the report warns."""
    entries = [entry_of(number) for number in range(20)]
    with opened(tmp_path / "live", LATE_MS) as spool:
        put(spool, entries)
        held = take(spool, "orders", 4)
        log = the(spool.path, "*.log")
        before = log.stat().st_size
        spool.finish(held[0]).result(10)
        after = log.stat().st_size
        spool.finish(held[1]).result(10)
        directory = image(spool, tmp_path / "root")
    flip(the(directory, "*.log"), after - 2)
    assert before < after - 2
    saved = Saved(directory)
    assert {each.uid for each in entries} - saved.uids() == {held[1].entry.uid}
    assert saved.report.missing == Missing(0, 0)
    assert saved.report.lost_events >= 1


def test_two_states_of_one_entry_are_saved_once(tmp_path: Path) -> None:
    """The record of one attempt is damaged, that of the next one is not: the later state is what counts."""
    entries = [entry_of(number) for number in range(6)]
    clock = Later(LATE_MS)
    with Spool(tmp_path / "live", options=QUIET, clock=clock) as spool:
        put(spool, entries)
        (held,) = take(spool, "orders", 1)
        log = the(spool.path, "*.log")
        before = log.stat().st_size
        spool.again(held, clock.now_ms() + 10, is_counted=True, error="first").result(10)
        after = log.stat().st_size
        clock.ahead_ms += 1_000
        others = take(spool, "orders", 4)
        (again,) = [each for each in others if each.entry.uid == held.entry.uid]
        spool.again(again, clock.now_ms() + 60_000, is_counted=True, error="second").result(10)
        directory = image(spool, tmp_path / "root")
    flip(the(directory, "*.log"), (before + after) // 2)
    saved = Saved(directory)
    assert saved.uids() == {each.uid for each in entries}
    (found,) = [each for each in saved.found if each.entry.uid == held.entry.uid]
    assert (found.entry.attempts, found.entry.error) == (2, "second")
    assert (saved.report.superseded, saved.report.missing) == (1, Missing(0, 0))


def test_cleaning_leaves_a_whole_log_alone(logged: Path, tmp_path: Path) -> None:
    """Not a byte changes where nothing is damaged, and a torn end is all that goes of a torn log."""
    directory = copied(logged, tmp_path / "root") / "rocksdb"
    log = the(directory.parent, "*.log")
    whole = log.read_bytes()
    assert clean_logs(directory, lambda _: None) == []
    assert log.read_bytes() == whole
    os.truncate(log, len(whole) - 3)
    (dropped,) = clean_logs(directory, lambda _: None)
    assert (dropped.is_tail, dropped.data) == (True, None)
    assert log.read_bytes() == whole[: dropped.at]
    assert clean_logs(directory, lambda _: None) == []


# -- what a salvage leaves alone ---------------------------------------------------------------------------------------


def test_a_whole_directory_stays_as_it_is(logged: Path, tmp_path: Path) -> None:
    """Not a byte of it changes, and there is no other one."""
    directory = copied(logged, tmp_path / "root")
    before = files_of(directory)
    report = salvage_spool(directory, SystemClock(), lambda _: None)
    assert (report.saved_in, report.kept_in, report.error) == ("", "", "")
    assert files_of(directory) == before
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    """It says whose it is, and changes nothing."""
    with opened(tmp_path) as spool:
        put(spool, [entry_of(1)])
        with pytest.raises(StoreLocked, match=f"{os.getpid()}"):
            salvage_spool(spool.path, SystemClock(), lambda _: None)
        put(spool, [entry_of(2)])
        assert spool.stats().waiting == 2


def test_a_failure_on_the_way_leaves_the_original(logged: Path, tmp_path: Path) -> None:
    """Whatever ends it before the new directory is complete, the root has what it had."""
    directory = copied(logged, tmp_path / "root")
    log = the(directory, "*.log")
    flip(log, log.stat().st_size // 2)
    before = files_of(directory)

    def tell(text: str) -> None:
        if "saved" in text:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        salvage_spool(directory, SystemClock(), tell)
    assert files_of(directory) == before
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]


def test_a_saved_directory_is_gone_on_with(logged: Path, tmp_path: Path) -> None:
    """The next process opens it as its own, sends what was saved, and does not see the damaged one."""
    directory = copied(logged, tmp_path / "root")
    log = the(directory, "*.log")
    flip(log, log.read_bytes().index(LOGGED[50].payload) + 5)
    saved = Saved(directory)
    with opened(tmp_path / "root", LATE_MS) as spool:
        assert str(spool.path) == saved.report.saved_in
        assert spool.damaged == []
        seen = set()
        for type_name in ("orders", "bills"):
            for _ in range(spool.stats(type_name).waiting):
                (held,) = take(spool, type_name, 1)
                seen.add(held.entry.uid)
                spool.finish(held).result(10)
        assert seen == {each.uid for each in LOGGED} - {uid_of(50)}
