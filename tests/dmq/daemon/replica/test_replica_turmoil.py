"""Takeovers with everything in flight, and an object store that fails: the audit of both hosts' trails is clean."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import cast

import pytest
from support.clients.load.turmoil import Turmoil
from support.effort import EFFORT, SEED, at_length
from support.rigs.daemon.process import Daemon, run_command
from support.rigs.faults.fault_proxy import Answer, Fault, FaultProxy, Held, LostAnswer, LostRequest
from support.rigs.replica.pair import Pair
from support.rigs.services.object_server import S3Server

pytestmark = pytest.mark.fault
ROUNDS = EFFORT
_ROUND_S = 3.0
_LEASE_S = 10  # a stalled machine must not lose it
_FAULTS = 0.08  # of the requests


class PairTurmoil(Turmoil):
    """Clients and operators at work on a pair of daemons. The test disturbs them."""

    def __init__(self, pair: Pair, folder: Path) -> None:
        super().__init__(cast("Daemon", pair.front), SEED, folder)

    def _disturb(self) -> None:
        """Do nothing."""


def plan_of(rng: random.Random, done: list[Fault]) -> Callable[[str, str], Fault | None]:
    """Return a plan with faults of all kinds. The probe is answered, since its failure would end a start."""

    def plan(method: str, path: str) -> Fault | None:
        if "/probe/" in path or rng.random() > _FAULTS:
            return None
        faults: list[Fault] = [LostRequest(), LostAnswer(), Held()]
        faults += [Answer(status) for status in (403, 409, 429, 500, 503, 507)]
        fault = rng.choice(faults)
        if isinstance(fault, Held):
            threading.Timer(rng.uniform(0.0, 1.5 * _LEASE_S), fault.release.set).start()
        done.append(fault)
        return fault

    return plan


@pytest.mark.timeout(300 + 120 * ROUNDS)
@pytest.mark.parametrize(
    "has_faults", [pytest.param(False, id="kills", marks=at_length), pytest.param(True, id="kills and faults")]
)
def test_takeovers_with_everything_in_flight(tmp_path: Path, has_faults: bool) -> None:
    """Sends, retries, recalls, schedules and transactions over takeovers from lost machines: nothing is lost, and the
    audit is clean.
    """
    print(f"DMQ_TEST_SEED={SEED} rounds={ROUNDS}")
    faults: list[Fault] = []
    with ExitStack() as stack:
        server = S3Server(tmp_path / "server")
        stack.callback(server.kill)
        proxy = FaultProxy(server.port)
        stack.callback(proxy.refuse)
        env = server.environment(proxy.port) | {"DMQ_TRAIL": "auto", "DMQ_TRAIL_EVERY": "1s"}
        env |= {"DMQ_REPLICA_LEASE": f"{_LEASE_S}s", "DMQ_REPLICA_BASE_EVERY": "1m"}
        pair = stack.enter_context(closing(Pair(tmp_path, "s3://orders/store", env)))
        with PairTurmoil(pair, tmp_path) as turmoil, pair.managed():
            for _ in range(ROUNDS):
                proxy.plan = plan_of(random.Random(SEED), faults) if has_faults else None
                threading.Event().wait(_ROUND_S)
                pair.lose()
            proxy.plan = None
            turmoil.calm()
            unexplained = turmoil.unexplained()
        books = turmoil.books
        print(f"{len(books.sent)} messages, {len(faults)} faults; done: {books.done}; refused: {books.refused}")
        pair.standby.kill()
        pair.primary.stop()
        assert not unexplained, "\n".join(unexplained)
        checked = run_command("store", "check", str(pair.primary.data), timeout_s=120)
        assert checked.returncode == 0, checked.stdout + checked.stderr
        trail = str(pair.primary.data / "trail")
        audit = ("audit", "run", "--trail", trail, "--out", str(tmp_path / "audit"), "--late-max", "1000000")
        audited = run_command(*audit, timeout_s=120)
        assert audited.returncode == 0, audited.stdout + audited.stderr
    assert len(books.owed()) > 20 * ROUNDS, "too little load to prove anything"
    assert bool(faults) == has_faults
