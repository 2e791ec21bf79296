"""The fronts of a daemon: started, given connections in turn, watched, replaced, and ended in order."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import structlog

from broker_adapter.runtime.clock import Clock
from dmq.acl.quotas import Holder, Quota
from dmq.errors import DmqError
from dmq.http2 import Accounts, SocketListener, address_of
from dmq.metrics.registry import CallsMetric
from dmq.metrics.usage import ProcessStatus, front_name, store_process
from dmq.processes import frames, passing
from dmq.processes.child import Child
from dmq.processes.clocks import wall_less_boot_ms
from dmq.processes.host import Host
from dmq.processes.link import Link
from dmq.processes.settings import Settings, part_of
from dmq.rocketmq_server.transport.http2_server import Port, said_plainly

_LATE_PONGS: Final = 2  # a front that owes so many gets no connection as long as another one can take it
_SHORT_LIFE_S: Final = 1.0  # a front that ends so soon after it was ready is not started again at once each time
_PASS_AGAIN_S: Final = 0.05
_KILLED_S: Final = 5.0

log = structlog.get_logger("dmq.processes")


class FrontFailed(DmqError):
    """A front does not start."""


class Patience(NamedTuple):
    """How long the store process waits for fronts, and how often."""

    ping_s: float = 1.0
    pongs_missed_max: int = 10  # of pings in a row: a front whose loop does not turn; half of it at the daemon's end
    start_s: float = 60.0  # for Python to start, and to import what a front needs
    again_s: tuple[float, ...] = (0.0, 0.1, 1.0, 5.0)  # before a start, by how many failed one after the other
    failures_max: int = 10  # of one front in a row, before it said that it is ready
    end_s: float = 2.0  # for a front to end by itself: beyond its grace, or when its link is lost


PATIENCE: Final = Patience()


class FrontRecord:
    """One front as the store process knows it."""

    def __init__(self, number: int) -> None:
        self.name = front_name(number)
        self.connections: Counter[str] = Counter()  # by address
        self.figures: frames.Figures | None = None
        self.link: Link | None = None
        self.process: Child | None = None
        self.sockets: socket.socket | None = None
        self.is_ready = False
        self.starts = 0
        self.last_end = ""  # how its last process ended
        self.pings = 0
        self.pongs = 0
        self.refused = ""  # why the last process was not welcomed

    @property
    def pid(self) -> int:
        """The process's; 0: there is none."""
        process = self.process
        return process.pid if process is not None and not process.has_ended else 0

    def status(self) -> ProcessStatus:
        """Return how it is, by what it said last; from any thread."""
        pid, figures = self.pid, self.figures
        known = ProcessStatus(
            name=self.name,
            pid=pid,
            state="serving" if self.is_ready else "starting" if pid else "ended",
            starts=self.starts,
            last_end=self.last_end,
        )
        if figures is None:
            return known
        return replace(
            known,
            connections=figures.connections,
            streams=figures.streams,
            cpu_s=figures.cpu_s,
            memory_bytes=figures.memory_bytes,
        )

    def held_by(self, holder: Holder) -> int:
        """Return how many bytes wait there for an address or a key, as it said last."""
        figures = self.figures
        return sum(size for who, size in figures.held_bytes if who == holder) if figures is not None else 0

    def begin(self, process: Child, sockets: socket.socket) -> None:
        """Take note of a process that was started."""
        self.process, self.sockets = process, sockets
        self.starts += 1
        self.refused = ""

    def serves(self, link: Link) -> None:
        """Take note that the process takes connections."""
        self.link, self.is_ready = link, True
        self.pings = self.pongs = 0

    def ends(self) -> None:
        """Take note that it takes none any more."""
        self.is_ready = False
        self.link = self.sockets = self.figures = None
        self.connections.clear()

    def kill(self) -> None:
        """End the process at once, if there is one."""
        if self.process is not None:
            self.process.kill()


class Fronts:
    """Serves a port by front processes: fits ``Transport``. Make and use it on one event loop."""

    def __init__(
        self,
        port: Port,
        *,
        data: Path,
        settings: Callable[[], Settings],
        count: int,
        host: str,
        port_number: int,
        clock: Clock,
        calls: CallsMetric,
        version: str,
        on_failure: Callable[[DmqError], None],
        patience: Patience = PATIENCE,
        sockets: Iterable[socket.socket] = (),
    ) -> None:
        """``settings`` of a front that starts now. ``on_failure`` hears why there can be no front any more.

        ``data`` is the daemon's directory: a front's command line names it. ``sockets`` listen already.
        """
        self._port = port
        self._data = data
        self._settings = settings
        self._host = host
        self._clock = clock
        self._calls = calls
        self._version = version
        self._on_failure = on_failure
        self._patience = patience
        self.fronts = [FrontRecord(number) for number in range(count)]
        self._listener = SocketListener(host, port_number, self._take, sockets)
        self._port_number = port_number
        quotas = port.service.quotas
        bounds = quotas.bounds
        shares = count + 1
        self._accounts = accounts = Accounts(
            bounds.bytes_held // shares,
            bounds.bytes_reserve // shares,
            lambda kind, name: part_of(quotas.limit(Quota.BYTES, Holder(kind, name)), shares),
        )
        quotas.bytes_of = lambda holder: accounts.held_by(*holder) + sum(each.held_by(holder) for each in self.fronts)
        quotas.on_change = self._limits_changed
        self._keeping: list[asyncio.Task[None]] = []
        self._ending = asyncio.Event()

    async def start(self) -> int:
        """Start the fronts, listen, and return the port. Raises AddressInUse and DmqError."""
        self._loop = asyncio.get_running_loop()
        ready = [self._loop.create_future() for _ in self.fronts]
        self._keeping = [
            self._loop.create_task(self._keep(front, first), name=f"dmq-{front.name}")
            for front, first in zip(self.fronts, ready, strict=True)
        ]
        await asyncio.gather(*ready)
        with said_plainly(self._host, self._port_number):
            self._port_number = await self._listener.start()
        self._port.service.listening_at(self._host, self._port_number)
        self._tell(frames.Listening(self._host, self._port_number))
        await self.set_serving(is_serving=True)
        self._keeping.append(self._loop.create_task(self._watch(), name="dmq-fronts"))
        log.info("listening", host=self._host, port=self._port_number, fronts=[each.pid for each in self.fronts])
        return self._port_number

    async def set_serving(self, *, is_serving: bool) -> None:
        """Set the state of the health service; calls are answered in either state."""
        self._port.health.set(is_serving=is_serving)

    def abort(self) -> None:
        """End every connection now: the fronts are killed, since an answer of this process may be on its way there."""
        for front in self.fronts:
            front.kill()

    async def stop(self, grace_s: float) -> None:
        """Take no new connections, end streams and long polls, and give the other calls ``grace_s`` to finish.

        A front that hangs meanwhile is found as ever, and killed; so is one that serves nobody yet.
        """
        if self._ending.is_set():
            return
        self._ending.set()
        await self._listener.stop()
        self._port.drain()
        self._tell(frames.DrainFront(grace_s))
        for front in self.fronts:
            if not front.is_ready:
                front.kill()
        keeping, watching = self._keeping[: len(self.fronts)], self._keeping[len(self.fronts) :]
        if keeping:
            _, late = await asyncio.wait(keeping, timeout=grace_s + self._patience.end_s)
            if late:
                for front in self.fronts:
                    front.kill()
                await asyncio.wait(late, timeout=_KILLED_S)
        for each in self._keeping:
            each.cancel()
        await asyncio.gather(*keeping, *watching, return_exceptions=True)

    def processes(self) -> Sequence[ProcessStatus]:
        """Return this process and the fronts; from any thread."""
        return [store_process(), *(each.status() for each in self.fronts)]

    # -- connections --------------------------------------------------------------------------------------------------

    async def _take(self, accepted: socket.socket, peer: object) -> None:
        """Give a connection to a front; while none takes it, it waits, and those behind it are not accepted."""
        address = address_of(peer)
        with accepted:
            while not any(self._passes_on(front, accepted, peer) for front in self._in_turn(address)):  # noqa: ASYNC110
                await asyncio.sleep(_PASS_AGAIN_S)  # nothing tells that there is room

    def _in_turn(self, address: str) -> list[FrontRecord]:
        """Return the fronts that are ready: first those that answer, the one with the fewest of an address before
        others, and of these the one with the fewest.
        """

        def key(front: FrontRecord) -> tuple[bool, int, int]:
            is_late = front.pings - front.pongs >= _LATE_PONGS
            return is_late, front.connections[address], front.connections.total()

        return sorted((front for front in self.fronts if front.is_ready), key=key)

    def _passes_on(self, front: FrontRecord, accepted: socket.socket, peer: object) -> bool:
        assert front.sockets is not None
        try:
            passing.pass_on(front.sockets, accepted, peer)
        except OSError as error:  # it takes none now, or never again
            log.debug("connection_handover_failed", front=front.name, why=error.strerror or str(error))
            return False
        front.connections[address_of(peer)] += 1
        return True

    # -- what fronts say ----------------------------------------------------------------------------------------------

    def _tell(self, frame: frames.Frame) -> None:
        for front in self.fronts:
            if front.link is not None:
                front.link.say(frame)

    def _limits_changed(self) -> None:
        self._accounts.share_changed()
        self._tell(frames.OperatorLimits(self._port.service.quotas.encoded()))

    def _left(self, front: FrontRecord, frame: frames.Left) -> None:
        connections = front.connections
        for address in frame.addresses:
            connections[address] -= 1
            if not connections[address]:
                del connections[address]

    def _counted(self, front: FrontRecord, frame: frames.Figures) -> None:
        front.figures = frame
        for each in frame.calls:
            self._calls.add(each)

    # -- processes ----------------------------------------------------------------------------------------------------

    async def _keep(self, front: FrontRecord, first: asyncio.Future[None]) -> None:
        """Have a front run until the daemon ends, whatever becomes of its processes.

        One that cannot start, such as while a file of keys is wrong, does not end the daemon that others serve.
        """
        patience = self._patience
        failures = 0
        while not self._ending.is_set():
            try:
                lived_s, why = await self._live(front, first)
                failures = min(failures + 1, len(patience.again_s) - 1) if lived_s < _SHORT_LIFE_S else 0
            except FrontFailed as error:
                failures += 1
                if not first.done():
                    first.set_exception(error)
                    return
                if failures >= patience.failures_max and not any(each.is_ready for each in self.fronts):
                    self._on_failure(error)
                    return
                why = str(error)
            front.last_end = why
            if not self._ending.is_set():
                again_s = patience.again_s[min(failures, len(patience.again_s) - 1)]
                log.error("front_ended", front=front.name, why=why, again_s=again_s)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), again_s)

    async def _live(self, front: FrontRecord, first: asyncio.Future[None]) -> tuple[float, str]:
        """Start a process, serve it, and return for how long it was ready and how it ended.

        Raises FrontFailed if it was never ready.
        """
        patience, monotonic_s = self._patience, self._clock.monotonic_s
        ready: asyncio.Future[None] = self._loop.create_future()
        lost: asyncio.Future[None] = self._loop.create_future()
        ready_s, code = 0.0, 0
        with ExitStack() as ours:
            try:
                here, there = map(ours.enter_context, socket.socketpair())
                sockets, their_sockets = map(ours.enter_context, passing.pair())
                link = await self._link(front, here, ready, lost)  # first, or what it says could come too soon
                ours.callback(link.abort)
                process = self._started(front, there, their_sockets)
            except OSError as error:  # such as no descriptor left, or no memory
                raise FrontFailed(f"a front process cannot be started: {error.strerror or error}") from error
            front.begin(process, sockets)
            there.close()
            their_sockets.close()
            if self._ending.is_set():
                front.kill()
            try:
                await asyncio.wait([ready, lost], timeout=patience.start_s, return_when=asyncio.FIRST_COMPLETED)
                if ready.done():
                    ready_s = monotonic_s()
                    self._welcomed(front, link)
                    _settle(first)
                    await lost
            finally:
                front.ends()
                link.abort()
                code = await self._ended(process)
                front.process = None
        ended = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        if not ready.done():
            raise FrontFailed(front.refused or f"a front process did not start ({ended}): its log says why")
        return monotonic_s() - ready_s, ended

    async def _link(
        self, front: FrontRecord, here: socket.socket, ready: asyncio.Future[None], lost: asyncio.Future[None]
    ) -> Link:
        """Return the link to a process that is yet to be started; it says by the futures what becomes of that."""

        def on_lost() -> None:
            front.ends()
            if self._ending.is_set():
                host.end()
            else:
                host.lose()
            _settle(lost)

        def on_frames(batch: Sequence[frames.Frame]) -> None:
            host.on_frames(batch)

        others: dict[type, Callable[[Any], None]] = {
            frames.Hello: lambda frame: self._greet(front, link, frame),
            frames.Ready: lambda _: _settle(ready),
            frames.Left: lambda frame: self._left(front, frame),
            frames.Figures: lambda frame: self._counted(front, frame),
            frames.Pong: lambda frame: setattr(front, "pongs", frame.number),
        }
        stream = socket.socket(fileno=here.detach())
        link = await Link.over(stream, frames.from_front, on_frames, on_lost, reads_while_behind=False)
        host = Host(link, self._port, self._accounts, self._clock, others)
        return link

    def _started(self, front: FrontRecord, *theirs: socket.socket) -> Child:
        numbers = [each.fileno() for each in theirs]
        return Child(
            [sys.executable, "-P", "-m", "dmq.processes.front", front.name, str(self._data), *map(str, numbers)],
            descriptors=numbers,
            # Where this process found its modules, and nowhere else: not in the directory it happens to be in.
            environment={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    def _greet(self, front: FrontRecord, link: Link, frame: frames.Hello) -> None:
        if frame.version == self._version:
            link.say(frames.Welcome(self._settings()))
            return
        front.refused = (
            f"a front process is of version {frame.version}, and this daemon of {self._version}: "
            "restart it, another version was installed under it"
        )
        link.abort()

    def _welcomed(self, front: FrontRecord, link: Link) -> None:
        front.serves(link)
        log.info("front_serving", front=front.name, pid=front.pid, starts=front.starts)
        link.say(frames.Listening(self._host, self._port_number))
        link.say(frames.OperatorLimits(self._port.service.quotas.encoded()))

    async def _ended(self, process: Child) -> int:
        """Return the exit code of a process whose link is lost; it is killed if it does not end by itself."""
        try:
            async with asyncio.timeout(self._patience.end_s):
                return await process.wait()
        except TimeoutError:
            process.kill()
            return await process.wait()

    async def _watch(self) -> None:
        """Tell the fronts the time, and end those that do not answer: their loop does not turn."""
        patience = self._patience
        while True:
            await asyncio.sleep(patience.ping_s)
            time = frames.Time(wall_less_boot_ms(self._clock))
            for front in self.fronts:
                if front.link is None:
                    continue
                owed = front.pings - front.pongs
                if owed >= patience.pongs_missed_max // (2 if self._ending.is_set() else 1):
                    log.error("front_unresponsive", front=front.name, pid=front.pid, pongs_missed=owed)
                    front.kill()
                    continue
                front.pings += 1
                front.link.say(time)
                front.link.say(frames.Ping(front.pings))


def _settle(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)
