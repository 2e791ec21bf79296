"""The fronts of a daemon: started, given connections in turn, watched, replaced, and ended in order."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import structlog

from broker_adapter.clock import Clock
from dmq.acl.quotas import Holder
from dmq.errors import DmqError
from dmq.http2 import address_of
from dmq.http2.bounds import Accounts
from dmq.http2.listener import Listener
from dmq.metrics import Calls
from dmq.processes import frames, passing
from dmq.processes.host import Host
from dmq.processes.link import Link
from dmq.processes.settings import Settings
from dmq.sidecar.http2_server import Port, said_plainly
from dmq.usage import ProcessStatus, front_name, store_process

PING_S: Final = 1.0
PONGS_MISSED_MAX: Final = 10  # of pings that were sent a second apart: a front whose loop does not turn
_START_S_MAX: Final = 60.0  # for Python to start, and to import what a front needs
_AGAIN_S: Final = (0.0, 0.1, 1.0, 5.0)  # before a front is started again, by how many failed one after the other
_FAILURES_MAX: Final = 10  # of one front in a row, before it said that it is ready
_END_S: Final = 2.0  # beyond its grace
_KILLED_S: Final = 5.0

log = structlog.get_logger("dmq.processes")


class FrontFailed(DmqError):
    """A front does not start."""


class Front:
    """One front as the store process knows it."""

    def __init__(self, number: int) -> None:
        self.name = front_name(number)
        self.connections: Counter[str] = Counter()  # by address
        self.figures: frames.Figures | None = None
        self.link: Link | None = None
        self.process: asyncio.subprocess.Process | None = None
        self.sockets: socket.socket | None = None
        self.is_ready = False
        self.starts = 0
        self.last_end = ""  # how its last process ended
        self.pings = 0
        self.pongs = 0

    @property
    def pid(self) -> int:
        """The process's; 0: there is none."""
        process = self.process
        return process.pid if process is not None and process.returncode is None else 0

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
        calls: Calls,
        version: str,
        on_failure: Callable[[DmqError], None],
    ) -> None:
        """``settings`` of a front that starts now. ``on_failure`` hears why there can be no front any more.

        ``data`` is the daemon's directory: a front's command line names it.
        """
        self._port = port
        self._data = data
        self._settings = settings
        self._host = host
        self._clock = clock
        self._calls = calls
        self._version = version
        self._on_failure = on_failure
        self.fronts = [Front(number) for number in range(count)]
        self._listener = Listener(host, port_number, self._take)
        self._port_number = port_number
        quotas = port.service.quotas
        bounds = quotas.bounds
        shares = count + 1
        self._accounts = accounts = Accounts(bounds.bytes_held // shares, bounds.bytes_reserve // shares)
        quotas.bytes_of = lambda holder: accounts.held_by(*holder) + sum(each.held_by(holder) for each in self.fronts)
        quotas.on_change = self._limits_changed
        self._keeping: list[asyncio.Task[None]] = []
        self._is_ending = False
        self._grace_s = 0.0

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
        self._port.health.set(is_serving=True)
        self._keeping.append(self._loop.create_task(self._watch(), name="dmq-fronts"))
        log.info("listening", host=self._host, port=self._port_number, fronts=[each.pid for each in self.fronts])
        return self._port_number

    async def stop(self, grace_s: float) -> None:
        """Take no new connections, end streams and long polls, and give the other calls ``grace_s`` to finish."""
        if self._is_ending:
            return
        self._is_ending = True
        self._grace_s = grace_s
        await self._listener.stop()
        self._port.drain()
        self._tell(frames.Drain(grace_s))
        keeping, watching = self._keeping[: len(self.fronts)], self._keeping[len(self.fronts) :]
        for each in watching:
            each.cancel()
        done, _ = await asyncio.wait(keeping, timeout=grace_s + _END_S) if keeping else (set(), set())
        if len(done) < len(keeping):
            for front in self.fronts:
                _kill(front)
            await asyncio.wait(keeping, timeout=_KILLED_S)
        for each in keeping:
            each.cancel()
        await asyncio.gather(*keeping, *watching, return_exceptions=True)

    def processes(self) -> Sequence[ProcessStatus]:
        """Return this process and the fronts; from any thread."""
        return [store_process(), *(each.status() for each in self.fronts)]

    # -- connections --------------------------------------------------------------------------------------------------

    async def _take(self, accepted: socket.socket, peer: object) -> None:
        """Give a connection to the front that has the fewest of its address; of these, to the one with the fewest."""
        address = address_of(peer)
        ready = [front for front in self.fronts if front.is_ready]
        ready.sort(key=lambda front: (front.connections[address], front.connections.total()))
        with accepted:
            for front in ready:
                assert front.sockets is not None
                try:
                    passing.pass_on(front.sockets, accepted, peer)
                except OSError as error:  # it takes none now, or never again
                    log.debug("connection_not_passed_on", front=front.name, why=error.strerror or str(error))
                    continue
                front.connections[address] += 1
                return
        log.debug("connection_refused", peer=str(peer), why="no front takes it")

    # -- what fronts say ----------------------------------------------------------------------------------------------

    def _tell(self, frame: frames.Frame) -> None:
        for front in self.fronts:
            if front.link is not None:
                front.link.say(frame)

    def _limits_changed(self) -> None:
        self._accounts.share_changed()
        self._tell(frames.Limits(self._port.service.quotas.encoded()))

    def _left(self, front: Front, frame: frames.Left) -> None:
        front.connections.subtract(frame.addresses)
        front.connections += Counter()  # without those that are nought

    def _counted(self, front: Front, frame: frames.Figures) -> None:
        front.figures = frame
        for each in frame.calls:
            self._calls.add(each)

    # -- processes ----------------------------------------------------------------------------------------------------

    async def _keep(self, front: Front, first: asyncio.Future[None]) -> None:
        """Have a front run until the daemon ends, whatever becomes of its processes."""
        failures = 0
        while True:
            try:
                why = await self._live(front, first)
                failures = 0
            except FrontFailed as error:
                failures += 1
                if not first.done():
                    first.set_exception(error)
                    return
                if failures >= _FAILURES_MAX:
                    self._on_failure(error)
                    return
                why = str(error)
            if self._is_ending:
                return
            front.last_end = why
            log.error("front_ended", front=front.name, why=why)
            await asyncio.sleep(_AGAIN_S[min(failures, len(_AGAIN_S) - 1)])

    async def _live(self, front: Front, first: asyncio.Future[None]) -> str:
        """Start a process, serve it, and return how it ended. Raises FrontFailed if it was never ready."""
        here, there = socket.socketpair()
        sockets, their_sockets = passing.pair()
        lost = self._loop.create_future()
        ready: asyncio.Future[None] = self._loop.create_future()
        with there, their_sockets:
            descriptors = there.fileno(), their_sockets.fileno()
            front.process = process = await asyncio.create_subprocess_exec(
                *(
                    sys.executable,
                    "-P",
                    "-m",
                    "dmq.processes.front",
                    front.name,
                    str(self._data),
                    *map(str, descriptors),
                ),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=descriptors,
                # Where this process found its modules, and nowhere else: not in the directory it happens to be in.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        front.starts += 1
        front.sockets = sockets
        hosts: list[Host] = []

        def on_lost() -> None:
            front.is_ready = False
            front.link = None
            for host in hosts:
                host.lose()
            _settle(lost)

        others: dict[type, Callable[[Any], None]] = {
            frames.Hello: lambda frame: self._greet(front, link, frame),
            frames.Ready: lambda _: _settle(ready),
            frames.Left: lambda frame: self._left(front, frame),
            frames.Figures: lambda frame: self._counted(front, frame),
            frames.Pong: lambda frame: setattr(front, "pongs", frame.number),
        }

        def on_frames(batch: Sequence[frames.Frame]) -> None:
            hosts[0].on_frames(batch)

        link = await Link.over(here, frames.from_front, on_frames, on_lost, reads_while_behind=False)
        hosts.append(Host(link, self._port, self._accounts, self._clock, others))
        try:
            await asyncio.wait([ready, lost], timeout=_START_S_MAX, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                self._welcomed(front, link)
                _settle(first)
                await lost
        finally:
            front.is_ready = False
            front.link = None
            front.connections.clear()
            front.figures = None
            front.sockets = None
            sockets.close()
            link.abort()
            code = await self._ended(process)
        if not ready.done():
            raise FrontFailed(f"a front process did not start (exit code {code}): its log says why")
        return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"

    def _greet(self, front: Front, link: Link, frame: frames.Hello) -> None:
        if frame.version != self._version:
            log.critical(
                "front_of_another_version",
                front=front.name,
                version=frame.version,
                why=f"this daemon runs {self._version}: restart it, another version was installed under it",
            )
            link.abort()
            return
        link.say(frames.Welcome(self._settings()))

    def _welcomed(self, front: Front, link: Link) -> None:
        front.link, front.is_ready = link, True
        log.info("front_serving", front=front.name, pid=front.pid, starts=front.starts)
        front.pings = front.pongs = 0
        link.say(frames.Listening(self._host, self._port_number))
        link.say(frames.Limits(self._port.service.quotas.encoded()))
        if self._is_ending:
            link.say(frames.Drain(self._grace_s))

    async def _ended(self, process: asyncio.subprocess.Process) -> int:
        """Return the exit code of a process whose link is lost; it is killed if it does not end by itself."""
        try:
            async with asyncio.timeout(_END_S):
                return await process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                process.kill()
            return await process.wait()

    async def _watch(self) -> None:
        """Tell the fronts the time, and end those that do not answer: their loop does not turn."""
        while True:
            await asyncio.sleep(PING_S)
            clock = self._clock
            time = frames.Time(clock.now_ms() - clock.boot_ms())
            for front in self.fronts:
                if front.link is None:
                    continue
                if front.pings - front.pongs >= PONGS_MISSED_MAX:
                    log.error("front_hangs", front=front.name, pid=front.pid, pings=front.pings - front.pongs)
                    _kill(front)
                    continue
                front.pings += 1
                front.link.say(time)
                front.link.say(frames.Ping(front.pings))


def _settle(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


def _kill(front: Front) -> None:
    if front.pid:
        with suppress(ProcessLookupError):
            os.kill(front.pid, signal.SIGKILL)
