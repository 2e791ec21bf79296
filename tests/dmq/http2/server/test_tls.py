"""TLS beside plain text on one port: told apart by the first byte, with certificates that change while it serves."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import uvloop

from broker_adapter.runtime.clock import ManualClock
from dmq.http2 import Limits, PlainServedTo, make_context
from dmq.http2.codec import frames
from dmq.http2.server.protocol import ClientProtocol
from dmq.http2.testing.peer import grpc_message
from dmq.http2.testing.wire import GREETING, Rig

pytestmark = pytest.mark.integration
OFTEN = 0.08  # in seconds, how often the server looks at its clients, times four; the clock itself moves by hand

Scenario = Callable[[Rig, ManualClock], Awaitable[None]]
Contexts = Callable[[], ssl.SSLContext]
Run = Callable[..., None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Run a scenario on a rig, on either event loop; the clock is moved by the scenario."""

    def run(
        scenario: Scenario, limits: Limits | None = None, *, tls: Contexts, plain_served_to: PlainServedTo = "all"
    ) -> None:
        clock = ManualClock()

        async def whole() -> None:
            async with Rig(clock.monotonic_s, limits=limits, tls=tls, plain_served_to=plain_served_to).serving() as rig:
                await scenario(rig, clock)

        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(whole())

    return run


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for loopback, signed by itself, made now."""
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=first"]
    subprocess.run([*command, "-out", path, "-keyout", path.with_suffix(".key")], check=True, capture_output=True)
    return path


def trusting(*protocols: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if protocols:
        context.set_alpn_protocols(list(protocols))
    return context


def contexts(path: Path) -> Contexts:
    return lambda: make_context(str(path), str(path.with_suffix(".key")))


def test_tls_and_plain_text_on_one_port(run: Run, certificate: Path) -> None:
    """Told apart by the first byte."""

    async def scenario(rig: Rig, clock: ManualClock) -> None:
        await rig.check_serving()
        wire = await rig.connect(context=trusting("h2"))
        await wire.say(wire.request("Echo", b"x" * 10_000))
        assert (await wire.until(frames.DATA)).payload == grpc_message(b"x" * 10_000)

    run(scenario, tls=contexts(certificate))


def test_nothing_is_sent_before_the_client_has_chosen(run: Run, certificate: Path) -> None:
    """Danger: a deadline that is over makes us write to all; a client that is silent yet may want TLS."""

    async def scenario(rig: Rig, clock: ManualClock) -> None:
        loop = asyncio.get_running_loop()
        silent = socket.create_connection(("127.0.0.1", rig.port))
        wire = await rig.connect()
        await wire.say(wire.request("Wait", fields=[("grpc-timeout", "1m")]))
        await rig.service.waiting.reach(1)
        clock.advance(10)
        await wire.until(frames.HEADERS)
        silent.setblocking(False)
        reader = asyncio.StreamReader()
        transport, _ = await loop.create_connection(
            lambda: asyncio.StreamReaderProtocol(reader), sock=silent, ssl=trusting("h2"), server_hostname=""
        )
        transport.write(GREETING)
        assert len(await asyncio.wait_for(reader.readexactly(9), 20)) == 9
        transport.close()

    run(scenario, Limits(preface_s=OFTEN), tls=contexts(certificate))


def test_plain_text_can_be_refused(run: Run, certificate: Path) -> None:
    """Where TLS is required."""

    async def scenario(rig: Rig, clock: ManualClock) -> None:
        plain = await rig.connect(b"")
        await plain.say(GREETING)
        assert await plain.is_closed()
        await rig.connect(context=trusting("h2"))

    run(scenario, tls=contexts(certificate), plain_served_to="none")


@pytest.mark.parametrize(
    ("address", "is_served"),
    [
        (("127.0.0.1", 5000), True),
        (("::1", 5000, 0, 0), True),
        (("::ffff:127.0.0.1", 5000, 0, 0), True),
        (("192.0.2.7", 5000), False),
        (("fe80::1%eth0", 5000, 0, 2), False),
    ],
)
def test_plain_text_can_be_for_this_machine_alone(
    run: Run, certificate: Path, address: object, *, is_served: bool
) -> None:
    """The address of the peer decides, in either family."""

    async def scenario(rig: Rig, clock: ManualClock) -> None:
        client, socket = ClientProtocol(rig.server, address), Mock(spec=asyncio.Transport)
        client.connection_made(socket)
        client.data_received(GREETING)
        assert (socket.write.called, socket.abort.called) == (is_served, not is_served)
        client.connection_lost(None)

    run(scenario, tls=contexts(certificate), plain_served_to="loopback")


def test_tls_without_h2_or_in_disorder(run: Run, certificate: Path) -> None:
    """No ALPN, another protocol, noise, a handshake that never ends: closed, and the server serves on."""

    async def scenario(rig: Rig, clock: ManualClock) -> None:
        for context in (trusting(), trusting("http/1.1")):
            wire = await rig.connect(b"", context)
            assert await wire.is_closed()
        noise = await rig.connect(b"")
        await noise.say(b"\x16" + os.urandom(1000))
        assert await noise.is_closed()
        slow = await rig.connect(b"")
        await slow.say(b"\x16\x03\x01\x02\x00")
        await rig.check_serving()
        clock.advance(1000)
        assert await slow.is_closed()

    run(scenario, Limits(preface_s=OFTEN), tls=contexts(certificate))


def test_certificate_is_changed_without_a_restart(run: Run, certificate: Path, tmp_path: Path) -> None:
    """The next connection gets the new one, a broken file ends the connection that asked, old connections go on."""
    live = tmp_path / "live.pem"
    second = tmp_path / "second.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=second"]
    subprocess.run([*command, "-out", second, "-keyout", second.with_suffix(".key")], check=True, capture_output=True)

    def install(path: Path) -> None:
        live.write_bytes(path.read_bytes())
        live.with_suffix(".key").write_bytes(path.with_suffix(".key").read_bytes())

    async def scenario(rig: Rig, clock: ManualClock) -> None:
        install(certificate)
        old = await rig.connect(context=trusting("h2"))
        install(second)
        new = await rig.connect(context=trusting("h2"))
        presented = [wire.writer.get_extra_info("ssl_object").getpeercert(binary_form=True) for wire in (old, new)]
        assert [ssl.DER_cert_to_PEM_cert(der) for der in presented] == [
            path.read_text(encoding="ascii") for path in (certificate, second)
        ]
        live.write_bytes(b"broken")
        with pytest.raises((ConnectionError, ssl.SSLError)):
            await rig.connect(context=trusting("h2"))
        await old.say(old.request("Echo", b"on"))
        assert (await old.until(frames.DATA)).payload == grpc_message(b"on")

    run(scenario, tls=contexts(live))
