"""Real spool directories, damage to them, and what a salvage must have left."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from support.rigs.store.rows import copy_at_rest

from broker_adapter.runtime.clock import SystemClock
from dmq.producer_store.directories.copies import directories_of
from dmq.producer_store.spool import Spool, SpoolOptions
from dmq.recovery.check.spool import SpoolCheck
from dmq.recovery.reading.spool import FoundEntry, SpoolLook
from dmq.recovery.salvage.spool import Missing, Report, salvage_spool
from retry.sink import Entry, Held

NOW = SystemClock().now_ms() + 3_600_000
LATE_MS = 20_000_000  # by then everything is due
QUIET = SpoolOptions(adopt_every_s=0)
UNIT_BYTES = 150_000  # payload of an entry whose record spans several blocks


def uid_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def entry_of(number: int, *, size: int = 60, key: str = "", due_ms: int = 0) -> Entry:
    payload = random.Random(number).randbytes(size)
    return Entry(
        type_name="bills" if number % 3 == 0 else "orders",
        uid=uid_of(number),
        payload=payload,
        key=key,
        created_at_ms=NOW + number,
        due_at_ms=due_ms or NOW + number * 1000,
    )


def put(spool: Spool, entries: Sequence[Entry]) -> None:
    """One by one, so that each is a record of its own in the log."""
    for each in entries:
        spool.put(each).result(10)


class Later(SystemClock):
    """So much later than it is."""

    def __init__(self, ahead_ms: int) -> None:
        self.ahead_ms = ahead_ms

    def now_ms(self) -> int:
        return super().now_ms() + self.ahead_ms


def opened(root: Path, ahead_ms: int = 0) -> Spool:
    return Spool(root, options=QUIET, clock=Later(ahead_ms))


def image(spool: Spool, to: Path) -> Path:
    """The directory as a SIGKILL would leave it now, alone under another root."""
    return copy_at_rest(spool.path, to / spool.path.name)


def flip(path: Path, at: int, mask: int = 0x10) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= mask
    path.write_bytes(content)


def the(directory: Path, pattern: str) -> Path:
    """The largest file of a kind."""
    return max((directory / "rocksdb").glob(pattern), key=lambda path: path.stat().st_size)


def table_of(directory: Path, payload: bytes) -> Path:
    (found,) = [path for path in (directory / "rocksdb").glob("*.sst") if payload[:40] in path.read_bytes()]
    return found


def files_of(directory: Path) -> dict[str, bytes]:
    every = (path for path in directory.rglob("*") if path.is_file() and path.name not in {"LOCK", "BALLAST"})
    return {str(path.relative_to(directory)): path.read_bytes() for path in every}


class Saved:
    """A salvage, and what it saved; the original is shown to be as it was, the new directory to be whole."""

    def __init__(self, directory: Path) -> None:
        before = files_of(directory)
        self.report: Report = salvage_spool(directory, SystemClock(), lambda _: None)
        assert self.report.saved_in, "there was something to salvage"
        assert not directory.exists()
        assert files_of(Path(self.report.kept_in)) == before
        assert [str(path) for path in directories_of(directory.parent)] == [self.report.saved_in]
        assert not list(directory.parent.glob(".work-*"))
        written = json.loads(Path(f"{self.report.kept_in}.json").read_text(encoding="utf-8"))
        assert written == json.loads(json.dumps(self.report.as_json()))
        with SpoolLook.strictly(Path(self.report.saved_in), SystemClock()) as found:
            assert SpoolCheck(found, lambda _: None).run().lines() == []
            self.found: list[FoundEntry] = list(found.entries())

    def uids(self) -> set[bytes]:
        return {each.entry.uid for each in self.found}

    def check(self, entries: Sequence[Entry]) -> set[bytes]:
        """As ``lost``; what is missing is counted exactly."""
        lost = self.lost(entries)
        assert self.report.missing == Missing(len(lost), len(lost))
        return lost

    def lost(self, entries: Sequence[Entry], *, made_up: Collection[str] = ()) -> set[bytes]:
        """Return what was lost; what was saved is as it was put, once each.

        All entries of a type may have one of the ``made_up`` names in place of their own.
        """
        known = {each.uid: each for each in entries}
        assert len(self.found) == len(self.uids())
        for each in self.found:
            assert (each.entry.payload, each.entry.key) == (known[each.entry.uid].payload, known[each.entry.uid].key)
        names = {(known[each.entry.uid].type_name, each.entry.type_name) for each in self.found}
        assert len(names) == len({name for name, _ in names})
        assert all(found == name or found in made_up for name, found in names), names
        assert self.report.waiting + self.report.dead == len(self.found)
        return known.keys() - self.uids()


def copied(directory: Path, to: Path) -> Path:
    to.mkdir()
    return Path(shutil.copytree(directory, to / directory.name))


def take(spool: Spool, type_name: str, count: int) -> list[Held]:
    taken: list[Held] = []
    while len(taken) < count:
        more = spool.take(type_name, count - len(taken), 5)
        if not more:
            break
        taken += more
    return taken
