"""Real memory of a daemon whose clients ask for large messages and do not read the answers."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.clients.wire.client import WireClient, a_message, a_receive
from support.models.costs.cost_oracle import Meter
from support.rigs.daemon.process import Daemon

from bench.attacks import SERVICE, data_frames, head_of, literal
from broker_adapter.contracts.limits import BODY_BYTES_MAX
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.http2.codec import frames
from dmq.http2.testing.peer import grpc_message

pytestmark = pytest.mark.fault
MIB = 2**20
HELD_BYTES_MAX = 128 * MIB
MEMORY_BYTES_MAX = HELD_BYTES_MAX * 5 // 4
CLIENTS = 80
WINDOWS = {"closed": 0, "wide": frames.WINDOW_MAX}


@pytest.fixture(scope="module", params=[1, 2], ids=["one-process", "two-fronts"])
def daemon(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with one message of 4 MiB, which has been received and pulled once."""
    env = {**os.environ, "DMQ_HELD_BYTES_MAX": str(HELD_BYTES_MAX), "DMQ_QUEUES_PER_TOPIC": "1"}
    path = tmp_path_factory.mktemp("unread") / "data"
    with Daemon(path, env=env, processes=request.param) as running, WireClient(running.address) as client:
        assert client.send(a_message("large", "m-1", bytes(BODY_BYTES_MAX)), deadline_s=60).status.code == wire.OK
        for number, (rpc, body) in enumerate(requests("warm")):
            assert len(client.frames(rpc, body, deadline_s=60)) == 3, number
        yield running


def requests(group: str) -> list[tuple[str, bytes]]:
    """Requests that are answered with the large message: a receive and a pull."""
    pull = wire.PullMessageRequest(batch_size=1)
    pull.group.name, pull.message_queue.topic.name = group, "large"
    received = a_receive("large", group, batch=1, invisible_s=300)
    return [("ReceiveMessage", received.SerializeToString()), ("PullMessage", pull.SerializeToString())]


def hung_client(daemon: Daemon, rpc: str, body: bytes, window: int) -> socket.socket:
    """Return a connection that has made a call and does not read the answer."""
    connection = socket.create_connection(("127.0.0.1", daemon.port), timeout=60)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    said = frames.PREFACE + frames.frame(frames.SETTINGS, 0, 0, frames.SETTING.pack(frames.INITIAL_WINDOW_SIZE, window))
    head = head_of(SERVICE + rpc) + literal(b"grpc-timeout", b"300S")
    said += frames.window_update(0, 2**30) + frames.header_block(1, head, ends=False)
    connection.sendall(said + data_frames(1, grpc_message(body), ends=True))
    return connection


def wait_for_headers(connection: socket.socket) -> None:
    """Read up to the HEADERS of the answer and nothing after them: the daemon has decided about the call."""

    def read(size: int) -> bytes:
        found = b""
        while len(found) < size:
            piece = connection.recv(size - len(found))
            assert piece, "the daemon closed the connection"
            found += piece
        return found

    while True:
        high, low, kind, _, _ = frames.HEAD.unpack(read(frames.HEAD_BYTES))
        read(high << 8 | low)
        if kind == frames.HEADERS:
            return


class Peak:
    """The most resident memory of a daemon's processes since this was made, as the kernel counts it."""

    def __init__(self, pid: int) -> None:
        process = psutil.Process(pid)
        self._folders = [Path(f"/proc/{each.pid}") for each in [process, *process.children(recursive=True)]]
        for folder in self._folders:
            (folder / "clear_refs").write_text("5")

    def memory_bytes(self) -> int:
        """Return the sum of the processes' peaks."""
        lines = [line for each in self._folders for line in (each / "status").read_text().splitlines()]
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("call", ["ReceiveMessage", "PullMessage"])
def test_unread_answers_take_no_more_real_memory_than_the_accounts_allow(
    daemon: Daemon, call: str, window: str
) -> None:
    """80 clients that do not read 4 MiB each: resident memory stays within ``held_bytes_max`` and a quarter."""
    meter = Meter(daemon.pid)
    meter.wait_until_quiet()
    before = meter.memory_bytes()
    peak = Peak(daemon.pid)
    with ExitStack() as stack:
        clients: list[Any] = []
        for number in range(CLIENTS):
            body = dict(requests(f"{window}-{number}"))[call]
            clients.append(stack.enter_context(hung_client(daemon, call, body, WINDOWS[window])))
        for client in clients:
            wait_for_headers(client)
        meter.wait_until_quiet()
        grown = peak.memory_bytes() - before
        with WireClient(daemon.address, "honest") as honest:
            assert honest.send(a_message("small", f"{call}-{window}"), deadline_s=60).status.code == wire.OK

    assert grown < MEMORY_BYTES_MAX, f"{grown / MIB:.0f} MiB"
