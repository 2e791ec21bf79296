"""Fronts are killed every two seconds under load: every promise is checked message by message.

``DMQ_TEST_EFFORT=2`` or more makes a minute of it, ``DMQ_TEST_SEED`` repeats the choices of a run (not its timing).
"""

from __future__ import annotations

import random
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from support.clients.load.crash import INVISIBLE_MS, Load
from support.clients.load.crash_operators import receive_all
from support.effort import EFFORT, SEED
from support.models.runs.crash_check import broken_promises
from support.models.store.outbox import read_outbox
from support.rigs.daemon.fronts import serving, until, with_fronts
from support.rigs.daemon.process import Daemon, run_command

from broker_adapter.runtime.clock import SystemClock
from dmq.store.store import Store, StoreOptions
from dmq.trail.events import gap_event

pytestmark = pytest.mark.fault
KILLED_FOR_S = 60.0 if EFFORT > 1 else 6.0
KILL_EVERY_S = 2.0
_DRAIN_S_MAX = 60.0


def kill_fronts(daemon: Daemon, rng: random.Random) -> int:
    """Kill one after the other, now and then all at once, those that start among them; return how many died."""
    until_s, killed = time.monotonic() + KILLED_FOR_S, 0
    while time.monotonic() < until_s:
        threading.Event().wait(KILL_EVERY_S)
        fronts = serving(daemon)[:1] if rng.random() < 0.9 else daemon.fronts
        for each in fronts:
            each.kill()
        killed += len(fronts)
    return killed


@pytest.mark.timeout(180 + 3 * KILLED_FOR_S)
def test_every_promise_survives_the_death_of_fronts(tmp_path: Path) -> None:
    """Nothing is lost, early, stored twice, out of its order or delivered after its ack; what comes twice is in the
    trail, and no message is stuck: what the dead had in hand comes before the leases of the living end.
    """
    print(f"DMQ_TEST_SEED={SEED}")
    rng = random.Random(SEED)
    # The outbox is the trail here: nothing is exported out of it.
    with Daemon(tmp_path / "data", env={**with_fronts(), "DMQ_TRAIL": "off"}) as daemon:
        with closing(Load(daemon.address, SEED)) as load:
            killed = kill_fronts(daemon, rng)
            load.end_sending()
            ended_s = time.monotonic()
            load.drain(_DRAIN_S_MAX)
            drained_s = time.monotonic() - ended_s
            accepted = {message_id for message_id, sent in load.ledger.sent.items() if sent.accepted}
            missing = receive_all(daemon.address, accepted, _DRAIN_S_MAX)
            until("both fronts are back", lambda: len(daemon.fronts) == 2)
            verified = run_command("--address", daemon.address, "ledger", "--verify", timeout_s=60)
        assert verified.returncode == 0, verified.stdout + verified.stderr
        deaths = daemon.events("front_ended")
        daemon.stop()
    ledger = load.ledger
    store = Store.open(tmp_path / "data", SystemClock(), StoreOptions(gap_event=gap_event))
    try:
        trail = list(read_outbox(store))
    finally:
        store.close()
    print(
        f"{killed} fronts killed, {len(ledger.sent)} messages, {len(ledger.seen)} deliveries, "
        f"{ledger.nacked_total} nacks, {len(ledger.dead)} dead letters, {ledger.stale_acks} stale handles, "
        f"{len(ledger.in_doubt)} acks in doubt, {len(deaths)} deaths told, drained in {drained_s:.1f} s"
    )
    broken = broken_promises(ledger, trail)
    broken += [f"lost: {each} never came to another group" for each in missing]
    assert not broken, f"{len(broken)} promises broken:\n" + "\n".join(broken[:50])
    assert killed >= KILLED_FOR_S / KILL_EVERY_S / 2, "too few died to mean anything"
    assert len(ledger.sent) > 20 * killed, "too little load to mean anything"
    assert all("killed by SIGKILL" in each["why"] for each in deaths), deaths
    assert drained_s < 2 * INVISIBLE_MS / 1000
