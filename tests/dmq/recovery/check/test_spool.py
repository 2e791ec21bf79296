"""``dmq spool check``: every rule between the rows of a spool directory, broken one at a time."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.forges.store.spool_damage import LATE_MS, entry_of, opened, put, take
from support.rigs.store.rows import copy_at_rest

from broker_adapter.runtime.clock import SystemClock
from dmq.producer_store.directories.bounds import store_options
from dmq.recovery.check.spool import SpoolCheck
from dmq.recovery.reading.spool import SpoolLook
from dmq.store.schema.keys import META_DONE, META_SEQUENCE, Family, pack_u64
from dmq.store.store import Store
from dmq.store.writer.operations import Delete, Op, Put
from retry.sink import Death

pytestmark = pytest.mark.fault
Tamper = Callable[[Store], Sequence[Op]]
SPOOL = b"\xff\xff\xff\xff"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Waiting, parked and dead entries of two types."""
    with opened(tmp_path_factory.mktemp("made"), LATE_MS) as spool:
        put(spool, [entry_of(number, key="k" if number % 3 else "") for number in range(30)])
        for held in take(spool, "bills", 3):
            spool.bury(held, Death.PERMANENT, "no good").result(10)
        return spool.path


def findings_of(directory: Path) -> list[str]:
    with SpoolLook.strictly(directory, SystemClock()) as found:
        return SpoolCheck(found, lambda _: None).run().lines()


def first(store: Store, family: Family, start: bytes = b"", stop: bytes = b"\xff" * 40) -> tuple[bytes, bytes]:
    return store.scan(family, start, stop, limit=1).rows[0]


def key_queue(store: Store) -> tuple[bytes, bytes]:
    return first(store, Family.GROUP, SPOOL + b"l", SPOOL + b"m")


def parked(store: Store) -> tuple[bytes, bytes]:
    return first(store, Family.GROUP, SPOOL + b"m", SPOOL + b"n")


def dead(store: Store) -> tuple[bytes, bytes]:
    return first(store, Family.GROUP, SPOOL + b"d", SPOOL + b"e")


def figure(store: Store, letter: bytes) -> bytes:
    return first(store, Family.META, letter, bytes((letter[0] + 1,)))[0]


TAMPERS: dict[str, tuple[Tamper, str]] = {
    "totals": (lambda store: [Put(Family.META, figure(store, b"w"), bytes(24))], "totals say 0 waiting"),
    "pending": (lambda store: [Put(Family.META, figure(store, b"t"), pack_u64(99))], "the figure says 99"),
    "due": (lambda store: [Put(Family.META, figure(store, b"m"), b"c" * 60)], "the counts by the minute of type"),
    "not due": (lambda store: [Delete(Family.META, figure(store, b"m"))], "the counts by the minute of type"),
    "sequence": (lambda store: [Put(Family.META, META_SEQUENCE, pack_u64(3))], "the last sequence is 3"),
    "done": (lambda store: [Put(Family.META, META_DONE, b"\x0f" * 16)], "it would never be delivered"),
    "no index": (lambda store: [Delete(Family.INDEX, first(store, Family.INDEX)[0])], "is not in the index"),
    "index": (
        lambda store: [Put(Family.INDEX, bytes(8) + b"u" * 20, first(store, Family.INDEX)[1])],
        "8 entries on the timeline, 9 in the index",
    ),
    "index value": (
        lambda store: [Put(Family.INDEX, first(store, Family.INDEX)[0], b"?")],
        "value of 1 bytes",
    ),
    "no entry": (
        lambda store: [Delete(Family.TIMELINE, first(store, Family.TIMELINE)[0])],
        "waits by the index, but is not there",
    ),
    "entry": (lambda store: [Put(Family.TIMELINE, first(store, Family.TIMELINE)[0], b"?")], "is no entry"),
    "no key queue": (lambda store: [Delete(Family.GROUP, key_queue(store)[0])], "which is not there"),
    "key queue": (lambda store: [Put(Family.GROUP, key_queue(store)[0], bytes(16))], "should have 0 parked entries"),
    "no parked": (lambda store: [Delete(Family.GROUP, parked(store)[0])], "parked entries, it has"),
    "dead": (lambda store: [Put(Family.GROUP, dead(store)[0][:-1] + b"?", dead(store)[1])], "under another's uid"),
    "foreign": (lambda store: [Put(Family.GROUP, SPOOL + b"z", b"")], "a row that no spool writes"),
    "queue": (lambda store: [Put(Family.QUEUE, b"x", b"")], "1 rows in the queue family"),
    "no event": (lambda store: [Delete(Family.AUDIT, first(store, Family.AUDIT)[0])], "audit events 1 up to"),
    "event": (lambda store: [Put(Family.AUDIT, first(store, Family.AUDIT)[0], b"?")], "an outbox row of 1 bytes"),
    "name": (lambda store: [Delete(Family.META, figure(store, b"n"))], "which has no record"),
}


@pytest.mark.parametrize("what", TAMPERS)
def test_each_rule_is_checked(made: Path, tmp_path: Path, what: str) -> None:
    """One row too many, too few or other than it should be is found and named."""
    directory = Path(shutil.copytree(made, tmp_path / made.name))
    assert findings_of(directory) == []
    tamper, said = TAMPERS[what]
    store = Store.open(directory, SystemClock(), store_options())
    store.commit(tamper(store))
    killed = copy_at_rest(directory, tmp_path / "killed")  # the end of a closed one is checked at its opening
    store.close()
    assert [finding for finding in findings_of(killed) if said in finding], findings_of(killed)
