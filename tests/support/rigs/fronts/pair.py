"""A front's end and the store process's end of one link, joined in this process over a real socket pair."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from support.clients.wire.protocol import Calls
from support.rigs.broker.rig import EmbeddedRig, until

from broker_adapter.wire import rocketmq_v2 as wire
from dmq.acl.quotas import Quotas
from dmq.http2.admission.bounds import Accounts
from dmq.processes import frames
from dmq.processes.host import Host
from dmq.processes.link import Link
from dmq.rocketmq_server.calls.dispatch import Dispatcher
from dmq.rocketmq_server.rpc.service import MessagingService
from dmq.rocketmq_server.sessions.sessions import Sessions
from dmq.rocketmq_server.sessions.settings import SidecarConfig
from dmq.rocketmq_server.transport.http2_server import Port

MIB = 2**20
HEADERS = (["x-mq-client-id", "x-mq-language"], [b"\x08client-1", b"\x04JAVA"])  # values as HPACK writes them

F = TypeVar("F", bound=frames.Frame)


class FrontPair:
    """A ``Host`` over the embedded broker of a rig, and what a front has heard from it. ``stream`` is the front's end.

    The front says and hears frames only when a test has it do so: it can be slow, and it can be wrong.
    """

    def __init__(self, rig: EmbeddedRig, *, held_bytes_max: int = 64 * MIB, unsent_high: int = MIB) -> None:
        clock = rig.clock
        service = MessagingService(
            *(rig.broker, clock, Sessions(clock), SidecarConfig(), rig.broker.transactions, rig.broker.pulls),
            quotas=Quotas(clock),
        )
        self.service = service
        self.port = Port(service, Dispatcher(service, clock=clock, observer=Calls([])))
        self.accounts = Accounts(held_bytes_max, 0)
        here, self.stream = socket.socketpair()
        self._here = here
        self._clock = clock
        self.is_lost = False
        self.heard: list[Any] = []
        self.link = Link(
            frames.from_front, self._on_frames, self._on_lost, reads_while_behind=False, unsent_high=unsent_high
        )
        self.host = Host(self.link, self.port, self.accounts, clock)
        self._front: Link | None = None

    def _on_frames(self, said: Sequence[Any]) -> None:
        self.host.on_frames(said)

    def _on_lost(self) -> None:
        self.is_lost = True
        self.host.lose()

    async def open(self) -> FrontPair:
        """Have the store process's end read."""
        await self.link.join(self._here)
        return self

    def say(self, *said: frames.Frame) -> None:
        """Say frames as one batch, which must fit into the socket."""
        self.stream.sendall(frames.encode(said))

    async def listen(self) -> None:
        """Have the front's end read, from now on."""
        self._front = await Link.over(self.stream, frames.from_store, self.heard.extend, lambda: None)

    def answers(self, kind: type[F], call: int | None = None) -> list[F]:
        """Return what was heard of a kind, of one call or of all."""
        return [each for each in self.heard if isinstance(each, kind) and call in {None, each.call}]  # type: ignore[attr-defined]

    async def answer(self, kind: type[F], call: int) -> F:
        """Return the first frame of a kind that answers a call, once it is there."""
        await until(lambda: bool(self.answers(kind, call)))
        return self.answers(kind, call)[0]

    async def close(self) -> None:
        """End both."""
        for link in (self._front, self.link):
            if link is not None:
                link.abort()
        if self._front is None:
            self.stream.close()
        await until(lambda: self.is_lost)
        for _ in range(3):
            await asyncio.sleep(0)


def a_relay(
    call: int, rpc: str, body: bytes | None, *, path: str = "", refusal: frames.Failure | None = None
) -> frames.Relay:
    """A call that a front passes on."""
    names, values = HEADERS
    where = path or wire.METHODS[rpc].path
    return frames.Relay(call, where, names, values, "ipv4:10.0.0.7:4000", "10.0.0.7", None, 0, body, refusal)


def a_receive(call: int, topic: str = "orders", *, batch_max: int = 32, wait_ms: int = 0) -> frames.ReceiveMessages:
    """A receive as a front asks."""
    return frames.ReceiveMessages(
        *(call, "client-1", (), "billing", topic, -1, [], "", batch_max, 60_000, wait_ms, False)
    )


async def joined(rig: EmbeddedRig, scenario: Callable[[FrontPair], Any], **options: Any) -> None:  # noqa: ANN401
    """Run a scenario with a pair over an open rig."""
    pair = await FrontPair(rig, **options).open()
    try:
        await scenario(pair)
    finally:
        await pair.close()
