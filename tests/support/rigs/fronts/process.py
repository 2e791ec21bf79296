"""A front as a process of its own, with a test in the place of the store process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from socket import socket, socketpair
from tempfile import TemporaryFile
from typing import IO, Any

from dmq.acl.quotas import QuotaBounds
from dmq.processes import frames, passing
from dmq.processes.settings import Settings

START_S = 60.0


def front_settings(**changes: Any) -> Settings:  # noqa: ANN401 - of any field
    """Return what a front is told that serves everybody in plain text, and passes no call on."""
    bounds = QuotaBounds()
    told: dict[str, Any] = {
        "log_level": "info",
        "log_format": "json",
        "delay_levels_ms": (1_000, 5_000),
        "delay_max_ms": None,
        "broker_name": "broker",
        "sends_in_flight_max": 1_000,
        "sends_busy": 500,
        "connections": 100,
        "connections_per_address": None,
        "idle_s": None,
        "request_s": 60.0,
        "bytes_held": bounds.bytes_held,
        "bytes_reserve": bounds.bytes_reserve,
        "limits": b"",
        "shares": 2,
        "acl": None,
        "tls": None,
        "plain_served_to": "all",
        "host": "127.0.0.1",
        "relayed": [],
        "wall_less_boot_ms": 0,
    }
    return Settings(**{**told, **changes})


class FrontProcess:
    """The process, and what it says until somebody reads that."""

    def __init__(self, process: subprocess.Popen[bytes], link: socket, log: IO[bytes]) -> None:
        self.process = process
        self._link = link
        self._said = link.makefile("rb")
        self._log = log

    def tell(self, *said: frames.Frame) -> None:
        """Say something, as the store process."""
        self._link.sendall(frames.encode(said))

    def batch(self) -> list[frames.Frame]:
        """Return what it says next, in one batch; EOFError once it has ended."""
        head = self._said.read(frames.LENGTH_BYTES)
        if len(head) < frames.LENGTH_BYTES:
            raise EOFError
        return list(frames.from_front(self._said.read(frames.length_at(bytearray(head), 0))))

    def ends(self) -> int:
        """End its stream, with which it has to end, and return its exit code."""
        self._said.close()
        self._link.close()
        return self.process.wait(START_S)

    def log(self) -> str:
        """Return what it wrote to stderr."""
        self._log.seek(0)
        return self._log.read().decode()


@contextmanager
def front_process(*options: str) -> Iterator[FrontProcess]:
    """Start one, by a Python with these options; it is killed if it did not end."""
    here, there = socketpair()
    here.settimeout(START_S)
    sockets, their_sockets = passing.pair()
    with here, sockets, TemporaryFile() as log:
        with there, their_sockets:
            descriptors = there.fileno(), their_sockets.fileno()
            command = [sys.executable, *options, "-m", "dmq.processes.front", "front-0", "data", *map(str, descriptors)]
            process = subprocess.Popen(command, stderr=log, pass_fds=descriptors)
        try:
            yield FrontProcess(process, here, log)
        finally:
            process.kill()
            process.wait()
