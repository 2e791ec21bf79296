"""SIGKILL at random moments under load: every promise that a crash could break, checked message by message.

``DMQ_TEST_CRASHES=200`` makes a long run of it, ``DMQ_TEST_SEED`` repeats the choices of one (not its timing).
"""

from __future__ import annotations

import os
import random
import threading
from contextlib import closing
from pathlib import Path

import pytest
from support.clients.load.crash import Ledger, Load
from support.clients.load.crash_operators import Operators, receive_all
from support.effort import CRASHES, SEED
from support.models.runs.crash_check import broken_promises
from support.models.store.outbox import read_outbox
from support.rigs.daemon.process import Daemon

from broker_adapter.runtime.clock import SystemClock
from dmq.recovery.check.ledger import compare
from dmq.store.store import Store, StoreOptions
from dmq.trail.events import gap_event
from dmq.trail.snapshots.layout import open_quiet

pytestmark = pytest.mark.fault
READY_S_MAX = 10.0
_DRAIN_S_MAX = 60.0


class Killer:
    """Chooses when the daemon dies."""

    def __init__(self, daemon: Daemon, ledger: Ledger, rng: random.Random) -> None:
        self._daemon = daemon
        self._ledger = ledger
        self._rng = rng

    def strike(self) -> str:
        """Wait for a moment, kill the daemon there, start it again, and say which kind of moment it was."""
        moment = self._rng.choice(("after a send", "after an ack", "after a nack", "whenever", "while it starts"))
        if moment == "after a send":
            self._wait_for("accepted_total")
        elif moment == "after an ack":
            self._wait_for("acked_total")
        elif moment == "after a nack":
            self._wait_for("nacked_total", 20)
        else:
            threading.Event().wait(self._rng.uniform(0.05, 1.5))
        self._daemon.kill()
        self._daemon.spawn()
        if moment == "while it starts":
            threading.Event().wait(self._rng.uniform(0.0, 0.5))
            self._daemon.kill()
            self._daemon.spawn()
        self._daemon.wait_until_serving()
        return moment

    def _wait_for(self, total: str, answers_max: int = 400) -> None:
        """Wait for a number of answers: the kill comes right behind the last of them."""
        ledger = self._ledger
        with ledger.news:
            wanted = getattr(ledger, total) + self._rng.randint(1, answers_max)
            assert ledger.news.wait_for(lambda: getattr(ledger, total) >= wanted, timeout=20), f"no {total} for 20 s"


@pytest.mark.timeout(180 + 8 * CRASHES)
def test_every_promise_survives_sigkill(tmp_path: Path) -> None:
    """Nothing lost, early, stored twice, tried too often, out of its order or delivered after its ack, however often
    the daemon is killed under load, and whatever operators do meanwhile with a group and a topic of their own.
    """
    print(f"DMQ_TEST_SEED={SEED} DMQ_TEST_CRASHES={CRASHES}")
    rng = random.Random(SEED)
    # The outbox is the trail here: nothing is exported out of it.
    with Daemon(tmp_path / "data", env={**os.environ, "DMQ_TRAIL": "off"}) as daemon:
        with closing(Load(daemon.address, SEED)) as load:
            with closing(Operators(daemon.address, SEED, tmp_path)) as operators:
                killer = Killer(daemon, load.ledger, rng)
                moments = [killer.strike() for _ in range(CRASHES)]
                operators.wait_until_each_was_done(_DRAIN_S_MAX)
            load.end_sending()
            daemon.kill()  # leases end here: what was left alone comes back now, not after 10 s
            daemon.restart()
            load.drain(_DRAIN_S_MAX)
            accepted = {message_id for message_id, sent in load.ledger.sent.items() if sent.accepted}
            missing = receive_all(daemon.address, accepted, _DRAIN_S_MAX)
        daemon.stop()
        slowest_s = max(daemon.started_s)
        ledger = load.ledger
        engine = open_quiet(tmp_path / "data" / "rocksdb")
        differing = compare(engine)
        engine.close()
        assert not differing, "\n".join(map(str, differing))
        print(
            f"{len(moments)} kills, {len(ledger.sent)} messages, {len(ledger.seen)} deliveries, "
            f"{ledger.nacked_total} nacks, {len(ledger.dead)} dead letters, "
            f"{ledger.stale_acks} stale handles, {len(ledger.in_doubt)} acks in doubt, slowest start {slowest_s:.2f} s"
        )
        store = Store.open(tmp_path / "data", SystemClock(), StoreOptions(gap_event=gap_event))
        try:
            trail = list(read_outbox(store))
        finally:
            store.close()
        print(f"operators: {dict(operators.done)}")
        broken = broken_promises(ledger, trail)
        broken += [f"lost: {each} never came to the group that operators acted on" for each in missing]
        assert not broken, f"{len(broken)} promises broken:\n" + "\n".join(broken[:50])
        assert len(ledger.sent) > 20 * CRASHES, "too little load to mean anything"
        assert slowest_s < READY_S_MAX
        for backup in operators.backups:
            Store.open(backup, SystemClock(), StoreOptions(gap_event=gap_event)).close()
