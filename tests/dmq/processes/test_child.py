"""Processes that the daemon starts for itself."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

import pytest

from dmq.processes.child import Child

_WITH_A_HANDLER = """
import asyncio, ctypes, sys
from dmq.processes.child import Child

ran = []
prepare = ctypes.CFUNCTYPE(None)(lambda: ran.append("prepare"))
assert ctypes.CDLL(None).__register_atfork(prepare, None, None, None) == 0

async def start():
    return await Child([sys.executable, "-c", "raise SystemExit(3)"], descriptors=[], environment={}).wait()

print(asyncio.run(start()), ran)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="handlers of forks are registered by glibc's name of it")
def test_no_handler_of_a_fork_runs() -> None:
    """Danger: gRPC's did in the daemon of a cluster, and the new process crashed before it was another program."""
    done = subprocess.run([sys.executable, "-c", _WITH_A_HANDLER], capture_output=True, text=True, check=True)
    assert done.stdout == "3 []\n"


def test_it_is_killed_and_waited_for() -> None:
    """Its end is told to all who wait, and killing it again does nothing."""

    async def scenario() -> None:
        child = Child([sys.executable, "-c", "import time; time.sleep(600)"], descriptors=[], environment={})
        waiting = [asyncio.ensure_future(child.wait()) for _ in range(2)]
        waiting[0].cancel()
        child.kill()
        assert await waiting[1] == -signal.SIGKILL
        assert child.has_ended
        child.kill()
        assert await child.wait() == -signal.SIGKILL

    asyncio.run(scenario())


def test_a_missing_file_is_an_error_at_once() -> None:
    """No thread waits for it."""

    async def scenario() -> None:
        with pytest.raises(FileNotFoundError):
            Child(["/nowhere/to/be/found"], descriptors=[], environment={})

    asyncio.run(scenario())
