"""A front process: serves the connections that it is given, and makes their calls to the store process.

    python -m dmq.processes.front NAME DATA LINK SOCKETS

NAME is its name in logs, such as front-0. DATA is the daemon's directory, which a front never opens: it tells whoever
looks at ``ps`` whose front this is. LINK and SOCKETS are numbers of descriptors: a stream to the store process, and a
socket by which accepted connections come. It ends with the store process, and never without it: signals that are meant
for the daemon are that one's to hear.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # structlog would load it for tracebacks, which are drawn plainly here: a tenth of a second of each start
    sys.modules["rich"] = None  # type: ignore[assignment]  # which makes it one that is not there

import asyncio
import signal
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog
import uvloop

from broker_adapter.contracts.limits import REQUEST_BYTES_MAX
from broker_adapter.runtime.clock import SystemClock
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.acl.file import KeyFile
from dmq.acl.gate import RpcPolicy
from dmq.acl.guard import Authenticator
from dmq.acl.quotas import Holder, Quota, QuotaBounds, Quotas
from dmq.admin.api import entrances
from dmq.errors import DmqError, with_advice
from dmq.http2 import Http2Server, address_of, no_certificate_fault
from dmq.http2 import Limits as Http2Limits
from dmq.metrics.counting import CallCounts
from dmq.metrics.usage import usage
from dmq.processes import frames, passing
from dmq.processes.clocks import FrontClock
from dmq.processes.link import Link
from dmq.processes.settings import Settings, part_of
from dmq.processes.store_process import StoreProcess
from dmq.processes.tuning import tune
from dmq.rocketmq_server.calls.access import Guarded, all_entrances
from dmq.rocketmq_server.calls.call import Call
from dmq.rocketmq_server.calls.dispatch import Dispatcher
from dmq.rocketmq_server.rpc.messages import ClientMessageCalls
from dmq.rocketmq_server.sessions.settings import SidecarConfig
from dmq.rocketmq_server.transport.http2_methods import messaging, with_bounds
from dmq.rocketmq_server.transport.tls import Certificates
from dmq.runtime.background import die_with_parent
from dmq.runtime.log import configure
from dmq.version import version_here

_FIGURES_S: Final = 1.0
_HOLDERS_TOLD: Final = 100
_UNSENT_HIGH: Final = 1024 * 1024  # what the store process did not take yet; then clients wait before they say more
_SEND_PATH: Final = wire.METHODS["SendMessage"].path

log = structlog.get_logger("dmq.processes")


@dataclass(frozen=True, slots=True)
class _Messages:
    """What a front serves by itself: fits ``Served``."""

    unary: Mapping[str, Callable[[Any, Call], Awaitable[Any]]]
    streaming: Mapping[str, Callable[[Any, Call], Awaitable[Iterator[Any]]]]

    def telemetry(
        self, requests: AsyncIterator[wire.TelemetryCommand], call: Call
    ) -> AsyncGenerator[wire.TelemetryCommand, None]:
        raise NotImplementedError("telemetry is the store process's")


class Front:
    """Everything of a front but its process. Belongs to the event loop."""

    def __init__(self, settings: Settings, link: Link, clock: FrontClock) -> None:
        self._settings = settings
        self._link = link
        self.clock = clock
        self.store = StoreProcess(link, clock)
        self.calls = CallCounts()
        bounds = QuotaBounds(bytes_held=settings.bytes_held, bytes_reserve=settings.bytes_reserve)
        self._quotas = Quotas(clock, bounds, settings.limits)
        config = SidecarConfig(
            delay_levels_ms=settings.delay_levels_ms,
            delay_max_ms=settings.delay_max_ms,
            broker_name=settings.broker_name,
            sends_in_flight_max=settings.sends_in_flight_max,
            sends_busy=settings.sends_busy,
        )
        self._messages = messages = ClientMessageCalls(self.store, clock, config, self._send_other)
        self._keys = KeyFile(Path(settings.acl), clock, tells=False) if settings.acl is not None else None
        self._certificates = _certificates(settings, clock)
        self.look_at_files()
        guard = Authenticator(self._keys, clock) if self._keys is not None else None
        served = _Messages(messages.unary, messages.streaming)
        dispatcher = Dispatcher(Guarded(served, guard) if guard else served, clock=clock, observer=self.calls)
        self.server = Http2Server(
            {
                **self.store.methods(settings.relayed),
                **messaging(dispatcher, (*messages.unary, *messages.streaming)),
            },
            host=settings.host,
            port=0,
            monotonic_s=clock.monotonic_s,
            limits=with_bounds(http2_limits(settings), bounds, settings.shares),
            admit=RpcPolicy(all_entrances(entrances()), guard, self._quotas).admit,
            share_of=self._share_of,
            tls=self._certificates.context if self._certificates is not None else None,
            certificate_fault=self._certificates.fault if self._certificates is not None else no_certificate_fault,
            plain_served_to=settings.plain_served_to,
            is_busy=messages.is_busy,
            is_full=lambda: link.is_behind,
            on_left=self._left,
        )
        messages.on_room = link.on_room = self.server.turns.go_on
        self._quotas.on_change = self.server.accounts.share_changed
        self._left_addresses: list[str] = []

    def takes(self) -> Mapping[type, Callable[[Any], None]]:
        """Return who takes each kind of frame, but for the end."""
        return {
            **self.store.takes(),
            frames.Time: self._set_time,
            frames.OperatorLimits: self._set_limits,
            frames.Listening: self._listening,
            frames.Ping: lambda frame: self._link.say(frames.Pong(frame.number)),
        }

    def look_at_files(self) -> None:
        """Read files of keys and certificates that changed. Raises DmqError for wrong ones if none were good before."""
        if self._keys is not None:
            self._keys.keys()
        if self._certificates is not None:
            self._certificates.context()

    def tell_figures(self) -> None:
        """Tell the store process what was counted."""
        figures, accounts = self.server.figures(), self.server.accounts
        held = [(Holder(kind, name), size) for kind, name, size in accounts.held(_HOLDERS_TOLD)]
        self._link.say(
            frames.Figures(
                self.calls.take(),
                figures.connections,
                figures.streams,
                held,
                *usage(),
            )
        )

    async def _send_other(self, request: wire.SendMessageRequest, call: Call) -> wire.SendMessageResponse:
        headers: Any = call.headers  # this transport's
        answer = await self.store.unary(_SEND_PATH, request.SerializeToString(), headers)
        return wire.SendMessageResponse.FromString(answer)

    def _share_of(self, kind: str, name: str) -> int | None:
        return part_of(self._quotas.limit(Quota.BYTES, Holder(kind, name)), self._settings.shares)

    def lose(self, peer: object) -> None:
        """Note that a connection from ``peer`` did not arrive here."""
        self._left(address_of(peer))

    def _left(self, address: str) -> None:
        if not self._left_addresses:
            asyncio.get_running_loop().call_soon(self._tell_left)
        self._left_addresses.append(address)

    def _tell_left(self) -> None:
        left, self._left_addresses = self._left_addresses, []
        self._link.say(frames.Left(left))

    def _set_time(self, frame: frames.Time) -> None:
        self.clock.wall_less_boot_ms = frame.wall_less_boot_ms

    def _set_limits(self, frame: frames.OperatorLimits) -> None:
        self._quotas.read(frame.encoded)

    def _listening(self, frame: frames.Listening) -> None:
        host, port = frame.host, frame.port
        self._messages.store_host = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _certificates(settings: Settings, clock: FrontClock) -> Certificates | None:
    tls = settings.tls
    if tls is None:
        return None
    client_ca = Path(tls.client_ca) if tls.client_ca is not None else None
    return Certificates(Path(tls.certificate), Path(tls.key), clock, client_ca, tells_expiry=False, tells=False)


def http2_limits(settings: Settings) -> Http2Limits:
    """Return the bounds of one front, but for the bytes that may wait."""
    fronts, whole = settings.shares - 1, Http2Limits()
    lists_per_address = whole.lists_per_address // fronts
    return Http2Limits(
        request_max=REQUEST_BYTES_MAX,
        connections=settings.connections,
        connections_per_address=settings.connections_per_address,
        connections_reserved=-(-whole.connections_reserved // fronts),
        lists_per_connection=min(whole.lists_per_connection, lists_per_address),
        lists_per_address=lists_per_address,
        lists_in_all=whole.lists_in_all // fronts,
        idle_s=settings.idle_s,
        request_s=settings.request_s,
    )


class _Process:
    """The life of the process: greet, serve, and end when told or when the store process is gone."""

    def __init__(self, name: str, sockets: socket.socket) -> None:
        self._name = name
        self._sockets = sockets
        self._welcome: asyncio.Future[Settings] = asyncio.get_running_loop().create_future()
        self._drain: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._takes: dict[type, Callable[[Any], None]] = {
            frames.Welcome: lambda frame: self._welcome.set_result(frame.settings),
            frames.DrainFront: lambda frame: self._end(frame.grace_s),
        }
        self.on_fault: Callable[[int], None] = lambda _: None

    def on_frames(self, said: Sequence[Any]) -> None:
        takes = self._takes
        for frame in said:
            try:
                takes[type(frame)](frame)
            except Exception:  # it is one call's, and all others go on
                log.exception("frame_failed", kind=type(frame).__name__)
                self.on_fault(getattr(frame, "call", 0))

    def on_lost(self) -> None:
        self._lost.set_result(None)
        self._welcome.cancel()
        self._end(-1.0)

    def _end(self, grace_s: float) -> None:
        if not self._drain.done():
            self._drain.set_result(grace_s)

    async def serve(self, link: Link) -> None:
        """Serve to the end. Raises DmqError if it cannot begin."""
        link.say(frames.Hello(version_here()))
        await asyncio.wait((self._welcome,))
        if self._welcome.cancelled():
            return
        settings = self._welcome.result()
        clock = FrontClock(settings.wall_less_boot_ms)
        configure(settings.log_level, settings.log_format, clock, process=self._name)
        front = Front(settings, link, clock)
        self._takes.update(front.takes())
        self.on_fault = front.store.fail
        tune()
        front.server.begin()
        receiving = passing.receive(self._sockets, front.server.take, front.lose)
        link.say(frames.Ready())
        telling = asyncio.get_running_loop().create_task(self._tell(front))
        grace_s = await self._drain
        telling.cancel()
        receiving()
        if grace_s < 0:
            return
        await front.server.stop(grace_s)
        front.tell_figures()
        link.close()
        await self._lost  # all of it was read

    @staticmethod
    async def _tell(front: Front) -> None:
        while True:
            front.tell_figures()
            await asyncio.sleep(_FIGURES_S)
            with suppress(DmqError):  # there was a good one before: the store process tells
                front.look_at_files()


async def _main(name: str, link_fd: int, sockets_fd: int) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):  # a terminal and a service manager send them to all processes
        loop.add_signal_handler(number, lambda: None)
    process = _Process(name, socket.socket(fileno=sockets_fd))
    stream = socket.socket(fileno=link_fd)
    link = await Link.over(stream, frames.from_store, process.on_frames, process.on_lost, unsent_high=_UNSENT_HIGH)
    await process.serve(link)


def run(name: str, link_fd: int, sockets_fd: int) -> int:
    """Be the process, and return its exit code; what keeps it from serving is one line of the log."""
    configure("info", "auto", SystemClock(), process=name)  # until the store process says how
    passing.name_process(f"dmq-{name}")
    try:
        uvloop.run(_main(name, link_fd, sockets_fd))
    except (DmqError, OSError) as error:
        log.error("front_failed", error=with_advice(error))  # noqa: TRY400 - it is known, and no fault of ours
    except Exception as error:
        log.exception("crashed", error=f"unexpected {type(error).__name__}: {with_advice(error)}")
    else:
        return 0
    return 1


if __name__ == "__main__":
    die_with_parent()
    sys.exit(run(sys.argv[1], int(sys.argv[3]), int(sys.argv[4])))
