"""The adapter of Apache RocketMQ in front of what is no cluster, or one that does not want to: a clear error each time.

A daemon of ours stands for the cluster, since it can be given keys and certificates; what misbehaves is a socket.
"""

from __future__ import annotations

import asyncio
import gzip
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

import grpc
import pytest
from support.rigs.daemon.acl import OPERATOR, SHOP, write_acl
from support.rigs.daemon.process import Daemon
from support.rigs.rocketmq.front import client, front_of, kinds, receive, until
from support.rigs.rocketmq.real_time import INVISIBLE_MS, Rig, a_message, now_ms

from broker_adapter.contracts.adapter import Subscription
from broker_adapter.contracts.errors import BrokerUnavailable, Overloaded, Refused, Rule
from broker_adapter.contracts.message import BodyEncoding
from broker_adapter.contracts.transactions import Check, Half
from broker_adapter.rocketmq import ClusterOptions, RocketMQBroker
from broker_adapter.rocketmq.addresses import Name, endpoints_of
from broker_adapter.runtime.clock import SystemClock
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.admin.client import AdminClient
from dmq.rocketmq_server.transport.tls import self_signed

pytestmark = pytest.mark.integration
REQUEST_MS = 500
PATIENT_MS = 30_000  # a machine that stalls is no broker that is away


@asynccontextmanager
async def connected(*addresses: str, **options: object) -> AsyncIterator[RocketMQBroker]:
    """An adapter, closed at the end."""
    made = ClusterOptions(endpoints=addresses, **options)  # type: ignore[arg-type]
    broker = RocketMQBroker(made, SystemClock())
    try:
        yield broker
    finally:
        await broker.close()


def test_keys(data: Path, tmp_path: Path) -> None:
    """No key, a wrong secret, a topic that the key may not send to; and one that may."""

    async def refused(topic: str, **key: str) -> Rule:
        async with connected(daemon.address, request_timeout_ms=PATIENT_MS, **key) as broker:
            with pytest.raises(Refused) as error:
                await broker.send([a_message(topic)])
            return error.value.rule

    async def scenario() -> None:
        assert await refused("orders") is Rule.UNAUTHORIZED
        assert await refused("orders", access_key=SHOP.access_key, secret_key="wrong") is Rule.UNAUTHORIZED
        assert await refused("bills", **SHOP.credentials) is Rule.FORBIDDEN
        async with connected(daemon.address, request_timeout_ms=PATIENT_MS, **OPERATOR.credentials) as broker:
            await broker.send([a_message("bills")])

    with Daemon(data, "--acl", str(write_acl(tmp_path))) as daemon:
        asyncio.run(scenario())


def test_certificates(data: Path, tmp_path: Path) -> None:
    """The daemon's own, and somebody else's."""
    certificate, key = self_signed(tmp_path, time.time_ns() // 1_000_000)
    (tmp_path / "other").mkdir()
    environment = {**os.environ, "DMQ_TLS_CERTIFICATE": str(certificate), "DMQ_TLS_KEY": str(key)}
    foreign, _ = self_signed(tmp_path / "other", time.time_ns() // 1_000_000)

    async def scenario() -> None:
        async with connected(daemon.address, tls_ca=certificate) as broker:
            await broker.send([a_message("orders")])
        async with connected(daemon.address, tls_ca=foreign, request_timeout_ms=REQUEST_MS) as broker:
            with pytest.raises(BrokerUnavailable, match=daemon.address):
                await broker.send([a_message("orders")])
            assert daemon.address in broker.proxies.errors
        with pytest.raises(BrokerUnavailable, match="cannot be read"):
            RocketMQBroker(ClusterOptions(endpoints=(daemon.address,), tls_ca=tmp_path / "none"), SystemClock())

    with Daemon(data, env=environment) as daemon:
        asyncio.run(scenario())


def _silence(connection: socket.socket) -> None:
    while connection.recv(65_536):
        pass


def _garbage(connection: socket.socket) -> None:
    connection.sendall(b"\x00garbage" * 1000)
    _silence(connection)


def _half(connection: socket.socket) -> None:
    """Settings of HTTP/2, and the beginning of an answer."""
    connection.recv(24)
    connection.sendall(bytes.fromhex("000000040000000000") + bytes.fromhex("0000ff010400000001"))


def _goaway(connection: socket.socket) -> None:
    connection.recv(24)
    connection.sendall(
        bytes.fromhex("000000040000000000") + bytes.fromhex("000008070000000000" + "00000000" + "0000000b")
    )
    _silence(connection)


def _web(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
    _silence(connection)


Serve = Callable[[socket.socket], None]


@contextmanager
def serving(serve: Serve) -> Iterator[str]:
    """Run a server that misbehaves; give its address."""

    def one(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            serve(connection)

    def accept() -> None:
        with suppress(OSError):  # it was shut down
            while True:
                threading.Thread(target=one, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize("serve", [_silence, _garbage, _half, _goaway, _web], ids=lambda serve: serve.__name__[1:])
def test_an_endpoint_that_is_no_proxy(serve: Serve, data: Path) -> None:
    """In doubt, by address, within the time of a request; a good proxy beside it is used in its place."""

    async def scenario(address: str) -> None:
        async with connected(address, request_timeout_ms=REQUEST_MS) as broker:
            with pytest.raises(BrokerUnavailable, match=address):
                await broker.send([a_message("orders")])
            assert broker.proxies.is_away
        async with connected(address, daemon.address) as broker:
            for _ in range(3):
                await broker.send([a_message("orders")])
            assert not broker.proxies.is_away

    with Daemon(data) as daemon, serving(serve) as address:
        asyncio.run(scenario(address))


def test_a_daemon_in_front_of_an_endpoint_that_is_no_proxy(data: Path) -> None:
    """What it was sent is kept; status, log and trail say so, and of each address what is wrong there."""
    wrong = (_silence, _garbage, _half, _goaway, _web)

    async def scenario(addresses: Sequence[str]) -> None:
        async with client(daemon) as broker:
            await broker.send([a_message("orders")])
            await broker.send([a_message("bills", deliver_at_ms=now_ms() + 1)])
        found = await until(daemon, lambda found: found.away_since_ms and found.waiting == 2)
        said = {each.address: each.why for each in found.proxies}
        assert said.keys() == set(addresses)
        assert all(address in why for address, why in said.items())
        assert not found.lanes  # no topic is tried by itself: it is the cluster that is away

    with ExitStack() as stack:
        addresses = [stack.enter_context(serving(each)) for each in wrong]
        options = "--broker", "rocketmq", "--endpoints", ";".join(addresses)
        daemon = stack.enter_context(
            Daemon(data, *options, env={**os.environ, "DMQ_CLUSTER_TIMEOUT": f"{REQUEST_MS}ms"})
        )
        asyncio.run(scenario(addresses))
        daemon.stop()
        assert {each["address"] for each in daemon.events("proxy_isolated")} == set(addresses)
        assert daemon.events("cluster_unreachable")
        found = kinds(daemon)
        assert found["SCHEDULED"] + found["QUEUED"] >= 2
        assert not found["FORWARDED"]


def test_a_certificate_that_has_expired(tmp_path: Path) -> None:
    """Nothing is said to such a proxy, and the error says why."""
    certificate, key = self_signed(tmp_path, now_ms() - 11 * 366 * 86_400_000)
    secrets = grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])

    async def scenario() -> None:
        async with (
            served(_BreaksOff(), secrets) as proxy,
            connected(proxy.address, tls_ca=certificate) as broker,
        ):
            with pytest.raises(BrokerUnavailable, match="certificate has expired"):
                await broker.send([a_message("orders")])
            assert "certificate has expired" in broker.proxies.errors[proxy.address]

    asyncio.run(scenario())


class _BreaksOff(grpc.GenericRpcHandler):
    """A proxy that asks its clients, hands out one message, if it is to, and breaks off."""

    def __init__(self, *, hands_out: bool = False, asks: Sequence[wire.TelemetryCommand] = ()) -> None:
        self.hands_out = hands_out
        self.asks = asks
        self.settings_after_s = 0.0
        self.address = ""
        self.settled = 0

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """Serve a route, a telemetry stream and a receive."""
        name = details.method.rpartition("/")[2]
        if name == "QueryRoute":
            return grpc.unary_unary_rpc_method_handler(self.route)
        if name == "Telemetry":
            return grpc.stream_stream_rpc_method_handler(self.settle)
        return grpc.unary_stream_rpc_method_handler(self.receive) if name == "ReceiveMessage" else None

    async def route(self, _: bytes, __: object) -> bytes:
        """One queue, here."""
        queue = wire.MessageQueue(permission=wire.READ_WRITE, broker=wire.Broker(endpoints=endpoints_of(self.address)))
        return wire.QueryRouteResponse(status=wire.Status(code=wire.OK), message_queues=[queue]).SerializeToString()

    async def settle(self, frames: AsyncIterator[bytes], _: object) -> AsyncIterator[bytes]:
        """Agree to all settings."""
        async for _frame in frames:
            self.settled += 1
            await asyncio.sleep(self.settings_after_s)
            yield wire.TelemetryCommand(status=wire.Status(code=wire.OK), settings=wire.Settings()).SerializeToString()
            for each in self.asks:
                yield each.SerializeToString()

    async def receive(self, _: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> AsyncIterator[bytes]:
        """Hand out, and break off."""
        if self.hands_out:
            message = wire.Message(topic=wire.Resource(name="orders"))
            message.system_properties.message_id = "m-1"
            message.system_properties.receipt_handle = "h-1"
            yield wire.ReceiveMessageResponse(message=message).SerializeToString()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "it broke off")


@asynccontextmanager
async def served(proxy: _BreaksOff, secrets: grpc.ServerCredentials | None = None) -> AsyncIterator[_BreaksOff]:
    """Run such a proxy."""
    server, place = grpc.aio.server(handlers=[proxy]), "127.0.0.1:0"
    port = server.add_insecure_port(place) if secrets is None else server.add_secure_port(place, secrets)
    proxy.address = f"127.0.0.1:{port}"
    await server.start()
    try:
        yield proxy
    finally:
        await server.stop(None)


class _Raises:
    """A producer that cannot be asked."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[str] = asyncio.Queue()

    def is_live(self, topic: str) -> bool:
        """Always there."""
        return True

    async def check(self, check: Check) -> bool:
        """Fail."""
        self.asked.put_nowait(check.message_id)
        raise RuntimeError("it cannot be asked")


def test_a_check_that_fails_ends_no_stream() -> None:
    """What the proxy asks next on it is heard; the log has the failure."""

    async def scenario() -> None:
        question = wire.TelemetryCommand()
        asked = question.recover_orphaned_transaction_command
        asked.message.topic.name, asked.message.system_properties.message_id, asked.transaction_id = "orders", "m", "t"
        events: list[str] = []
        async with served(_BreaksOff(asks=[question, question])) as proxy:
            options = ClusterOptions(endpoints=(proxy.address,))
            broker = RocketMQBroker(options, SystemClock(), lambda event, **_: events.append(event))
            try:
                producer = _Raises()
                broker.attach(producer)
                with pytest.raises(Refused, match="Method not found"):
                    await broker.prepare([Half(a_message("orders"))])
                async with asyncio.timeout(30):
                    assert [await producer.asked.get() for _ in range(2)] == ["m", "m"]
                    while len(events) < 2:  # noqa: ASYNC110 - no event tells of it
                        await asyncio.sleep(0.01)
                assert events == ["check_failed"] * 2
                assert proxy.settled == 1
            finally:
                await broker.close()

    asyncio.run(scenario())


def test_settings_are_awaited_as_long_as_other_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that is slow to answer them is not away before the time limit of calls is over."""
    monkeypatch.setattr("broker_adapter.rocketmq.sessions._SETTINGS_S_MIN", 0.01)

    async def scenario() -> None:
        async with served(_BreaksOff()) as proxy:
            proxy.settings_after_s = 0.2
            async with connected(proxy.address, request_timeout_ms=PATIENT_MS) as broker:
                broker.attach(_Raises())
                with pytest.raises(Refused, match="Method not found"):
                    await broker.prepare([Half(a_message("orders"))])
        assert proxy.settled == 1

    asyncio.run(scenario())


def test_nothing_is_kept_of_unknown_groups() -> None:
    """A client can name as many as it likes; of those that are taken there are bounds."""

    async def scenario(monkeypatch: pytest.MonkeyPatch) -> None:
        async with served(_BreaksOff(hands_out=True)) as proxy, connected(proxy.address) as broker:
            await broker.ensure_group("workers")
            monkeypatch.setattr("broker_adapter.rocketmq.broker._SESSIONS_MAX", 1)
            await broker.ensure_group("workers")
            with pytest.raises(Overloaded, match="limit 1"):
                await broker.ensure_group("others")
        with serving(_web) as stranger:
            async with connected(stranger, request_timeout_ms=REQUEST_MS) as broker:
                for number in range(3):
                    with pytest.raises(BrokerUnavailable):
                        await broker.ensure_group(f"workers {number}")

    with pytest.MonkeyPatch.context() as monkeypatch:
        asyncio.run(scenario(monkeypatch))


def test_messages_packed_differently_go_apart(data: Path) -> None:
    """RocketMQ would take all of a send for packed if the first one is."""

    async def scenario() -> None:
        async with connected(daemon.address) as broker:
            packed = a_message("orders", gzip.compress(b"packed"), body_encoding=BodyEncoding.GZIP)
            with pytest.raises(Refused, match="GZIP and IDENTITY"):
                await broker.send([packed, a_message("orders")])
            await asyncio.gather(broker.send([packed]), *(broker.send([a_message("orders")]) for _ in range(8)))

    with Daemon(data) as daemon:
        asyncio.run(scenario())


@pytest.mark.parametrize("hands_out", [True, False])
def test_messages_from_before_a_receive_broke_off_are_kept(*, hands_out: bool) -> None:
    """It is hidden from everybody else; without anything the failure is told."""

    async def scenario() -> None:
        async with served(_BreaksOff(hands_out=hands_out)) as proxy, connected(proxy.address) as broker:
            receiving = broker.receive(
                "workers", Subscription("orders"), batch_max=2, invisible_ms=INVISIBLE_MS, wait_ms=0
            )
            if hands_out:
                assert [each.message_id for each in await receiving] == ["m-1"]
            else:
                with pytest.raises(BrokerUnavailable, match="it broke off"):
                    await receiving

    asyncio.run(scenario())


def test_a_handle_opens_no_connection(data: Path) -> None:
    """A client could write any address into one, and would be sent our signature."""

    async def scenario(stranger: str) -> None:
        async with connected(daemon.address) as broker:
            handle = str(Name(stranger, "c", "m", "h"))
            (refused,) = await broker.ack("workers", "orders", [handle])
            assert isinstance(refused, Refused)
            assert refused.rule is Rule.RECEIPT_HANDLE
            for work in (
                broker.change_invisible("workers", "orders", handle, INVISIBLE_MS),
                broker.dead_letter("workers", "orders", handle, attempts=1),
                broker.recall("orders", handle),
                broker.commit("orders", handle),
            ):
                with pytest.raises(Refused, match="not one of this cluster"):
                    await work

    dialled: list[socket.socket] = []
    with Daemon(data) as daemon, serving(dialled.append) as stranger:
        asyncio.run(scenario(stranger))
    assert not dialled


def test_a_proxy_that_was_restarted_is_used_again(data: Path) -> None:
    """Its streams are opened anew by whoever needs them: a receive behind the restart gets what was sent before."""

    async def scenario() -> None:
        async with connected(daemon.address, heartbeat_ms=200) as broker:
            rig = Rig(broker, broker, str, str)
            await broker.ensure_group("workers")
            (sent,) = await rig.send("orders", b"before")
            await asyncio.to_thread(daemon.kill)
            with pytest.raises(BrokerUnavailable):
                await rig.send("orders", b"away")
            await asyncio.to_thread(daemon.start)
            async with asyncio.timeout(30):
                while broker.proxies.is_away:  # noqa: ASYNC110 - no event tells of it
                    await asyncio.sleep(0.05)
            (found,) = await rig.receive("workers", "orders")
            assert found.message_id == sent.message_id
            handle = await broker.change_invisible("workers", "orders", found.receipt_handle, INVISIBLE_MS)
            assert list(await broker.ack("workers", "orders", [handle])) == [None]

    with Daemon(data) as daemon:
        asyncio.run(scenario())


def test_groups_of_the_cluster_are_created_by_no_call(data: Path, tmp_path: Path) -> None:
    """A client may use a topic and a group of the cluster more often than it may make new ones."""

    async def scenario() -> None:
        async with client(front) as broker:
            for _ in range(3):
                await broker.send([a_message("orders")])
            assert len(await receive(broker, "orders", 3)) == 3
            sends = [broker.send([a_message(f"new-{number}")]) for number in range(3)]
            results = await asyncio.gather(*sends, return_exceptions=True)
            assert any(isinstance(each, Overloaded) and "new_per_min" in str(each) for each in results)

    with Daemon(tmp_path / "cluster") as cluster, front_of(cluster, data) as front:
        with AdminClient(front.address) as admin:
            admin.set_quota("address", "loopback", "new_per_min", 4)
        asyncio.run(scenario())
