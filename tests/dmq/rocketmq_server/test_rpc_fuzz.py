"""Requests that nobody sends, in their thousands, to a real daemon: each is answered, and nothing is left behind.

``DMQ_TEST_EFFORT=50`` sends 100,000.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.clients.wire.client import WireClient, a_message
from support.effort import EFFORT, SEED
from support.forges.wire.fuzz import GROUP, TOPIC, Fuzzer, Request
from support.rigs.daemon.process import Daemon, run_command

from broker_adapter.wire import rocketmq_v2 as wire

pytestmark = pytest.mark.property
_REQUESTS = 2_000 * EFFORT
_AT_ONCE = 48
_DEADLINE_S = 20.0
_POLL_S = 1.0
# Codes that say "our fault", and the one that says nothing.
_OURS = {wire.INTERNAL_SERVER_ERROR, wire.INTERNAL_ERROR, wire.CODE_UNSPECIFIED}
# How gRPC itself may end a call: a telemetry stream that was refused, which its last frame explains; a long poll on a
# machine that is busy with something else, which happens to a few.
_ENDS = {
    "Telemetry": {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED},
    "ReceiveMessage": {grpc.StatusCode.DEADLINE_EXCEEDED},
    "PullMessage": {grpc.StatusCode.DEADLINE_EXCEEDED},
}
_OTHER_REQUEST_BYTES_MAX = 1024 * 1024  # of all but sends and telemetry: GUARANTEES_LIMITS, section 9
# grpcio's own word for a write to a stream that the server ended meanwhile; no server said it
_WRITTEN_TOO_LATE = "Internal error from Core"
# Half of it is the store's buffers, filled by chance; the messages and leases of a long run take some of the rest.
_LATE_POLLS_MAX = 0.05  # of all; on a quiet machine none
_LEAK_BYTES_MAX = 16 * 1024 * 1024


class Attack:
    """Sends what a fuzzer makes, some at once, and remembers what came of it."""

    def __init__(self, address: str, fuzzer: Fuzzer) -> None:
        self._address = address
        self._fuzzer = fuzzer
        self.codes: Counter[tuple[str, str]] = Counter()
        self.accepted: set[str] = set()  # ids in the fuzzed topic, that are to be delivered at some time
        self.visible: set[str] = set()  # of these, at once

    async def run(self, count: int) -> None:
        """Send ``count`` requests; an ``AssertionError`` names the first that got no proper answer."""
        options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        async with grpc.aio.insecure_channel(self._address, options=options) as channel:
            calls = {name: _call(channel, name) for name in wire.METHODS}

            async def work() -> None:
                nonlocal count
                while count > 0:
                    count -= 1
                    request = self._fuzzer.request()
                    self._check(request, await self._answers_to(calls[request.rpc], request))

            await asyncio.gather(*(work() for _ in range(_AT_ONCE)))

    def _check(self, request: Request, answers: Sequence[Any]) -> None:
        if not answers:  # a telemetry stream without settings, or ended by gRPC in a way that `_answers_to` allows
            return
        self._fuzzer.learn(answers)
        answer = answers[0]
        code = answer.status.code
        assert code in wire.Code.values(), (request, answer)
        assert code not in _OURS, (request, answer.status)
        self.codes[request.rpc, wire.Code.Name(code)] += 1
        if request.rpc == "SendMessage" and code in {wire.OK, wire.MULTIPLE_RESULTS}:
            messages = wire.SendMessageRequest.FromString(request.body).messages
            assert len(answer.entries) == len(messages)
            if messages[0].topic == wire.Resource(name=TOPIC):
                self._note(messages, answer.entries)

    async def _answers_to(self, call: Any, request: Request) -> Sequence[Any]:  # noqa: ANN401 - one class per RPC
        """Return all answers; gRPC itself may end a telemetry stream with an error, and a request that is too large."""
        metadata = (
            ("x-mq-client-id", request.client_id.encode("ascii", "replace")),
            ("x-mq-language", request.language.encode("ascii", "replace")),
        )
        method = wire.METHODS[request.rpc]
        answers: list[Any] = []
        try:
            if method.client_streaming:
                async for answer in call(_one(request.body), metadata=metadata, timeout=_DEADLINE_S):
                    answers.append(answer)  # noqa: PERF401 - those before an error count
            elif method.server_streaming:
                answers = [each async for each in call(request.body, metadata=metadata, timeout=_POLL_S)]
            else:
                answers = [await call(request.body, metadata=metadata, timeout=_DEADLINE_S)]
        except grpc.aio.AioRpcError as error:
            is_known = error.code() in _ENDS.get(request.rpc, ()) or (
                request.rpc != "SendMessage"
                and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                and len(request.body) > _OTHER_REQUEST_BYTES_MAX
            )
            if not is_known and not (method.client_streaming and error.details() == _WRITTEN_TOO_LATE):
                raise AssertionError(f"{error.code()} {error.details()}: {request}") from error
            self.codes[request.rpc, error.code().name] += 1
            return answers
        if request.rpc == "ReceiveMessage":
            assert answers[-1].HasField("delivery_timestamp"), request
        return answers

    def _note(self, messages: Any, entries: Any) -> None:  # noqa: ANN401 - repeated fields
        for message, entry in zip(messages, entries, strict=True):
            if entry.status.code != wire.OK:
                continue
            message_id = message.system_properties.message_id
            assert entry.message_id == message_id
            self.accepted.add(message_id)
            if not entry.recall_handle and message.system_properties.message_type != wire.TRANSACTION:
                self.visible.add(message_id)


def _call(channel: grpc.aio.Channel, name: str) -> Any:  # noqa: ANN401 - one class per kind
    method = wire.METHODS[name]
    if method.client_streaming:
        make: Any = channel.stream_stream
    else:
        make = channel.unary_stream if method.server_streaming else channel.unary_unary
    return make(method.path, response_deserializer=method.response_class.FromString)


async def _one(body: bytes) -> AsyncIterator[bytes]:
    yield body


def _rss_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _connections(pid: int) -> int:
    files = Path(f"/proc/{pid}/fd").iterdir()
    return sum(file.readlink().name.startswith("socket:") for file in files if file.is_symlink())


@pytest.mark.timeout(180 + 20 * EFFORT)
def test_no_request_does_worse_than_being_refused(tmp_path: Path) -> None:
    """Every answer is one of the protocol and none an internal error; what was accepted is there, and nothing leaks."""
    print(f"DMQ_TEST_SEED={SEED}")
    # Without a trail: its first export, after a minute, loads a library that is larger than any leak.
    env = {**os.environ, "DMQ_TRAIL": "off", "DMQ_MEMTABLE_BYTES_MAX": "8MiB", "DMQ_WAL_BYTES_MAX": "8MiB"}
    with Daemon(tmp_path / "data", env=env) as daemon, WireClient(daemon.address) as client:
        fuzzer = Fuzzer(SEED, client)
        attack = Attack(daemon.address, fuzzer)
        attack.accepted |= {"plain", "ordered", "half"}
        asyncio.run(attack.run(_REQUESTS // 2))
        connections, rss_bytes = _connections(daemon.pid), _rss_bytes(daemon.pid)
        fuzzer.settle()
        asyncio.run(attack.run(_REQUESTS // 2))
        grown_bytes = _rss_bytes(daemon.pid) - rss_bytes
        print(*sorted(attack.codes.items()), sep="\n")
        print(f"RSS {rss_bytes / 2**20:.1f} MiB after the first half, {grown_bytes / 2**20:+.1f} MiB after the second")
        for poll in ("ReceiveMessage", "PullMessage"):
            polls = sum(count for (rpc, _), count in attack.codes.items() if rpc == poll)
            assert attack.codes[poll, "DEADLINE_EXCEEDED"] <= polls * _LATE_POLLS_MAX
        found = json.loads(run_command("--address", daemon.address, "client", "ls", "-o", "json").stdout)
        assert len(found) <= 45, "sessions of clients that nobody is"
        assert not [each for each in found if each["streams"]]
        delivered = {each.message_id for each in _all(client)}
        assert attack.visible <= delivered <= attack.accepted
        assert client.send(a_message("afterwards", "good")).status.code == wire.OK
        assert [each.message_id for each in client.drain("afterwards", GROUP, 1)] == ["good"]
        assert _connections(daemon.pid) <= connections + 2, "connections that nobody closed"
        if EFFORT > 1:  # a short run measures what is filled once, and not what leaks
            assert grown_bytes < _LEAK_BYTES_MAX
        daemon.stop()
        wrong = [line for line in daemon.log().splitlines() if '"level": "error"' in line or "Traceback" in line]
        assert not wrong, wrong[:3]


def _all(client: WireClient) -> list[Any]:
    """Everything in the fuzzed topic, for a group that sees it for the first time."""
    found: list[Any] = []
    while deliveries := client.receive(TOPIC, "auditors", wait_s=1):
        found += deliveries
        assert client.ack(TOPIC, "auditors", deliveries).status.code == wire.OK
    return found
