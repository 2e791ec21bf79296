"""The server of a web process ends at a signal, also while it starts."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.unit
_SIGNALLED = """
import os, signal, socket, sys
from contextlib import asynccontextmanager
from dmq.runtime.web_server import serve

@asynccontextmanager
async def application():
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    yield None

serve(application, [socket.create_server(("127.0.0.1", 0))], None, connections_max=1, grace_s=1)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_before_the_first_request_is_not_lost(name: str) -> None:
    """A daemon that is stopped just after its start would wait for the process until it kills it."""
    done = subprocess.run([sys.executable, "-c", _SIGNALLED, name], timeout=60, check=False)
    assert done.returncode == 0
