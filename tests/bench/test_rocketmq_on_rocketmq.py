"""The cluster of the tests itself."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest
from support.rigs.rocketmq.cluster import cluster

pytestmark = pytest.mark.cluster
_LISTENS = "0A"
_LOOPBACK = {
    socket.inet_aton("127.0.0.1"),
    socket.inet_pton(socket.AF_INET6, "::1"),
    socket.inet_pton(socket.AF_INET6, "::ffff:127.0.0.1"),
}


def listens_at(pid: int) -> dict[int, bytes]:
    """Return the ports that a process listens at, and at which address."""
    sockets = {str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir() if each.is_symlink()}
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == _LISTENS and f"socket:[{inode}]" in sockets:
                address, port = local.split(":")
                words = (bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8))
                found[int(port, 16)] = b"".join(words)
    return found


@pytest.mark.skipif(shutil.which("cc") is None, reason="without a C compiler three ports of each broker are open")
def test_it_listens_at_the_loopback_alone() -> None:
    """Nobody from outside reaches a broker, its proxy or the name server of a test run."""
    for process in cluster().rocketmq.processes:
        ports = listens_at(process.pid)
        assert ports
        assert {port for port, address in ports.items() if address not in _LOOPBACK} == set()
