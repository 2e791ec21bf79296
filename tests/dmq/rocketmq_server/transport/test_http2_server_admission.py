"""Admission before work, on a daemon in a process of its own: what a few bytes can cost, with access keys and without.

The bounds of memory are generous: each attack took gigabytes, or all there is of something.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from support.clients.wire.client import WireClient, a_receive
from support.clients.wire.client import a_message as a_wire_message
from support.clients.wire.protocol import a_message, a_send
from support.clients.wire.raw import METADATA, RawClient
from support.models.costs.cost_oracle import Meter
from support.rigs.daemon.acl import KEYS, OPERATOR, SHOP, write_acl
from support.rigs.daemon.process import Daemon, run_command

from broker_adapter.wire import rocketmq_v2 as wire
from dmq.http2.codec import frames
from dmq.http2.testing.peer import Encoder, grpc_message

pytestmark = pytest.mark.integration
MIB = 2**20
_RULELESS = '[keys.bare]\nsecret = "bare-secret-0001"\n'


@pytest.fixture(params=["without keys", "with keys"])
def daemon(request: pytest.FixtureRequest, tmp_path: Path) -> Daemon:
    """A daemon; behind access keys or not."""
    options = ("--acl", str(write_acl(tmp_path))) if request.param == "with keys" else ()
    return Daemon(tmp_path / "data", *options)


def memory_bytes(daemon: Daemon) -> int:
    """Return what all processes of a daemon have in memory."""
    return Meter(daemon.pid).memory_bytes()


def head(rpc: str, stream_id: int, fields: tuple[tuple[str, str], ...], *, is_gzip: bool = False) -> bytes:
    """The headers of a call."""
    encoder = Encoder()
    encoding = (("grpc-encoding", "gzip"),) if is_gzip else ()
    pseudo = ((":method", "POST"), (":scheme", "http"), (":path", wire.METHODS[rpc].path), (":authority", "x"))
    block = encoder.encode(
        [*pseudo, ("te", "trailers"), ("content-type", "application/grpc"), *encoding, *fields], is_kept=False
    )
    return frames.header_block(stream_id, block, ends=False)


def in_frames(stream_id: int, said: bytes, *, ends: bool) -> bytes:
    """DATA."""
    made = b"".join(
        frames.frame(frames.DATA, 0, stream_id, said[at : at + frames.FRAME_BYTES])
        for at in range(0, len(said), frames.FRAME_BYTES)
    )
    return made + (frames.frame(frames.DATA, frames.END_STREAM, stream_id) if ends else b"")


CLIENT = (("x-mq-client-id", "stranger"), ("x-mq-language", "JAVA"))


async def connected(daemon: Daemon) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", daemon.port)
    writer.write(frames.PREFACE + frames.settings({}) + frames.window_update(0, 2**30))
    return reader, writer


async def heard(reader: asyncio.StreamReader, stream_id: int) -> bytes:
    """Everything of a stream until it ends."""
    said = b""
    async with asyncio.timeout(60):
        while True:
            high, low, kind, flags, of = frames.HEAD.unpack(await reader.readexactly(frames.HEAD_BYTES))
            payload = await reader.readexactly(high << 8 | low)
            if of & frames.STREAM_MAX != stream_id:
                continue
            said += payload
            if (kind in {frames.HEADERS, frames.DATA} and flags & frames.END_STREAM) or kind == frames.RST_STREAM:
                return said


def dmq(daemon: Daemon, tmp_path: Path, *asked: str) -> Any:  # noqa: ANN401 - JSON
    """What a command says."""
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text(OPERATOR.secret_key)
    keys = ("--access-key", OPERATOR.access_key, "--secret-file", str(secret))
    done = run_command(*keys, *asked, "-o", "json", "--address", f"127.0.0.1:{daemon.port}", timeout_s=60)
    done.check_returncode()
    return json.loads(done.stdout)


async def sends(daemon: Daemon, name: str) -> None:
    """Have a small honest send answered."""
    client = RawClient(daemon.port)
    try:
        metadata = (*METADATA, *SHOP.signer().metadata())
        answer = await client.ask("SendMessage", a_send(a_message(name)).SerializeToString(), metadata, timeout=60)
        assert answer.status.code == wire.OK, answer.status
    finally:
        await client.channel.close()


@pytest.mark.parametrize("rpc", ["SendMessage", "AckMessage", "ReceiveMessage"])
def test_a_small_gzip_with_millions_of_elements_costs_little(daemon: Daemon, rpc: str) -> None:
    """Danger: 12 KB that inflate to millions of empty messages took 6.8 GiB and 20 s of the loop."""
    elements = b"\x1a\x00" if rpc == "AckMessage" else b"\x0a\x00"
    bombs = [gzip.compress(elements * (size // 2)) for size in (MIB - 2, 12 * MIB)]

    async def scenario() -> None:
        reader, writer = await connected(daemon)
        for number in range(40):
            stream_id = 2 * number + 1
            said = grpc_message(bombs[number % 2], flag=1)
            writer.write(head(rpc, stream_id, CLIENT, is_gzip=True) + in_frames(stream_id, said, ends=True))
            await heard(reader, stream_id)
        writer.close()
        await sends(daemon, "after-gzip")

    with daemon:
        before = memory_bytes(daemon)
        asyncio.run(scenario())
        assert memory_bytes(daemon) < before + 150 * MIB


def test_unfinished_requests_lock_no_client_out(daemon: Daemon, tmp_path: Path) -> None:
    """Danger: five connections with unfinished requests held all 256 MiB; every other send was refused for ever."""

    async def scenario() -> None:
        hogs = [await connected(daemon) for _ in range(8)]
        sizes = [MIB - 200] * 62 + [size for size in (2**16, 2**12, 256, 32) for _ in range(70)]
        signed = tuple((name, value) for name, value in SHOP.signer().metadata())
        for _, writer in hogs:
            for number, size in enumerate(sizes):  # each within the window of its stream; the last ones fill the gaps
                stream_id = 2 * number + 1
                said = (b"\0" + (size + 100).to_bytes(4, "big")).ljust(size, b"x")
                writer.write(
                    head("SendMessage", stream_id, (*CLIENT, *signed)) + in_frames(stream_id, said, ends=False)
                )
                await writer.drain()
        await sends(daemon, "beside-hogs")
        status = await asyncio.to_thread(dmq, daemon, tmp_path, "status")
        assert status
        client = RawClient(daemon.port)
        check: Any = client.channel.unary_unary("/grpc.health.v1.Health/Check")
        assert await check(b"", timeout=60) == b"\x08\x01"
        await client.channel.close()
        for _, writer in hogs:
            writer.close()

    with daemon:
        before = memory_bytes(daemon)
        asyncio.run(scenario())
        assert memory_bytes(daemon) < before + 400 * MIB


def test_an_unsigned_call_is_answered_before_its_body_is_kept(tmp_path: Path) -> None:
    """Danger: 16 KB stalled a daemon with access keys for 5 s, its key unknown. The answer is what it always was."""

    async def scenario(daemon: Daemon) -> None:
        reader, writer = await connected(daemon)
        said = (b"\0" + (60 * MIB).to_bytes(4, "big")).ljust(100_000, b"x")
        writer.write(head("SendMessage", 1, CLIENT) + in_frames(1, said, ends=False))
        answer = await heard(reader, 1)
        assert b"40100" not in answer  # a status of the protocol in a message, not a text
        at = answer.index(b"\0\0\0\0", 1)
        size = int.from_bytes(answer[at + 1 : at + 5], "big")
        response = wire.SendMessageResponse.FromString(answer[at + 5 : at + 5 + size])
        assert response.status.code == wire.UNAUTHORIZED
        writer.close()

    with Daemon(tmp_path / "data", "--acl", str(write_acl(tmp_path))) as daemon:
        asyncio.run(scenario(daemon))


def test_a_key_without_rules_holds_a_few_streams(tmp_path: Path) -> None:
    """Danger: it took all 10,000, each under another client id."""
    from support.rigs.daemon.acl import ACL, Key

    bare = Key("bare", "bare-secret-0001")
    acl = write_acl(tmp_path, ACL + "\n" + _RULELESS)

    async def scenario(daemon: Daemon) -> None:
        client = RawClient(daemon.port)
        multi: Any = client.channel.stream_stream(
            wire.METHODS["Telemetry"].path, response_deserializer=wire.TelemetryCommand.FromString
        )
        codes: list[int] = []
        calls = []
        for number in range(20):
            metadata = (("x-mq-client-id", f"c-{number}"), ("x-mq-language", "JAVA"), *bare.signer().metadata())
            call = multi(metadata=metadata, timeout=60)
            calls.append(call)
        for call in calls:
            try:
                frame = await asyncio.wait_for(call.read(), 3)
            except TimeoutError:
                continue
            codes.append(frame.status.code)
        assert codes == [wire.TOO_MANY_REQUESTS] * 16
        await client.channel.close()

    with Daemon(tmp_path / "data", "--acl", str(acl)) as daemon:
        asyncio.run(scenario(daemon))


@pytest.mark.parametrize(
    "group",
    [wire.Resource(resource_namespace="ns"), wire.Resource(resource_namespace="ns", name="")],
    ids=["no name", "empty name"],
)
def test_a_heartbeat_makes_no_group_of_a_namespace_alone(daemon: Daemon, tmp_path: Path, group: wire.Resource) -> None:
    """Danger: it needed no permission, and made a group."""

    async def scenario() -> None:
        client = RawClient(daemon.port)
        request = wire.HeartbeatRequest(client_type=wire.PUSH_CONSUMER, group=group)
        answer = await client.ask(
            "Heartbeat", request.SerializeToString(), (*METADATA, *KEYS[0].signer().metadata()), timeout=60
        )
        assert answer.status.code in {wire.OK, wire.ILLEGAL_CONSUMER_GROUP}
        await client.channel.close()

    with daemon:
        asyncio.run(scenario())
        assert dmq(daemon, tmp_path, "group", "ls") == []


def test_one_client_cannot_make_all_topics(daemon: Daemon, tmp_path: Path) -> None:
    """Danger: it made all 10,000 in two seconds, under whatever names; then nobody could make one."""

    async def scenario() -> None:
        client = RawClient(daemon.port)
        metadata = (*METADATA, *SHOP.signer().metadata())
        codes = []
        for first in range(0, 3000, 100):
            codes += [
                answer.status.code
                for answer in await asyncio.gather(
                    *(
                        client.ask("QueryRoute", _route(f"orders-{first + n}").SerializeToString(), metadata, 60)
                        for n in range(100)
                    )
                )
            ]
        assert set(codes) == {wire.OK, wire.TOO_MANY_REQUESTS}
        assert codes.count(wire.OK) < 2900
        await client.channel.close()

    with daemon:
        asyncio.run(scenario())
        assert dmq(daemon, tmp_path, "status")


def _route(topic: str) -> wire.QueryRouteRequest:
    return wire.QueryRouteRequest(topic=wire.Resource(name=topic))


def test_pairs_of_groups_and_topics_are_bounded(daemon: Daemon, tmp_path: Path) -> None:
    """Danger: 100 groups and 100 topics are 10,000 pairs, each in memory for good; those that are there go on."""
    with daemon, WireClient(daemon.address, signer=SHOP.signer()) as client:
        dmq(daemon, tmp_path, "quota", "set", "address", "loopback", "subscriptions", "2")
        for _ in range(2):
            for topic in ("orders-1", "orders-2"):
                assert client.receive(topic, "billing") == []
        (refused, *_) = client.frames("ReceiveMessage", a_receive("orders-3", "billing"))
        assert refused.status.code == wire.TOO_MANY_REQUESTS
        assert "quota subscriptions of address loopback: 2 in use (limit 2)" in refused.status.message
        daemon.stop()
        daemon.restart()
        client.send(a_wire_message("orders-3", "M1"))
        (received,) = client.receive("orders-3", "billing", wait_s=5)  # what was made counts since the start
        client.ack("orders-3", "billing", [received])


def test_a_limit_that_operators_set_counts_at_once_and_after_a_restart(daemon: Daemon, tmp_path: Path) -> None:
    """42900 names the quota, what is in use and the limit; the clients of others are served."""

    async def refused(what: str) -> None:
        client = RawClient(daemon.port)
        metadata = (*METADATA, *SHOP.signer().metadata())
        answer = await client.ask("QueryRoute", _route("orders-new").SerializeToString(), metadata, 60)
        assert answer.status.code == wire.TOO_MANY_REQUESTS
        assert what in answer.status.message
        await client.channel.close()

    with daemon:
        (row,) = dmq(daemon, tmp_path, "quota", "set", "address", "loopback", "topics", "0")
        assert (row["limit"], row["is_set"]) == ("0", True) or (row["limit"], row["is_set"]) == (0, True)
        asyncio.run(refused("quota topics of address loopback: 0 in use (limit 0)"))
        daemon.stop()
        daemon.restart()
        asyncio.run(refused("quota topics of address loopback: 0 in use (limit 0)"))
        dmq(daemon, tmp_path, "quota", "unset", "address", "loopback", "topics")
        asyncio.run(sends(daemon, "after-unset"))
        rows = dmq(daemon, tmp_path, "quota", "ls")
        assert [each["quota"] for each in rows if each["kind"] == "address"].count("topics") == 1
