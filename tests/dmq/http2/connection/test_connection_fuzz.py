"""Whole connections against random peers: no unexpected exception, memory within its bound, windows never overdrawn."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import EFFORT

from dmq.http2.admission.limits import Limits
from dmq.http2.codec import frames
from dmq.http2.codec.headers import RequestHeaders
from dmq.http2.connection.messages import check_growing, next_message, only_message
from dmq.http2.connection.methods import Methods, NotGrpc, Unary
from dmq.http2.connection.stream import ARRIVED, ENDED, GONE, OPENED, Stream
from dmq.http2.errors import CallEnded, Code, Status
from dmq.http2.testing.peer import REQUEST, Peer, ReceivedFrame, grpc_message, split

pytestmark = pytest.mark.property
LIMITS = Limits(streams=20, request_max=50_000, held_per_connection=200_000, stream_window=20_000)
EXAMPLES = 150 * EFFORT


async def _echo(message: bytes, headers: RequestHeaders) -> bytes:
    return message


METHODS = Methods({"/test.Test/Echo": Unary(_echo)})


class App:
    """What the rim does with streams that have news, with a will of its own instead of handlers."""

    def __init__(self, peer: Peer, dice: random.Random) -> None:
        self._peer = peer
        self._dice = dice
        self._waiting: list[Stream] = []

    def turn(self) -> None:
        """Look at the news, and answer some of the calls."""
        out = self._peer.connection.out
        for stream, news in self._peer.changed():
            if news & GONE or stream.is_closed:
                continue
            try:
                self._look(stream, news)
            except CallEnded as end:
                out.end(stream, end.status, end.text)
            except NotGrpc as answer:
                out.send_raw(stream, answer.block, answer.body)
        self._dice.shuffle(self._waiting)
        while self._waiting and self._dice.random() < 0.7:
            stream = self._waiting.pop()
            kind = self._dice.randrange(3)
            if kind == 0:
                out.end(stream, Status.INTERNAL, "bad luck")
            elif kind == 1 and not stream.pending:
                out.send(stream, bytes(self._dice.randrange(30_000)))
                self._waiting.append(stream)
            elif not stream.pending:
                out.answer(stream, bytes(self._dice.randrange(30_000)))
        if self._dice.random() < 0.1:
            out.is_paused = not out.is_paused
            out.pump()

    def _look(self, stream: Stream, news: int) -> None:
        connection = self._peer.connection
        if news & OPENED:
            METHODS.admit(stream)
        if stream.id % 4 == 1:  # read as a stream of messages
            while next_message(connection, stream, "gzip") is not None:
                pass
            if news & ENDED:
                self._waiting.append(stream)
        elif news & ENDED:
            only_message(connection, stream, "gzip")
            self._waiting.append(stream)
        elif news & ARRIVED:
            check_growing(connection, stream)


def script(peer: Peer, dice: random.Random) -> bytes:
    """Return what a client may say on a bad day; most of it legal."""
    said = []
    open_ids: list[int] = []
    for _ in range(dice.randrange(1, 40)):
        kind = dice.randrange(12)
        if kind < 4 or not open_ids:
            fields = [*REQUEST, ("x-mq-request-id", str(dice.random()))]
            if dice.random() < 0.1:
                fields = fields[dice.randrange(3) :]
            block = peer.encoder.encode(fields, is_huffman=dice.random() < 0.8)
            ends = dice.random() < 0.1
            said.append(frames.header_block(peer.next_id, block, ends=ends, frame_bytes=dice.choice((5, 16_384))))
            open_ids.append(peer.next_id)
            peer.next_id += 2
            continue
        stream_id = dice.choice(open_ids)
        body = grpc_message(bytes(dice.choice((0, 1, 300, 9000))), flag=int(dice.random() < 0.1))
        said.append(
            {
                4: frames.frame(frames.DATA, dice.choice((0, 1)), stream_id, body),
                5: frames.frame(frames.DATA, 1, stream_id, body),
                6: frames.frame(frames.DATA, 0, stream_id, body[: dice.randrange(len(body) + 1)]),
                7: frames.rst_stream(stream_id, Code.CANCEL),
                8: frames.window_update(dice.choice((0, stream_id)), dice.choice((1, 1000, 2**20))),
                9: frames.settings({frames.INITIAL_WINDOW_SIZE: dice.choice((0, 10, 65_535, 2**20))}),
                10: frames.ping(b"12345678", is_answer=dice.random() < 0.3),
                11: frames.frame(dice.randrange(16), dice.randrange(256), stream_id, bytes(dice.randrange(12))),
            }[kind]
        )
    return b"".join(said)


def mutate(said: bytes, dice: random.Random) -> bytes:
    """Change, remove, repeat or add a few bytes."""
    made = bytearray(said)
    for _ in range(dice.choice((0, 0, 1, 1, 2, 5, 20))):
        at = dice.randrange(len(made)) if made else 0
        kind = dice.randrange(4)
        if kind == 0 and made:
            made[at] = dice.randrange(256)
        elif kind == 1:
            del made[at : at + dice.randrange(20)]
        elif kind == 2:
            made[at:at] = made[at : at + dice.randrange(50)]
        else:
            made[at:at] = dice.randbytes(dice.randrange(20))
    return bytes(made)


def check_accounts(peer: Peer) -> None:
    """What is counted as held is what is held, and it is bounded."""
    connection = peer.connection
    held = sum(stream.unread + len(stream.pending) for stream in connection.streams.values())
    assert held == connection.out.held == peer.account.bytes_held
    assert all(len(stream.body) <= stream.unread for stream in connection.streams.values())
    # each stream at most its window or one message, and one answer
    assert held <= LIMITS.streams * (LIMITS.stream_window + LIMITS.request_max + 30_005)
    assert len(connection.streams) <= LIMITS.streams
    assert all(not stream.is_closed for stream in connection.streams.values())


@settings(max_examples=EXAMPLES)
@given(st.integers(0, 2**32))
def test_mutated_connections(seed: int) -> None:
    """Nothing is raised, all that we say is frames, accounts are right, and at the end nothing is held."""
    dice = random.Random(seed)
    peer = Peer(LIMITS)
    app = App(peer, dice)
    for _ in range(3):
        said = mutate(script(peer, dice), dice)
        while said:
            cut = dice.choice((1, 7, 100, 5000, len(said)))
            peer.now_s += dice.random() / 10
            peer.say(said[:cut])
            said = said[cut:]
            check_accounts(peer)
            app.turn()
            check_accounts(peer)
            peer.hear()
    if peer.connection.fault is not None:
        assert not peer.connection.streams
    peer.connection.lose()
    app.turn()
    assert peer.account.bytes_held == 0


@settings(max_examples=EXAMPLES)
@given(st.integers(0, 2**32))
def test_cuts_make_no_difference(seed: int) -> None:
    """The same bytes in one piece and in many have the same answer, faults included."""
    heard = []
    for is_whole in (True, False):
        dice = random.Random(seed)
        peer = Peer(LIMITS)
        said = mutate(script(peer, dice), dice)
        while said:
            cut = len(said) if is_whole else dice.choice((1, 9, 50, 1000))
            peer.say(said[:cut])
            said = said[cut:]
        heard.append((peer.hear(), str(peer.connection.fault), sorted(peer.connection.streams)))
    assert heard[0] == heard[1]


class Counting:
    """A client that counts what it may be sent."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self.peer = Peer()
        self._initial = self._whole_left = frames.WINDOW_DEFAULT
        self._left: dict[int, int] = {}
        self.received: dict[int, bytes] = {}
        self.wanted: dict[int, bytes] = {}
        self.ended: set[int] = set()

    def call(self) -> None:
        """Call, and have the answer given at once."""
        stream_id = self.peer.call()
        self._left[stream_id], self.received[stream_id] = self._initial, b""
        body = self._dice.randbytes(self._dice.choice((0, 1, 1000, 20_000, 100_000)))
        self.wanted[stream_id] = grpc_message(body)
        self.peer.connection.out.answer(self.peer.stream(stream_id), body)

    def widen(self, size: int) -> None:
        """Widen the window of the connection."""
        self._whole_left += size
        self.peer.say(frames.window_update(0, size))

    def widen_streams(self, size: int, share: float) -> None:
        """Widen the windows of some streams."""
        for stream_id in self._left:
            if self._dice.random() < share:
                self._left[stream_id] += size
                self.peer.say(frames.window_update(stream_id, size))

    def rewindow(self, value: int) -> None:
        """Change the windows of all streams, perhaps to less than nothing."""
        for stream_id in self._left:
            self._left[stream_id] += value - self._initial
        self._initial = value
        self.peer.say(frames.settings({frames.INITIAL_WINDOW_SIZE: value}))

    def listen(self) -> None:
        """Count what came."""
        for frame in self.peer.hear():
            if frame.kind == frames.DATA:
                size = len(frame.payload)
                assert 0 < size <= min(self._left[frame.stream_id], self._whole_left, frames.FRAME_BYTES)
                self._left[frame.stream_id] -= size
                self._whole_left -= size
                self.received[frame.stream_id] += frame.payload
            elif frame.kind == frames.HEADERS and frame.flags & frames.END_STREAM:
                self.ended.add(frame.stream_id)


@settings(max_examples=EXAMPLES)
@given(st.integers(0, 2**32))
def test_windows_are_never_overdrawn(seed: int) -> None:
    """No DATA beyond the windows, each answer whole and in order, and everything in the end."""
    dice = random.Random(seed)
    client = Counting(dice)
    out = client.peer.connection.out
    for _ in range(dice.randrange(5, 60)):
        kind = dice.randrange(5)
        if kind == 0:
            client.call()
        elif kind == 1:
            client.widen(dice.choice((1, 100, 50_000)))
        elif kind == 2:
            client.widen_streams(dice.choice((1, 100, 50_000)), 0.3)
        elif kind == 3:
            client.rewindow(dice.choice((0, 5, 1000, 65_535, 200_000)))
        elif dice.random() < 0.3:
            out.is_paused = not out.is_paused
            out.pump()
        client.listen()
    out.is_paused = False
    client.widen(2**30)
    client.widen_streams(2**25, 1)
    out.pump()
    client.listen()
    while out.blocked:  # one write carries a part of the data that the windows allow
        out.pump()
        client.listen()
    assert client.received == client.wanted
    assert client.ended == set(client.wanted)
    assert client.peer.account.bytes_held == 0


@given(st.binary(max_size=400), st.booleans())
def test_noise_on_a_connection(noise: bytes, greets: bool) -> None:
    """Random bytes from the start, or behind a right beginning."""
    peer = Peer(LIMITS, greets=greets)
    peer.say(noise)
    peer.hear()
    check_accounts(peer)


def test_frames_of_ours_are_split_as_they_were_made() -> None:
    """The tests' own reader reads what the builder builds."""
    assert split(frames.ping(b"12345678") + frames.rst_stream(3, Code.CANCEL)) == [
        ReceivedFrame(frames.PING, 0, 0, b"12345678"),
        ReceivedFrame(frames.RST_STREAM, 0, 3, b"\0\0\0\x08"),
    ]
