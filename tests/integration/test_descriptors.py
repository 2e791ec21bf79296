"""Descriptors are few and clients are many: the daemon goes on, and operators get in."""

from __future__ import annotations

import socket
import sys
from contextlib import ExitStack
from pathlib import Path

from support.daemon import Daemon, run_command
from support.wire_client import WireClient, a_message

from broker_adapter.wire import rocketmq_v2 as wire
from dmq.daemon.descriptors import share

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


def test_idle_sockets_lock_nobody_out(tmp_path: Path) -> None:
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
