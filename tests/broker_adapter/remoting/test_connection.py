"""The classic protocol's connection in front of peers that break it: a clear error, and the next call is well."""

from __future__ import annotations

import asyncio
import re
import ssl
import struct
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path

import pytest
import uvloop

from broker_adapter.contracts.errors import BrokerUnavailable
from broker_adapter.remoting import RemotingClient, RemotingOptions
from broker_adapter.remoting import client as remoting
from broker_adapter.remoting.connection import RemotingConnection, not_served
from broker_adapter.remoting.protocol.frames import RemotingFrame, decode_frame, encode_frame
from dmq.rocketmq_server.transport.tls import self_signed

pytestmark = pytest.mark.integration
Peer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
QUICK_S, PATIENCE_S = 0.05, 30.0


async def request_of(reader: asyncio.StreamReader) -> RemotingFrame:
    (length,) = struct.unpack(">I", await reader.readexactly(4))
    return decode_frame(await reader.readexactly(length))


def answer_to(request: RemotingFrame, body: bytes = b"") -> bytes:
    return encode_frame(RemotingFrame(code=0, opaque=request.opaque, is_answer=True, body=body))


async def well(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        request = await request_of(reader)
        writer.write(answer_to(request, b"%d" % request.code))


async def garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await request_of(reader)
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")


async def half_a_frame(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(answer_to(await request_of(reader), b"x" * 100)[:-50])
    writer.close()


async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await request_of(reader)
    writer.transport.abort()


async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


def play(
    first: Peer,
    scenario: Callable[[str], Coroutine[object, object, None]],
    tls: ssl.SSLContext | None = None,
    then: Peer = well,
    make_loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> None:
    """Run a scenario with the address of a peer whose first connection is served by ``first``, others by ``then``."""

    async def main() -> None:
        peers = [first]
        tasks: list[asyncio.Task[None]] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.append(task)
            try:
                await (peers.pop() if peers else then)(reader, writer)
            except (asyncio.IncompleteReadError, OSError, asyncio.CancelledError):
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
        try:
            await scenario(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        finally:
            server.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(main())


@pytest.mark.parametrize(
    ("peer", "why"),
    [
        (garbage, "not the classic protocol: a frame of"),
        (half_a_frame, "in the middle of a frame"),
        (reset, "reset|closed by its peer"),
        (silence, "no answer from .* within"),
    ],
)
def test_a_broken_peer_costs_an_error_and_a_new_connection(peer: Peer, why: str) -> None:
    """Every call that waits hears why, and the next one connects anew."""

    async def scenario(address: str) -> None:
        connection = RemotingConnection(address, timeout_s=QUICK_S if peer is silence else PATIENCE_S)
        errors = await asyncio.gather(*(connection.ask(RemotingFrame(code=n)) for n in (1, 2)), return_exceptions=True)
        assert [type(each) for each in errors] == [BrokerUnavailable] * 2
        assert all(re.search(why, str(each)) for each in errors), errors
        patient = RemotingConnection(address, timeout_s=PATIENCE_S) if peer is silence else connection
        assert (await patient.ask(RemotingFrame(code=7))).body == b"7"
        await connection.close()
        await patient.close()

    play(peer, scenario)


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_connection_that_broke_unheard_costs_one_call(make_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """Danger: uvloop raises an error of its own when such a one is written to, which a daemon took for its end."""

    async def scenario(address: str) -> None:
        connection = RemotingConnection(address, timeout_s=PATIENCE_S)
        for turns in range(5):  # of the loop, until the next call
            assert (await connection.ask(RemotingFrame(code=1))).body == b"1"
            assert connection._link is not None
            connection._link._writer.transport.abort()
            for _ in range(turns):
                await asyncio.sleep(0)
            with suppress(BrokerUnavailable):
                assert (await connection.ask(RemotingFrame(code=2))).body == b"2"
        await connection.close()

    play(well, scenario, make_loop=make_loop)


def test_answers_are_matched_in_any_order() -> None:
    """And what the peer asks by itself in between is nobody's answer."""

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests = [await request_of(reader) for _ in range(3)]
        writer.write(encode_frame(RemotingFrame(code=40, opaque=requests[0].opaque, is_one_way=True)))
        for request in reversed(requests):
            writer.write(answer_to(request, b"%d" % request.code))
        await reader.read()

    async def scenario(address: str) -> None:
        connection = RemotingConnection(address, timeout_s=PATIENCE_S)
        answers = await asyncio.gather(*(connection.ask(RemotingFrame(code=number)) for number in (1, 2, 3)))
        assert [each.body for each in answers] == [b"1", b"2", b"3"]
        await connection.close()

    play(peer, scenario)


def test_a_slow_answer_costs_only_its_own_call() -> None:
    """A peer that says other things meanwhile is well: the connection stays, and so do the calls that wait longer."""

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        patient, slow = await request_of(reader), await request_of(reader)
        for _ in range(2):
            writer.write(answer_to(await request_of(reader)))
        writer.write(answer_to(slow) + answer_to(patient, b"at last"))
        await reader.read()

    async def scenario(address: str) -> None:
        connection = RemotingConnection(address, timeout_s=QUICK_S)
        patient = asyncio.create_task(connection.ask(RemotingFrame(code=1), wait_s=PATIENCE_S))
        await asyncio.sleep(0)
        slow = asyncio.create_task(connection.ask(RemotingFrame(code=2), timeout_s=QUICK_S))
        await asyncio.sleep(0)
        await connection.ask(RemotingFrame(code=3), timeout_s=PATIENCE_S)
        with pytest.raises(BrokerUnavailable, match="no answer"):
            await slow
        await connection.ask(RemotingFrame(code=4), timeout_s=PATIENCE_S)
        assert (await patient).body == b"at last"
        await connection.close()

    play(peer, scenario)


def test_questions_of_the_peer_are_answered() -> None:
    """By whoever serves it; what nobody serves with a refusal, and what is said one way with nothing."""

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await request_of(reader)
        for code in (39, 307, 999):
            writer.write(encode_frame(RemotingFrame(code=code, opaque=code, is_one_way=code == 39)))
        answers = [await request_of(reader) for _ in range(2)]
        told = [(each.code, each.opaque, each.is_answer, each.body) for each in answers]
        assert told == [(0, 307, True, b"running"), (3, 999, True, b"")], told
        writer.write(answer_to(request, b"well"))
        await reader.read()

    async def scenario(address: str) -> None:
        asked: list[int] = []

        def serve(request: RemotingFrame) -> RemotingFrame | None:
            asked.append(request.code)
            return RemotingFrame(code=0, body=b"running") if request.code in {39, 307} else not_served(request)

        connection = RemotingConnection(address, timeout_s=PATIENCE_S, on_request=serve)
        assert (await connection.ask(RemotingFrame(code=1))).body == b"well"
        assert asked == [39, 307, 999]
        await connection.close()

    play(peer, scenario)


def test_a_fault_of_ours_costs_the_connection_and_no_more() -> None:
    """Danger: nobody read the connection any more, and each call over it took its whole time to fail."""

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(encode_frame(RemotingFrame(code=40, opaque=1)))
        await reader.read()

    async def scenario(address: str) -> None:
        def serve(request: RemotingFrame) -> RemotingFrame | None:
            raise LookupError("unexpected")

        connection = RemotingConnection(address, timeout_s=PATIENCE_S, on_request=serve)
        with pytest.raises(BrokerUnavailable, match="could not be served: LookupError: unexpected"):
            await connection.ask(RemotingFrame(code=1))
        assert (await connection.ask(RemotingFrame(code=1))).body == b"1"
        await connection.close()

    play(peer, scenario)


def test_a_peer_that_goes_away_is_asked_nothing_new() -> None:
    """What it was asked before it still answers; the next call connects anew."""
    elsewhere = asyncio.Event()

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        waiting, asked = await request_of(reader), await request_of(reader)
        writer.write(encode_frame(RemotingFrame(code=1500, opaque=asked.opaque, is_answer=True)))
        await elsewhere.wait()
        writer.write(answer_to(waiting, b"before the end"))
        assert await reader.read() == b""

    async def scenario(address: str) -> None:
        connection = RemotingConnection(address, timeout_s=PATIENCE_S)
        waiting = asyncio.create_task(connection.ask(RemotingFrame(code=1)))
        await asyncio.sleep(0)
        assert (await connection.ask(RemotingFrame(code=2))).code == 1500
        assert (await connection.ask(RemotingFrame(code=7))).body == b"7"
        elsewhere.set()
        assert (await waiting).body == b"before the end"
        await connection.close()

    play(peer, scenario)


def test_a_one_way_request_is_written_and_not_waited_for() -> None:
    """A greeting goes before it, over each connection but the first one."""
    came: list[RemotingFrame] = []
    both = asyncio.Event()

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(await request_of(reader))
        if len(came) == 1:
            writer.transport.abort()
            return
        came.append(await request_of(reader))
        both.set()
        await reader.read()

    async def scenario(address: str) -> None:
        connection = RemotingConnection(address, timeout_s=PATIENCE_S, greeting=lambda: RemotingFrame(code=34))
        with pytest.raises(BrokerUnavailable):
            await connection.ask(RemotingFrame(code=1))
        await connection.tell(RemotingFrame(code=37))
        await both.wait()
        assert [(each.code, each.is_one_way) for each in came] == [(1, False), (34, False), (37, True)]
        await connection.close()
        nobody = RemotingConnection("127.0.0.1:1", timeout_s=PATIENCE_S)
        with pytest.raises(BrokerUnavailable, match="failed"):
            await nobody.tell(RemotingFrame(code=37))

    play(peer, scenario, then=peer)


def test_no_server_listens() -> None:
    """That is an error with the address, and a later call tries again."""

    async def scenario(address: str) -> None:
        port = int(address.rpartition(":")[2])
        connection = RemotingConnection(f"127.0.0.1:{port}", timeout_s=PATIENCE_S)
        await connection.ask(RemotingFrame(code=1))
        await connection.close()
        nobody = RemotingConnection("127.0.0.1:1", timeout_s=PATIENCE_S)
        for _ in range(2):
            with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:1 failed"):
                await nobody.ask(RemotingFrame(code=1))

    play(well, scenario)


def test_tls_is_spoken_with_the_trusted_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a signature on the request; somebody who is not trusted, and plain text, are errors."""
    monkeypatch.setattr(remoting, "_PAUSES_S", ())
    asked: list[RemotingFrame] = []

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await request_of(reader))
        writer.write(answer_to(asked[0], b'{"queueDatas":[],"brokerDatas":[]}'))
        await reader.read()

    certificate, key = self_signed(tmp_path / "tls", time.time_ns() // 1_000_000)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)

    async def scenario(address: str) -> None:
        known = RemotingOptions(names=(address,), tls_ca=certificate, access_key="k", secret_key="s")
        async with RemotingClient(known) as client:
            assert await client.queues("orders") == []
        assert {"AccessKey", "Signature"} <= asked[0].fields.keys()
        for wrong in (RemotingOptions(names=(address,), tls=True), RemotingOptions(names=(address,))):
            async with RemotingClient(wrong) as client:
                with pytest.raises(BrokerUnavailable, match=address):
                    await client.queues("orders")

    play(peer, scenario, tls)
