"""Everything that fits ``DelaySink``, behind one handle, for the contract suite.

The sinks in this process have a wall clock that a test moves on; the daemon has the host's, so its tests wait for what
becomes due in a moment. Timeouts are real for all of them.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, TypeVar

from support.rigs.daemon.process import Daemon

from broker_adapter.runtime.clock import ManualClock, SystemClock
from dmq.client import SidecarClient
from dmq.producer_store.spool import Spool
from retry.sink import DelaySink, Entry, Held, SinkError
from retry.testing import MemorySink

PATIENCE_S = 15.0  # nothing waits that long unless it is broken
_T = TypeVar("_T")
_numbers = itertools.count(1)


class SkippingClock:
    """The host's clock, and whatever was skipped: tests need not wait, and time does not stand still either."""

    def __init__(self) -> None:
        self._skipped = ManualClock(0)
        self._real = SystemClock()

    def now_ms(self) -> int:
        return self._real.now_ms() + self._skipped.now_ms()

    def monotonic_s(self) -> float:
        return self._real.monotonic_s()

    def boot_ms(self) -> int:
        return self._real.boot_ms() + self._skipped.boot_ms()

    def boot_id(self) -> str:
        return self._real.boot_id()

    def advance(self, ms: int) -> None:
        """Skip ``ms`` on the wall clock."""
        self._skipped.advance(ms)


class SinkRig(Protocol):
    """A sink and what a test does to it. ``type_name`` is of this test alone."""

    type_name: str
    sink: DelaySink
    knows_backlog: bool  # figures and ``has_waiting`` are exact

    def advance(self, ms: int) -> None:
        """Let ``ms`` pass, or let them be waited for by the next take."""
        ...

    def restart(self) -> None:
        """End the run as abruptly as the sink can be ended, and begin another."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class MemoryRig:
    """The sink of tests."""

    knows_backlog = True

    def __init__(self, path: Path, daemon: Daemon | None) -> None:
        self.type_name = _type_name()
        self._clock = SkippingClock()
        self.sink: DelaySink = MemorySink(self._clock)

    def advance(self, ms: int) -> None:
        self._clock.advance(ms)

    def restart(self) -> None:
        assert isinstance(self.sink, MemorySink)
        self.sink = self.sink.crash()

    def close(self) -> None:
        self.sink.close()


class SpoolRig:
    """RocksDB in this process. It cannot be killed alone: its restart is a close with entries in hand."""

    knows_backlog = True

    def __init__(self, path: Path, daemon: Daemon | None) -> None:
        self.type_name = _type_name()
        self._path = path / "spool"
        self._clock = SkippingClock()
        self.sink: DelaySink = Spool(self._path, clock=self._clock)

    def advance(self, ms: int) -> None:
        self._clock.advance(ms)

    def restart(self) -> None:
        self.sink.close()
        self.sink = Spool(self._path, clock=self._clock)

    def close(self) -> None:
        self.sink.close()


class SidecarRig:
    """A client of a real daemon. Its restart kills the daemon, and another client goes on."""

    knows_backlog = False

    def __init__(self, path: Path, daemon: Daemon | None) -> None:
        assert daemon is not None
        self.type_name = _type_name()
        self._daemon = daemon
        self.sink: DelaySink = SidecarClient(daemon.address)

    def advance(self, ms: int) -> None:
        """Nothing: the daemon's clock goes by itself."""

    def restart(self) -> None:
        self._daemon.kill()
        self.sink.close()
        self._daemon.restart()
        self.sink = SidecarClient(self._daemon.address)

    def close(self) -> None:
        self.sink.close()


Make = Callable[[Path, Daemon | None], SinkRig]
EVERY_SINK: Sequence[tuple[str, Make]] = (("memory", MemoryRig), ("spool", SpoolRig), ("sidecar", SidecarRig))


def an_entry(rig: SinkRig, number: int = 1, *, in_ms: int = 0, **facts: Any) -> Entry:  # noqa: ANN401 - any field
    """Return an entry of a number, due ``in_ms`` from now."""
    now_ms = rig.sink.clock.now_ms()
    given = {"payload": b"payload %d" % number, "created_at_ms": now_ms - 1_000, "due_at_ms": now_ms + in_ms, **facts}
    return Entry(type_name=rig.type_name, uid=uid_of(number), **given)


def uid_of(number: int) -> bytes:
    """Return the uid of an entry: those of two types may be the same, and they have the order of their numbers."""
    return number.to_bytes(16, "big")


def put(rig: SinkRig, *entries: Entry) -> None:
    """Put entries, one after the other, each durable."""
    for entry in entries:
        assert result(rig.sink.put(entry)) is None, "what is not held belongs to nobody"


def result(future: Future[_T]) -> _T:
    """Return what a future comes to."""
    return future.result(PATIENCE_S)


def take(rig: SinkRig, count: int = 1, *, within_s: float = PATIENCE_S, most: int = 32) -> list[Held]:
    """Take ``count`` entries, in as many calls as that needs; fail if they do not come."""
    taken: list[Held] = []
    clock = SystemClock()
    until_s = clock.monotonic_s() + within_s
    while len(taken) < count:
        left_s = until_s - clock.monotonic_s()
        assert left_s > 0, f"only {len(taken)} of {count} came"
        taken += rig.sink.take(rig.type_name, min(most, count - len(taken)), left_s)
    return taken


def take_when_due(rig: SinkRig, due_at_ms: int, in_ms: int, count: int = 1) -> list[Held]:
    """Take what is due then, ``in_ms`` from now; nothing comes before, also if the machine stands still meanwhile."""
    early = list(rig.sink.take(rig.type_name, 8, 0.0))
    assert not early or rig.sink.clock.now_ms() >= due_at_ms
    rig.advance(in_ms)
    return early + take(rig, count - len(early), most=8)


def none_left(rig: SinkRig) -> bool:
    """Say whether there is nothing to take now; what is about to be ready gets a moment."""
    return not rig.sink.take(rig.type_name, 32, 0.3)


def numbers(taken: Sequence[Held]) -> list[int]:
    """Return the numbers of entries."""
    return [int.from_bytes(each.entry.uid, "big") for each in taken]


def failure_of(call: Callable[[], Future[Any]]) -> BaseException | None:
    """Return what a call fails with, at once or by its future."""
    try:
        return call().exception(PATIENCE_S)
    except (SinkError, ValueError) as error:
        return error


def _type_name() -> str:
    return f"orders-{os.getpid()}-{next(_numbers)}"
