"""What a handler promises to who calls it holds as well when a front passes the call on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any

import pytest
from support.rigs.broker.joined import Joined, port_of
from support.rigs.broker.memory_broker import MemoryBroker
from support.rigs.broker.rig import PATIENCE_S, until

from broker_adapter.runtime.clock import ManualClock
from dmq.http2 import Bidirectional, CallEnded, Method, RequestHeaders, Status, Streaming, Unary

pytestmark = pytest.mark.contract
BODY_MAX = 4 * 1024 * 1024
PEER, ADDRESS = "ipv4:192.0.2.7:5000", "192.0.2.7"


class Handlers:
    """What is called, and what it saw."""

    def __init__(self) -> None:
        self.headers: list[RequestHeaders] = []
        self.given = self.read = 0
        self.entered, self.left, self.go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.read_error: list[CallEnded] = []
        self.methods: Mapping[str, Method] = {
            "/test.Test/Echo": Unary(self.echo),
            "/test.Test/Refuse": Unary(self.refuse),
            "/test.Test/Fail": Unary(self.fail),
            "/test.Test/Wait": Unary(self.wait),
            "/test.Test/Count": Streaming(self.count),
            "/test.Test/Break": Streaming(self.break_off),
            "/test.Test/Talk": Bidirectional(self.talk),
            "/test.Test/Hold": Bidirectional(self.hold),
            "/test.Test/HangUp": Bidirectional(self.hang_up),
        }

    async def echo(self, body: bytes, headers: RequestHeaders) -> bytes:
        self.headers.append(headers)
        return body

    async def refuse(self, body: bytes, _: RequestHeaders) -> bytes:
        raise CallEnded(Status.FAILED_PRECONDITION, body.decode())

    async def fail(self, _: bytes, __: RequestHeaders) -> bytes:
        raise ValueError("a secret")

    async def wait(self, body: bytes, _: RequestHeaders) -> bytes:
        self.entered.set()
        try:
            await self.go_on.wait()
        finally:
            self.left.set()
        return body

    async def count(self, body: bytes, _: RequestHeaders) -> AsyncGenerator[bytes | list[bytes], None]:
        """Give as many pieces as the body has bytes, the second one of two messages."""
        try:
            for number in range(len(body)):
                self.given += 1
                yield [b"%d" % number, b"again"] if number == 1 else b"%d" % number
        finally:
            self.left.set()

    async def break_off(self, _: bytes, __: RequestHeaders) -> AsyncGenerator[bytes, None]:
        yield b"one"
        raise CallEnded(Status.DATA_LOSS, "two is lost")

    async def talk(self, bodies: AsyncIterator[bytes], _: RequestHeaders) -> AsyncGenerator[bytes, None]:
        """Answer each message, the end, and a message that cannot be read."""
        try:
            async for body in bodies:
                self.read += 1
                yield b"heard " + body
            yield b"all heard"
        except CallEnded as end:
            yield f"not heard: {end.status.name} {end.text}".encode()
        finally:
            self.left.set()

    async def hold(self, bodies: AsyncIterator[bytes], _: RequestHeaders) -> AsyncGenerator[bytes, None]:
        """Read one message, and the others once it is told to go on."""
        yield await anext(bodies)
        await self.go_on.wait()
        async for body in bodies:
            yield body

    async def hang_up(self, bodies: AsyncIterator[bytes], _: RequestHeaders) -> AsyncGenerator[bytes, None]:
        yield await anext(bodies)


class Rig:
    """Handlers, and the methods that lead to them."""

    def __init__(self, handlers: Handlers, methods: Mapping[str, Method], joined: Joined | None) -> None:
        self.handlers = handlers
        self.joined = joined
        self._methods = methods

    def unary(self, name: str, body: bytes = b"", headers: RequestHeaders | None = None) -> Awaitable[bytes]:
        method = self._methods[f"/test.Test/{name}"]
        assert isinstance(method, Unary)
        return method.handle(body, headers or _headers())

    def streaming(self, name: str, body: bytes = b"") -> AsyncGenerator[Any, None]:
        method = self._methods[f"/test.Test/{name}"]
        assert isinstance(method, Streaming)
        return method.handle(body, _headers())

    def talk(self, name: str, bodies: AsyncIterator[bytes]) -> AsyncGenerator[Any, None]:
        method = self._methods[f"/test.Test/{name}"]
        assert isinstance(method, Bidirectional)
        return method.handle(bodies, _headers())


def _headers() -> RequestHeaders:
    # values as HPACK has them: behind their length
    headers = RequestHeaders((":path", "x-mq-client-id"), [b"\x01/", b"\x06client"], PEER)
    headers.deadline_s, headers.packed_bytes = 7.5, 12
    return headers


async def _all(pieces: AsyncGenerator[Any, None]) -> list[bytes]:
    """Return all messages, whatever pieces they came in."""
    found: list[bytes] = []
    async with aclosing(pieces):
        async for piece in pieces:
            found += piece if isinstance(piece, list) else [piece]
    return found


async def _said(*bodies: bytes) -> AsyncGenerator[bytes, None]:
    for body in bodies:
        yield body


Scenario = Callable[[Rig], Coroutine[object, object, None]]


def _play(scenario: Scenario, *, is_relayed: bool) -> None:
    async def play() -> None:
        handlers, strays = Handlers(), list[str]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: strays.append(repr(context)))
        clock = ManualClock()
        async with asyncio.timeout(PATIENCE_S * 3):
            if not is_relayed:
                await scenario(Rig(handlers, handlers.methods, None))
            else:
                async with Joined(port_of(MemoryBroker(clock), clock, methods=handlers.methods), clock) as joined:
                    await scenario(Rig(handlers, joined.methods(), joined))
                    await joined.quiet()
                    assert not joined.store._relayed, "a call that nobody makes any more is known to the front"
                    await until(lambda: not joined.host._tasks)
                    assert not joined.host._relays._relayed
                    assert not joined.accounts._pools, "an account of a call that is over stayed open"
        assert not strays, strays

    asyncio.run(play())


def either_way(scenario: Scenario) -> Callable[..., None]:
    """Run a scenario on the handlers, and on what passes calls on to them."""

    def test(is_relayed: bool) -> None:
        _play(scenario, is_relayed=is_relayed)

    test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
    return pytest.mark.parametrize("is_relayed", [False, True], ids=["directly", "passed on"])(test)


def passed_on(scenario: Scenario) -> Callable[[], None]:
    """Run a scenario on what passes calls on."""

    def test() -> None:
        _play(scenario, is_relayed=True)

    test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
    return test


@either_way
async def test_an_answer_comes_back_whole(rig: Rig) -> None:
    """Empty, and as large as bodies get."""
    for body in (b"", b"x", bytes(range(256)) * (BODY_MAX // 256)):
        assert await rig.unary("Echo", body) == body


@passed_on
async def test_the_headers_of_a_call_come_with_it(rig: Rig) -> None:
    """All that a handler may ask for."""
    await rig.unary("Echo")
    (headers,) = rig.handlers.headers
    assert (headers.get("x-mq-client-id"), headers.peer) == ("client", PEER)
    assert (headers.deadline_s, headers.packed_bytes) == (7.5, 12)
    assert headers.admission is not None
    assert headers.account is not None


@either_way
async def test_a_call_ends_with_the_status_of_its_handler(rig: Rig) -> None:
    """With its status and its text."""
    with pytest.raises(CallEnded) as ended:
        await rig.unary("Refuse", "not nów".encode())
    assert (ended.value.status, ended.value.text) == (Status.FAILED_PRECONDITION, "not nów")


@passed_on
async def test_an_internal_error_is_reported_without_its_text(rig: Rig) -> None:
    """The caller hears that there is one; the next call is served."""
    with pytest.raises(CallEnded) as ended:
        await rig.unary("Fail")
    assert ended.value.status is Status.INTERNAL
    assert "secret" not in ended.value.text
    assert await rig.unary("Echo", b"next") == b"next"


@either_way
async def test_an_abandoned_call_is_cancelled(rig: Rig) -> None:
    """Its handler hears of it."""
    calling = asyncio.ensure_future(rig.unary("Wait"))
    await rig.handlers.entered.wait()
    calling.cancel()
    await asyncio.gather(calling, return_exceptions=True)
    assert calling.cancelled()
    await rig.handlers.left.wait()


@either_way
async def test_a_call_may_be_cancelled_before_it_began(rig: Rig) -> None:
    """In the same turn in which it was made, and in the next ones: nothing of it stays."""
    for turns in range(6):
        calling = asyncio.ensure_future(rig.unary("Wait"))
        for _ in range(turns):
            await asyncio.sleep(0)
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)
        assert calling.cancelled()
    assert await rig.unary("Echo", b"next") == b"next"


@either_way
async def test_an_answer_of_many_pieces_comes_in_order(rig: Rig) -> None:
    """Also if a piece has several messages."""
    assert await _all(rig.streaming("Count", b"....")) == [b"0", b"1", b"again", b"2", b"3"]
    assert await _all(rig.streaming("Count")) == []


@either_way
async def test_the_next_piece_is_made_when_the_last_was_taken(rig: Rig) -> None:
    """However many there will be: one piece is under way at most."""
    async with aclosing(rig.streaming("Count", bytes(100))) as pieces:
        for taken in range(1, 6):
            await anext(pieces)
            if rig.joined is not None:
                await rig.joined.quiet()
            assert rig.handlers.given == taken
    await rig.handlers.left.wait()
    assert rig.handlers.given == 5


@either_way
async def test_an_answer_may_break_off(rig: Rig) -> None:
    """What came before is good."""
    pieces = rig.streaming("Break")
    assert await anext(pieces) in (b"one", [b"one"])
    with pytest.raises(CallEnded) as ended:
        await anext(pieces)
    assert (ended.value.status, ended.value.text) == (Status.DATA_LOSS, "two is lost")


@either_way
async def test_both_ends_send_until_one_has_finished(rig: Rig) -> None:
    """Messages come in order, and behind the last one the handler may go on."""
    assert await _all(rig.talk("Talk", _said(b"1", b"2", b"3"))) == [b"heard 1", b"heard 2", b"heard 3", b"all heard"]
    assert await _all(rig.talk("Talk", _said())) == [b"all heard"]


@either_way
async def test_an_unreadable_message_is_reported_to_the_handler(rig: Rig) -> None:
    """In its place; the handler says how the call ends, and it does."""

    async def broken() -> AsyncGenerator[bytes, None]:
        yield b"1"
        raise CallEnded(Status.RESOURCE_EXHAUSTED, "too large")

    assert await _all(rig.talk("Talk", broken())) == [b"heard 1", b"not heard: RESOURCE_EXHAUSTED too large"]


@either_way
async def test_a_handler_may_hang_up(rig: Rig) -> None:
    """While the client has more to say."""
    given = 0

    async def much() -> AsyncGenerator[bytes, None]:
        nonlocal given
        while True:
            given += 1
            yield b"%d" % given

    async with asyncio.timeout(PATIENCE_S):
        assert await _all(rig.talk("HangUp", much())) == [b"1"]


@either_way
async def test_unread_data_of_a_handler_is_not_consumed(rig: Rig) -> None:
    """Of a client that has much to say two messages are under way at most."""
    given = 0

    async def much() -> AsyncGenerator[bytes, None]:
        nonlocal given
        for _ in range(50):
            given += 1
            yield b"%d" % given

    async with aclosing(rig.talk("Hold", much())) as pieces:
        await anext(pieces)
        rest = asyncio.ensure_future(anext(pieces))
        if rig.joined is not None:
            await rig.joined.quiet()
        assert given <= 2
        rig.handlers.go_on.set()
        await rest
        assert len(await _all(pieces)) == 48
    assert given == 50


@either_way
async def test_a_client_that_leaves_in_the_middle_leaves_nothing(rig: Rig) -> None:
    """The handler's generator is closed, and nobody reads the client's messages any more."""
    heard = asyncio.Event()

    async def waits() -> AsyncGenerator[bytes, None]:
        yield b"1"
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            heard.set()

    async with aclosing(rig.talk("Talk", waits())) as pieces:
        await anext(pieces)
        leaving = asyncio.ensure_future(anext(pieces))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
    await rig.handlers.left.wait()
    await heard.wait()


@passed_on
async def test_data_that_comes_with_the_call_is_read(rig: Rig) -> None:
    """The store process reads the call, its only message and its end in one go, as it does when it is behind."""
    assert rig.joined is not None
    for _ in range(20):
        talking = [asyncio.ensure_future(_all(rig.talk("Talk", _said(b"1")))) for _ in range(50)]
        assert await asyncio.gather(*talking) == [[b"heard 1", b"all heard"]] * 50


@passed_on
async def test_a_front_that_dies_ends_its_calls(rig: Rig) -> None:
    """Handlers are cancelled, and who called hears that the call may have had an effect."""
    assert rig.joined is not None
    calling = asyncio.ensure_future(rig.unary("Wait"))
    await rig.handlers.entered.wait()
    rig.joined.kill()
    with pytest.raises(CallEnded) as ended:
        await calling
    assert ended.value.status is Status.UNAVAILABLE
    await rig.handlers.left.wait()
    await rig.joined.close()
    await rig.joined.open()
