"""What reaches the daemon's ports: nonsense, too much, too little. It answers what it can and goes on serving."""

from __future__ import annotations

import json
import random
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from support.clients.wire.client import WireClient, a_message
from support.rigs.daemon.process import Daemon, run_command

from broker_adapter.contracts.limits import BODY_BYTES_MAX
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.admin.api.server import SERVICE_NAME

pytestmark = pytest.mark.integration

_TOPIC, _GROUP = "orders", "billing"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@pytest.fixture(scope="module")
def abused(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for all of this module: what a test did to it must not show in the next one, nor at the end."""
    with Daemon(tmp_path_factory.mktemp("abused") / "data", metrics="127.0.0.1:0") as daemon:
        yield daemon
        daemon.stop()
        lines = [line for line in daemon.log().splitlines() if '"disk_stalled"' not in line]  # the machine's affair
        unwanted = [line for line in lines if '"level": "error"' in line or "Traceback" in line]
        assert not unwanted, unwanted[:3]


@pytest.fixture
def client(abused: Daemon, request: pytest.FixtureRequest) -> Iterator[WireClient]:
    """A client; after the test the daemon must still take a message and give it back."""
    topic = f"after-{request.node.name}".translate({ord(mark): "-" for mark in "[]. "})[:120]
    with WireClient(abused.address) as connected:
        yield connected
        assert connected.send(a_message(topic, "good")).status.code == wire.OK
        assert [each.message_id for each in connected.drain(topic, _GROUP, 1)] == ["good"]
    abused.print_log()


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "code", "text"),
    [
        (a_message(_TOPIC, "1", b"x" * (BODY_BYTES_MAX + 1)), wire.MESSAGE_BODY_TOO_LARGE, "4194305"),
        (a_message(_TOPIC, "1", b""), wire.MESSAGE_BODY_EMPTY, "body"),
        (a_message("no topic!", "1"), wire.ILLEGAL_TOPIC, "no topic!"),
        (a_message("", "1"), wire.ILLEGAL_TOPIC, "blank"),
        (a_message("t" * 128, "1"), wire.ILLEGAL_TOPIC, "127"),
        (a_message("SCHEDULE_TOPIC_XXXX", "1"), wire.ILLEGAL_TOPIC, "SCHEDULE_TOPIC_XXXX"),
        (a_message(_TOPIC, ""), wire.ILLEGAL_MESSAGE_ID, "empty"),
        (a_message(_TOPIC, "1", deliver_at_ms=time.time_ns() // 1_000), wire.ILLEGAL_DELIVERY_TIME, "9999-12-31"),
        (a_message(_TOPIC, "1", properties={"DELAY": "x"}), wire.ILLEGAL_DELIVERY_TIME, "DELAY"),
        (a_message(_TOPIC, "1", properties={"UNIQ_KEY": "x"}), wire.ILLEGAL_MESSAGE_PROPERTY_KEY, "UNIQ_KEY"),
        (a_message(_TOPIC, "1", tag="a|b"), wire.ILLEGAL_MESSAGE_TAG, "a|b"),
        (a_message(_TOPIC, "1", message_group="g" * 64), wire.ILLEGAL_MESSAGE_GROUP, "63"),
        (a_message(_TOPIC, "1", properties={"k": "v" * 17_000}), wire.MESSAGE_PROPERTIES_TOO_LARGE, "16384"),
    ],
    ids=lambda value: str(value)[:20] if isinstance(value, int) else "",
)
def test_a_bad_message_is_refused_with_its_whole_batch(
    client: WireClient, message: wire.Message, code: int, text: str
) -> None:
    """The protocol's own code, a text that names limit or value, and not half of the batch is kept."""
    good = a_message(message.topic.name, f"beside-{code}-{text}"[:100])
    for batch in ([message], [good, message]):
        answer = client.send(*batch)
        assert wire.Code.Name(answer.status.code) == wire.Code.Name(code)
        assert text in answer.status.message
    if message.topic.name == _TOPIC:
        found = [each.message_id for each in client.receive(_TOPIC, _GROUP)]
        assert good.system_properties.message_id not in found


def test_a_batch_is_accepted_in_order(client: WireClient) -> None:
    """Ten messages in one call, some delayed: ten receipts in the order of the request."""
    later_ms = time.time_ns() // 1_000_000 + 200
    batch = [a_message("batched", f"b-{number}", deliver_at_ms=later_ms * (number % 2)) for number in range(10)]
    answer = client.send(*batch)
    assert [entry.message_id for entry in answer.entries] == [f"b-{number}" for number in range(10)]
    assert {entry.status.code for entry in answer.entries} == {wire.OK}
    found = client.drain("batched", _GROUP, 10)
    assert sorted(each.message_id for each in found) == [f"b-{number}" for number in range(10)]


def test_a_caller_without_a_client_id_is_refused(abused: Daemon) -> None:
    """Code 40017, on a call and on a stream."""
    with grpc.insecure_channel(abused.address) as channel:
        method: Any = wire.METHODS["SendMessage"]
        call: Any = channel.unary_unary(
            method.path,
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=method.response_class.FromString,
        )
        answer = call(wire.SendMessageRequest(messages=[a_message(_TOPIC, "1")]), timeout=5)
    assert answer.status.code == wire.CLIENT_ID_REQUIRED


def test_an_unknown_method_is_unimplemented(abused: Daemon, client: WireClient) -> None:
    """A path nobody serves gets gRPC's own answer; an RPC of the protocol that is not served says 50100."""
    with grpc.insecure_channel(abused.address) as channel:
        call: Any = channel.unary_unary("/apache.rocketmq.v2.MessagingService/Nonsense")
        with pytest.raises(grpc.RpcError) as refused:
            call(b"", timeout=5)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    answer = client.ask("SyncLiteSubscription", wire.SyncLiteSubscriptionRequest())
    assert answer.status.code == wire.NOT_IMPLEMENTED


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 100_000])
def test_telemetry_of_garbage_ends_its_stream_only(client: WireClient, size: int) -> None:
    """A frame that cannot be read ends the stream it came on, with an error."""
    stream = client.open("Telemetry", iter([random.Random(size).randbytes(size)]))
    with suppress(grpc.RpcError):
        list(stream)
    assert client.ask("QueryRoute", wire.QueryRouteRequest(topic=wire.Resource(name=_TOPIC))).status.code == wire.OK


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),  # how TLS begins
        b"\0" * 70_000,
        _PREFACE[:10],
        _PREFACE + b"\xff" * 4096,
        _PREFACE + b"\0\0\0\4\0\0\0\0\0" + b"\xff\xff\xff\1\4\0\0\0\1" + bytes(5000),  # a frame of 16 MiB, begun
        random.Random(1).randbytes(20_000),
    ],
    ids=["http1", "tls", "zeros", "half-preface", "preface-ff", "endless-frame", "random"],
)
def test_garbage_on_the_port_is_harmless(abused: Daemon, client: WireClient, garbage: bytes) -> None:
    """Bytes that are no HTTP/2: their connections fare badly, everybody else is served meanwhile and afterwards."""
    address = ("127.0.0.1", abused.port)
    connections = [socket.create_connection(address, timeout=5) for _ in range(20)]
    try:
        for connection in connections:
            with suppress(OSError):  # it may hang up while we talk
                connection.sendall(garbage)
        assert client.send(a_message(_TOPIC, f"meanwhile-{time.time_ns()}")).status.code == wire.OK
    finally:
        for connection in connections:
            connection.close()


@pytest.mark.parametrize(("rpc", "bytes_max"), [("SendMessage", 64 * 1024 * 1024), ("AckMessage", 1024 * 1024)])
def test_a_request_above_the_limit_of_its_call_is_refused(client: WireClient, rpc: str, bytes_max: int) -> None:
    """One byte more is gRPC's to refuse, with the limit; the connection lives on."""
    with pytest.raises(grpc.RpcError) as refused:
        client.ask(rpc, bytes(bytes_max + 1), deadline_s=20)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert f"the maximum is {bytes_max}" in str(refused.value.details())
    client.ask(rpc, b"", deadline_s=20)


# -- what operators ask -----------------------------------------------------------------------------------------------


def _get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status), answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def _sends(daemon: Daemon) -> float:
    """How many sends were answered OK, as the metrics say."""
    status, text = _get(f"http://{daemon.metrics_address}/metrics")
    assert status == 200
    figures = {line.split(" ")[0]: line.split(" ")[1] for line in text.splitlines() if line and line[0] != "#"}
    return sum(float(value) for name, value in figures.items() if "SendMessage" in name and "20000" in name)


def test_metrics_and_health_over_http(abused: Daemon, client: WireClient) -> None:
    """The second port counts what clients did, and says that the daemon serves."""
    assert client.send(a_message(_TOPIC, f"counted-{time.time_ns()}")).status.code == wire.OK
    until_s = time.monotonic() + 30
    while not _sends(abused):  # fronts tell what they counted each second
        assert time.monotonic() < until_s
        time.sleep(0.05)
    assert _get(f"http://{abused.metrics_address}/healthz")[0] == 200
    assert _get(f"http://{abused.metrics_address}/nothing")[0] == 404


def test_health_over_grpc(abused: Daemon) -> None:
    """The standard health service says SERVING, for the server and for the protocol."""
    with grpc.insecure_channel(abused.address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        for name in ("", wire.SERVICE):
            answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as unknown:
            health.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=5)
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


def test_health_is_watched_to_the_end(daemon: Daemon) -> None:
    """A load balancer that watches hears SERVING, and NOT_SERVING when the daemon begins to end."""
    with grpc.insecure_channel(daemon.address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=20)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        daemon.stop()
        assert [answer.status for answer in watch] == [health_pb2.HealthCheckResponse.NOT_SERVING]


def test_reflection_lists_the_services(abused: Daemon) -> None:
    """Grpcurl needs no proto files: the services are listed, and their files are given."""
    with grpc.insecure_channel(abused.address) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=wire.SERVICE),
        ]
        listed, described = stub.ServerReflectionInfo(iter(requests), timeout=5)
    names = {service.name for service in listed.list_services_response.service}
    assert {wire.SERVICE, SERVICE_NAME, "grpc.health.v1.Health"} <= names
    assert described.file_descriptor_response.file_descriptor_proto


def test_the_command_line_agrees(abused: Daemon, client: WireClient) -> None:
    """``dmq status`` tells of this very process."""
    ended = run_command("status", "--address", abused.address, "-o", "json")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["pid"] == abused.pid
