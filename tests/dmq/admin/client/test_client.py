"""The admin service over real gRPC: answers, refusals, and the errors of the client if no daemon answers."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from support.forges.messages.letters import a_message
from support.rigs.commands.live_cell import LiveCell, live_cell

from broker_adapter.contracts.limits import BODY_BYTES_MAX
from dmq.admin import admin_v1 as wire
from dmq.admin.client.client import AdminClient, CallFailed, CallRefused, DaemonUnavailable, NotFound
from dmq.errors import StoreCorrupt, StoreFailed
from dmq.metrics.usage import ProcessStatus

pytestmark = pytest.mark.integration


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveCell]:
    """A daemon's parts, served by grpcio."""
    with live_cell(tmp_path / "data", transport="grpcio") as live:
        yield live


@pytest.fixture
def client(live: LiveCell) -> Iterator[AdminClient]:
    """A client of it."""
    with AdminClient(live.cell.listen, timeout_s=10) as client:
        yield client


def test_what_is_answered_comes_out_of_the_client(client: AdminClient) -> None:
    """Created objects are listed; an unknown one is an answer, or an error of its own for scripts."""
    assert client.status().state == wire.SERVING
    policy = wire.Policy(fixed=wire.FixedBackoff(delay_ms=5), max_attempts=2)
    assert client.set_group("billing", policy=policy, is_fifo=True).policy == policy
    assert client.set_group("billing", reset_policy=True).is_fifo
    assert client.message("orders", "nobody").state == wire.UNKNOWN
    with pytest.raises(NotFound, match="consumer group not found"):
        client.group("nobody")
    with pytest.raises(NotFound, match="no job has this number"):
        client.stop_job(7)


def test_the_largest_body_comes_through(live: LiveCell, client: AdminClient) -> None:
    """4 MiB of body are more than gRPC's default limit for a whole answer."""
    body = b"x" * BODY_BYTES_MAX

    async def send() -> None:
        await live.rig.broker.send([a_message("big", body=body)])

    live.do(send())
    assert client.message("orders", "big", with_body=True).content.body == body


def test_a_refused_call_names_its_rule(client: AdminClient) -> None:
    """The daemon's own sentence."""
    with pytest.raises(CallRefused, match="illegal topic"):
        client.message("a b", "x")


@pytest.mark.parametrize(
    ("failure", "expected", "text"),
    [
        (StoreFailed("disk gone"), DaemonUnavailable, "disk gone"),
        (StoreCorrupt("block 7"), CallFailed, "block 7"),
        (KeyError("hunter2"), CallFailed, "internal error"),
    ],
)
def test_a_failure_of_the_daemon(
    live: LiveCell,
    client: AdminClient,
    caplog: pytest.LogCaptureFixture,
    failure: Exception,
    expected: type[Exception],
    text: str,
) -> None:
    """It answers, nothing of the inside gets out, and grpcio's own log stays empty."""

    def fail() -> list[ProcessStatus]:
        raise failure

    live.cell.processes = fail
    with caplog.at_level(logging.DEBUG), pytest.raises(expected, match=text) as caught:
        client.status()
    assert "hunter2" not in str(caught.value)
    assert not [record for record in caplog.records if record.name.startswith("grpc") and record.levelno > 10]


def test_bytes_that_are_no_request_are_refused(live: LiveCell) -> None:
    """A malformed protobuf is the caller's mistake."""
    with grpc.insecure_channel(live.cell.listen) as channel:
        call = channel.unary_unary(
            "/rockdmq.admin.v1.AdminService/GetMessage", request_serializer=bytes, response_deserializer=bytes
        )
        with pytest.raises(grpc.RpcError) as caught:
            call(b"\xff\xff\xff", timeout=10)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_no_server_answers() -> None:
    """One sentence with the address, at once."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with AdminClient(address, timeout_s=10) as client, pytest.raises(DaemonUnavailable) as caught:
            client.status()
    assert str(caught.value) == f"no daemon answers at {address}; is `dmq serve` running?"


def test_a_silent_server() -> None:
    """The deadline holds when a connection is accepted and nothing is said."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        started_s = time.monotonic()
        with AdminClient(address, timeout_s=0.2) as client, pytest.raises(DaemonUnavailable, match=address):
            client.status()
    assert 0.1 < time.monotonic() - started_s < 2.5


def test_a_foreign_server_answers() -> None:
    """A gRPC server without this service has another error than a daemon that is down."""
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with (
        AdminClient(f"127.0.0.1:{port}", timeout_s=10) as client,
        pytest.raises(CallFailed, match="not a Rock-DMQ daemon"),
    ):
        client.status()
    server.stop(0).wait()
