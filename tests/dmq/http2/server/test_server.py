"""The rim on real sockets, with clients that misbehave in time and space: silent, slow, deaf, too many."""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from collections.abc import Awaitable, Callable
from itertools import count, pairwise
from typing import Any
from unittest.mock import Mock

import pytest
import uvloop
from support.forms import needs_python

from broker_adapter.runtime.clock import ManualClock
from dmq.http2 import CallEnded, Http2Server, Limits, Rate, Status
from dmq.http2.admission.backpressure import MUCH
from dmq.http2.admission.connection_admission import AdmissionPlace
from dmq.http2.codec import frames
from dmq.http2.errors import Code
from dmq.http2.server.protocol import ClientProtocol
from dmq.http2.testing.peer import Encoder, ReceivedFrame, grpc_message
from dmq.http2.testing.wire import GREETING, RequestEncoder, Rig, Wire, until

pytestmark = pytest.mark.integration
MIB = 2**20
# The server looks at its clients every quarter of the shortest time; the clock itself moves by hand.
OFTEN = 0.08

Scenario = Callable[[Rig, ManualClock], Awaitable[None]]
Run = Callable[..., None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Run a scenario on a rig, on either event loop; the clock is moved by the scenario."""

    def run(scenario: Scenario, limits: Limits | None = None) -> None:
        clock = ManualClock()

        async def whole() -> None:
            async with Rig(clock.monotonic_s, limits=limits).serving() as rig:
                await scenario(rig, clock)

        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(whole())

    return run


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run_busy(request: pytest.FixtureRequest) -> Run:
    """As ``run``, with a server that is busy from so many calls of Deferred on as make a client one that sends much."""

    def run(scenario: Scenario) -> None:
        clock = ManualClock()

        async def whole() -> None:
            rig = Rig(clock.monotonic_s, limits=Limits(preface_s=OFTEN), is_busy=lambda: len(rig.service.later) >= MUCH)
            async with rig.serving():
                await scenario(rig, clock)

        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(whole())

    return run


# -- time --------------------------------------------------------------------------------------------------------------


def test_a_silent_client_is_released(run: Run) -> None:
    """Danger: half-open connections. Not one byte, a part of the preface, or the preface without SETTINGS."""

    async def scenario(rig: Rig, clock: ManualClock) -> None:
        silent = [await rig.connect(b"") for _ in range(3)]
        await silent[1].say(frames.PREFACE[:10])
        await silent[2].say(frames.PREFACE)
        await rig.check_serving()
        clock.advance(1000)
        for wire in silent:
            assert await wire.is_closed()
        await rig.check_serving()

    run(scenario, Limits(preface_s=OFTEN))


def test_client_that_vanished_is_found(run: Run) -> None:
    """Danger: idle and dead. After a silence it is asked; no answer ends it and its calls, any answer is enough."""

    async def scenario(rig: Rig, clock: ManualClock) -> None:
        dead, alive = await rig.connect(), await rig.connect()
        await dead.say(dead.request("Wait"))
        await rig.service.waiting.reach(1)
        clock.advance(61_000)
        ping = await alive.until(frames.PING)
        await alive.say(frames.ping(ping.payload, is_answer=True) + alive.request("Echo"))
        await alive.until(frames.DATA)
        clock.advance(21_000)
        assert await dead.is_closed()
        await rig.service.ended.reach(1)
        await alive.say(alive.request("Echo"))
        await alive.until(frames.DATA)

    run(scenario, Limits(preface_s=OFTEN))


@pytest.mark.parametrize("limits", [Limits(idle_s=OFTEN), Limits(age_s=OFTEN)], ids=["idle", "old"])
def test_idle_and_old_connections_are_drained(run: Run, limits: Limits) -> None:
    """GOAWAY, and the end when the client has answered and no call is left."""

    async def scenario(rig: Rig, clock: ManualClock) -> None:
        wire = await rig.connect()
        clock.advance(1000)
        assert (await wire.until(frames.GOAWAY)).payload[:4] == (2**31 - 1).to_bytes(4, "big")
        ping = await wire.until(frames.PING)
        await wire.say(frames.ping(ping.payload, is_answer=True))
        assert (await wire.until(frames.GOAWAY)).payload[:4] == bytes(4)
        assert await wire.is_closed()

    run(scenario, limits)


def test_old_connection_keeps_its_calls_for_the_grace(run: Run) -> None:
    """Then they end with UNAVAILABLE."""

    async def scenario(rig: Rig, clock: ManualClock) -> None:
        wire = await rig.connect()
        await wire.say(wire.request("Wait"))
        await rig.service.waiting.reach(1)
        clock.advance(1000)
        await wire.until(frames.GOAWAY)
        assert rig.service.ended.count == 0
        clock.advance(31_000)
        assert b"grpc-status\x0214" in (await wire.until(frames.HEADERS)).payload
        assert await wire.is_closed()

    run(scenario, Limits(age_s=OFTEN))


@pytest.mark.parametrize("ends", [True, False], ids=["ended", "left open"])
def test_a_stream_both_ways_holds_up_the_end_for_a_moment(run: Run, ends: bool) -> None:
    """Until the client has ended its half, which the server does not do; a client that never does is not waited for."""

    async def scenario(rig: Rig, clock: ManualClock) -> None:
        wire = await rig.connect()
        await wire.say(wire.request("Twice", b"x", ends=False))
        await wire.until(frames.DATA)
        clock.advance(1000)
        await wire.until(frames.GOAWAY)
        clock.advance(31_000)  # the end of its age; a stop of the server would close it in any case
        ended = await wire.until(frames.HEADERS)
        assert ended.flags & frames.END_STREAM
        if ends:
            await wire.say(frames.rst_stream(ended.stream_id, Code.CANCEL))
        assert await wire.is_closed()

    run(scenario, Limits(age_s=OFTEN))


def test_deadlines_end_in_their_order(run: Run) -> None:
    """One alarm for all: the earliest first, wherever it came in; those without a deadline stay."""

    async def scenario(rig: Rig, clock: ManualClock) -> None:
        wire = await rig.connect()
        for timeout in ("1S", "1m", "52500H"):
            await wire.say(wire.request("Wait", fields=[("grpc-timeout", timeout)]))
        await wire.say(wire.request("Wait"))
        await rig.service.waiting.reach(4)
        clock.advance(10)
        first = await wire.until(frames.HEADERS)
        assert (first.stream_id, b"grpc-status\x014" in first.payload) == (3, True)
        clock.advance(1000)
        assert (await wire.until(frames.HEADERS)).stream_id == 1
        assert rig.server.figures().streams == 2

    run(scenario, Limits(preface_s=OFTEN))


# -- clients that do not read ------------------------------------------------------------------------------------------


async def connect_deaf(rig: Rig) -> socket.socket:
    """Connect a socket with room for little."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.setblocking(False)
    await asyncio.get_running_loop().sock_connect(made, ("127.0.0.1", rig.port))
    return made


def test_a_deferred_answer_ends_its_call(run: Run) -> None:
    """At once or later, with a message, an error, or a bug; without a task."""

    async def scenario(rig: Rig, _clock: ManualClock) -> None:
        wire = await rig.connect()
        for message in (b"now", b"raise", b"good", b"bad"):
            await wire.say(wire.request("Deferred", message))
        assert (await wire.until(frames.DATA)).payload[5:] == b"now"
        assert b"grpc-status\x010" in (await wire.until(frames.HEADERS)).payload
        assert b"grpc-status\x0213" in (await wire.until(frames.HEADERS)).payload
        await rig.service.waiting.reach(2)
        rig.service.later[b"bad"].fail(CallEnded(Status.ABORTED, "in doubt"))
        rig.service.later[b"good"].settle(b"done")
        assert b"grpc-status\x0210" in (await wire.until(frames.HEADERS)).payload
        assert (await wire.until(frames.DATA)).payload[5:] == b"done"
        await wire.until(frames.HEADERS)
        assert rig.server.figures().streams == 0

    run(scenario)


def test_an_answer_that_comes_too_late_is_dropped(run: Run) -> None:
    """The deadline was over, or the peer had gone, or gave it up: the others do not notice."""

    async def scenario(rig: Rig, clock: ManualClock) -> None:
        wire, gone = await rig.connect(), await rig.connect()
        await wire.say(wire.request("Deferred", b"late", fields=[("grpc-timeout", "1m")]))
        await wire.say(wire.request("Deferred", b"reset"))
        await gone.say(gone.request("Deferred", b"gone"))
        await rig.service.waiting.reach(3)
        await wire.say(frames.rst_stream(3, Code.CANCEL))
        gone.writer.close()
        clock.advance(10)
        assert b"grpc-status\x014" in (await wire.until(frames.HEADERS)).payload
        await until(lambda: rig.server.figures().connections == 1)
        for later in rig.service.later.values():
            later.settle(b"nobody waits")
        await wire.say(wire.request("Echo", b"next"))
        assert (await wire.until(frames.DATA)).payload[5:] == b"next"

    run(scenario)


def test_client_that_sends_too_much_waits_while_others_are_served(run_busy: Run) -> None:
    """Its requests stay with it, not one is refused, and all are served when there is room."""
    calls = 10 * MUCH

    async def scenario(rig: Rig, clock: ManualClock) -> None:
        wire, other = await rig.connect(), await rig.connect()
        names = [b"%d" % number for number in range(calls)]
        for name in names:
            await wire.say(wire.request("Deferred", name + bytes(4_000)))  # a read does not hold all of them
        await rig.service.waiting.reach(MUCH)
        for _ in range(3):
            clock.advance(61_000)  # asked whether it is alive the first one could not answer
            ping = await other.until(frames.PING)
            await other.say(frames.ping(ping.payload, is_answer=True) + other.request("Echo", b"beside"))
            await other.until(frames.DATA)
        assert rig.service.waiting.count < calls
        while rig.service.waiting.count < calls or rig.service.later:
            for name in list(rig.service.later):
                rig.service.later.pop(name).settle(name[:-4_000])
            rig.server.turns.go_on()
            await asyncio.sleep(0)
        found = [(await wire.until(frames.DATA)).payload[5:] for _ in names]
        assert sorted(found) == sorted(names)

    run_busy(scenario)


def test_peer_that_does_not_read_answers(run: Run) -> None:
    """Danger: calls of 16 KB, windows wide open. What is kept is bounded, others are served, nothing stays."""

    async def scenario(rig: Rig, clock: ManualClock) -> None:
        loop = asyncio.get_running_loop()
        peer = await connect_deaf(rig)
        caller = RequestEncoder()
        await loop.sock_sendall(peer, GREETING + frames.settings({frames.INITIAL_WINDOW_SIZE: 2**31 - 1}))
        await loop.sock_sendall(peer, frames.window_update(0, 2**30))
        calls = 0
        while rig.server.figures().held_bytes < MIB // 2:  # the kernel's buffers come first
            await loop.sock_sendall(peer, caller.request("Echo", b"x" * 16_000))
            calls += 1
            assert calls < 5000
        await rig.check_serving()
        assert rig.server.figures().held_bytes < 2 * MIB
        peer.close()
        await until(lambda: rig.server.figures().held_bytes == 0)

    run(scenario, Limits(held_per_connection=MIB))


def test_peer_that_does_not_read_and_floods(run: Run) -> None:
    """Danger: PINGs whose answers nobody takes. Reading stops, so the peer's writing does; its memory is bounded."""

    async def scenario(rig: Rig, clock: ManualClock) -> None:
        loop = asyncio.get_running_loop()
        peer = await connect_deaf(rig)
        await loop.sock_sendall(peer, GREETING)
        sent = 0
        flood = frames.ping(b"12345678") * 1000
        try:
            while sent < 200 * MIB:
                async with asyncio.timeout(1.5):
                    await loop.sock_sendall(peer, flood)
                sent += len(flood)
        except TimeoutError:
            pass
        assert sent < 100 * MIB
        (client,) = rig.server._clients
        assert client.connection.out.part_bytes < 2 * MIB
        await rig.check_serving()
        peer.close()

    run(scenario, Limits(pings=Rate(burst=10**9, per_s=1)))


# -- numbers, ports, faults --------------------------------------------------------------------------------------------


def test_connections_have_a_number(run: Run) -> None:
    """One too many is closed without a word while all others have calls; when one leaves there is room again."""

    async def scenario(rig: Rig, clock: ManualClock) -> None:
        wires = [await rig.connect() for _ in range(3)]
        for wire in wires:
            await wire.say(wire.request("Wait"))
        await rig.service.waiting.reach(3)
        assert await (await rig.connect(b"")).is_closed()
        figures = rig.server.figures()
        assert (figures.connections, figures.refused_connections) == (3, 1)
        wires[0].writer.close()
        await until(lambda: rig.server.figures().connections < 3)
        await rig.check_serving()

    run(scenario, Limits(connections=3))


def test_a_newcomer_replaces_an_idle_client(run: Run) -> None:
    """Danger: idle sockets that lock everybody out. Those without a preface go first, then the longest idle."""

    async def scenario(rig: Rig, clock: ManualClock) -> None:
        idle, busy, silent = await rig.connect(), await rig.connect(), await rig.connect(b"")
        await busy.say(busy.request("Wait"))
        await rig.service.waiting.reach(1)
        await until(lambda: rig.server.figures().connections == 3)
        await rig.check_serving()
        assert await silent.is_closed()
        await rig.check_serving()
        assert await idle.is_closed()
        assert rig.service.ended.count == 0
        assert rig.server.figures().refused_connections == 0

    run(scenario, Limits(connections=3))


def test_header_block_that_does_not_become_whole_ends_the_connection(run: Run) -> None:
    """Danger: blocks that are held for as long as the peer likes. What was kept of it is given back."""

    async def scenario(rig: Rig, clock: ManualClock) -> None:
        wire = await rig.connect()
        await wire.say(frames.frame(frames.HEADERS, 0, 1, bytes(1000)))
        await until(lambda: rig.server.lists.held == 1000)
        clock.advance(11_000)
        assert b"unfinished header block" in (await wire.until(frames.GOAWAY)).payload
        assert await wire.is_closed()
        assert rig.server.lists.held == 0

    run(scenario, Limits(preface_s=OFTEN))


def test_input_is_read_in_slices(run: Run) -> None:
    """Danger: one read that holds the loop. Calls of another client are answered between the slices of the first."""

    async def scenario(rig: Rig, clock: ManualClock) -> None:
        wire, other = await rig.connect(), await rig.connect()
        calls = 1000
        await wire.say(b"".join(wire.request("Echo", b"%d" % number) for number in range(calls)))
        await other.say(other.request("Echo", b"beside"))
        assert (await other.until(frames.DATA)).payload[5:] == b"beside"
        found = {(await wire.until(frames.DATA)).payload[5:] for _ in range(calls)}
        assert found == {b"%d" % number for number in range(calls)}

    run(scenario, Limits(slice_cost=50))


def test_large_requests_have_their_time_in_a_turn(run: Run) -> None:
    """Danger: requests that take a millisecond each, a hundred of them in one turn of the loop."""
    needs_python()

    async def scenario(rig: Rig, clock: ManualClock) -> None:
        wire = await rig.connect()
        await wire.say(wire.request("Echo"))
        await wire.until(frames.DATA)
        (client,) = rig.server._clients
        calls, advance = client.calls, client.calls.advance
        begun = [0]
        ticks = count()
        calls._monotonic_s = lambda: next(ticks) * 0.001  # so long each request takes

        def counted() -> float:
            pause_s = advance()
            begun.append(rig.service.waiting.count)
            return pause_s

        calls.advance = counted  # type: ignore[method-assign]
        bodies = [b"%05d" % number + bytes(4096) for number in range(50)]
        await wire.say(b"".join(wire.request("Deferred", body) for body in bodies))
        await rig.service.waiting.reach(len(bodies))
        assert max(after - before for before, after in pairwise(begun)) <= 2
        for body in bodies:
            rig.service.later[body].settle(body[:5])
        found = {(await wire.until(frames.DATA)).payload[5:] for _ in bodies}
        assert found == {body[:5] for body in bodies}

    run(scenario)


class Backpressure:
    """Counts something at the end of each turn of the loop; ``steps`` is by how much it grew in each."""

    def __init__(self, counted: Callable[[], int]) -> None:
        self._counted = counted
        self._seen = [counted()]
        self._next = asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        self._seen.append(self._counted())
        self._next = asyncio.get_running_loop().call_soon(self._look)

    def stop(self) -> list[int]:
        self._next.cancel()
        return [after - before for before, after in pairwise(self._seen)]


def test_calls_that_are_seldom_begin_a_few_in_a_turn(run: Run) -> None:
    """Danger: hundreds of tasks that one read begins, all in the next turn of the loop. So for their end."""

    async def scenario(rig: Rig, clock: ManualClock) -> None:
        wire = await rig.connect()
        turns = Backpressure(lambda: rig.service.waiting.count)
        await wire.say(b"".join(wire.request("Wait") for _ in range(60)))
        await rig.service.waiting.reach(60)
        assert max(turns.stop()) <= 4
        turns = Backpressure(lambda: rig.service.ended.count)
        wire.writer.close()
        await rig.service.ended.reach(60)
        assert max(turns.stop()) <= 4

    run(scenario)


def test_deadlines_that_are_over_together_end_some_in_a_turn(run: Run) -> None:
    """Danger: thousands of calls with the same deadline, all cancelled in one turn of the loop."""

    async def scenario(rig: Rig, clock: ManualClock) -> None:
        wire = await rig.connect()
        await wire.say(b"".join(wire.request("Wait", fields=[("grpc-timeout", "1S")]) for _ in range(60)))
        await rig.service.waiting.reach(60)
        turns = Backpressure(lambda: rig.service.ended.count)
        clock.advance(1001)
        await rig.service.ended.reach(60)
        assert max(turns.stop()) <= 16

    run(scenario)


def test_connections_are_accepted_one_in_a_turn(run: Run) -> None:
    """Danger: thousands of connections at once, all made in one turn of the loop."""

    async def scenario(rig: Rig, clock: ManualClock) -> None:
        opened = rig.server.figures().opened_connections
        turns = Backpressure(lambda: rig.server.figures().opened_connections)
        made = [socket.socket() for _ in range(60)]
        try:
            for each in made:  # without a turn in between
                each.connect(("127.0.0.1", rig.port))
            await until(lambda: rig.server.figures().opened_connections == opened + len(made))
        finally:
            for each in made:
                each.close()
        assert max(turns.stop()) == 1

    run(scenario)


def test_a_failing_connection_excludes_no_other(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Danger: one error ends the task that accepts, and nobody can connect any more."""

    async def scenario(rig: Rig, clock: ManualClock) -> None:
        loop, made = asyncio.get_running_loop(), [0]
        connect = loop.connect_accepted_socket

        async def fail_once(*arguments: Any, **options: Any) -> object:  # noqa: ANN401 - passed on
            made[0] += 1
            if made[0] == 1:
                raise ValueError("injected")
            return await connect(*arguments, **options)

        rig.server._loop = Mock(wraps=loop, connect_accepted_socket=fail_once, sock_accept=loop.sock_accept)
        assert await (await rig.connect(b"")).is_closed()
        await rig.check_serving()
        assert made[0] == 2

    run(scenario)


def test_a_client_gone_before_it_is_accepted_is_no_client_of_this_machine(run: Run) -> None:
    """Danger: its socket knows no peer any more, but gives what was sent, as if it came from who may do more."""
    needs_python()

    async def scenario(rig: Rig, clock: ManualClock) -> None:
        seen: list[str] = []
        joined = rig.server.joined

        def noted(client: ClientProtocol) -> AdmissionPlace:
            seen.append(client.peer)
            return joined(client)

        rig.server.joined = noted  # type: ignore[method-assign]
        gone = socket.socket()
        gone.connect(("127.0.0.1", rig.port))
        name = "ipv4:{}:{}".format(*gone.getsockname())
        gone.send(GREETING)
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # RST, and not FIN
        gone.close()
        await until(lambda: bool(seen))
        assert seen == [name]

    run(scenario)


def test_a_busy_sender_is_read_once_in_a_turn(run: Run) -> None:
    """Danger: megabytes that wait in the socket, all read in one turn of the loop."""
    needs_python()

    async def scenario(rig: Rig, clock: ManualClock) -> None:
        wire = await rig.connect()
        await wire.say(wire.request("Echo"))
        await wire.until(frames.DATA)
        (client,) = rig.server._clients
        receive, reads = client.connection.receive, [0]

        def counted(data: bytes, now_s: float) -> None:
            reads[0] += len(data) >= 64 * 1024
            receive(data, now_s)

        client.connection.receive = counted  # type: ignore[method-assign]
        turns = Backpressure(lambda: reads[0])
        await wire.say(frames.frame(0xEE, 0, 0, bytes(frames.FRAME_BYTES)) * 512 + wire.request("Echo"))
        await wire.until(frames.DATA)
        assert reads[0] > 10
        assert max(turns.stop()) == 1

    run(scenario)


def test_port_in_use_is_an_os_error(run: Run) -> None:
    """The caller says it in its own words."""

    async def scenario(rig: Rig, clock: ManualClock) -> None:
        second = Http2Server({}, host="127.0.0.1", port=rig.port, monotonic_s=clock.monotonic_s)
        with pytest.raises(OSError, match="address") as caught:
            await second.start()
        assert caught.value.errno == errno.EADDRINUSE
        await second.stop(0)

    run(scenario)


@pytest.mark.parametrize("is_there", [True, False])
def test_addresses_that_this_machine_has_are_enough(
    run: Run, monkeypatch: pytest.MonkeyPatch, *, is_there: bool
) -> None:
    """A host's name may stand for one of IPv6, too, where there is no IPv6; if none is there, that is said."""

    async def scenario(rig: Rig, clock: ManualClock) -> None:
        far: tuple[Any, ...] = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("2001:db8::1", 0, 0, 0))
        near = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))
        server = Http2Server({}, host="both", port=0, monotonic_s=clock.monotonic_s)
        loop = asyncio.get_running_loop()

        async def found(*_: object, **__: object) -> list[Any]:
            return [far, near] if is_there else [far]

        monkeypatch.setattr(asyncio, "get_running_loop", lambda: Mock(wraps=loop, getaddrinfo=found))
        if is_there:
            port = await server.start()
            socket.create_connection(("127.0.0.1", port)).close()
        else:
            with pytest.raises(OSError, match="address"):
                await server.start()
        monkeypatch.undo()
        await server.stop(0)

    run(scenario)


def test_client_that_breaks_a_rule_hears_why(run: Run) -> None:
    """GOAWAY arrives before the end; its calls are cancelled; what handlers then write goes nowhere."""

    async def scenario(rig: Rig, clock: ManualClock) -> None:
        wire = await rig.connect()
        await wire.say(wire.request("Wait") + wire.request("Echo"))
        await rig.service.waiting.reach(1)
        await wire.say(wire.request("Echo") + frames.frame(frames.PUSH_PROMISE, 0, 1))
        assert b"PUSH_PROMISE from a client" in (await wire.until(frames.GOAWAY)).payload
        assert await wire.is_closed()
        await rig.service.ended.reach(1)
        await rig.check_serving()

    run(scenario)


def test_http1_gets_no_answer_in_http1(run: Run) -> None:
    """A GOAWAY and the end."""

    async def scenario(rig: Rig, clock: ManualClock) -> None:
        wire = await rig.connect(b"")
        await wire.say(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"this is not HTTP/2" in (await wire.until(frames.GOAWAY)).payload
        assert await wire.is_closed()

    run(scenario)


@pytest.mark.parametrize("rest", ["the end", "a full window"])
def test_request_that_is_no_grpc_is_answered_when_it_is_whole(run: Run, rest: str) -> None:
    """Not before, so that a fault behind its head is told as such; a body that fills its window is long enough."""
    window = 64

    async def scenario(rig: Rig, clock: ManualClock) -> None:
        wire = await rig.connect()
        fields = [(":method", "GET"), (":scheme", "http"), (":path", "/"), (":authority", "x")]
        await wire.say(frames.header_block(1, Encoder().encode(fields), ends=False))
        heard: list[ReceivedFrame] = []
        for opaque in (b"ping 1st", b"ping 2nd"):  # what the head brought about was written before the second answer
            await wire.say(frames.ping(opaque))
            while not heard or heard[-1].payload != opaque:
                heard.append(await wire.frame())
        assert not [frame for frame in heard if frame.stream_id]
        ends = rest == "the end"
        await wire.say(frames.frame(frames.DATA, frames.END_STREAM if ends else 0, 1, b"x" * (1 if ends else window)))
        assert b"405" in (await wire.until(frames.HEADERS)).payload
        assert b"POST" in (await wire.until(frames.DATA)).payload
        await rig.check_serving()

    run(scenario, Limits(stream_window=window))


# -- what waits for its peer -------------------------------------------------------------------------------------------


async def passes(clock: ManualClock, is_so: Callable[[], bool]) -> None:
    """Let time pass until something has become of it."""
    for _ in range(250):
        if is_so():
            return
        clock.advance(5_000)
        await asyncio.sleep(OFTEN)
    raise TimeoutError


def pieces(wire: Wire, body: bytes, *, ends: bool) -> bytes:
    """A call of Echo in frames; without its end if it does not end."""
    head = wire.request("Echo")
    stop = frames.HEAD_BYTES + int.from_bytes(head[:3], "big")
    stream_id = int.from_bytes(head[5:9], "big")
    said = grpc_message(body)[: None if ends else -1000]
    return (
        head[:stop]
        + b"".join(
            frames.frame(frames.DATA, 0, stream_id, said[at : at + frames.FRAME_BYTES])
            for at in range(0, len(said), frames.FRAME_BYTES)
        )
        + (frames.frame(frames.DATA, frames.END_STREAM, stream_id) if ends else b"")
    )


def test_request_that_does_not_become_whole_is_ended(run: Run) -> None:
    """Danger: a few unfinished requests hold everybody's memory for ever. One that moves is waited for."""

    async def scenario(rig: Rig, clock: ManualClock) -> None:
        wire = await rig.connect()
        await wire.say(pieces(wire, b"x" * 100_000, ends=False))
        await until(lambda: rig.server.figures().held_bytes > 0)
        headers = wire.request("Echo")  # and one of which nothing came but its headers
        await wire.say(headers[: frames.HEAD_BYTES + int.from_bytes(headers[:3], "big")])
        await until(lambda: rig.server.figures().streams == 2)
        await passes(clock, lambda: rig.server.figures().streams == 0)
        for _ in range(2):
            assert b"grpc-status\x014" in (await wire.until(frames.HEADERS)).payload
        assert rig.server.figures().held_bytes == 0

    run(scenario, Limits(preface_s=OFTEN, ping_after_s=1e9))


def test_answer_that_is_not_taken_is_ended(run: Run) -> None:
    """Danger: gigabytes of answers to a client that gives no window."""

    async def scenario(rig: Rig, clock: ManualClock) -> None:
        wire = await rig.connect(frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: 10}))
        await wire.say(wire.request("Echo", b"x" * 1000))
        await until(lambda: rig.server.figures().held_bytes > 1000)
        await passes(clock, lambda: rig.server.figures().streams == 0)
        while b"grpc-status\x014" not in (await wire.until(frames.HEADERS)).payload:
            pass
        assert rig.server.figures().held_bytes == 0

    run(scenario, Limits(preface_s=OFTEN, ping_after_s=1e9))


def test_unfinished_requests_exclude_no_client(run: Run) -> None:
    """Danger: five connections hold all there is. Who holds less finds room, for small calls and for large ones."""

    async def scenario(rig: Rig, clock: ManualClock) -> None:
        hogs = [await rig.connect() for _ in range(6)]
        for hog in hogs:
            hog.writer.write(pieces(hog, b"x" * 500_000, ends=False))
        await until(lambda: rig.server.figures().held_bytes > MIB // 8)
        await rig.check_serving()
        wire = await rig.connect()
        await wire.say(pieces(wire, b"y" * 300_000, ends=True))
        assert (await wire.until(frames.DATA)).payload[5:6] == b"y"
        assert rig.server.figures().held_bytes <= 3 * MIB

    run(scenario, Limits(held_per_connection=MIB, held_in_all=3 * MIB, held_reserve=MIB // 4))


def test_a_server_stops_next_to_a_connection_that_was_just_reset(run: Run) -> None:
    """Its end has not been heard of yet, and its transport takes no more."""

    async def scenario(rig: Rig, clock: ManualClock) -> None:
        wire = await rig.connect(GREETING)
        await rig.check_serving()
        for client in list(rig.server._clients):  # as uvloop's is for a moment
            closed = RuntimeError("unable to perform operation; the handler is closed")
            client._transport = Mock(wraps=client._transport, write=Mock(side_effect=closed))
        await rig.server.stop(0)
        assert await wire.is_closed()

    run(scenario)
