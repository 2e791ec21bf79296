"""Direct link to a standby: messages that only the standby has survive the loss of the primary."""

from __future__ import annotations

import json
import random
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.clients.load.crash import Load
from support.effort import EFFORT, SEED
from support.rigs.daemon.process import Daemon, run_command
from support.rigs.replica.pair import Pair, assert_kept

pytestmark = pytest.mark.fault
ROUNDS = EFFORT
_DRAIN_S_MAX = 90.0
_LINK = {"DMQ_REPLICA_LINK": "127.0.0.1:0", "DMQ_REPLICA_EVERY": "1h"}  # no segment is due


def status(daemon: Daemon) -> dict[str, Any]:
    """Return the answer of ``dmq replica status``."""
    done = run_command("replica", "status", "--address", daemon.address, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.timeout(180 + 90 * ROUNDS)
def test_a_takeover_by_link_keeps_every_promise(tmp_path: Path) -> None:
    """The primary is lost under load while the object store lacks the answered messages: its standby has them all."""
    print(f"DMQ_TEST_SEED={SEED} rounds={ROUNDS}")
    rng = random.Random(SEED)
    with closing(Pair(tmp_path, env=_LINK)) as pair, closing(Load(pair.front.address, SEED)) as load:
        for _ in range(ROUNDS):
            pair.primary.wait_for("link_in_sync", timeout_s=60)
            load.ledger.wait_for_sends(rng.randint(50, 300))
            found = status(pair.primary)
            assert found["link"] == "in_sync"
            assert int(found["lag_bytes"]) > 0, "the object store has everything"
            assert int(found.get("lag_batches", 0)) <= 1  # the one on its way
            pair.lose()
            assert pair.primary.events("link_segment_written")
        load.end_sending()
        pair.primary.kill()  # leases end here
        pair.take_over()
        load.drain(_DRAIN_S_MAX)
        pair.primary.stop()
        assert_kept(load, pair.primary.data)
        done = run_command("replica", "check", "--replica-url", pair.url)
        assert done.returncode == 0, done.stderr
