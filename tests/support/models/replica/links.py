"""Direct links between simulated processes: connections that delay and lose messages, and directories with batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from support.models.replica.threads import Event, Process, current_task, wait_ms

from dmq.replication.link import LinkBroken, LinkChannel
from dmq.replication.link.frames import LinkFrame
from dmq.replication.link.received import ReceivedBatch

_DELAY_MS_MAX = 3
_BREAKS = 0.004  # of the messages
_REFUSES = 0.05  # of the connections
_NOTICES = 0.8  # of the ends of a process, by the other side
_NOTICED_MS_MAX = 20


class SimulatedChannel:
    """One side of a connection."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.peer: SimulatedChannel | None = None
        self._inbox: deque[bytes] = deque()
        self._news = Event()
        self._is_broken = False
        self._arrives_ms = 0  # the last message: order is kept

    def send(self, body: bytes, timeout_s: float) -> None:
        assert timeout_s
        self._require()
        scheduler, peer = self.process.scheduler, self.peer
        assert peer is not None
        if scheduler.rng.random() < _BREAKS:
            self.close()
        self._require()
        self._arrives_ms = max(self._arrives_ms, scheduler.now_ms + scheduler.rng.randint(0, _DELAY_MS_MAX))
        scheduler.at(self._arrives_ms - scheduler.now_ms, partial(peer.arrive, body))

    def receive(self, size_max: int, timeout_s: float) -> bytes:
        until_ms = self.process.now_ms() + round(timeout_s * 1000)
        while not self._inbox:
            self._require()
            left_ms = until_ms - self.process.now_ms()
            if left_ms <= 0:
                raise LinkBroken("no answer")
            self._news = Event()
            self._news.wait(left_ms / 1000)
        body = self._inbox.popleft()
        assert len(body) <= size_max
        return body

    def close(self) -> None:
        for each in (self, self.peer):
            if each is not None:
                each.break_off()

    def arrive(self, body: bytes) -> None:
        """Take a message of the other side."""
        self._inbox.append(body)
        self._news.set()

    def break_off(self) -> None:
        """Accept and send no message any more."""
        self._is_broken = True
        self._news.set()

    def _require(self) -> None:
        if self._is_broken:
            raise LinkBroken("broken")


class Network:
    """Ports of all processes, and the connections."""

    def __init__(self) -> None:
        self._ports: dict[str, tuple[Process, Callable[[LinkChannel], None]]] = {}
        self._channels: list[SimulatedChannel] = []

    def listen(self, serve: Callable[[LinkChannel], None]) -> str:
        """Open a port of the current process."""
        process = current_task().process
        address = f"{process.host.name}-{len(self._channels)}-{len(self._ports)}"
        self._ports[address] = (process, serve)
        return address

    def dial(self, address: str) -> SimulatedChannel:
        """Connect to a port."""
        process = current_task().process
        rng = process.scheduler.rng
        wait_ms(rng.randint(1, _DELAY_MS_MAX))
        found = self._ports.get(address)
        if found is None or found[0].is_dead or rng.random() < _REFUSES:
            raise LinkBroken("connection refused")
        near, far = SimulatedChannel(process), SimulatedChannel(found[0])
        near.peer, far.peer = far, near
        self._channels += [near, far]
        found[0].start(partial(found[1], far))
        return near

    def end(self, process: Process) -> None:
        """Break the connections of a process that ended; the other side may not notice."""
        scheduler = process.scheduler
        for each in self._channels:
            if each.process is process and scheduler.rng.random() < _NOTICES:
                scheduler.at(scheduler.rng.randint(1, _NOTICED_MS_MAX), each.close)
        self._channels = [each for each in self._channels if each.process is not process]


class SimulatedListener:
    """Port of the direct link of a standby."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def start(self, serve: Callable[[LinkChannel], None]) -> str:
        return self._network.listen(serve)

    def close(self) -> None:
        """Leave the port: its receiver refuses all connections."""


@dataclass(slots=True)
class ReceivedRow:
    """ReceivedBatches batch in a directory."""

    store: int
    epoch: int
    batch: ReceivedBatch
    is_synced: bool = False


class SimulatedReceived:
    """``ReceivedBatches`` in a simulated directory."""

    def __init__(self, directory: Any, *, makes: bool) -> None:  # noqa: ANN401 - of the simulation
        self._rows: list[ReceivedRow] = directory.received
        self._acknowledged: list[ReceivedRow] = directory.acknowledged
        self.member = directory.member if makes or self._rows else ""
        self._current: tuple[int, int] | None = None

    def begin(self, store: int, epoch: int) -> int:
        self._current = store, epoch
        return self.last(store, epoch)

    def add(self, frame: LinkFrame, body: bytes) -> int:
        assert body
        if self._current is None:
            raise LinkBroken("the log has a later epoch")
        store, epoch = self._current
        added = [
            ReceivedRow(store, epoch, ReceivedBatch(number, data, frame.time_ms))
            for number, data in enumerate(frame.batches, frame.first)
        ]
        self._rows += added
        if added:
            self.sync(added)
            self._acknowledged += added
        last = self.last(store, epoch)
        for each in self._rows[:]:
            if each.epoch == epoch and each.batch.number <= min(frame.stored, last - 1):
                self._rows.remove(each)
        return last

    def sync(self, added: list[ReceivedRow]) -> None:
        """Sync the last rows."""
        wait_ms(current_task().process.scheduler.rng.randint(0, 2))
        for each in added:
            each.is_synced = True

    def last(self, store: int, epoch: int) -> int:
        return max((each.batch.number for each in self._rows if (each.store, each.epoch) == (store, epoch)), default=0)

    def after(self, store: int, epoch: int, batch: int) -> list[ReceivedBatch]:
        of_epoch = [each.batch for each in self._rows if (each.store, each.epoch) == (store, epoch)]
        return [each for each in of_epoch if each.number > batch]

    def drop_before(self, store: int, epoch: int) -> None:
        if self._current is not None and self._current[1] < epoch:
            self._current = None
        self._rows[:] = [each for each in self._rows if each.store == store and each.epoch >= epoch]

    def close(self) -> None:
        """Keep the rows."""
