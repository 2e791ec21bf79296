"""A process that this one started, waited for on the event loop."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress


class Child:
    """Starts a process, and tells the loop when it has ended. Raises OSError if it cannot be started.

    It is started by ``subprocess``, whose way into the other program runs none of the handlers that libraries leave for
    a fork: gRPC's, in the daemon of a cluster, look after threads that the new process does not have, and crash it. The
    loop's own way is a plain fork.
    """

    def __init__(self, command: Sequence[str], *, descriptors: Sequence[int], environment: Mapping[str, str]) -> None:
        """``descriptors`` are those that it inherits, beside those for output and errors."""
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=descriptors, env=environment, close_fds=True
        )
        threading.Thread(target=self._wait, name="dmq-child", daemon=True).start()

    @property
    def pid(self) -> int:
        """The process's; it may be somebody else's once it has ended."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether it is known to have ended."""
        return self._process.returncode is not None

    def kill(self) -> None:
        """End it at once; nothing happens if it has ended."""
        self._process.kill()

    def terminate(self) -> None:
        """Ask it to end; nothing happens if it has ended."""
        self._process.terminate()

    async def wait(self) -> int:
        """Return its exit code once it has ended: that of a signal is negative."""
        return await asyncio.shield(self._ended)

    def _wait(self) -> None:
        code = self._process.wait()
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._tell, code)

    def _tell(self, code: int) -> None:
        if not self._ended.done():
            self._ended.set_result(code)
