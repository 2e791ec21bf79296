"""Primary and standby of one replication log, in processes of this host."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from support.clients.load.crash import Load
from support.models.runs.crash_check import broken_promises
from support.models.store.outbox import read_outbox
from support.rigs.daemon.process import Daemon, DaemonDied
from support.rigs.faults.forwarder_port import ForwarderPort

from broker_adapter.runtime.clock import SystemClock
from dmq.daemon.run import EXIT_FENCED
from dmq.store.store import Store, StoreOptions
from dmq.trail.events import gap_event

_NEWER = Path(__file__).with_name("newer_daemon.py")
_LOOK_S = 0.2


class Pair:
    """Primary and standby of one log, with one address for clients."""

    def __init__(
        self,
        folder: Path,
        url: str = "",
        env: dict[str, str] | None = None,
        *,
        metrics: str = "off",
        data: Path | None = None,
    ) -> None:
        """Without ``url`` the log is in a directory; ``env`` has credentials of an object store and other settings.

        ``data`` is the directory of the first primary.
        """
        self._folder = folder
        self._metrics = metrics
        (folder / "copy").mkdir()
        self.url = url or f"file://{folder}/copy"
        self._env = {**os.environ, "DMQ_TRAIL": "off", "DMQ_REPLICA": "sync"}
        # A host that stalls for the lease loses it: with 2 s that happened in 1 of 30 takeovers at a load of 20.
        self._env |= {"DMQ_REPLICA_URL": self.url, "DMQ_REPLICA_LEASE": "4s"} | (env or {})
        self._count = 0
        self._changing = threading.RLock()  # roles
        self.primary = self.daemon(data).start()
        self.front = ForwarderPort(self.primary.port)
        self.standby = self.wait_for_standby(self.daemon())

    def daemon(self, data: Path | None = None) -> Daemon:
        """Return a daemon on a new directory."""
        self._count += 1
        return Daemon(data or self._folder / f"data-{self._count}", env=self._env, metrics=self._metrics)

    def upgraded(self, daemon: Daemon) -> Daemon:
        """Return a daemon of the next store format on the directory of one that has ended."""
        return Daemon(daemon.data, prefix=(sys.executable, str(_NEWER)), env=self._env)

    def wait_for_standby(self, daemon: Daemon) -> Daemon:
        """Start a daemon as standby, and wait until the primary is bound to its lease. Return the standby."""
        with self._changing:
            self.standby = daemon.spawn()
            daemon.wait_for("standby_started", timeout_s=60)
            try:
                self.primary.wait_for("standby_registered", timeout_s=60)
            except DaemonDied:
                self._hand_over()
            return self.standby

    def take_over(self) -> None:
        """Wait until the standby serves; it is the primary then. If its lease ends before that, it starts again."""
        with self._changing:
            while True:
                try:
                    self.standby.wait_for("serving", timeout_s=180)
                    break
                except DaemonDied:
                    assert self.standby.wait(60) == EXIT_FENCED
                    self.standby.spawn()
            self.primary, self.standby = self.standby, self.primary
            self.front.target = self.primary.port

    def lose(self) -> None:
        """Kill the primary, delete its directory, and wait until the standby serves, with a new standby."""
        with self._changing:
            self.primary.kill()
            while self.primary.data.exists():  # a child of the primary may write for a moment
                shutil.rmtree(self.primary.data, ignore_errors=True)
            self.take_over()
            self.wait_for_standby(self.daemon())

    def suspend(self) -> None:
        """Stop the primary until the standby serves. It ends as fenced then, and is the new standby."""
        with self._changing:
            stopped = self.primary
            stopped.signal(signal.SIGSTOP)
            self.take_over()
            stopped.signal(signal.SIGCONT)
            assert stopped.wait(60) == EXIT_FENCED
            self.wait_for_standby(stopped)

    def end_with_successor(self) -> None:
        """Kill the primary, and wait until the standby serves, without another one."""
        with self._changing:
            self.primary.kill()
            self.take_over()

    @contextmanager
    def managed(self) -> Iterator[None]:
        """Start a fenced daemon again, as service managers do: a stalled machine may end the lease of any primary."""
        is_over = threading.Event()

        def manage() -> None:
            while not is_over.wait(_LOOK_S):
                with self._changing:
                    if not self.primary.is_running:
                        self._hand_over()

        with ThreadPoolExecutor() as pool:
            managing = pool.submit(manage)
            try:
                yield
            finally:
                is_over.set()
        managing.result()

    def _hand_over(self) -> None:
        fenced, successor = self.primary, self.standby
        assert fenced.wait(60) == EXIT_FENCED
        if successor.is_running:
            self.take_over()
            self.wait_for_standby(fenced)
        else:
            fenced.restart()

    def close(self) -> None:
        """End both."""
        self.standby.close()
        self.primary.close()
        self.front.close()


def assert_kept(load: Load, data: Path) -> None:
    """Compare the ledger of the load with a store at rest."""
    store = Store.open(data, SystemClock(), StoreOptions(gap_event=gap_event))
    try:
        trail = list(read_outbox(store))
    finally:
        store.close()
    broken, ledger = broken_promises(load.ledger, trail), load.ledger
    again = len(ledger.seen) - len({each.received.message_id for each in ledger.seen})
    print(f"{len(ledger.sent)} messages, {len(ledger.seen)} deliveries, {again} again")
    assert not broken, f"{len(broken)} promises broken:\n" + "\n".join(broken[:50])
