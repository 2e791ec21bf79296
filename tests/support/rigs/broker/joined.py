"""A front's end and the store process's end of one stream, in one process: everything between them but processes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from broker_adapter.contracts.adapter import Subscription
from broker_adapter.contracts.deferred import Deferred
from broker_adapter.contracts.message import Delivery, Envelope, SendReceipt
from broker_adapter.runtime.clock import Clock
from dmq.acl.gate import Entrance
from dmq.http2 import Bidirectional, Method, Streaming
from dmq.http2.admission.bounds import Accounts
from dmq.metrics.counting import CallCounts
from dmq.processes import frames
from dmq.processes.clocks import FrontClock
from dmq.processes.host import Host
from dmq.processes.link import Link
from dmq.processes.settings import RelayedMethod
from dmq.processes.store_process import StoreProcess
from dmq.rocketmq_server.calls.dispatch import Dispatcher
from dmq.rocketmq_server.calls.exchange import Receive, ServedBroker
from dmq.rocketmq_server.rpc.service import MessagingService
from dmq.rocketmq_server.sessions.sessions import Sessions
from dmq.rocketmq_server.sessions.settings import SidecarConfig
from dmq.rocketmq_server.transport.http2_server import Port

CLIENT = "client-1"


def port_of(
    broker: ServedBroker,
    clock: Clock,
    config: SidecarConfig | None = None,
    methods: Mapping[str, Method] | None = None,
) -> Port:
    """Return everything that a daemon serves in front of a broker, and more ``methods``, which take no key."""
    service = MessagingService(broker, clock, Sessions(clock), config or SidecarConfig())
    entrances = {path: Entrance(rpc=path.rpartition("/")[2], request_max=2**23) for path in methods or {}}
    dispatcher = Dispatcher(service, clock=clock, observer=CallCounts())
    return Port(service, dispatcher, methods=methods, entrances=entrances)


class _LiveClock(FrontClock):
    """A front's clock that has heard of every step of the store process's."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        super().__init__(0)

    @property
    def wall_less_boot_ms(self) -> int:  # of the base it is told
        """As it is now."""
        return self._clock.now_ms() - self._clock.boot_ms()

    @wall_less_boot_ms.setter
    def wall_less_boot_ms(self, _: int) -> None:
        pass


class Joined:
    """A front's ``StoreProcess`` and its ``Host``, joined by a stream. Within one event loop."""

    def __init__(self, port: Port, clock: Clock, wall: FrontClock | None = None) -> None:
        """``wall``: the front's clock, if it is not to be the store process's."""
        self.port = port
        self._clock = clock
        self._wall = wall or _LiveClock(clock)
        self.accounts = Accounts(2**26, 2**20)
        self.said: list[frames.Frame] = []  # by the front
        self.heard: list[frames.Frame] = []  # by the front
        self.front: Link
        self.behind: Link
        self.store: StoreProcess
        self.host: Host

    async def open(self) -> Self:
        """Join them."""
        ours, theirs = socket.socketpair()
        takes: dict[type, Callable[[Any], None]] = {}
        self._ponged = asyncio.Event()

        def front_hears(heard: Sequence[Any]) -> None:
            self.heard += heard
            for frame in heard:
                takes[type(frame)](frame)

        def store_hears(said: Sequence[Any]) -> None:
            self.said += said
            self.host.on_frames(said)

        self.front = await Link.over(ours, frames.from_store, front_hears, lambda: self.store.lose())  # noqa: PLW0108 - it is made below
        self.behind = await Link.over(
            *(theirs, frames.from_front, store_hears, lambda: self.host.lose()),  # noqa: PLW0108
            reads_while_behind=False,
        )
        self.store = StoreProcess(self.front, self._wall)
        others: dict[type, Callable[[Any], None]] = {frames.Pong: lambda _: self._ponged.set()}
        self.host = Host(self.behind, self.port, self.accounts, self._clock, others)
        takes |= {**self.store.takes(), frames.Ping: lambda frame: self.front.say(frames.Pong(frame.number))}
        return self

    async def quiet(self) -> None:
        """Return once both ends have heard what the other one said before now."""
        for _ in range(2):  # what is said in answer to something is heard by the second one
            self._ponged.clear()
            self.behind.say(frames.Ping(0))
            await self._ponged.wait()

    def kill(self) -> None:
        """End the stream as the death of the front does."""
        self.front.abort()

    async def close(self) -> None:
        """End the stream and everything that goes on over it."""
        self.front.abort()
        self.behind.abort()
        while not (self.front.is_lost and self.behind.is_lost) or self.host._tasks:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0)

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def methods(self) -> dict[str, Method]:
        """Return everything that the port serves, passed on."""
        kinds = {Bidirectional: "bidirectional", Streaming: "streaming"}
        return self.store.methods(
            [RelayedMethod(path, kinds.get(type(each), "unary"), False) for path, each in self.port.methods.items()]  # type: ignore[arg-type]
        )


class FrontedBroker:
    """A broker whose messages go through a front: fits ``PopBroker``. What a front passes on it is asked directly."""

    def __init__(self, broker: ServedBroker, joined: Joined) -> None:
        self._broker = broker
        self._joined = joined

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - of the broker
        return getattr(self._broker, name)

    def send(self, envelopes: Sequence[Envelope]) -> Deferred[Sequence[SendReceipt]]:
        return self._joined.store.send(envelopes, ())

    async def receive(
        self,
        group: str,
        subscription: Subscription,
        *,
        batch_max: int,
        invisible_ms: int,
        wait_ms: int,
        renew_for: str = "",
    ) -> Sequence[Delivery]:
        wanted = Receive(group, subscription, batch_max, invisible_ms, wait_ms, bool(renew_for))
        received = await self._joined.store.receive(wanted, renew_for or CLIENT, ())
        received.over(True)
        return received.deliveries

    async def ack(self, group: str, topic: str, receipt_handles: Sequence[str]) -> Sequence[Exception | None]:
        results = await self._joined.store.ack(group, topic, receipt_handles)
        return results or [None] * len(receipt_handles)

    def change_invisible(
        self, group: str, topic: str, receipt_handle: str, invisible_ms: int, *, suspend: bool = False
    ) -> Deferred[str]:
        return self._joined.store.change_invisible(group, topic, receipt_handle, invisible_ms, suspend=suspend)
