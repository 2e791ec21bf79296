"""Descriptors are few and clients are many: the daemon goes on, and operators get in."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from support.clients.wire.client import WireClient, a_message
from support.rigs.daemon.process import Daemon, run_command

from bench.attacks import data_frames, head_of
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.daemon.server.descriptors import share
from dmq.http2.codec import frames
from dmq.http2.testing.peer import grpc_message

pytestmark = pytest.mark.integration
_LIMITED = """import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
os.execvp(sys.argv[1], sys.argv[1:])"""
_LOW = (sys.executable, "-c", _LIMITED)


def test_parts_of_the_limit() -> None:
    """Tables and connections never take what the others need; an operator cannot ask for more than there is."""
    assert [
        (each.tables, each.connections) for each in (share(1024, None), share(20_000, None), share(1024, 5000))
    ] == [
        (256, 640),
        (512, 4096),
        (256, 640),
    ]


def test_idle_sockets_exclude_no_client(tmp_path: Path) -> None:
    """950 of them under a limit of 1,024, half without a byte: sends and acknowledgements go on, and so does status."""
    with Daemon(tmp_path / "data", prefix=_LOW) as daemon, ExitStack() as stack:
        for number in range(950):
            idle = stack.enter_context(socket.create_connection(("127.0.0.1", daemon.port)))
            if number % 2:
                idle.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
        with WireClient(daemon.address) as client:
            for number in range(50):
                assert client.send(a_message("orders", f"m-{number}")).status.code == wire.OK
            assert len(client.drain("orders", "billing", 50)) == 50
        assert run_command("status", "--address", daemon.address).returncode == 0
        daemon.stop()


def test_busy_connections_of_this_machine_leave_room_for_operators(tmp_path: Path) -> None:
    """Each place is taken by a client on this host with a call under way: operators are served, others are told why."""
    env = {**os.environ, "DMQ_CONNECTIONS_MAX": "24"}
    watch = frames.header_block(1, head_of("/grpc.health.v1.Health/Watch"), ends=False)
    watch += data_frames(1, grpc_message(b""), ends=True)
    with Daemon(tmp_path / "data", env=env) as daemon, ExitStack() as stack:
        for _ in range(40):
            busy = stack.enter_context(socket.create_connection(("127.0.0.1", daemon.port)))
            busy.sendall(frames.PREFACE + frames.settings({}) + watch)
        assert run_command("status", "--address", daemon.address).returncode == 0
        client = stack.enter_context(WireClient(daemon.address))
        with pytest.raises(grpc.RpcError) as refused:
            client.send(a_message("orders", "m-1"))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "kept for operators" in (refused.value.details() or "")
        assert run_command("status", "--address", daemon.address).returncode == 0
        daemon.stop()
