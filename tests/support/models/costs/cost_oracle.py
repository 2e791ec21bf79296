"""What input costs a daemon, and what it may: processor time and memory, measured from outside, per byte sent."""

from __future__ import annotations

import selectors
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from dmq.http2.codec import frames

CORPUS = Path(__file__).resolve().parents[3] / "corpus"
# Fixed parts: a connection, the first use of something, what the store and the interpreter do by themselves.
CPU_FIXED_S, CPU_S_PER_BYTE = 0.1, 1e-6
MEMORY_FIXED_BYTES, MEMORY_PER_BYTE = 48 * 2**20, 32
_QUIET_S, _QUIET_CPU_S = 0.05, 0.002
_PATIENCE_S = 60.0


class Cost(NamedTuple):
    """What some input cost."""

    sent_bytes: int
    cpu_s: float
    memory_bytes: int

    def excess(self) -> str:
        """Say what is more than allowed; empty if nothing is."""
        cpu_s = CPU_FIXED_S + CPU_S_PER_BYTE * self.sent_bytes
        memory_bytes = MEMORY_FIXED_BYTES + MEMORY_PER_BYTE * self.sent_bytes
        told = []
        if self.cpu_s > cpu_s:
            told.append(f"{self.cpu_s:.3f} s of processor time; {cpu_s:.3f} s is allowed")
        if self.memory_bytes > memory_bytes:
            told.append(f"{self.memory_bytes / 1e6:.0f} MB of memory; {memory_bytes / 1e6:.0f} MB is allowed")
        return f"{self.sent_bytes} bytes cost " + " and ".join(told) if told else ""


class Meter:
    """Reads what a daemon has used: its process and its fronts, all of which must be there already."""

    def __init__(self, pid: int) -> None:
        process = psutil.Process(pid)
        self._processes = [process, *process.children(recursive=True)]

    def cpu_s(self) -> float:
        """Return the processor time of all threads so far, to the nanosecond."""
        total_ns = 0
        for each in self._processes:
            with suppress(FileNotFoundError):  # a front that was replaced
                for task in Path(f"/proc/{each.pid}/task").iterdir():
                    with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
                        total_ns += int((task / "schedstat").read_text().split()[0])
        return total_ns / 1e9

    def memory_bytes(self) -> int:
        """Return the resident memory."""
        total = 0
        for each in self._processes:
            with suppress(psutil.NoSuchProcess):  # a front that was replaced
                total += int(each.memory_info().rss)
        return total

    def wait_until_quiet(self) -> int:
        """Return once the process does nothing any more, and the most memory that it had meanwhile."""
        most = self.memory_bytes()
        until_s = time.monotonic() + _PATIENCE_S
        before_s = self.cpu_s()
        while time.monotonic() < until_s:
            time.sleep(_QUIET_S)
            most = max(most, self.memory_bytes())
            now_s = self.cpu_s()
            if now_s - before_s < _QUIET_CPU_S:
                return most
            before_s = now_s
        raise AssertionError(f"the daemon is still busy {_PATIENCE_S} s after the last byte")


def cost_of(meter: Meter, port: int, said: bytes) -> Cost:
    """Send ``said`` on a connection of its own, close it once the daemon is quiet, and return what that cost."""
    meter.wait_until_quiet()
    cpu_s, memory = meter.cpu_s(), meter.memory_bytes()
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        sent = _send(connection, said)
        most = meter.wait_until_quiet()
        used_s = meter.cpu_s() - cpu_s
    return Cost(sent, used_s, most - memory)


def _send(connection: socket.socket, said: bytes) -> int:
    """Send and read at once, until all is sent or the daemon has closed; return how much was sent."""
    connection.setblocking(False)
    view, sent = memoryview(said), 0
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE)
        while sent < len(view):
            for _, ready in selector.select(10):
                try:
                    if ready & selectors.EVENT_READ and not connection.recv(2**20):
                        return sent
                    if ready & selectors.EVENT_WRITE:
                        sent += connection.send(view[sent:])
                except BlockingIOError:
                    continue
                except OSError:
                    return sent
    return sent


def corpus() -> list[Path]:
    """Return the inputs that are kept: the bytes of one connection each, without the preface that all begin with."""
    return sorted(CORPUS.glob("*.bin"))


def with_preface(said: bytes) -> bytes:
    """Return what a connection begins with, and ``said``."""
    return frames.PREFACE + frames.settings({}) + said
