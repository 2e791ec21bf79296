"""Calls that a front passes on, between the real two ends of a link, in front of methods of the tests' own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from broker_adapter.contracts.errors import Refused, Rule
from broker_adapter.runtime.clock import SystemClock
from dmq.acl.gate import Entrance, RpcPolicy
from dmq.acl.quotas import Quotas
from dmq.http2 import Admission, Bidirectional, CallEnded, Method, RequestHeaders, Status, Unary
from dmq.http2.admission.bounds import Accounts
from dmq.processes import frames
from dmq.processes.clocks import FrontClock
from dmq.processes.host import Host
from dmq.processes.link import Link
from dmq.processes.settings import RelayedMethod
from dmq.processes.store_process import StoreProcess
from dmq.rocketmq_server.transport.http2_server import Port

PATIENCE_S = 60
CLOCK = SystemClock()
PATH = "/tests.Calls/Call"
ADDRESS = "192.0.2.1"


class Rig:
    """Both ends. ``host_takes`` sees the batches of the front first, and may give them on together."""

    def __init__(self, method: Method) -> None:
        self.accounts = Accounts(1024 * 1024, 0)
        self._method = method
        self.late: list[Any] | None = None  # frames that are kept back, to come in one read with those behind

    async def open(self) -> None:
        here, there = socket.socketpair()
        gate = RpcPolicy({PATH: Entrance(rpc="Call")}, None, Quotas(CLOCK))
        methods = {PATH: self._method}
        port = SimpleNamespace(
            service=SimpleNamespace(exchange=None), gate=gate, methods=methods, methods_of_fronts=methods
        )
        self.lost = asyncio.get_running_loop().create_future()
        self._link = await Link.over(
            here, frames.from_front, self._take, lambda: self.lost.set_result(None), reads_while_behind=False
        )
        self._host = Host(self._link, cast("Port", port), self.accounts, CLOCK)
        takes: dict[type, Callable[[Any], None]] = {}

        def on_frames(said: Sequence[Any]) -> None:
            for each in said:
                takes[type(each)](each)

        self.front = await Link.over(there, frames.from_store, on_frames, lambda: None)
        self.store = StoreProcess(self.front, FrontClock(0))
        takes |= self.store.takes()

    def _take(self, said: Sequence[Any]) -> None:
        if self.late is not None:
            self.late += said
            return
        self._host.on_frames(said)

    def go_on(self) -> None:
        """Take the frames that were kept back as the loop would that did not turn since the first of them."""
        assert self.late is not None
        late, self.late = self.late, None
        self._take(late)

    async def until(self, done: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not done():  # noqa: ASYNC110 - a few turns of the loop, and no event tells of it
                await asyncio.sleep(0)

    async def close(self) -> None:
        self.front.close()
        await self.lost


def play(method: Method, scenario: Callable[[Rig], Awaitable[None]]) -> None:
    async def run() -> None:
        rig = Rig(method)
        await rig.open()
        async with asyncio.timeout(PATIENCE_S):
            await scenario(rig)
        await rig.close()

    asyncio.run(run())


def headers(refusal: Exception | None = None) -> RequestHeaders:
    made = RequestHeaders((), (), "ipv4:192.0.2.1:1")
    made.admission = Admission(address=ADDRESS, refusal=refusal)
    return made


def stream_of(rig: Rig, bodies: AsyncIterator[bytes]) -> AsyncGenerator[list[bytes], None]:
    method = rig.store.methods([RelayedMethod(PATH, "bidirectional", False)])[PATH]
    assert isinstance(method, Bidirectional)
    return cast("AsyncGenerator[list[bytes], None]", method.handle(bodies, headers()))


async def echo(bodies: AsyncIterator[bytes], _: RequestHeaders) -> AsyncGenerator[bytes, None]:
    async for body in bodies:
        yield body


async def said(*bodies: bytes, then: CallEnded | None = None) -> AsyncIterator[bytes]:
    for each in bodies:
        yield each
    if then is not None:
        raise then


def test_a_message_that_comes_together_with_its_call_is_heard() -> None:
    """A store process that is behind reads a call and its first message at once."""

    async def scenario(rig: Rig) -> None:
        rig.late = []
        answers = stream_of(rig, said(b"settings"))
        first = asyncio.ensure_future(anext(answers))
        await rig.until(lambda: len(rig.late or ()) == 2)
        rig.go_on()
        assert await first == [b"settings"]
        assert [each async for each in answers] == []

    play(Bidirectional(echo), scenario)


def test_the_fault_of_a_message_is_passed_to_the_handler() -> None:
    """It has its own words for the client, as in one process; and the call is over on both sides."""
    heard: list[CallEnded] = []

    async def handle(bodies: AsyncIterator[bytes], _: RequestHeaders) -> AsyncGenerator[bytes, None]:
        try:
            async for body in bodies:
                yield body
        except CallEnded as end:
            heard.append(end)
            yield b"the handler's words"
            raise CallEnded(Status.INVALID_ARGUMENT, "the handler's end") from end

    async def scenario(rig: Rig) -> None:
        wrong = CallEnded(Status.RESOURCE_EXHAUSTED, "a message of 9 bytes; 8 are taken")
        found = list[bytes]()

        async def read() -> None:
            async for each in stream_of(rig, said(b"good", then=wrong)):
                found.extend(each)

        with pytest.raises(CallEnded, match="the handler's end") as ended:
            await read()
        assert ended.value.status is Status.INVALID_ARGUMENT
        assert found == [b"good", b"the handler's words"]
        assert [(each.status, each.text) for each in heard] == [(wrong.status, wrong.text)]
        assert rig.accounts.held(1) == []

    play(Bidirectional(handle), scenario)


def test_a_call_that_is_given_up_at_once_leaves_no_account() -> None:
    """The call and its end are read together: nothing of it stays."""

    async def handle(_: bytes, __: RequestHeaders) -> bytes:
        raise AssertionError("it must not be served")

    async def scenario(rig: Rig) -> None:
        rig.late = []
        call = asyncio.ensure_future(rig.store.unary(PATH, b"body", headers()))
        await rig.until(lambda: len(rig.late or ()) == 1)
        call.cancel()
        await rig.until(lambda: len(rig.late or ()) == 2)
        rig.go_on()
        await asyncio.gather(call, return_exceptions=True)
        await rig.until(lambda: not rig._host._tasks)
        assert not rig.accounts._pools
        assert not rig.accounts.everyone.accounts
        assert not rig._host._relays._relayed

    play(Unary(handle), scenario)


def test_a_call_that_the_front_refused_stays_refused() -> None:
    """The front dropped its body: a key that became good meanwhile must not have it served without."""
    seen: list[tuple[bytes, Exception | None]] = []

    async def handle(body: bytes, headers: RequestHeaders) -> bytes:
        assert headers.admission is not None
        seen.append((body, headers.admission.refusal))
        return b"refused"

    async def scenario(rig: Rig) -> None:
        refusal = Refused(Rule.UNAUTHORIZED, "the access key is not known")
        assert await rig.store.unary(PATH, b"", headers(refusal)) == b"refused"
        ((_, kept),) = seen
        assert isinstance(kept, Refused)
        assert (kept.rule, str(kept)) == (refusal.rule, str(refusal))

    play(Unary(handle), scenario)
