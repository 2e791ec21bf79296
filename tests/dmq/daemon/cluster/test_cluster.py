"""An idle daemon notices that its cluster does not answer, or that an address is a server of another kind.

A second daemon stands for the proxies of a cluster, and a peer of the classic protocol for name servers and brokers.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.rigs.daemon.process import Daemon, free_port, run_command
from support.rigs.rocketmq.front import front_of, status
from support.rigs.rocketmq.remoting_peer import Peer, remoting_peer

from broker_adapter.remoting.protocol.frames import RemotingFrame

pytestmark = pytest.mark.integration
PATIENCE_S = 30.0  # it is about ten seconds; more on a machine that stalls


@pytest.fixture
def name_server() -> Iterator[Peer]:
    """A name server, which knows no broker."""
    with remoting_peer() as peer:
        peer.before = lambda _: RemotingFrame(code=0, body=b'{"brokerAddrTable":{},"clusterAddrTable":{}}')
        yield peer


@pytest.fixture
def broker() -> Iterator[Peer]:
    """A broker, which does not serve the requests of name servers."""
    with remoting_peer() as peer:
        peer.before = lambda _: RemotingFrame(code=3, remark="request type 106 not supported")
        yield peer


def page(daemon: Daemon, path: str) -> str:
    with urllib.request.urlopen(f"http://{daemon.metrics_address}{path}", timeout=PATIENCE_S) as answer:
        return str(answer.read().decode())


def test_an_idle_daemon_notices_that_its_proxies_are_killed_and_come_back(data: Path, tmp_path: Path) -> None:
    """Without any call by a client: in the log, the health, the metrics and the status."""
    with Daemon(tmp_path / "cluster") as cluster, front_of(cluster, data, metrics="127.0.0.1:0") as front:
        cluster.kill()
        front.wait_for("cluster_unreachable", timeout_s=PATIENCE_S)
        assert "cluster: none of its addresses answers" in page(front, "/healthz")
        assert "dmq_cluster_away 1.0" in page(front, "/metrics")
        assert status(front).away_since_ms
        cluster.start()
        front.wait_for("cluster_reachable", timeout_s=PATIENCE_S)
        assert "cluster:" not in page(front, "/healthz")


@pytest.mark.parametrize("kind", ["name server", "broker", "nothing"])
def test_an_endpoint_that_is_no_proxy_is_named(
    kind: str, data: Path, tmp_path: Path, name_server: Peer, broker: Peer
) -> None:
    """An idle daemon says which kind of server is there, and ``config check`` refuses it."""
    nobody = f"127.0.0.1:{free_port()}"
    address = {"name server": name_server.address, "broker": broker.address, "nothing": nobody}[kind]
    options = ("--broker", "rocketmq", "--endpoints", address)
    checked = run_command("config", "check", "--data", str(tmp_path / "new"), *options, cwd=tmp_path)
    assert checked.returncode == (0 if kind == "nothing" else 1), checked  # a daemon waits for a cluster that is away
    with Daemon(data, *options, metrics="127.0.0.1:0") as daemon:
        daemon.wait_for("cluster_unreachable", timeout_s=PATIENCE_S)
        assert "cluster: " in page(daemon, "/healthz")
        if kind == "nothing":
            assert f"cluster: nothing answers at {address}" in checked.stdout
            return
        assert f"{address}: it is a RocketMQ {kind}: endpoints needs proxies" in checked.stdout
        found = daemon.wait_for("cluster_endpoint_invalid", timeout_s=PATIENCE_S)
        assert (found["address"], f"a RocketMQ {kind}" in found["why"]) == (address, True)
        assert f"a RocketMQ {kind}" in page(daemon, "/healthz")
        assert [f"a RocketMQ {kind}" in each.why for each in status(daemon).proxies] == [True]


@pytest.mark.parametrize("kind", ["broker", "proxy"])
def test_a_name_server_that_is_none_is_named(kind: str, data: Path, tmp_path: Path, broker: Peer) -> None:
    """A broker answers every look, but not what a name server is asked; a proxy speaks another protocol."""
    with Daemon(tmp_path / "cluster") as cluster:
        address = broker.address if kind == "broker" else cluster.address
        options = ("--broker", "rocketmq-remoting", "--namesrv", address)
        checked = run_command("config", "check", "--data", str(tmp_path / "new"), *options, cwd=tmp_path)
        assert checked.returncode == 1, checked
        assert f"{address}: it is a RocketMQ {kind}: namesrv needs name servers" in checked.stdout
        with Daemon(data, *options, metrics="127.0.0.1:0") as daemon:
            daemon.wait_for("cluster_unreachable", timeout_s=PATIENCE_S)
            found = daemon.wait_for("cluster_endpoint_invalid", timeout_s=PATIENCE_S)
            assert (found["address"], f"a RocketMQ {kind}" in found["why"]) == (address, True)
            assert f"a RocketMQ {kind}" in page(daemon, "/healthz")
            assert len(daemon.events("broker_unreachable")) == 1  # and not at each look


@pytest.mark.parametrize("kind", ["proxy", "name server"])
def test_a_check_reports_the_parts_of_the_cluster_that_answer(kind: str, tmp_path: Path, name_server: Peer) -> None:
    """The kind of server at each address is shown; one silent address of several keeps no daemon from starting."""
    nobody = f"127.0.0.1:{free_port()}"
    with Daemon(tmp_path / "cluster") as cluster:
        options = {
            "proxy": ("--broker", "rocketmq", "--endpoints", f"{cluster.address};{nobody}"),
            "name server": ("--broker", "rocketmq-remoting", "--namesrv", f"{name_server.address};{nobody}"),
        }[kind]
        checked = run_command("config", "check", "--data", str(tmp_path / "new"), *options, cwd=tmp_path)
        assert checked.returncode == 0, checked
        assert f"is a RocketMQ {kind}" in checked.stdout
        assert f"cluster: nothing answers at {nobody}" in checked.stdout
