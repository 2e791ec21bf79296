"""The admin service over real gRPC: answers, refusals, and what the client says when nobody answers."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc
import pytest
from support.admin_source import MESSAGE, MESSAGE_ID, FixedSource, service_over

from broker_adapter.contracts.limits import BODY_BYTES_MAX
from broker_adapter.contracts.message import Message
from broker_adapter.wire.mapping import encode
from dmq.admin import admin_v1 as wire
from dmq.admin.api.server import grpc_handler
from dmq.admin.client.client import AdminClient, CallFailed, CallRefused, DaemonUnavailable, NotFound
from dmq.admin.requests import status as source
from dmq.errors import StoreCorrupt, StoreFailed
from dmq.states import MessageState


@dataclass
class Served:
    """An asyncio gRPC server with the admin service, on a thread of its own."""

    source: FixedSource = field(default_factory=FixedSource)
    address: str = ""
    _started: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        self._thread.start()
        assert self._started.wait(10)

    async def _serve(self) -> None:
        self._ended = asyncio.Event()
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((grpc_handler(service_over(self.source)),))
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        self._started.set()
        await self._ended.wait()
        await server.stop(0)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(10)
        self._loop.close()


@pytest.fixture
def served() -> Iterator[Served]:
    """A server that is stopped again."""
    served = Served()
    yield served
    served.stop()


@pytest.fixture
def client(served: Served) -> Iterator[AdminClient]:
    """A client of it."""
    with AdminClient(served.address, timeout_s=10) as client:
        yield client


def test_the_three_calls(client: AdminClient) -> None:
    """What the service answers comes out of the client."""
    assert client.status().state == wire.SERVING
    assert [topic.name for topic in client.topics().topics] == ["orders", "%DLQ%group"]
    assert client.message("orders", MESSAGE_ID).state == wire.WAITING
    assert client.message("orders", "nobody").state == wire.UNKNOWN


def test_groups_and_retries(served: Served, client: AdminClient) -> None:
    """One round trip of each call."""
    assert [group.name for group in client.groups()] == ["billing", "shipping"]
    assert client.group("billing").waiting == 3
    policy = wire.Policy(fixed=wire.FixedBackoff(delay_ms=5), max_attempts=2)
    assert client.set_group("billing", policy=policy, is_fifo=True).policy == policy
    assert client.set_group("billing", reset_policy=True).is_fifo
    page = client.retries("billing", limit=1)
    assert ([retry.entry for retry in page.retries], page.next_token) == (["7-11"], "1")
    assert [retry.entry for retry in client.retries("billing", topic="refunds", token="1").retries] == ["7-12"]
    ran = client.run_retries_now("billing", ["7-11", "7-99"])
    assert (ran.moved, ran.gone) == (1, 1)
    ended = client.end_retries("billing", ["7-12"])
    assert (ended.moved, ended.gone) == (1, 0)
    assert (served.source.ran, served.source.ended) == ([["7-11", "7-99"]], [["7-12"]])


def test_dead_letters_and_jobs(client: AdminClient) -> None:
    """One round trip of each call."""
    page = client.dead_letters("billing", wire.DeadFilter(reasons=[wire.TOO_OLD]))
    assert ([letter.message_id for letter in page.letters], page.next_offset) == (["D5"], -1)
    page = client.dead_letters("billing", wire.DeadFilter(), offset=6, limit=1, with_outcome=True, with_body=True)
    assert (page.letters[0].outcome, page.letters[0].content.body) == ("redriven", MESSAGE.body)
    request = wire.StartJobRequest(kind=wire.PURGE, group="billing", why="old", is_dry_run=True)
    assert (client.start_job(request).job_id, client.start_job(request).done) == (0, 3)
    request.is_dry_run = False
    assert client.start_job(request).job_id == 1
    assert [job.state for job in client.jobs("billing")] == [wire.RUNNING]
    assert client.stop_job(1).state == wire.STOPPED
    assert client.jobs("shipping") == []


def test_what_nobody_knows_is_an_error_of_its_own(client: AdminClient) -> None:
    """So that a script can tell it from a mistake."""
    with pytest.raises(NotFound, match="consumer group not found"):
        client.group("nobody")
    with pytest.raises(NotFound, match="no job has this number"):
        client.stop_job(7)


def test_the_largest_body_comes_through(served: Served, client: AdminClient) -> None:
    """4 MiB of body are more than gRPC's default limit for a whole answer."""
    body = b"x" * BODY_BYTES_MAX
    payload = encode(Message(topic="orders", message_id="big", body=body)).payload
    served.source.found["orders", "big"] = source.MessageStatus(state=MessageState.QUEUED, payload=payload)
    assert client.message("orders", "big", with_body=True).content.body == body


def test_a_refused_call_says_which_rule(client: AdminClient) -> None:
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
    served: Served,
    client: AdminClient,
    caplog: pytest.LogCaptureFixture,
    failure: Exception,
    expected: type[Exception],
    text: str,
) -> None:
    """It answers, nothing of the inside gets out, and grpcio's own log stays empty."""
    served.source.failure = failure
    with caplog.at_level(logging.DEBUG), pytest.raises(expected, match=text) as caught:
        client.status()
    assert "hunter2" not in str(caught.value)
    assert not [record for record in caplog.records if record.name.startswith("grpc") and record.levelno > 10]


def test_bytes_that_are_no_request_are_refused(served: Served) -> None:
    """A malformed protobuf is the caller's mistake."""
    with grpc.insecure_channel(served.address) as channel:
        call = channel.unary_unary(
            "/rockdmq.admin.v1.AdminService/GetMessage", request_serializer=bytes, response_deserializer=bytes
        )
        with pytest.raises(grpc.RpcError) as caught:
            call(b"\xff\xff\xff", timeout=10)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_nobody_answers() -> None:
    """One sentence with the address, at once."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with AdminClient(address, timeout_s=10) as client, pytest.raises(DaemonUnavailable) as caught:
            client.status()
    assert str(caught.value) == f"no daemon answers at {address}; is `dmq serve` running?"


def test_somebody_is_silent() -> None:
    """The deadline holds when a connection is accepted and nothing is said."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        started_s = time.monotonic()
        with AdminClient(address, timeout_s=0.2) as client, pytest.raises(DaemonUnavailable, match=address):
            client.status()
    assert 0.1 < time.monotonic() - started_s < 2.5


def test_somebody_else_answers() -> None:
    """A gRPC server without this service is told from a daemon that is down."""
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with (
        AdminClient(f"127.0.0.1:{port}", timeout_s=10) as client,
        pytest.raises(CallFailed, match="no Rock-DMQ daemon"),
    ):
        client.status()
    server.stop(0).wait()
