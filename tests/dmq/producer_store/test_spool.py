"""Corners of a spool that its state machine does not reach."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.rigs.broker.rig import End
from support.rigs.producer.spool import PATIENCE_S, SpoolRig, an_entry, number_of, recount

from dmq.errors import StoreFailed
from dmq.producer_store.directories.bounds import SpoolOptions
from dmq.producer_store.directories.running import Running
from dmq.producer_store.spool import Spool
from dmq.store.schema.keys import Family, timeline_key, timeline_mark
from dmq.store.schema.spool import encode_entry
from dmq.store.writer.operations import Put
from dmq.store.writer.writer import Unit
from retry.sink import Death, Held, SinkClosed, SinkFull, SinkUnavailable


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SpoolRig]:
    monkeypatch.setattr("dmq.producer_store.directories.running.REOPEN_S", (0.0,))
    made = SpoolRig(tmp_path, on_disk=False)
    made.open()
    yield made
    made.spool.close()


def take(rig: SpoolRig, type_name: str = "orders") -> list[Held]:
    """Take what is due."""
    rig.spool.take(type_name, 0, 0)
    rig.clock.advance(1)
    rig.spool.turn()
    return list(rig.spool.take(type_name, 100, 0))


def test_a_cancelled_future_is_harmless(rig: SpoolRig) -> None:
    """What it stands for cannot be undone, so it cannot be cancelled: asyncio does that to futures it waits for."""
    answers = [rig.spool.put(an_entry(number)) for number in range(1, 50)]
    assert not any(each.cancel() for each in answers)
    for each in answers:
        each.result(PATIENCE_S)
    (held, *_) = take(rig)
    answer = rig.spool.finish(held)
    answer.cancel()
    answer.result(PATIENCE_S)


def test_memory_held_from_the_start_belongs_to_its_owner(rig: SpoolRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the reader sees the row before its writer is told: it is due at once, and read in that moment."""
    assert not take(rig)
    rig.clock.advance(1)
    submit = rig.spool.entries.store.submit

    def submit_read_first(unit: Unit, *, is_urgent: bool) -> None:
        def read_first(ended: Unit) -> None:
            rig.spool.turn()
            unit.settle(ended)

        submit(Unit(unit.ops, read_first), is_urgent=is_urgent)

    monkeypatch.setattr(rig.spool.entries.store, "submit", submit_read_first)
    held = rig.spool.put(an_entry(created_at_ms=rig.clock.now_ms()), is_held=True).result(PATIENCE_S)
    monkeypatch.undo()
    assert held is not None
    assert not take(rig)
    assert rig.spool.stats().held == 1
    rig.spool.finish(held).result(PATIENCE_S)
    assert recount(rig.spool.entries).waiting == {}


def test_a_row_that_is_finished_while_it_is_read_does_not_come_again(
    rig: SpoolRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader looks at its rows after an entry of them was finished: it is there no more."""
    rig.clock.step_to(rig.clock.now_ms() + 10_000)
    held = rig.spool.put(an_entry(created_at_ms=rig.clock.now_ms()), is_held=True).result(PATIENCE_S)
    assert held is not None
    scan = rig.spool.entries.store.scan

    def finish_meanwhile(family: Family, *arguments: object, **options: object) -> object:
        rows = scan(family, *arguments, **options)  # type: ignore[arg-type]
        if family is Family.TIMELINE and rows.rows:
            rig.spool.finish(held).result(PATIENCE_S)
        return rows

    rig.spool.take("orders", 0, 0)
    rig.clock.advance(1)
    monkeypatch.setattr(rig.spool.entries.store, "scan", finish_meanwhile)
    rig.spool.turn()
    monkeypatch.undo()
    assert not take(rig)
    assert rig.spool.stats().waiting == rig.spool.stats().held == 0


def test_the_next_of_a_key_waits_for_its_own_time_too(rig: SpoolRig) -> None:
    """An entry that is due in an hour is not sent earlier because the one in front of it is gone."""
    now_ms = rig.clock.now_ms()
    rig.spool.put(an_entry(1, key="a", due_at_ms=now_ms)).result(PATIENCE_S)
    rig.spool.put(an_entry(2, key="a", due_at_ms=now_ms + 3_600_000)).result(PATIENCE_S)
    (held,) = take(rig)
    rig.spool.finish(held).result(PATIENCE_S)
    rig.clock.advance(3_599_000)
    assert not take(rig)
    rig.clock.advance(1_000)
    assert [number_of(held) for held in take(rig)] == [2]


@pytest.mark.parametrize("type_name", ["", " ", "a b", "x" * 500, "rmq_sys_x"])
def test_names_that_are_none_are_refused(rig: SpoolRig, type_name: str) -> None:
    """A type's name fits the rules of topics; nothing of what is refused is kept, or known."""
    with pytest.raises(ValueError, match="topic"):
        rig.spool.put(an_entry(type_name=type_name))
    assert rig.spool.types == []


@pytest.mark.parametrize(
    "bad", [{"uid": b"short"}, {"key": "ä" * 128}, {"due_at_ms": -1}, {"created_at_ms": 2**70}, {"attempts": -1}]
)
def test_an_entry_that_cannot_be_kept_leaves_nothing_behind(rig: SpoolRig, bad: dict[str, object]) -> None:
    """Not even the name of its type, which would be known and not on disk."""
    with pytest.raises(ValueError, match=r"uid|key|time|attempts"):
        rig.spool.put(replace(an_entry(type_name="first"), **bad))  # type: ignore[arg-type]
    rig.spool.put(an_entry(type_name="second")).result(PATIENCE_S)
    rig.spool.close()
    rig.memory = rig.memory.reopened()
    rig.open()
    assert rig.spool.types == ["second"]
    assert len(take(rig, "second")) == 1


def test_attempts_end_at_the_maximum_of_their_field(rig: SpoolRig) -> None:
    """An entry that failed more often is kept all the same."""
    rig.spool.put(replace(an_entry(), attempts=0x10000)).result(PATIENCE_S)
    (held,) = take(rig)
    assert held.entry.attempts == 0xFFFF


def test_the_same_uid_can_die_twice(rig: SpoolRig) -> None:
    """It is one dead entry, and counts as one."""
    for _ in range(2):
        held = rig.spool.put(an_entry(1), is_held=True).result(PATIENCE_S)
        assert held is not None
        rig.spool.bury(held, Death.PERMANENT, "no").result(PATIENCE_S)
    assert rig.spool.stats().dead == len(rig.spool.dead("orders")) == 1
    assert rig.spool.requeue("orders", [an_entry(1).uid]) == 1
    assert rig.spool.stats().dead == 0


@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("key", ["", "k"])
def test_an_entry_whose_uid_is_pending_is_kept_once(rig: SpoolRig, key: str, *, is_held: bool) -> None:
    """Under way, waiting, in a worker's hands, in a later turn, after a restart: who puts it again is told that it is.

    It stays as it was put first, and is not handed to who puts it again.
    """

    def put_again() -> None:
        again = replace(an_entry(1, key=key), payload=b"another")
        assert rig.spool.put(again, is_held=is_held).result(PATIENCE_S) is None

    answers = [rig.spool.put(an_entry(1, key=key), is_held=at > 0 and is_held) for at in range(3)]
    assert [each.result(PATIENCE_S) for each in answers] == [None] * 3
    put_again()
    (held,) = take(rig)
    put_again()
    rig.spool.again(held, rig.clock.now_ms() + 500, is_counted=True).result(PATIENCE_S)
    put_again()
    rig.restart(End.CLOSE)
    put_again()
    rig.clock.advance(500)
    (held,) = take(rig)
    assert (held.entry.payload, held.entry.attempts) == (b"payload", 1)
    rig.spool.finish(held).result(PATIENCE_S)
    assert not take(rig)
    stats = rig.spool.stats()
    assert (stats.waiting, stats.waiting_bytes, stats.held) == (0, 0, 0)
    assert recount(rig.spool.entries).totals["orders"] == rig.spool.entries.total()
    rig.spool.put(an_entry(1, key=key)).result(PATIENCE_S)  # it is gone, so this is another one
    assert len(take(rig)) == 1


@pytest.mark.parametrize("is_answered", [True, False], ids=["written", "under way"])
def test_a_parked_entry_is_kept_once(rig: SpoolRig, *, is_answered: bool) -> None:
    """Behind another one of its key, and once it is the first itself; the same uid under another key is another."""
    answers = [rig.spool.put(an_entry(number, key="k")) for number in (1, 2, 3)]
    for each in answers if is_answered else []:
        each.result(PATIENCE_S)
    for number in (3, 2, 3):
        rig.spool.put(an_entry(number, key="k")).result(PATIENCE_S)
    assert rig.spool.stats().waiting == 3
    for number in (1, 2, 3):
        (held,) = take(rig)
        assert number_of(held) == number
        rig.spool.put(an_entry(3, key="k")).result(PATIENCE_S)
        rig.spool.finish(held).result(PATIENCE_S)
    assert not take(rig)
    assert rig.spool.entries.store.scan(Family.GROUP, b"", b"\xff" * 60, limit=9).rows == []


def test_a_full_spool_counts_its_entries(tmp_path: Path) -> None:
    """It refuses what is new, and says of what waits that it does."""
    rig = SpoolRig(tmp_path, on_disk=False, options=SpoolOptions(adopt_every_s=0, entries_max=1))
    rig.open()
    rig.spool.put(an_entry(1)).result(PATIENCE_S)
    with pytest.raises(SinkFull):
        rig.spool.put(an_entry(2)).result(PATIENCE_S)
    rig.spool.put(an_entry(1)).result(PATIENCE_S)
    rig.spool.close()


def test_a_failed_unit_is_reported_to_all(rig: SpoolRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who put it a second time hears of the first one's failure, and not that it is kept."""
    waiting: list[Unit] = []
    monkeypatch.setattr(rig.spool.entries.store, "submit", lambda unit, **_: waiting.append(unit))
    answers = [rig.spool.put(an_entry(1)) for _ in range(2)]
    waiting[0].error = StoreFailed("no")
    for unit in waiting:
        unit.settle(unit)
    for each in answers:
        with pytest.raises(SinkUnavailable):
            each.result(PATIENCE_S)


def test_a_row_that_is_no_entry_is_skipped(rig: SpoolRig) -> None:
    """It stays where it is, and is named; entries in front of it and behind it come, now and in the next run."""
    now_ms = rig.clock.now_ms()
    rig.spool.put(an_entry(1)).result(PATIENCE_S)
    good = encode_entry(an_entry(9), 1, 0)
    bad = {1: b"?", 2: good[:20], 3: good[:29], 4: encode_entry(an_entry(9), 77, 0)}
    rows = [Put(Family.TIMELINE, timeline_key(timeline_mark(now_ms, 2**32 + at)), value) for at, value in bad.items()]
    rig.spool.entries.store.commit(rows)
    rig.clock.advance(1)
    rig.spool.put(an_entry(2, due_at_ms=rig.clock.now_ms())).result(PATIENCE_S)
    for expected in ([1, 2], []):
        taken = take(rig)
        assert [number_of(held) for held in taken] == expected
        for held in taken:
            rig.spool.finish(held).result(PATIENCE_S)
        assert len(rig.spool.damaged) == len(bad)
        assert rig.spool.entries.store.failure is None
        rig.clock.advance(1_000)
        rig.spool.turn()
        rig.spool.close()
        rig.memory = rig.memory.reopened()
        rig.open()


def test_close_is_not_held_up_by_mending(rig: SpoolRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The spool is closed while its directory is being opened again: both come to an end."""
    mends, closes = threading.Event(), threading.Event()
    open_again = Running._open_again

    def open_late(running: Running) -> object:
        mends.set()
        assert closes.wait(PATIENCE_S)
        return open_again(running)

    monkeypatch.setattr(Running, "_open_again", open_late)
    rig.memory.fail_next_sync = True
    with pytest.raises(SinkUnavailable):
        rig.spool.put(an_entry()).result(PATIENCE_S)
    assert mends.wait(PATIENCE_S)
    thread = threading.Thread(target=rig.spool.close, daemon=True)
    thread.start()
    while not rig.spool._is_closed:
        threading.Event().wait(0.001)
    closes.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    with pytest.raises(SinkClosed):
        rig.spool.put(an_entry())
    assert rig.spool.take("orders", 1, 1.0) == []


def test_a_failure_while_mending_is_mended_too(rig: SpoolRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store that was just opened fails before anybody notices: it is opened once more."""
    start = Running._start

    def fail_at_once(running: Running, entries: object) -> None:
        monkeypatch.setattr(Running, "_start", start)
        rig.memory.fail_next_sync = True
        with pytest.raises(Exception, match="injected"):
            entries.store.commit([])  # type: ignore[attr-defined]
        start(running, entries)  # type: ignore[arg-type]

    monkeypatch.setattr(Running, "_start", fail_at_once)
    rig.memory.fail_next_sync = True
    with pytest.raises(SinkUnavailable):
        rig.spool.put(an_entry(1)).result(PATIENCE_S)
    for _ in range(int(PATIENCE_S * 1000)):
        if rig.spool.reopened_total == 2:
            break
        threading.Event().wait(0.001)
    rig.mended()
    rig.spool.put(an_entry(2)).result(PATIENCE_S)
    assert 2 in recount(rig.spool.entries).waiting


def test_an_error_that_a_caller_gets_is_the_sinks(rig: SpoolRig) -> None:
    """No error of the store comes out of the methods of a sink."""
    rig.spool.put(an_entry()).result(PATIENCE_S)
    rig.spool.entries.store.close()
    for call in (
        lambda: rig.spool.put(an_entry(2)).result(PATIENCE_S),
        lambda: rig.spool.has_waiting("orders", "a"),
        lambda: rig.spool.dead("orders"),
        lambda: rig.spool.requeue("orders", [b"?" * 16]),
    ):
        with pytest.raises(SinkUnavailable):
            call()
    assert rig.spool.stats().waiting == 1


def test_key_queues_are_not_kept_in_memory(rig: SpoolRig) -> None:
    """However many keys wait, only what is under way costs memory."""
    for answer in [rig.spool.put(an_entry(number, key=f"key {number % 500}")) for number in range(1_000)]:
        answer.result(PATIENCE_S)
    key_queues = rig.spool.entries.key_queues
    assert not key_queues._ahead
    assert not key_queues._parked
    for held in take(rig):
        rig.spool.finish(held).result(PATIENCE_S)
    assert not key_queues._ahead


# -- steps of the clock ------------------------------------------------------------------------------------------------

_HOUR_MS = 3_600_000


def put_back(rig: SpoolRig, held: Held, wait_ms: int) -> None:
    """Have an entry wait after a failure."""
    rig.spool.again(held, rig.spool.clock.now_ms() + wait_ms, is_counted=True).result(PATIENCE_S)


@pytest.mark.parametrize("end", [None, End.CLOSE, End.KILL], ids=["goes on", "closed", "killed"])
def test_a_step_back_keeps_no_entry_waiting(rig: SpoolRig, end: End | None) -> None:
    """What waits for a second waits for one, whatever the clock says when it is over; a restart changes nothing."""
    rig.spool.put(an_entry(due_at_ms=rig.clock.now_ms())).result(PATIENCE_S)
    (held,) = take(rig)
    put_back(rig, held, 1_000)
    rig.clock.step_to(rig.clock.now_ms() - _HOUR_MS)
    if end is not None:
        rig.restart(end)
    assert not take(rig)
    rig.clock.advance(1_000)
    (held,) = take(rig)
    put_back(rig, held, 1_000)  # and the next one, by the clock as it is now
    assert not take(rig)
    rig.clock.advance(1_000)
    assert len(take(rig)) == 1


@pytest.mark.parametrize("end", [None, End.KILL], ids=["goes on", "killed"])
def test_a_glitch_by_minutes_keeps_no_entry_waiting(rig: SpoolRig, end: End | None) -> None:
    """The clock is five minutes ahead, an entry is put back, and it is right again; also in the next process."""
    rig.spool.put(an_entry(due_at_ms=rig.clock.now_ms())).result(PATIENCE_S)
    (held,) = take(rig)
    rig.clock.step_to(rig.clock.now_ms() + 300_000)
    rig.spool.turn()
    put_back(rig, held, 1_000)
    rig.clock.step_to(rig.clock.now_ms() - 300_000)
    if end is not None:
        rig.restart(end)
    rig.clock.advance(1_000)
    assert len(take(rig)) == 1


def test_a_glitch_by_a_year_is_not_seen(rig: SpoolRig) -> None:
    """Nothing becomes too old, and nothing is put back for a year."""
    before_ms = rig.spool.clock.now_ms()
    rig.clock.step_to(rig.clock.now_ms() + 365 * 24 * _HOUR_MS)
    rig.clock.advance(1_000)
    assert rig.spool.clock.now_ms() == before_ms + 1_000


def test_after_a_start_of_the_machine_no_entry_waits_for_its_old_clock(rig: SpoolRig) -> None:
    """The clock was an hour ahead when the directory was opened, and is right when the machine is there again."""
    rig.clock.step_to(rig.clock.now_ms() + _HOUR_MS)
    rig.restart(End.CLOSE)
    rig.spool.put(an_entry(due_at_ms=rig.clock.now_ms())).result(PATIENCE_S)
    (held,) = take(rig)
    put_back(rig, held, 1_000)
    rig.spool.close()
    rig.clock.reboot(-_HOUR_MS)
    rig.memory = rig.memory.reopened()
    rig.open()
    rig.clock.advance(1_010)
    assert len(take(rig)) == 1


def test_an_empty_directory_leaves_the_clock_as_it_is(rig: SpoolRig) -> None:
    """A clock that was ahead once is not so for ever: where nothing waits, the next process begins with the host's."""
    rig.clock.step_to(rig.clock.now_ms() + _HOUR_MS)
    rig.restart(End.CLOSE)
    rig.clock.step_to(rig.clock.now_ms() - _HOUR_MS)
    rig.restart(End.CLOSE)
    assert rig.spool.clock.now_ms() == rig.clock.now_ms()


def test_a_relative_path_is_that_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that goes into another folder, as daemons do, opens its directory where it is."""
    monkeypatch.chdir(tmp_path)
    with Spool("spool", options=SpoolOptions(adopt_every_s=0)) as spool:
        assert spool.path.parent == tmp_path / "spool"
