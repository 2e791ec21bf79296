"""What happens at each bound of a spool, under each policy."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
from support.rigs.producer.spool import PATIENCE_S, QUIET, SpoolRig, an_entry, number_of, recount
from support.rigs.store.rows import events

from dmq.producer_store.entries.plan import ENTRY_BYTES
from dmq.producer_store.spool import Spool, SpoolOptions
from dmq.trail.events import EventKind, decode_event
from retry.sink import Held, SinkClosed, SinkFull

AT_THREE = (
    ("entries_max", replace(QUIET, entries_max=3)),
    ("bytes_max", replace(QUIET, bytes_max=3 * (ENTRY_BYTES + len(b"payload")))),
)
POLICIES = ("refuse", "block", "drop_newest", "drop_oldest")


class Rigs:
    """Makes rigs, and closes them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.made: list[SpoolRig] = []

    def open(self, options: SpoolOptions) -> SpoolRig:
        """Return a spool on the engine in memory."""
        rig = SpoolRig(self._path / str(len(self.made)), on_disk=False, options=options)
        rig.open()
        self.made.append(rig)
        return rig


@pytest.fixture
def rigs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rigs]:
    monkeypatch.setattr("dmq.producer_store.directories.bounds.WAIT_S", 0.01)
    made = Rigs(tmp_path)
    yield made
    for each in made.made:
        each.spool.close()


def fill(spool: Spool, *numbers: int, key: str = "", type_name: str = "orders") -> None:
    """Keep entries, made a millisecond apart."""
    for number in numbers:
        entry = an_entry(number, key=key, type_name=type_name, created_at_ms=spool.clock.now_ms() + number)
        spool.put(replace(entry, due_at_ms=spool.clock.now_ms())).result(PATIENCE_S)


def there(spool: Spool) -> list[int]:
    """What is kept."""
    return sorted(recount(spool.entries).waiting)


def dropped(spool: Spool) -> list[int]:
    """What the trail says was thrown away."""
    spool.entries.store.commit([])  # behind it, all events are written
    found = [decode_event(record.event) for record in events(spool.entries.store)]
    return [int.from_bytes(each.message_id[-16:], "big") for each in found if each.kind is EventKind.DROPPED]


@pytest.mark.parametrize(("limit", "options"), AT_THREE, ids=[limit for limit, _ in AT_THREE])
def test_refuse(rigs: Rigs, limit: str, options: SpoolOptions) -> None:
    """The fourth is refused with the name of the bound, nothing of it is kept, and there is room once one is gone."""
    rig = rigs.open(options)
    spool = rig.spool
    fill(spool, 1, 2, 3)
    with pytest.raises(SinkFull) as refused:
        spool.put(an_entry(4)).result(PATIENCE_S)
    assert refused.value.limit == limit
    assert (spool.refused_total, spool.dropped_total, dropped(spool)) == (1, 0, [])
    assert there(spool) == [1, 2, 3]
    (held, *_) = take(rig)
    with pytest.raises(SinkFull):
        spool.put(an_entry(4)).result(PATIENCE_S)
    spool.finish(held).result(PATIENCE_S)
    spool.put(an_entry(4)).result(PATIENCE_S)
    assert there(spool) == [2, 3, 4]


@pytest.mark.parametrize(("limit", "options"), AT_THREE, ids=[limit for limit, _ in AT_THREE])
def test_drop_newest(rigs: Rigs, limit: str, options: SpoolOptions) -> None:
    """As refuse, with an event in the trail."""
    spool = rigs.open(replace(options, overflow="drop_newest")).spool
    fill(spool, 1, 2, 3)
    with pytest.raises(SinkFull) as refused:
        spool.put(an_entry(4)).result(PATIENCE_S)
    assert refused.value.limit == limit
    assert isinstance(spool.put(an_entry(5)).exception(PATIENCE_S), SinkFull)
    assert there(spool) == [1, 2, 3]
    assert (spool.refused_total, spool.dropped_total, dropped(spool)) == (2, 2, [4, 5])


@pytest.mark.parametrize(("limit", "options"), AT_THREE, ids=[limit for limit, _ in AT_THREE])
def test_drop_oldest(rigs: Rigs, limit: str, options: SpoolOptions) -> None:
    """The one that was made first goes, of whatever type, ready or not, with an event; none that is held."""
    del limit
    rig = rigs.open(replace(options, overflow="drop_oldest"))
    spool = rig.spool
    fill(spool, 2)
    fill(spool, 1, 3, type_name="mails")
    fill(spool, 4)
    assert there(spool) == [2, 3, 4]
    assert [number_of(held) for held in take(rig, limit=1)] == [2]  # 4 is ready too
    fill(spool, 5)
    assert there(spool) == [2, 4, 5]
    fill(spool, 6)
    assert there(spool) == [2, 5, 6]
    assert [number_of(held) for held in take(rig)] == [5, 6]
    with pytest.raises(SinkFull):
        fill(spool, 7)
    assert there(spool) == [2, 5, 6]
    assert (spool.refused_total, spool.dropped_total, dropped(spool)) == (1, 3, [1, 3, 4])


def test_drop_oldest_looks_behind_many_that_are_held(rigs: Rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many of the oldest are in somebody's hands, the oldest of the others goes; what it leaves is exact."""
    monkeypatch.setattr("dmq.producer_store.entries.entries._OLDEST_LOOKED_AT", 4)
    rig = rigs.open(replace(QUIET, entries_max=30, overflow="drop_oldest"))
    spool = rig.spool
    fill(spool, *range(1, 31))
    assert [number_of(held) for held in take(rig, limit=20)] == list(range(1, 21))
    fill(spool, 31, 32, 33)
    assert there(spool) == [*range(1, 21), *range(24, 34)]
    assert dropped(spool) == [21, 22, 23]
    assert recount(spool.entries).totals["orders"] == spool.entries.totals[1]


def test_drop_oldest_releases_the_next_of_its_key(rigs: Rigs) -> None:
    """The first of a key is dropped, and what was parked behind it becomes the first."""
    rig = rigs.open(replace(QUIET, entries_max=3, overflow="drop_oldest"))
    spool = rig.spool
    fill(spool, 1, 2, key="a")
    fill(spool, 3, 4)
    assert sorted(number_of(held) for held in take(rig)) == [2, 3, 4]
    assert dropped(spool) == [1]


def test_the_oldest_is_found_wherever_the_last_search_ended(rigs: Rigs) -> None:
    """A search begins where the last one found something; what comes in front of that later is found too."""
    spool = rigs.open(replace(QUIET, entries_max=3, overflow="drop_oldest")).spool
    fill(spool, 7, 8, 9)
    fill(spool, 10)
    fill(spool, 1)
    assert dropped(spool) == [7, 8]
    assert spool.stats().oldest_at_ms == an_entry().created_at_ms + 1
    fill(spool, 11)
    assert dropped(spool) == [7, 8, 1]


def test_an_entry_bigger_than_the_bound_drops_and_awaits_nothing(rigs: Rigs) -> None:
    """It can never fit: refused at once, under every policy, and everything else stays."""
    for policy in POLICIES:
        spool = rigs.open(replace(QUIET, bytes_max=2_000, overflow=policy)).spool  # type: ignore[arg-type]
        fill(spool, 1, 2)
        with pytest.raises(SinkFull):
            spool.put(an_entry(3, payload=bytes(2_000))).result(PATIENCE_S)
        assert there(spool) == [1, 2]


@pytest.mark.parametrize("policy", POLICIES)
def test_short_of_space_nothing_new_is_kept_and_nothing_is_dropped(
    rigs: Rigs, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """Dropping entries gives no space back at once, and events would take some; what is kept can be finished."""
    rig = rigs.open(replace(QUIET, overflow=policy, block_s=0))  # type: ignore[arg-type]
    spool = rig.spool
    fill(spool, 1, 2)
    monkeypatch.setattr(spool.entries.store, "is_disk_low", lambda: True)
    with pytest.raises(SinkFull) as refused:
        spool.put(an_entry(3)).result(PATIENCE_S)
    assert refused.value.limit == "free_bytes_min"
    assert (spool.refused_total, spool.dropped_total, dropped(spool)) == (1, 0, [])
    for held in take(rig):
        spool.finish(held).result(PATIENCE_S)
    assert there(spool) == []


# -- block -------------------------------------------------------------------------------------------------------------


class Blocked:
    """A put in a thread of its own."""

    def __init__(self, spool: Spool, number: int) -> None:
        self._spool = spool
        self._entry = an_entry(number)
        self.answer: Future[Held | None] = Future()
        self.thread = threading.Thread(target=self._put, daemon=True)
        self.thread.start()

    def _put(self) -> None:
        try:
            self.answer.set_result(self._spool.put(self._entry).result(PATIENCE_S))
        except Exception as error:  # noqa: BLE001 - the test looks
            self.answer.set_exception(error)


def wait_until_blocked(spool: Spool) -> None:
    """Return once somebody waits for room."""
    for _ in range(int(PATIENCE_S * 1000)):
        with spool.entries.lock:
            if spool.entries.room._waiters:  # type: ignore[attr-defined]
                return
        threading.Event().wait(0.001)
    raise AssertionError("nobody waits")


@pytest.mark.parametrize(("limit", "options"), AT_THREE, ids=[limit for limit, _ in AT_THREE])
def test_block_waits_for_room(rigs: Rigs, monkeypatch: pytest.MonkeyPatch, limit: str, options: SpoolOptions) -> None:
    """It is kept once another one is finished, at once, and nobody else waits with it."""
    del limit
    monkeypatch.setattr("dmq.producer_store.directories.bounds.WAIT_S", 2 * PATIENCE_S)
    rig = rigs.open(replace(options, overflow="block", block_s=3_600))
    spool = rig.spool
    fill(spool, 1, 2, 3)
    blocked = Blocked(spool, 4)
    wait_until_blocked(spool)
    (held, *_) = take(rig)
    assert not blocked.answer.done()
    spool.finish(held).result(PATIENCE_S)
    assert blocked.answer.result(PATIENCE_S) is None
    assert there(spool) == [2, 3, 4]
    assert spool.refused_total == 0


def test_block_ends_when_its_time_is_up(rigs: Rigs) -> None:
    """Not before ``block_s`` is over, and then as refuse."""
    rig = rigs.open(replace(QUIET, entries_max=1, overflow="block", block_s=5.0))
    fill(rig.spool, 1)
    blocked = Blocked(rig.spool, 2)
    wait_until_blocked(rig.spool)
    rig.clock.advance(4_999)
    with rig.spool.entries.lock:
        rig.spool.entries.room.notify_all()  # so that it looks at the clock again
    wait_until_blocked(rig.spool)
    assert not blocked.answer.done()
    rig.clock.advance(1)
    assert isinstance(blocked.answer.exception(PATIENCE_S), SinkFull)
    assert rig.spool.refused_total == 1


def test_close_ends_puts_that_wait_for_room(rigs: Rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    """They hear that the spool is closed, at once, and ``close`` returns."""
    monkeypatch.setattr("dmq.producer_store.directories.bounds.WAIT_S", 2 * PATIENCE_S)
    spool = rigs.open(replace(QUIET, entries_max=1, overflow="block", block_s=1_000.0)).spool
    fill(spool, 1)
    blocked = [Blocked(spool, number) for number in (2, 3)]
    wait_until_blocked(spool)
    spool.close()
    for each in blocked:
        assert isinstance(each.answer.exception(PATIENCE_S), SinkClosed)


def take(rig: SpoolRig, *, limit: int = 100) -> list[Held]:
    """Take what is due of orders."""
    rig.spool.take("orders", 0, 0)
    rig.clock.advance(1)
    rig.spool.turn()
    return list(rig.spool.take("orders", limit, 0))
