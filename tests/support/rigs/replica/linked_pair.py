"""Store with a direct link to standbys, in one process: real directories and sockets, an object store in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from support.rigs.replica.objects import Fault, MemoryObjects

from broker_adapter.runtime.clock import SystemClock
from dmq.errors import StoreError
from dmq.replication.link import LinkChannel, LinkListener, LinkSender, LinkState, ReceivedBatches, StandbyLink, dial
from dmq.replication.log import LogOptions, ReplicationLog
from dmq.replication.segment import PREFIX
from dmq.replication.standby import Standby
from dmq.store.files.cell import Cell
from dmq.store.schema.keys import Family
from dmq.store.store import Store
from dmq.store.writer.operations import Put
from dmq.trail.snapshots.layout import open_quiet

CLOCK = SystemClock()
WAIT_S = 60.0
_HOST = "127.0.0.1"
_PRIMARY_THREADS = ("dmq-replica", "dmq-link")


class Port:
    """Port of a direct link on loopback."""

    def __init__(self) -> None:
        self._listener = LinkListener(_HOST, 0, lambda: None)

    def start(self, serve: Callable[[LinkChannel], None]) -> str:
        return f"{_HOST}:{self._listener.start(serve)}"

    def close(self) -> None:
        self._listener.close()


def dial_loopback(address: str) -> LinkChannel:
    """Connect to a standby of this process."""
    return dial(_HOST, int(address.rpartition(":")[2]), None)


class StandbyHost:
    """Directory of a standby with its link."""

    def __init__(self, folder: Path, objects: MemoryObjects) -> None:
        self.folder = folder
        self.cell = Cell(folder)
        self.received = ReceivedBatches(folder, makes=True)
        self.standby = Standby(objects, self.cell, CLOCK, self.received)
        self.link = StandbyLink(objects, objects, self.received, self.standby, Port())
        self.standby.catch_up()
        self.link.look()

    def close(self) -> None:
        """End it as a kill does: the directory keeps its content."""
        self.link.close()
        self.standby.close()
        self.cell.close()

    def take_over(self, objects: MemoryObjects) -> set[bytes]:
        """Take over, and return the keys of the store."""
        epoch = self.link.begin_takeover()
        assert epoch is not None
        self.standby.promote(epoch)
        self.close()
        log = ReplicationLog(objects, CLOCK, LogOptions(is_sync=True, grace_s=5.0), lambda _: 0)
        store = Store.open(self.folder, CLOCK, batch_log=log)
        store.close()
        return keys_of(self.folder)


class LinkedStore:
    """Primary. With ``holds`` no segment is put after the opening."""

    def __init__(self, folder: Path, objects: MemoryObjects, *, patience_s: float = 3600.0) -> None:
        self.objects = objects
        self.folder = folder
        options = LogOptions(is_sync=True, every_s=3600.0, grace_s=0.2)
        self.log = ReplicationLog(objects, CLOCK, options, lambda _: 0)
        self.store = Store.open(folder, CLOCK, batch_log=self.log)
        self.sender = LinkSender(
            *(self.log, objects, CLOCK, dial_loopback),
            store=self.store.identity.number,
            epoch=self.store.boot,
            patience_s=patience_s,
        )
        self.sender.start()
        self._pool = ThreadPoolExecutor()

    def hold_segments(self, *, also: str = "") -> None:
        """Lose the requests of the primary that write segments, and those that replace the register ``also``."""

        def fault(method: str, name: str) -> Fault | None:
            is_held = (method == "create" and name.startswith(PREFIX)) or (method == "replace" and name == also)
            is_primary = threading.current_thread().name in _PRIMARY_THREADS
            return Fault.REQUEST_LOST if is_held and is_primary else None

        self.objects.fault = fault

    def release_segments(self) -> None:
        """Answer all requests again."""
        self.objects.fault = lambda method, name: None

    def connect(self, *hosts: StandbyHost) -> None:
        """Offer the standbys, and wait for the link."""
        self.sender.offer([each.link.address for each in hosts])
        self.wait_for(LinkState.IN_SYNC)

    def wait_for(self, state: LinkState) -> None:
        """Wait until the link has a state."""
        for _ in range(int(WAIT_S / 0.01)):
            if self.sender.status().state is state:
                return
            threading.Event().wait(0.01)
        raise AssertionError(f"the link is {self.sender.status()}")

    def put(self, key: bytes) -> None:
        """Put a row and wait for the answer."""
        self.begin_put(key).result(WAIT_S)

    def begin_put(self, key: bytes) -> Future[object]:
        """Put a row; the future is its answer."""
        return self._pool.submit(self.store.commit, [Put(Family.META, b"~" + key, b"v")])

    def lose(self) -> None:
        """End the primary without another segment."""
        self.hold_segments()
        self.sender.close()
        with suppress(StoreError):
            self.store.close()
        self.release_segments()

    def close(self) -> None:
        """End the primary in order."""
        self.sender.close()
        self.store.close()
        self.sender.leave()


def keys_of(folder: Path) -> set[bytes]:
    """Return the keys that tests put into a store at rest."""
    engine = open_quiet(folder / "rocksdb")
    try:
        return {key[1:] for key, _ in engine.scan(Family.META, b"~", b"\xff", limit=10_000).rows}
    finally:
        engine.close()
