"""grpcio's client in front of our server, on both event loops, in plain text and TLS: everything that gRPC promises."""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvloop

from broker_adapter.runtime.clock import SystemClock
from dmq.http2 import Http2Server, Limits, make_context
from dmq.http2.testing.service import Service

pytestmark = pytest.mark.integration
MIB = 2**20
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


@dataclass
class Rig:
    """A running server and a channel to it."""

    server: Http2Server
    channel: grpc.aio.Channel
    service: Service

    # ruff: noqa: ANN401 - grpcio's calls have types of their own
    async def unary(self, name: str, message: bytes = b"", **options: Any) -> bytes:
        call: Any = self.channel.unary_unary(f"/t.T/{name}")
        answer: bytes = await call(message, **options)
        return answer

    def start(self, name: str, message: bytes = b"") -> Any:
        """Begin a call with one answer."""
        call: Any = self.channel.unary_unary(f"/t.T/{name}")
        return call(message)

    def answers(self, name: str, message: bytes, **options: Any) -> Any:
        """Begin a call with a stream of answers."""
        call: Any = self.channel.unary_stream(f"/t.T/{name}")
        return call(message, **options)

    def both(self) -> Any:
        """Begin a call with streams both ways."""
        return self.channel.stream_stream("/t.T/Twice")()

    async def refusal(self, name: str, message: bytes = b"", **options: Any) -> grpc.aio.AioRpcError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.unary(name, message, **options)
        return caught.value


@dataclass(frozen=True)
class Setting:
    """How a test's server is reached."""

    loop: str
    certificate: Path | None = None

    @asynccontextmanager
    async def rig(self, limits: Limits | None = None) -> AsyncGenerator[Rig, None]:
        """Serve, and connect."""
        service = Service()
        tls: Callable[[], ssl.SSLContext] | None = None
        path = self.certificate
        if path is not None:
            tls = lambda: make_context(str(path), str(path.with_suffix(".key")))  # noqa: E731
        clock_s = SystemClock().monotonic_s
        server = Http2Server(service.methods, host="127.0.0.1", port=0, monotonic_s=clock_s, limits=limits, tls=tls)
        address = f"127.0.0.1:{await server.start()}"
        try:
            async with self._channel(address) as channel:
                yield Rig(server, channel, service)
        finally:
            await server.stop(0)

    def _channel(self, address: str) -> grpc.aio.Channel:
        if self.certificate is None:
            return grpc.aio.insecure_channel(address, options=OPTIONS)
        trusted = grpc.ssl_channel_credentials(self.certificate.read_bytes())
        return grpc.aio.secure_channel(address, trusted, options=OPTIONS)

    def run(self, scenario: Callable[[Rig], Awaitable[None]], limits: Limits | None = None) -> None:
        """Run a scenario to its end; nothing may be left in the server then."""

        async def whole() -> None:
            async with self.rig(limits) as rig:
                await scenario(rig)
            figures = rig.server.figures()
            assert (figures.connections, figures.streams, figures.held_bytes) == (0, 0, 0)

        with asyncio.Runner(loop_factory=LOOPS[self.loop]) as runner:
            runner.run(whole())


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for loopback, signed by itself, made now."""
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    subprocess.run([*command, "-out", path, "-keyout", path.with_suffix(".key")], check=True, capture_output=True)
    return path


@pytest.fixture(params=["asyncio", "uvloop", "uvloop-tls"])
def setting(request: pytest.FixtureRequest) -> Setting:
    """Every way to be served."""
    loop, _, tls = request.param.partition("-")
    return Setting(loop, request.getfixturevalue("certificate") if tls else None)


# -- calls -------------------------------------------------------------------------------------------------------------


def test_messages_of_all_sizes(setting: Setting) -> None:
    """0 bytes to 20 MiB and back, over every edge of a frame and a window."""

    async def scenario(rig: Rig) -> None:
        for size in (0, 1, 256, 16_374, 16_379, 16_380, 65_530, 65_531, MIB, 8 * MIB, 20 * MIB):
            message = os.urandom(size)
            assert await rig.unary("Echo", message, timeout=30) == message, size

    setting.run(scenario, Limits(request_max=20 * MIB))


def test_requests_have_a_bound(setting: Setting) -> None:
    """One byte more is RESOURCE_EXHAUSTED, and the connection goes on."""

    async def scenario(rig: Rig) -> None:
        assert len(await rig.unary("Echo", b"x" * MIB)) == MIB
        assert (await rig.refusal("Echo", b"x" * (MIB + 1))).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await rig.unary("Echo", b"again") == b"again"
        assert rig.server.figures().opened_connections == 1

    setting.run(scenario, Limits(request_max=MIB))


def test_metadata(setting: Setting) -> None:
    """Text, many values of a name, binary ones, empty ones, long ones; the deadline and who is asking."""

    async def scenario(rig: Rig) -> None:
        metadata = (
            ("a", "1"),
            ("a", "2"),
            ("empty", ""),
            ("key-bin", bytes(range(256))),
            ("key-bin", b""),
            ("long", "v" * 20_000),
        )
        told = (await rig.unary("Tell", metadata=metadata)).decode()
        items, peer = eval(told)
        assert set(metadata) <= set(items)
        assert {name for name, _ in items} == {"a", "empty", "key-bin", "long", "user-agent"}
        assert peer.startswith("ipv4:127.0.0.1:")
        assert await rig.unary("Left") == b"None"
        assert 4.5 < float(await rig.unary("Left", timeout=5)) <= 5.1  # grpcio rounds

    setting.run(scenario)


def test_headers_have_a_bound(setting: Setting) -> None:
    """Above 64 KiB a call is refused and the next one served: the tables of both sides still agree."""

    async def scenario(rig: Rig) -> None:
        for _ in range(3):
            refusal = await rig.refusal("Echo", metadata=[("large", "v" * 100_000)])
            assert refusal.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await rig.unary("Echo", b"x", metadata=[("small", "v" * 1000)]) == b"x"

    setting.run(scenario)


def test_every_status_and_its_text(setting: Setting) -> None:
    """A handler ends a call with any of them; the text survives, whatever is in it."""

    async def scenario(rig: Rig) -> None:
        for code in grpc.StatusCode:
            if code is grpc.StatusCode.OK:
                continue
            number: int = code.value[0]
            refusal = await rig.refusal("Refuse", str(number).encode())
            assert (refusal.code(), refusal.details()) == (code, "100 % nö\n")
        assert (await rig.refusal("Nothing")).code() is grpc.StatusCode.UNIMPLEMENTED

    setting.run(scenario)


def test_exception_in_a_handler_ends_one_call(setting: Setting) -> None:
    """INTERNAL, without a word of the inside; calls beside it go on, on the same connection."""

    async def scenario(rig: Rig) -> None:
        beside = asyncio.gather(*(rig.unary("Echo", str(at).encode()) for at in range(50)))
        for name in ("Fail", "Broken"):
            refusal = await rig.refusal(name)
            assert refusal.code() is grpc.StatusCode.INTERNAL
            assert "bug" not in (refusal.details() or "")
        assert await beside == [str(at).encode() for at in range(50)]
        assert rig.server.figures().opened_connections == 1

    setting.run(scenario)


def test_500_at_once(setting: Setting) -> None:
    """Each gets its own answer."""

    async def scenario(rig: Rig) -> None:
        wanted = [os.urandom(at * 37 % 5000) for at in range(500)]
        assert await asyncio.gather(*(rig.unary("Echo", one) for one in wanted)) == wanted

    setting.run(scenario)


def test_gzip(setting: Setting) -> None:
    """A client that compresses is understood; a bomb is refused."""

    async def scenario(rig: Rig) -> None:
        text = b"text " * 40_000
        assert await rig.unary("Echo", text, compression=grpc.Compression.Gzip) == text
        refusal = await rig.refusal("Echo", b"\0" * (2 * MIB), compression=grpc.Compression.Gzip)
        assert refusal.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        deflated = await rig.refusal("Echo", text, compression=grpc.Compression.Deflate)
        assert deflated.code() is grpc.StatusCode.UNIMPLEMENTED

    setting.run(scenario, Limits(request_max=MIB))


# -- cancels and deadlines ---------------------------------------------------------------------------------------------


def test_deadline_ends_the_call_and_its_handler(setting: Setting) -> None:
    """The handler is cancelled though the client only stopped waiting."""

    async def scenario(rig: Rig) -> None:
        while not rig.service.waiting.count:  # a deadline that passes before the call is there begins nothing
            assert (await rig.refusal("Wait", timeout=0.2)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await rig.service.ended.reach(rig.service.waiting.count)

    setting.run(scenario)


def test_cancel_reaches_the_handler(setting: Setting) -> None:
    """500 calls that are given up, and the connection serves on."""

    async def scenario(rig: Rig) -> None:
        calls = [rig.start("Wait") for _ in range(500)]
        await rig.service.waiting.reach(500)
        for call in calls:
            call.cancel()
        await rig.service.ended.reach(500)
        assert rig.server.figures().streams == 0
        assert await rig.unary("Echo", b"on") == b"on"
        assert rig.server.figures().opened_connections == 1

    setting.run(scenario)


# -- streams -----------------------------------------------------------------------------------------------------------


def test_stream_of_answers(setting: Setting) -> None:
    """None, one, many; and a status behind them."""

    async def scenario(rig: Rig) -> None:
        for number in (0, 1, 20_000):
            assert [one async for one in rig.answers("Count", str(number).encode())] == [
                str(at).encode() for at in range(number)
            ]
        call = rig.answers("Count", b"3", metadata=[("then", "fail")])
        assert [await call.read() for _ in range(3)] == [b"0", b"1", b"2"]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.ABORTED, "as asked")

    setting.run(scenario)


def test_generator_waits_for_a_client_that_does_not_read(setting: Setting) -> None:
    """It makes what the windows take and stops; other calls are served; a cancel ends it."""

    async def scenario(rig: Rig) -> None:
        call = rig.answers("Blocks", b"100000")
        await call.read()
        made = -1
        while made != rig.service.made.count:
            made = rig.service.made.count
            assert await rig.unary("Echo", b"beside") == b"beside"
            await asyncio.sleep(0.2)
        assert made < 500
        for _ in range(made + 50):  # it goes on where it stopped
            assert len(await call.read()) == 100_000
        call.cancel()
        await rig.service.ended.reach(1)

    setting.run(scenario)


def test_both_ways(setting: Setting) -> None:
    """Each message is answered before the next is sent; the end of one side is the end of the other."""

    async def scenario(rig: Rig) -> None:
        call = rig.both()
        for message in (b"", b"x", b"y" * 300_000, b"z" * (3 * MIB)):
            await call.write(message)
            assert await call.read() == message * 2
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK

    setting.run(scenario)


def test_both_ways_cancelled_and_lost(setting: Setting) -> None:
    """A handler that waits for the next message is cancelled with its call, and with its connection."""

    async def scenario(rig: Rig) -> None:
        call = rig.both()
        await call.write(b"x")
        assert await call.read() == b"xx"
        call.cancel()
        await rig.service.ended.reach(1)
        call = rig.both()
        await call.write(b"x")
        await call.read()
        await rig.channel.close()
        await rig.service.ended.reach(2)

    setting.run(scenario)


def test_stop_allows_calls_to_finish(setting: Setting) -> None:
    """Those in flight are answered; those that take too long are told UNAVAILABLE; then nobody is connected."""

    async def scenario(rig: Rig) -> None:
        both = rig.both()
        await both.write(b"x")
        await both.read()
        waiting = asyncio.create_task(rig.refusal("Wait"))
        await rig.service.waiting.reach(1)
        stopping = asyncio.create_task(rig.server.stop(0.5))
        await both.write(b"y")
        assert await both.read() == b"yy"
        await both.done_writing()
        assert await both.code() is grpc.StatusCode.OK
        assert (await waiting).code() is grpc.StatusCode.UNAVAILABLE
        await stopping

    setting.run(scenario)
