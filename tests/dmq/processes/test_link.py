"""One end of a stream of batches, however they are cut, and whatever the other end does."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Sequence
from itertools import product
from typing import Any

import pytest
import uvloop
from structlog.testing import capture_logs

from dmq.processes import frames
from dmq.processes.link import Link

PATIENCE_S = 60.0
BUFFER_BYTES = 256 * 1024  # of a link that has nothing large to read
MANY_BYTES = 64 * 1024 * 1024
PART_BYTES = 64 * 1024
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}
_links: list[Link] = []  # of the scenario that is played
Scenario = Callable[[], Coroutine[object, object, None]]


def on_each_loop(scenario: Scenario) -> Callable[..., None]:
    """Run a scenario on the loop of fronts and store processes, and asyncio's; no callback may fail beside it."""

    def test(loop: str) -> None:
        strays: list[str] = []

        async def play() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: strays.append(repr(context)))
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await scenario()
            finally:
                for each in _links:
                    each.abort()
                _links.clear()
                await asyncio.sleep(0)

        with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
            runner.run(play())
        assert not strays, strays

    test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
    return pytest.mark.parametrize("loop", LOOPS)(test)


class End:
    """A link, and what became of it."""

    def __init__(self, on_frame: Callable[[End, Any], None] = lambda *_: None) -> None:
        self.heard: list[Any] = []
        self.lost = 0
        self.link: Link
        self._on_frame = on_frame
        self._news = asyncio.Event()

    async def open(self, stream: socket.socket, decode: Any, *, reads_while_behind: bool) -> End:  # noqa: ANN401
        self.link = await Link.over(stream, decode, self._take, self._lose, reads_while_behind=reads_while_behind)
        _links.append(self.link)
        return self

    def _take(self, heard: Sequence[Any]) -> None:
        for frame in heard:
            self.heard.append(frame)
            self._on_frame(self, frame)
        self._news.set()

    def _lose(self) -> None:
        self.lost += 1
        self._news.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._news.clear()
            await self._news.wait()


async def ends(on_frame: Callable[[End, Any], None] = lambda *_: None) -> tuple[End, End]:
    """Return a front's end and the store process's, joined."""
    ours, theirs = socket.socketpair()
    front = await End(on_frame).open(ours, frames.from_store, reads_while_behind=True)
    return front, await End(on_frame).open(theirs, frames.from_front, reads_while_behind=False)


async def raw(on_frame: Callable[[End, Any], None] = lambda *_: None) -> tuple[socket.socket, End]:
    """Return a socket in the place of a front, and the store process's end."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    return ours, await End(on_frame).open(theirs, frames.from_front, reads_while_behind=False)


def message(size_bytes: int, call: int = 1) -> frames.StreamMessage:
    return frames.StreamMessage(call, bytes(size_bytes))


def _feed(link: Link, data: bytes | bytearray, part_bytes: int = 2**30) -> None:
    """Have a link read bytes as a loop has it."""
    rest = memoryview(data)
    while rest:
        room = link.get_buffer(-1)
        assert len(room), "a loop that finds no room gives up"
        size = min(len(room), len(rest), part_bytes)
        room[:size] = rest[:size]
        rest = rest[size:]
        link.buffer_updated(size)


def _reading(heard: list[Any]) -> Link:
    return Link(frames.from_front, heard.extend, lambda: None)


@on_each_loop
async def test_batches_may_be_cut_anywhere() -> None:
    """At each byte of them, also within their lengths."""
    said = [frames.Hello("1.2"), message(7), frames.Cancel(3), frames.Ready(), message(0)]
    data = frames.encode(said[:2]) + frames.encode([]) + frames.encode(said[2:4]) + frames.encode(said[4:])
    for at in range(len(data) + 1):
        heard: list[Any] = []
        link = _reading(heard)
        _feed(link, data[:at])
        _feed(link, data[at:])
        assert heard == said, at


@on_each_loop
async def test_a_batch_may_be_larger_than_the_buffer() -> None:
    """Of each size around the buffer's, with others before and behind it; the memory for it is given back."""
    own = len(frames.encode([message(0)]))
    for size, part_bytes in product(
        (BUFFER_BYTES - own - 9, *range(BUFFER_BYTES - own - 4, BUFFER_BYTES - own + 5), 3 * BUFFER_BYTES),
        (9_999, BUFFER_BYTES - 1, 2**30),
    ):
        said = [message(5), message(size), message(6), message(size), message(size), message(7)]
        heard: list[Any] = []
        link = _reading(heard)
        _feed(link, b"".join(frames.encode([each]) for each in said), part_bytes)
        assert heard == said, size
        assert len(link.get_buffer(-1)) == BUFFER_BYTES


@on_each_loop
async def test_many_batches_come_in_one_read() -> None:
    """As many as there is room for, and a part of the next one."""
    heard: list[Any] = []
    link = _reading(heard)
    said = [message(100, call) for call in range(BUFFER_BYTES // 100)]
    _feed(link, b"".join(frames.encode([each]) for each in said))
    assert heard == said


@on_each_loop
async def test_frames_arrive_in_order() -> None:
    """In both directions, also what is said in answer while a batch is read."""

    def answer(end: End, frame: Any) -> None:  # noqa: ANN401
        if isinstance(frame, frames.StreamMessage):
            end.link.say(frames.Piece(frame.call, [frame.body]))
            end.link.say(frames.End(frame.call, 0, ""))

    front, store = await ends(answer)
    for call in range(1_000):
        front.link.say(message(call, call))
        if call % 7 == 0:
            await asyncio.sleep(0)
    await front.until(lambda: len(front.heard) == 2_000)
    assert [each.call for each in store.heard] == list(range(1_000))
    assert [each.call for each in front.heard] == [call for call in range(1_000) for _ in range(2)]
    front.link.abort()
    await store.until(lambda: store.lost > 0)


@on_each_loop
async def test_frames_from_before_the_end_arrive() -> None:
    """All of it, however much it is; then both hear of the end, once, and nothing that is said later does harm."""
    front, store = await ends()
    for call in range(100):
        front.link.say(message(PART_BYTES, call))
    front.link.close()
    front.link.say(message(1))
    front.link.close()
    await store.until(lambda: store.lost > 0)
    await front.until(lambda: front.lost > 0)
    assert [each.call for each in store.heard] == list(range(100))
    for end in (front, store):
        end.link.say(message(1))
        end.link.close()
        end.link.abort()
        await asyncio.sleep(0)
        assert (end.link.is_lost, end.lost) == (True, 1)


@on_each_loop
async def test_an_immediate_end_waits_for_no_call() -> None:
    """Also with much unsent."""
    front, store = await ends()
    front.link.say(message(MANY_BYTES))
    front.link.abort()
    await front.until(lambda: front.lost > 0)
    await store.until(lambda: store.lost > 0)
    assert (front.lost, store.lost) == (1, 1)


@on_each_loop
async def test_bytes_that_are_no_batch_end_their_link_alone() -> None:
    """Whatever is wrong with them; what came before them was taken, what lies behind them is not."""
    other_front, other_store = await ends()
    wrong = [
        b"\0\0\0\1\xc1",  # no MessagePack
        b"\0\0\0\0",  # nothing
        b"\0\0\0\1\xc0",  # no array
        b"\0\0\0\3\x91\x91\x7f",  # no kind of frame
        b"\0\0\0\3\x91\x91\x20",  # a kind that a front does not say
        b"\0\0\0\5\x91\x92\1\xa1\x80",  # text that is none
        b"\0\0\0\4\x91\x92\1\1",  # a field of another type
        b"\0\0\0\3\x91\x91\1",  # a field that is missing
    ]
    for each in wrong:
        peer, store = await raw()
        with capture_logs() as logs:
            peer.send(frames.encode([frames.Ready()]) + each + frames.encode([frames.Cancel(9)]))
            await store.until(lambda store=store: store.lost > 0)  # type: ignore[misc]
        assert [each["event"] for each in logs] == ["frames_unreadable"]
        assert store.heard == [frames.Ready()]
        peer.close()
    other_front.link.say(frames.Ready())
    await other_store.until(lambda: bool(other_store.heard))
    other_front.link.abort()
    await other_store.until(lambda: other_store.lost > 0)


@on_each_loop
async def test_a_batch_behind_the_end_is_not_taken() -> None:
    """Who ends the stream while a batch is read hears nothing more of what lies behind it."""
    peer, store = await raw(lambda end, _: end.link.abort())
    peer.send(frames.encode([frames.Ready()]) + frames.encode([frames.Cancel(1)]))
    await store.until(lambda: store.lost > 0)
    assert store.heard == [frames.Ready()]
    peer.close()


@on_each_loop
async def test_an_end_that_does_not_read_is_not_read() -> None:
    """What it is told waits within a bound, whatever it asks for; when it reads again it gets all of it."""
    loop = asyncio.get_running_loop()
    peer, store = await raw(lambda end, frame: end.link.say(frames.Piece(frame.call, [frame.body])))
    asked = 0
    batch = frames.encode([message(PART_BYTES)])

    async def ask() -> None:
        nonlocal asked
        while asked < MANY_BYTES // PART_BYTES:
            await loop.sock_sendall(peer, batch)
            asked += 1

    asking = loop.create_task(ask())
    asked_before = -1
    while asked != asked_before or not store.heard:  # until nothing more goes in
        asked_before = asked
        for _ in range(200):
            await asyncio.sleep(0)
    assert len(store.heard) * PART_BYTES < MANY_BYTES // 4
    got_bytes = 0
    while got_bytes < MANY_BYTES:
        got_bytes += len(await loop.sock_recv(peer, 2**20))
    await asking
    assert len(store.heard) == MANY_BYTES // PART_BYTES
    peer.close()
    await store.until(lambda: store.lost > 0)


@on_each_loop
async def test_two_ends_that_are_behind_do_not_wait_for_each_other() -> None:
    """Both have far more to say than fits into between, and say it at once."""
    front, store = await ends()
    count = MANY_BYTES // PART_BYTES
    for call in range(count):
        front.link.say(message(PART_BYTES, call))
        store.link.say(frames.Piece(call, [bytes(PART_BYTES)]))
    await front.until(lambda: len(front.heard) == count)
    await store.until(lambda: len(store.heard) == count)
    front.link.abort()
    await store.until(lambda: store.lost > 0)
