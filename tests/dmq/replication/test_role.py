"""Way of a process to the role of the primary: the registration of a standby."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from broker_adapter.runtime.clock import SystemClock
from dmq.replication.directory_objects import DirectoryObjects
from dmq.replication.log import LogOptions, ReplicationLog
from dmq.replication.role import Primacy
from dmq.replication.segment import PREFIX
from dmq.store.store import Store

pytestmark = pytest.mark.integration
CLOCK = SystemClock()
_WAIT_S = 60.0


class SlowLog(DirectoryObjects):
    """Objects whose segments are read only after ``release``."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.reading, self.release = threading.Event(), threading.Event()

    def read(self, name: str) -> tuple[bytes, str] | None:
        if name.startswith(PREFIX):
            self.reading.set()
            assert self.release.wait(_WAIT_S)
        return super().read(name)


def test_a_standby_stays_registered_while_it_reads_a_long_log(tmp_path: Path) -> None:
    """Its registration changes although no look at the log ends; after the takeover it is gone."""
    (tmp_path / "copy").mkdir()
    objects = DirectoryObjects((tmp_path / "copy").as_uri())
    log = ReplicationLog(objects, CLOCK, LogOptions(is_sync=True), lambda _: 0)
    Store.open(tmp_path / "first", CLOCK, batch_log=log).close()
    slow, standby = SlowLog(objects.url), threading.Event()
    primacy = Primacy(
        slow, objects, CLOCK, tmp_path / "second", address="host:8081", term_ms=60_000, on_lost=lambda _: None
    )
    primacy._term_s = 0.3  # for the registrations; a stalled machine does not lose the lease
    slow.release.set()
    with ThreadPoolExecutor() as pool:

        def stall() -> None:
            slow.release.clear()
            slow.reading.clear()
            standby.set()

        waiting = pool.submit(primacy.wait, may_begin=True, on_standby=stall)
        try:
            assert standby.wait(_WAIT_S)
            assert slow.reading.wait(_WAIT_S)
            seen: set[str] = set()
            until_s = time.monotonic() + _WAIT_S
            while len(seen) < 5:
                assert time.monotonic() < until_s, "the registration does not change"
                for name in objects.list("standbys/"):
                    found = objects.read(name)
                    seen |= {found[1]} if found is not None else set()
                threading.Event().wait(0.01)
        finally:
            slow.release.set()
        assert waiting.result(_WAIT_S)
    assert objects.list("standbys/") == []
    primacy.close(is_complete=True)
