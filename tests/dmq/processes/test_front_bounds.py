"""Front processes and what they may take: real daemons with two of them, and clients that want more than there is."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from support.clients.wire.client import WireClient, a_message
from support.models.costs.cost_oracle import Meter
from support.rigs.daemon.process import Daemon, run_command

from bench.attacks import SERVICE, data_frames, head_of, literal
from broker_adapter.contracts.limits import BODY_BYTES_MAX
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.http2.codec import frames
from dmq.http2.testing.peer import grpc_message

pytestmark = pytest.mark.integration
MIB = 2**20
PATIENCE_S = 60.0
GREETING = frames.PREFACE + frames.settings({})
WINDOWS = frames.frame(frames.SETTINGS, 0, 0, frames.SETTING.pack(frames.INITIAL_WINDOW_SIZE, frames.WINDOW_MAX))


def a_daemon(path: Path, *, processes: int = 2, **settings: str) -> Daemon:
    """A daemon with fronts, not started yet."""
    told = {f"DMQ_{key.upper()}": value for key, value in settings.items()}
    return Daemon(path / "data", env={**os.environ, "DMQ_PROCESSES": str(processes), **told})


def served_by(front: psutil.Process, port: int) -> int:
    """Return how many clients a front has."""
    found = front.net_connections(kind="tcp")
    return sum(1 for each in found if each.laddr.port == port and each.status == psutil.CONN_ESTABLISHED)


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait until something holds that has no event."""
    until_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until_s, f"not {what} within {PATIENCE_S} s"
        time.sleep(0.02)


def connect(daemon: Daemon, said: bytes = GREETING) -> socket.socket:
    """Return a connection that has said so much."""
    connection = socket.create_connection(("127.0.0.1", daemon.port), timeout=10)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # or it takes a whole message that nobody reads
    connection.sendall(said)
    return connection


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process for a while."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_fronts_have_equal_shares_of_connections_after_a_restart_too(tmp_path: Path) -> None:
    """Of 1, 4 and 64 connections; a front that was killed has its share again with as many new ones as it lost."""
    with a_daemon(tmp_path) as daemon, ExitStack() as stack:
        port = daemon.port

        def counts() -> list[int]:
            return sorted(served_by(each, port) for each in daemon.fronts)

        for number in range(64):
            stack.enter_context(connect(daemon))
            if number + 1 in {1, 4, 64}:
                shares = [(number + 1) // 2, (number + 2) // 2]
                until(partial(lambda wanted: counts() == wanted, shares), f"{shares} connections")
        stays, goes = daemon.fronts
        goes.kill()
        daemon.wait_for("front_ended", timeout_s=PATIENCE_S)

        def is_there_again() -> bool:
            fronts = daemon.fronts
            with connect(daemon):
                return len(fronts) == 2 and any(served_by(each, port) == 1 for each in fronts if each != stays)

        until(is_there_again, "a front in its place")
        until(lambda: counts() == [0, 32], "the first front's connections and no others")
        for _ in range(32):
            stack.enter_context(connect(daemon))
        until(lambda: counts() == [32, 32], "equal shares again")


def test_no_connection_waits_at_a_front_that_does_not_answer(tmp_path: Path) -> None:
    """Danger: half of the new clients waited at a stopped front until it was replaced, ten seconds later."""
    with a_daemon(tmp_path) as daemon:
        one, _ = daemon.fronts
        with stopped(one.pid), ExitStack() as stack:
            number = in_a_row = 0

            def is_served() -> bool:
                nonlocal number, in_a_row
                number += 1
                client = stack.enter_context(WireClient(daemon.address))  # and it stays, whoever serves it
                request = wire.SendMessageRequest(messages=[a_message("orders", f"m-{number}")])
                try:
                    assert client.ask("SendMessage", request, deadline_s=1).status.code == wire.OK
                    in_a_row += 1
                except grpc.RpcError:
                    in_a_row = 0
                return in_a_row == 4

            until(is_served, "served four times in a row")
            assert one.is_running(), "it was to be avoided, not to be replaced"
            assert one.status() == psutil.STATUS_STOPPED


@pytest.mark.parametrize("processes", [2, 3])
def test_the_largest_messages_pass_with_the_least_memory(tmp_path: Path, processes: int) -> None:
    """A request of three bodies of 4 MiB, and an answer with all of them, where all processes have 64 MiB together."""
    with (
        a_daemon(tmp_path, processes=processes, held_bytes_max="64MiB") as daemon,
        WireClient(daemon.address) as client,
    ):
        for round_ in range(4):
            batch = [a_message("orders", f"{round_}-{number}", b"x" * BODY_BYTES_MAX) for number in range(3)]
            answer = client.ask("SendMessage", wire.SendMessageRequest(messages=batch), deadline_s=60)
            assert answer.status.code == wire.OK
        assert len({each.message_id for each in client.drain("orders", "billing", 12)}) == 12


def test_a_quota_shows_the_waiting_bytes_of_all_fronts(tmp_path: Path) -> None:
    """Two connections with unfinished requests, one at each front: operators see the sum."""
    said = GREETING + frames.header_block(1, head_of(SERVICE + "SendMessage"), ends=False)
    said += data_frames(1, b"\0" + (8 * MIB).to_bytes(4, "big") + b"x" * (MIB - 100), ends=False)
    with a_daemon(tmp_path) as daemon, connect(daemon, said), connect(daemon, said):
        with WireClient(daemon.address) as client:  # who has nothing but bytes that wait is not listed
            assert client.send(a_message("orders", "m-1")).status.code == wire.OK

        def used() -> int:
            shown = run_command("quota", "ls", "-o", "json", "--address", daemon.address)
            rows = [each for each in json.loads(shown.stdout) if each["quota"] == "bytes"]
            return int(rows[0]["used"]) if rows else 0

        until(lambda: 2 * MIB - 2000 <= used() <= 2 * MIB + 10_000, "the sum of both")


def test_clients_wait_while_the_store_process_does(tmp_path: Path) -> None:
    """Danger: calls were read, passed on and given up as long as somebody sent them, and the front kept them all."""
    many_bytes = 400 * MIB
    body = grpc_message(b"x" * (MIB - 1000))
    with a_daemon(tmp_path) as daemon:
        meter = Meter(daemon.pid)
        with connect(daemon, WINDOWS_UP) as flood:
            flood.setblocking(False)
            meter.wait_until_quiet()
            before = meter.memory_bytes()
            with stopped(daemon.pid):
                sent = 0
                for stream_id in range(1, 2 * many_bytes // MIB, 2):
                    said = frames.header_block(stream_id, head_of(SERVICE + "QueryRoute"), ends=False)
                    said += data_frames(stream_id, body, ends=True)
                    if stream_id > 4:  # one that was passed on
                        said += frames.frame(frames.RST_STREAM, 0, stream_id - 4, b"\0\0\0\x08")
                    left = _send(flood, said)
                    sent += len(said) - left
                    if left:
                        break
                assert sent < 64 * MIB
                assert meter.memory_bytes() - before < 100 * MIB
        with WireClient(daemon.address) as client:
            answer = client.ask(
                "SendMessage", wire.SendMessageRequest(messages=[a_message("orders", "m")]), deadline_s=60
            )
        assert answer.status.code == wire.OK


WINDOWS_UP = GREETING + frames.window_update(0, 2**30)


def _send(connection: socket.socket, said: bytes, patience_s: float = 2.0) -> int:
    """Send, and read what comes; return how much was left when nothing more was taken for a while."""
    view = memoryview(said)
    while view:
        readable, writable, _ = select.select([connection], [connection], [], patience_s)
        if readable:
            assert connection.recv(MIB), "the daemon closed"
        if writable:
            view = view[connection.send(view[: 256 * 1024]) :]
        elif not readable:
            break
    return len(view)


def test_unread_receives_cost_no_more_than_the_bound(tmp_path: Path) -> None:
    """Forty receives of 4 MiB each, none of them read; an honest client is served, and gets all of it afterwards."""
    request = wire.ReceiveMessageRequest(group=wire.Resource(name="billing"), batch_size=32)
    request.message_queue.topic.name = "orders"
    request.filter_expression.expression = "*"
    request.invisible_duration.seconds = 10  # one whose answer the kernel took, whole, has it for so long
    body = grpc_message(request.SerializeToString())
    with a_daemon(tmp_path, held_bytes_max="64MiB") as daemon, WireClient(daemon.address) as client:
        for number in range(40):
            message = a_message("orders", f"m-{number}", b"x" * BODY_BYTES_MAX)
            answer = client.ask("SendMessage", wire.SendMessageRequest(messages=[message]), deadline_s=60)
            assert answer.status.code == wire.OK
        meter = Meter(daemon.pid)
        before = meter.wait_until_quiet()
        with ExitStack() as stack:
            for _ in range(20):
                hog = stack.enter_context(connect(daemon, frames.PREFACE + WINDOWS + frames.window_update(0, 2**30)))
                for stream_id in (1, 3):
                    head = head_of(SERVICE + "ReceiveMessage") + literal(b"grpc-timeout", b"60S")
                    hog.sendall(frames.header_block(stream_id, head, ends=False))
                    hog.sendall(data_frames(stream_id, body, ends=True))
            most = before
            for number in range(20):
                message = a_message("others", f"o-{number}")
                answer = client.ask("SendMessage", wire.SendMessageRequest(messages=[message]), deadline_s=60)
                assert answer.status.code == wire.OK
                most = max(most, meter.memory_bytes())
        assert most - before < 400 * 10**6
        assert len({each.message_id for each in client.drain("orders", "billing", 40, within_s=PATIENCE_S)}) == 40


@pytest.mark.parametrize("processes", [1, 2])
def test_many_requests_for_the_same_large_messages_cost_no_more_than_the_bound(tmp_path: Path, processes: int) -> None:
    """Danger: a pull of 23 bytes had 8 MiB read, whoever else asked, before anything was counted: 400 took 2.4 GB."""
    held_bytes_max, pulls = 64 * MIB, 100
    settings = {"held_bytes_max": str(held_bytes_max), "queues_per_topic": "1"}
    with (
        a_daemon(tmp_path, processes=processes, **settings) as daemon,
        WireClient(daemon.address, "fills") as client,
        WireClient(daemon.address, "pulls") as other,
    ):
        for number in range(8):
            assert client.send(a_message("large", f"m-{number}", bytes(MIB))).status.code == wire.OK
        request = wire.PullMessageRequest(batch_size=32)
        request.group.name, request.message_queue.topic.name = "reads", "large"
        meter = Meter(daemon.pid)
        memory = meter.wait_until_quiet()
        calls: list[Any] = [other.begin("PullMessage", request) for _ in range(pulls)]
        assert client.send(a_message("small", "m-8")).status.code == wire.OK
        assert meter.wait_until_quiet() - memory < held_bytes_max + 200 * MIB
        request.batch_size = 2  # who asks for less than the others hold is served all the same
        for _ in range(3):
            found = client.frames("PullMessage", request)
            assert found[0].status.code == wire.OK
            assert len(found) == 2 + 2
        for call in calls:
            call.cancel()
