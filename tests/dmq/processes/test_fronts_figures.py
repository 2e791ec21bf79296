"""What people see of a daemon of several processes: its status, its figures, its log, and the list of processes."""

from __future__ import annotations

import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.clients.wire.client import WireClient, a_message
from support.rigs.daemon.acl import OPERATOR, SHOP, Key, write_acl
from support.rigs.daemon.process import Daemon

from broker_adapter.wire import rocketmq_v2 as wire
from dmq.admin import admin_v1
from dmq.admin.client import AdminClient, DaemonUnavailable

pytestmark = pytest.mark.integration
_PATIENCE_S = 60.0
_AGAIN_S = 0.05
_Found = TypeVar("_Found")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Two fronts before a store, with access keys."""
    folder = tmp_path_factory.mktemp("fronts")
    options = ("--processes", "2", "--acl", str(write_acl(folder)))
    with Daemon(folder / "data", *options, metrics="127.0.0.1:0") as daemon:
        yield daemon


def _until(look: Callable[[], _Found], is_right: Callable[[_Found], bool]) -> _Found:
    """Look again until what is found is right: figures of fronts come once a second."""
    until_s = time.monotonic() + _PATIENCE_S
    while not is_right(found := look()):
        assert time.monotonic() < until_s, found
        time.sleep(_AGAIN_S)
    return found


def _processes(daemon: Daemon) -> list[admin_v1.Process]:
    with AdminClient(daemon.address, signer=OPERATOR.signer()) as admin:
        return list(admin.status().processes)


def _figures(daemon: Daemon, name: str) -> dict[str, float]:
    """Return the samples of a metric by the values of their labels."""
    with urllib.request.urlopen(f"http://{daemon.metrics_address}/metrics", timeout=_PATIENCE_S) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {
            " ".join(sample.labels.values()): sample.value
            for family in families
            for sample in family.samples
            if sample.name == name
        }


def test_each_process_is_shown(daemon: Daemon) -> None:
    """The store and its fronts, each with its pid, what it takes and the connections that it serves."""
    with WireClient(daemon.address, signer=SHOP.signer()) as client:
        assert client.send(a_message("orders", "m-1")).status.code == wire.OK
        found = _until(lambda: _processes(daemon), lambda all_: sum(one.connections for one in all_) >= 1)
    assert [one.name for one in found] == ["store", "front-0", "front-1"]
    assert {one.state for one in found} == {"serving"}
    assert [one.pid for one in found] == [daemon.pid, *daemon.event("listening")["fronts"]]
    assert found[0].connections == 0
    assert all(one.cpu_s > 0 and one.memory_bytes > 2**20 for one in found)
    for name in ("cpu_seconds_total", "resident_memory_bytes", "connections", "streams", "starts_total"):
        assert _figures(daemon, f"dmq_process_{name}").keys() == {"store", "front-0", "front-1"}


def test_a_front_names_its_daemon(daemon: Daemon) -> None:
    """In the list of processes: its number and the directory of its daemon, and a short name."""
    for number, pid in enumerate(daemon.event("listening")["fronts"]):
        process = psutil.Process(pid)
        assert process.cmdline()[1:6] == ["-P", "-m", "dmq.processes.front", f"front-{number}", str(daemon.data)]
        assert process.name() == f"dmq-front-{number}"


def test_a_front_names_itself_in_its_log(daemon: Daemon) -> None:
    """A refusal is logged where it is judged, in one form with the rest."""
    with WireClient(daemon.address, signer=Key(SHOP.access_key, "wrong").signer()) as client:
        assert client.send(a_message("orders", "m-2")).status.code == wire.UNAUTHORIZED
    refused = daemon.wait_for("access_refused", timeout_s=_PATIENCE_S)
    assert (refused["process"], refused["level"], refused["rpc"]) in [
        (name, "warning", "SendMessage") for name in ("front-0", "front-1")
    ]
    assert "process" not in daemon.event("serving")


def test_a_call_that_is_passed_on_is_counted_once(daemon: Daemon) -> None:
    """A send by the front, which knows what becomes of it, and not by the store process as well; others by that one."""
    passed_on = a_message("orders", "m-3", properties={"DMQ_CRON": "nonsense"})
    judged_by_the_front = a_message("elsewhere", "m-4")
    with WireClient(daemon.address, signer=SHOP.signer()) as client:
        refused, forbidden = client.send(passed_on).status.code, client.send(judged_by_the_front).status.code
        before = _figures(daemon, "dmq_calls_total").get(f"{wire.OK} QueryRoute", 0)
        assert (
            client.ask("QueryRoute", wire.QueryRouteRequest(topic=wire.Resource(name="orders"))).status.code == wire.OK
        )
    assert {refused, forbidden} & {wire.OK, wire.UNAUTHORIZED} == set()
    assert refused != forbidden
    counted = _until(
        lambda: _figures(daemon, "dmq_calls_total"), lambda found: f"{forbidden} SendMessage" in found
    )  # and with it, what the front counted before
    assert counted[f"{refused} SendMessage"] == 1
    assert counted[f"{wire.OK} QueryRoute"] == before + 1


def test_a_front_that_ended_is_loud(daemon: Daemon) -> None:
    """Status and figures say that it was started again and how the last one ended, and so does the log."""
    victim = daemon.event("listening")["fronts"][1]
    os.kill(victim, signal.SIGKILL)

    def processes() -> list[admin_v1.Process]:
        try:
            return _processes(daemon)
        except DaemonUnavailable:  # a connection that went to the front that is dead: nobody knew yet
            return []

    found = _until(processes, lambda all_: bool(all_) and all_[2].state == "serving" and all_[2].pid != victim)[2]
    assert (found.starts, found.last_end) == (2, "killed by SIGKILL")
    assert _figures(daemon, "dmq_process_starts_total") == {"store": 1, "front-0": 1, "front-1": 2}
    ended = daemon.event("front_ended")
    assert (ended["front"], ended["why"]) == ("front-1", "killed by SIGKILL")
    serving = daemon.event("front_serving")
    assert (serving["front"], serving["pid"], serving["starts"]) == ("front-1", found.pid, 2)


def test_one_process_is_shown_as_one(tmp_path: Path) -> None:
    """With the same figures, the connections and open calls that it serves itself among them."""
    with Daemon(tmp_path / "data", "--processes", "1", metrics="127.0.0.1:0") as daemon:
        with AdminClient(daemon.address) as admin:
            (one,) = admin.status().processes
        assert (one.name, one.pid, one.connections, one.streams) == ("store", daemon.pid, 1, 1)
        assert one.cpu_s > 0
        assert _figures(daemon, "dmq_process_starts_total") == {"store": 1}
