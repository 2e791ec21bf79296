"""What a stranger can make a daemon do: every input has a price that is bounded by its size, and honest calls go on.

``DMQ_TEST_EFFORT=10`` lets each attack last ten times as long.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest
from support.clients.wire.client import WireClient, a_message
from support.effort import EFFORT
from support.models.costs.cost_oracle import Cost, Meter, corpus, cost_of, with_preface
from support.rigs.commands import forked
from support.rigs.daemon.process import Daemon

from bench.attacks import ATTACKS
from broker_adapter.wire import rocketmq_v2 as wire

pytestmark = pytest.mark.fault
ROOT = Path(__file__).resolve().parents[2]
ATTACK_S = 0.5 * EFFORT if EFFORT > 1 else 0.3
ATTACK = "import sys; from bench.attacks import main; main(*sys.argv[1:])"
MEMORY_BYTES_MAX = 400 * 10**6
NUMBERS = count()


@pytest.fixture(scope="module", params=[1, 2], ids=["one-process", "two-fronts"])
def daemon(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon in one process, or one with front processes: what these cost counts as well."""
    with Daemon(tmp_path_factory.mktemp("hostile") / "data", processes=request.param) as running:
        yield running


def check_honest_call(daemon: Daemon) -> None:
    with WireClient(daemon.address, "honest") as client:
        answer = client.ask(
            "SendMessage",
            wire.SendMessageRequest(messages=[a_message("honest", f"honest-{next(NUMBERS)}")]),
            deadline_s=30,
        )
    assert answer.status.code == wire.OK, answer.status


@pytest.mark.parametrize("kept", corpus(), ids=lambda path: path.stem)
def test_the_cost_of_an_input_is_bounded_by_its_size(daemon: Daemon, kept: Path) -> None:
    meter = Meter(daemon.pid)
    said = with_preface(kept.read_bytes())
    cost = cost_of(meter, daemon.port, said)
    if cost.excess():  # what the daemon does by itself falls on some input or other: not on the same one twice
        cost = cost_of(meter, daemon.port, said)
    assert not cost.excess()
    check_honest_call(daemon)


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_costs_in_proportion_to_its_bytes_and_honest_calls_continue(daemon: Daemon, name: str) -> None:
    meter = Meter(daemon.pid)
    meter.wait_until_quiet()
    cpu_s, memory = meter.cpu_s(), meter.memory_bytes()
    asked = name, daemon.address, str(ATTACK_S)
    with ThreadPoolExecutor(1) as pool:
        attacking = pool.submit(forked.run_code, ATTACK, *asked, cwd=ROOT, timeout_s=ATTACK_S + 60)
        check_honest_call(daemon)
        attack = attacking.result()
    assert attack.returncode == 0, attack.stderr
    sent = json.loads(attack.stdout)
    check_honest_call(daemon)
    most = meter.wait_until_quiet()
    assert most - memory < MEMORY_BYTES_MAX
    cost = Cost(sent["sent_bytes"] + 1000 * sent["connections"], meter.cpu_s() - cpu_s, 0)
    assert not cost.excess()
