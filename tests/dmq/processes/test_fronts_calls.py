"""Clients of one daemon that are connected to different front processes: together they meet one daemon."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.clients.wire.client import WireClient, a_message, a_receive, received_of
from support.rigs.daemon.acl import ACL, OPERATOR, SHOP, Key, write_acl
from support.rigs.daemon.process import Daemon

from broker_adapter.wire import rocketmq_v2 as wire
from dmq.admin import admin_v1
from dmq.admin.client import AdminClient

pytestmark = pytest.mark.integration
PATIENCE_S = 60.0
TOPIC, GROUP = "orders", "billing"
LATER = Key("later", "later-secret-11aa")
TOO_LARGE = 5 * 1024 * 1024


class Two(NamedTuple):
    """A daemon, a client at each of its fronts, and an operator."""

    daemon: Daemon
    here: WireClient
    there: WireClient
    admin: AdminClient


def connections(daemon: Daemon) -> list[int]:
    """Return how many connections of clients each front has."""
    return [
        sum(each.status == psutil.CONN_ESTABLISHED for each in front.net_connections("tcp")) for front in daemon.fronts
    ]


def until(done: Callable[[], object]) -> None:
    """Wait until something is so that no event tells of."""
    until_s = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < until_s
        time.sleep(0.02)


@pytest.fixture
def acl(tmp_path: Path) -> Path:
    return write_acl(tmp_path)


@pytest.fixture
def two(tmp_path: Path, acl: Path) -> Iterator[Two]:
    with (
        Daemon(tmp_path / "data", "--acl", str(acl), metrics="127.0.0.1:0", processes=2) as daemon,
        WireClient(daemon.address, signer=SHOP.signer()) as here,
        WireClient(daemon.address, signer=SHOP.signer()) as there,
        AdminClient(daemon.address, signer=OPERATOR.signer(), timeout_s=PATIENCE_S) as admin,
    ):
        for client in (here, there):
            assert client.send(a_message(TOPIC, f"first-{id(client)}")).status.code == wire.OK
        assert connections(daemon) == [1, 1]
        assert len(here.drain(TOPIC, GROUP, 2)) == 2
        yield Two(daemon, here, there, admin)


def used(admin: AdminClient, quota: str, holder: str = SHOP.access_key) -> int:
    """Return how much of a quota is in use."""
    return next((each.used for each in admin.quotas() if (each.name, each.quota) == (holder, quota)), 0)


def telemetry(client: WireClient) -> tuple[Any, SimpleQueue[wire.TelemetryCommand | None]]:
    """Return an open stream of a consumer, and what it says next; None ends it."""
    says: SimpleQueue[wire.TelemetryCommand | None] = SimpleQueue()
    settings = wire.Settings(client_type=wire.PUSH_CONSUMER, subscription=wire.Subscription())
    settings.subscription.group.name = GROUP
    says.put(wire.TelemetryCommand(settings=settings))
    return client.open("Telemetry", iter(says.get, None)), says


def test_a_goodbye_ends_the_polls_at_every_front(two: Two) -> None:
    """A client's poll came by one front, its goodbye by another: the poll ends with a proper answer."""
    poll = two.here.begin("ReceiveMessage", a_receive(TOPIC, GROUP, wait_s=PATIENCE_S))
    until(lambda: used(two.admin, "polls") == 1)
    assert two.there.ask("NotifyClientTermination", wire.NotifyClientTerminationRequest()).status.code == wire.OK
    assert [frame.WhichOneof("content") for frame in poll] == ["status", "delivery_timestamp"]


def test_a_cancelled_receive_takes_nothing_from_the_next(two: Two) -> None:
    """A client hung up at one front: a message that comes then goes at once to who asks at another."""
    for number in range(5):
        poll: Any = two.here.begin("ReceiveMessage", a_receive(TOPIC, GROUP, invisible_s=300, wait_s=PATIENCE_S))
        until(lambda: used(two.admin, "polls") == 1)
        poll.cancel()
        until(lambda: used(two.admin, "polls") == 0)
        assert two.here.send(a_message(TOPIC, f"m-{number}")).status.code == wire.OK
        (found,) = two.there.receive(TOPIC, GROUP, invisible_s=300)
        assert (found.message_id, found.attempt) == (f"m-{number}", 1)


def test_limits_of_a_key_count_at_all_fronts_together(two: Two) -> None:
    """Streams, polls and sends of one key, by two fronts; what is too much is refused with one text at both."""
    two.admin.set_quota("key", SHOP.access_key, "streams", 2)
    two.admin.set_quota("key", SHOP.access_key, "polls", 1)
    streams = [telemetry(client) for client in (two.here, two.there)]
    assert {next(stream).status.code for stream, _ in streams} == {wire.OK}
    why = f"quota streams of key {SHOP.access_key}: 2 in use (limit 2)"
    for client in (two.here, two.there):
        stream, says = telemetry(client)
        answer = next(stream)
        assert answer.status.code == wire.TOO_MANY_REQUESTS
        assert why in answer.status.message
        says.put(None)
    streams[0][1].put(None)
    until(lambda: used(two.admin, "streams") == 1)
    stream, says = telemetry(two.there)
    assert next(stream).status.code == wire.OK
    for each in (says, streams[1][1]):
        each.put(None)
    poll: Any = two.here.begin("ReceiveMessage", a_receive(TOPIC, GROUP, wait_s=PATIENCE_S))
    until(lambda: used(two.admin, "polls") == 1)
    (refused, _) = two.there.frames("ReceiveMessage", a_receive(TOPIC, GROUP))
    assert refused.status.code == wire.TOO_MANY_REQUESTS
    assert f"quota polls of key {SHOP.access_key}: 1 in use (limit 1)" in refused.status.message
    poll.cancel()
    two.admin.set_quota("key", SHOP.access_key, "sends_per_s", 1)
    answers = [client.send(a_message(TOPIC, f"fast-{n}")) for n in range(10) for client in (two.here, two.there)]
    texts = {each.status.message for each in answers if each.status.code != wire.OK}
    assert texts == {f"quota sends_per_s of key {SHOP.access_key}: 1 in use (limit 1); try again later"}


def test_settings_of_a_group_reach_consumers_at_every_front(two: Two) -> None:
    """`dmq group set` is told on the streams of both."""
    with (
        WireClient(two.daemon.address, "consumer-1", signer=SHOP.signer()) as here,
        WireClient(two.daemon.address, "consumer-2", signer=SHOP.signer()) as there,
    ):
        streams = [telemetry(client) for client in (here, there)]
        for stream, _ in streams:
            assert next(stream).settings.subscription.group.name == GROUP
        assert connections(two.daemon) == [2, 2]
        two.admin.set_group(GROUP, policy=admin_v1.Policy(max_attempts=3, fixed=admin_v1.FixedBackoff(delay_ms=1000)))
        for stream, says in streams:
            assert next(stream).settings.backoff_policy.max_attempts == 3
            says.put(None)


def test_keys_that_change_count_at_every_front(two: Two, acl: Path, tmp_path: Path) -> None:
    """A key that is new is let in by both, one that is gone by none; the log tells of the file once each time."""

    def codes(key: Key) -> set[int]:
        found: set[int] = set()
        for client in clients[key]:
            found.add(client.send(a_message(TOPIC, "m")).status.code)
            found.add(client.ask("QueryRoute", wire.QueryRouteRequest(topic=wire.Resource(name=TOPIC))).status.code)
        return found

    clients = {key: [WireClient(two.daemon.address, signer=key.signer()) for _ in range(2)] for key in (SHOP, LATER)}
    assert codes(SHOP) == {wire.OK}
    assert codes(LATER) == {wire.UNAUTHORIZED}
    assert len(set(connections(two.daemon))) == 1
    write_acl(
        tmp_path,
        ACL.replace(f"[keys.{SHOP.access_key}]", f"[keys.{LATER.access_key}]").replace(
            SHOP.secret_key, LATER.secret_key
        ),
    )
    until(lambda: codes(LATER) == {wire.OK} and codes(SHOP) == {wire.UNAUTHORIZED})
    assert len(two.daemon.events("access_keys_loaded")) == 2
    acl.write_text("no keys", encoding="utf-8")
    two.daemon.wait_for("access_keys_load_failed", timeout_s=PATIENCE_S)
    assert codes(LATER) == {wire.OK}
    for each in (client for some in clients.values() for client in some):
        each.channel.close()


def test_a_half_message_is_counted_once(two: Two) -> None:
    """It passes two processes that count calls."""
    half = a_message(TOPIC, "half")
    half.system_properties.message_type = wire.TRANSACTION
    for client in (two.here, two.there):
        stream, says = producer(client)
        assert next(stream).status.code == wire.OK
        answer = client.send(half)
        assert answer.status.code == wire.OK, answer
        says.put(None)
    drained = two.here.send(a_message(TOPIC, "marker")), two.there.send(a_message(TOPIC, "marker"))
    assert {each.status.code for each in drained} == {wire.OK}
    sends = 2 + 2 + 2  # of the fixture, halves, and the last ones
    until(lambda: counted(two.daemon) >= sends)
    assert counted(two.daemon) == sends


def producer(client: WireClient) -> tuple[Any, SimpleQueue[wire.TelemetryCommand | None]]:
    says: SimpleQueue[wire.TelemetryCommand | None] = SimpleQueue()
    settings = wire.Settings(client_type=wire.PRODUCER, publishing=wire.Publishing())
    settings.publishing.topics.add(name=TOPIC)
    says.put(wire.TelemetryCommand(settings=settings))
    return client.open("Telemetry", iter(says.get, None)), says


def counted(daemon: Daemon) -> int:
    """Return how many sends were answered OK, as the metrics say."""
    with urllib.request.urlopen(f"http://{daemon.metrics_address}/metrics", timeout=PATIENCE_S) as answer:
        lines = answer.read().decode().splitlines()
    found = [line.split()[1] for line in lines if line.startswith('dmq_calls_total{code="20000",rpc="SendMessage"}')]
    return int(float(found[0])) if found else 0


def test_all_that_is_open_at_every_front_ends_in_order(two: Two) -> None:
    """SIGTERM: long polls are answered, streams and watches end without an error, the daemon with 0."""
    polls = [each.begin("ReceiveMessage", a_receive(TOPIC, GROUP, wait_s=PATIENCE_S)) for each in two[1:3]]
    streams = [telemetry(each) for each in two[1:3]]
    stubs: list[Any] = [health_pb2_grpc.HealthStub(each.channel) for each in two[1:3]]
    watches = [each.Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S) for each in stubs]
    for stream, _ in streams:
        assert next(stream).status.code == wire.OK
    for watch in watches:
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    until(lambda: used(two.admin, "polls") == 2)
    fronts = two.daemon.fronts
    two.daemon.stop()
    assert [received_of(list(poll)) for poll in polls] == [[], []]
    assert [list(stream) for stream, _ in streams] == [[], []]
    assert [[each.status for each in watch] for watch in watches] == [[health_pb2.HealthCheckResponse.NOT_SERVING]] * 2
    for _, says in streams:
        says.put(None)
    assert not [each for each in fronts if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def bad_requests() -> list[tuple[str, Any]]:
    """What is refused, in many ways, by the front or by the store process."""
    long = a_message("x" * 200, "m")
    recurring = a_message(TOPIC, "m", properties={"DMQ_EVERY": "never"})
    half = a_message(TOPIC, "half", message_group="g")
    half.system_properties.message_type = wire.TRANSACTION
    group, topic = wire.Resource(name=GROUP), wire.Resource(name=TOPIC)
    ack = wire.AckMessageRequest(topic=topic, group=group)
    ack.entries.add(message_id="m", receipt_handle="no handle")
    return [
        ("SendMessage", wire.SendMessageRequest()),
        ("SendMessage", wire.SendMessageRequest(messages=[long])),
        ("SendMessage", wire.SendMessageRequest(messages=[recurring])),
        ("SendMessage", wire.SendMessageRequest(messages=[half])),
        ("SendMessage", wire.SendMessageRequest(messages=[a_message(TOPIC, "")])),
        ("SendMessage", wire.SendMessageRequest(messages=[a_message(TOPIC, "m", b"x" * TOO_LARGE)])),
        ("SendMessage", b"\xff\xff"),
        ("SendMessage", b"x" * 9 * 1024 * 1024),
        ("ReceiveMessage", a_receive("%wrong%", GROUP)),
        ("ReceiveMessage", a_receive(TOPIC, "")),
        ("ReceiveMessage", b"\xff\xff"),
        ("AckMessage", ack),
        ("AckMessage", wire.AckMessageRequest(topic=topic, group=group)),
        ("ChangeInvisibleDuration", wire.ChangeInvisibleDurationRequest(topic=topic, group=group, receipt_handle="x")),
        ("EndTransaction", wire.EndTransactionRequest(topic=topic, transaction_id="x", message_id="m")),
        ("RecallMessage", wire.RecallMessageRequest(topic=topic, recall_handle="x")),
        ("QueryRoute", wire.QueryRouteRequest()),
        ("QueryRoute", b"\xff\xff"),
        ("QueryRoute", b"x" * 2 * 1024 * 1024),
        ("PullMessage", wire.PullMessageRequest(group=group, offset=-1)),
        ("Heartbeat", wire.HeartbeatRequest(client_type=wire.PUSH_CONSUMER, group=wire.Resource(name="%"))),
        ("Telemetry", wire.TelemetryCommand(settings=wire.Settings())),
        ("Telemetry", b"\xff\xff"),
        ("Telemetry", b"x" * TOO_LARGE),
    ]


def said_to(client: WireClient, rpc: str, request: object) -> list[str]:
    """Return all that a client hears in answer to a call, and how it ended."""
    heard: list[str] = []
    method = wire.METHODS[rpc]
    try:
        if method.client_streaming:
            heard.extend(f"{each.status.code} {each.status.message}" for each in client.open(rpc, iter([request])))
        elif method.server_streaming:
            frames = client.frames(rpc, request)
            heard.extend(f"{each.WhichOneof('content')} {each.status.code} {each.status.message}" for each in frames)
        else:
            heard.append(str(client.ask(rpc, request)))
    except grpc.RpcError as error:
        heard.append(f"{error.code()} {error.details()}")
    return heard


def test_refusals_have_the_same_words(tmp_path: Path) -> None:
    """With fronts, whichever of the processes refuses it, and without; with a key that is wrong, too."""
    said: list[list[list[str]]] = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        with (
            Daemon(folder / "data", "--acl", str(write_acl(folder)), processes=processes) as daemon,
            WireClient(daemon.address, signer=OPERATOR.signer()) as client,
            WireClient(daemon.address, signer=Key(SHOP.access_key, "wrong").signer()) as wrong,
            WireClient(daemon.address, client_id="", signer=OPERATOR.signer()) as nobody,
        ):
            said.append([said_to(each, *asked) for asked in bad_requests() for each in (client, wrong, nobody)])
    for asked, one, other in zip((each[0] for each in bad_requests() for _ in range(3)), *said, strict=True):
        assert one == other, asked
        assert one


def test_fronts_import_the_modules_of_the_daemon(tmp_path: Path) -> None:
    """A module of that name in the folder where the daemon was started is none of theirs."""
    (tmp_path / "random.py").write_text("raise SystemExit('a module of somebody else')\n", encoding="utf-8")
    with Daemon(tmp_path / "data", processes=2) as daemon, WireClient(daemon.address) as client:
        assert client.send(a_message(TOPIC, "m")).status.code == wire.OK
