"""Port of a standby: it reports its role, refuses clients, and serves on the same sockets after the takeover."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from support.rigs.daemon.acl import OPERATOR, write_acl
from support.rigs.daemon.process import Daemon, run_command
from support.rigs.replica.pair import Pair

from broker_adapter.wire import rocketmq_v2 as wire
from dmq.daemon.replica.standby import Redirects

pytestmark = pytest.mark.fault


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with closing(Pair(tmp_path, metrics="127.0.0.1:0")) as pair:
        pair.standby.wait_for("standby_listening", timeout_s=60)
        yield pair


def health(channel: grpc.Channel, service: str = "") -> int:
    """Return the answer of the health service."""
    stub: Any = HealthStub(channel)
    return int(stub.Check(HealthCheckRequest(service=service), timeout=30, wait_for_ready=True).status)


def call(channel: grpc.Channel, rpc: str = "QueryRoute") -> None:
    """Make a client call with an empty request."""
    method: Any = channel.unary_unary(wire.METHODS[rpc].path)
    method(b"", timeout=30, metadata=(("x-mq-client-id", "c"),))


def page(daemon: Daemon, path: str) -> tuple[int, str]:
    """Return status and body of a page of the metrics port of a standby."""
    metrics = daemon.event("standby_listening")["metrics"]
    try:
        with urllib.request.urlopen(f"http://{metrics}/{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_standby_reports_its_role(pair: Pair) -> None:
    """Health, status, replica status, /healthz and /metrics of a standby name its role and its primary."""
    standby, primary = pair.standby, pair.primary.address
    with grpc.insecure_channel(standby.address) as channel:
        states = [health(channel, service) for service in ("", wire.SERVICE, "liveness")]
    not_serving, serving = HealthCheckResponse.NOT_SERVING, HealthCheckResponse.SERVING
    assert states == [not_serving, not_serving, serving]
    assert page(standby, "healthz") == (503, f"not ready\nstandby of {primary}\n")
    metrics = page(standby, "metrics")[1]
    assert 'dmq_replica_role{role="standby"} 1.0' in metrics
    assert 'dmq_replica_role{role="primary"} 0.0' in metrics
    assert "dmq_replica_lag_seconds " in metrics

    shown = run_command("status", "--address", standby.address)
    assert shown.returncode == 6
    assert f"standby of {primary}" in shown.stdout
    found = json.loads(run_command("status", "--json", "--address", standby.address).stdout)
    assert (found["state"], found["state_reason"]) == ("NOT_SERVING", f"standby of {primary}")
    done = run_command("replica", "status", "--json", "--address", standby.address)
    replica = json.loads(done.stdout)
    assert (done.returncode, replica["role"], replica["primary"]) == (0, "standby", primary)
    assert int(replica["segment"]) >= 1
    assert int(replica["lag_ms"]) < 60_000
    served = json.loads(run_command("replica", "status", "--json", "--address", primary).stdout)
    assert (served["role"], served["primary"]) == ("primary", primary)


def test_a_standby_refuses_clients_with_the_address_of_the_primary(pair: Pair) -> None:
    """An operator's call and those of a client without another address get UNAVAILABLE with the primary's address."""
    primary, standby = pair.primary.address, pair.standby.address
    text = f"this daemon is a standby and serves no clients: call the primary at {primary}"
    done = run_command("topic", "ls", "--address", standby)
    assert (done.returncode, text in done.stderr) == (6, True)
    options = [("grpc.min_reconnect_backoff_ms", 10), ("grpc.initial_reconnect_backoff_ms", 10)]
    with grpc.insecure_channel(standby, options) as channel:
        details: str | None = ""
        while details != text:
            with pytest.raises(grpc.RpcError) as refused:
                call(channel)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            details = refused.value.details()


@pytest.mark.parametrize("retries", [0, 1])
def test_a_client_with_both_addresses_reaches_the_primary(pair: Pair, retries: int) -> None:
    """At once if the client repeats unprocessed calls; otherwise with the call after the first one."""
    addresses = f"ipv4:{pair.standby.address},{pair.primary.address}"
    with grpc.insecure_channel(addresses, [("grpc.enable_retries", retries)]) as channel:
        if not retries:
            with pytest.raises(grpc.RpcError) as refused:
                call(channel)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        call(channel)


def test_a_standby_checks_the_keys_of_operators(tmp_path: Path) -> None:
    """The status of a standby needs the same key as that of a primary; health needs none."""
    with closing(Pair(tmp_path, env={"DMQ_ACL": str(write_acl(tmp_path))})) as pair:
        pair.standby.wait_for("standby_listening", timeout_s=60)
        status = ("status", "--json", "--address", pair.standby.address)
        refused = run_command(*status)
        assert (refused.returncode, refused.stdout) == (5, ""), refused.stderr
        keys = {"DMQ_ACCESS_KEY": OPERATOR.access_key, "DMQ_SECRET_KEY": OPERATOR.secret_key}
        assert json.loads(run_command(*status, env=keys).stdout)["replica"]["role"] == "standby"
        with grpc.insecure_channel(pair.standby.address) as channel:
            assert health(channel, "liveness") == HealthCheckResponse.SERVING


def test_the_sockets_of_a_standby_serve_after_the_takeover(pair: Pair) -> None:
    """A watch of health at the standby ends with the takeover, and the same address serves at once."""
    standby = pair.standby
    with grpc.insecure_channel(standby.address) as channel:
        stub: Any = HealthStub(channel)
        watch = stub.Watch(HealthCheckRequest(), timeout=120)
        assert next(watch).status == HealthCheckResponse.NOT_SERVING
        pair.primary.stop()
        with pytest.raises(grpc.RpcError):
            next(watch)
        host, port = standby.address.split(":")
        socket.create_connection((host, int(port)), timeout=30).close()  # never refused in between
        pair.take_over()
        assert health(channel) == HealthCheckResponse.SERVING
    assert run_command("topic", "ls", "--address", standby.address).returncode == 0


def test_each_refused_connection_causes_one_redirect() -> None:
    """As many connections as were refused are closed, of the same address and within a minute only."""
    now_s = [0.0]
    redirects = Redirects(lambda: now_s[0])
    redirects.note_refused("a")
    redirects.note_refused("a")
    redirects.note_refused("b")
    assert [redirects.is_redirected(each) for each in "aaac"] == [True, True, False, False]
    assert not redirects.is_stranded("a")
    for _ in range(14):
        redirects.note_refused("a")
    assert [redirects.is_stranded(each) for each in "ab"] == [True, False]
    now_s[0] = 61.0
    assert not redirects.is_redirected("b")
    assert not redirects.is_stranded("a")
