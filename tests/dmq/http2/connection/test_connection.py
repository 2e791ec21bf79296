"""A connection from its preface to its end: every frame's rules, without a socket."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable

import pytest

from dmq.http2.admission.limits import Limits, Rate
from dmq.http2.codec import frames
from dmq.http2.connection.methods import Bidirectional, Sent
from dmq.http2.connection.stream import ARRIVED, ENDED, GONE, OPENED
from dmq.http2.errors import Code, Status
from dmq.http2.testing.peer import REQUEST, Peer, ReceivedFrame, grpc_message, split

ES, EH = frames.END_STREAM, frames.END_HEADERS


def fault_of(peer: Peer) -> Code | None:
    """Return how the connection ended; GOAWAY says it to the peer as well."""
    fault = peer.connection.fault
    if fault is None:
        return None
    (away,) = [frame for frame in peer.hear() if frame.kind == frames.GOAWAY]
    assert int.from_bytes(away.payload[4:8], "big") == fault.code
    assert peer.connection.is_over
    return fault.code


def reset_of(peer: Peer, stream_id: int) -> Code | None:
    """Return the code of the RST_STREAM of a stream."""
    found = [frame for frame in peer.hear() if frame.kind == frames.RST_STREAM and frame.stream_id == stream_id]
    return Code(int.from_bytes(found[0].payload, "big")) if found else None


# -- beginning ---------------------------------------------------------------------------------------------------------


def test_greeting_and_acknowledgement() -> None:
    """Our SETTINGS and the wide window go out first, and the client's SETTINGS are acknowledged."""
    peer = Peer(greets=False)
    settings, window = peer.hear()
    assert settings.kind == frames.SETTINGS
    assert window == ReceivedFrame(frames.WINDOW_UPDATE, 0, 0, (16 * 2**20 - 65_535).to_bytes(4, "big"))
    peer.say(frames.PREFACE + frames.settings({frames.ENABLE_PUSH: 0}))
    assert peer.hear() == [ReceivedFrame(frames.SETTINGS, frames.ACK, 0, b"")]
    assert peer.connection.is_ready


def test_bytes_may_come_one_by_one() -> None:
    """Wherever the network cuts, frames are put together again."""
    peer = Peer(greets=False)
    said = frames.PREFACE + frames.settings({})
    said += frames.header_block(1, peer.encoder.encode(REQUEST), ends=False)
    said += frames.frame(frames.DATA, ES, 1, grpc_message(b"hello"))
    for at in range(len(said)):
        peer.say(said[at : at + 1])
    assert peer.stream(1).is_ended
    assert peer.stream(1).body == grpc_message(b"hello")


def test_frame_that_is_too_large_is_not_waited_for() -> None:
    """Danger: its head in pieces must not make us keep 16 MiB before we see that it is too large."""
    peer = Peer()
    head = frames.head(2**24 - 1, frames.DATA, 0, 1)
    for piece in (head[:4], head[4:]):
        peer.say(piece)
    assert fault_of(peer) is Code.FRAME_SIZE_ERROR


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", b"P\x00", b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n", b"\x16\x03\x01"]
)
def test_bytes_that_are_no_http2_are_turned_away(said: bytes) -> None:
    """At the first byte that differs."""
    peer = Peer(greets=False)
    peer.say(said)
    assert fault_of(peer) is Code.PROTOCOL_ERROR


def test_settings_come_first() -> None:
    """A preface without SETTINGS behind it is not HTTP/2."""
    for first in (frames.ping(b"12345678"), frames.SETTINGS_ACK):
        peer = Peer(greets=False)
        peer.say(frames.PREFACE + first)
        assert fault_of(peer) is Code.PROTOCOL_ERROR


# -- a call ------------------------------------------------------------------------------------------------------------


def test_call_and_answer() -> None:
    """One request brings one change; the answer is HEADERS, DATA, trailers, in one write, and the stream is gone."""
    peer = Peer()
    stream_id = peer.call(b"hello")
    ((stream, news),) = peer.changed()
    assert news == OPENED | ARRIVED | ENDED
    peer.connection.out.answer(stream, b"bye")
    begin, body, end = peer.hear()
    assert (begin.kind, begin.flags, begin.stream_id) == (frames.HEADERS, EH, stream_id)
    assert peer.fields(begin.payload) == [(":status", "200"), ("content-type", "application/grpc")]
    assert body == ReceivedFrame(frames.DATA, 0, stream_id, grpc_message(b"bye"))
    assert (end.kind, end.flags) == (frames.HEADERS, EH | ES)
    assert peer.fields(end.payload) == [("grpc-status", "0")]
    assert not peer.connection.streams
    assert peer.connection.out.held == peer.account.bytes_held == 0


def test_error_is_one_frame() -> None:
    """Status and text without a message before them are HEADERS that end the stream."""
    peer = Peer()
    stream_id = peer.call()
    peer.connection.out.end(peer.stream(stream_id), Status.NOT_FOUND, "no, 100%")
    (frame,) = peer.hear()
    assert frame.flags == EH | ES
    assert peer.fields(frame.payload)[2:] == [("grpc-status", "5"), ("grpc-message", "no, 100%25")]


def test_answer_before_the_end_of_the_request_stops_the_client() -> None:
    """It need not send the rest; what is on its way is no fault."""
    peer = Peer()
    stream_id = peer.open()
    peer.connection.out.end(peer.stream(stream_id), Status.UNIMPLEMENTED)
    assert [frame.kind for frame in peer.hear()] == [frames.HEADERS, frames.RST_STREAM]
    peer.data(stream_id, b"x" * 100, ends=True)
    assert peer.hear() == []
    assert peer.connection.fault is None


def test_the_end_of_a_stream_of_both_ways_is_its_status_alone() -> None:
    """Danger: the official Rust client asks a stream that was reset behind its status for ever, as fast as it can."""
    peer = Peer()
    stream_id = peer.open()
    peer.stream(stream_id).method = Bidirectional(lambda messages, headers: echo(messages))
    peer.connection.out.end(peer.stream(stream_id), Status.CANCELLED)
    (frame,) = peer.hear()
    assert (frame.kind, frame.flags) == (frames.HEADERS, EH | ES)
    peer.data(stream_id, b"x" * 100)
    peer.frame(frames.RST_STREAM, 0, stream_id, b"\0\0\0\x08")  # what clients do then
    assert peer.hear() == []
    assert peer.connection.fault is None
    assert not peer.connection.streams


@pytest.mark.parametrize("kind", [frames.RST_STREAM, frames.DATA, frames.HEADERS])
def test_the_end_waits_for_the_halves_of_the_peer(kind: int) -> None:
    """Danger: grpcio calls a stream lost if the connection ends before it has answered the status with its own end."""
    peer = Peer()
    stream_id = peer.open()
    peer.stream(stream_id).method = Bidirectional(lambda messages, headers: echo(messages))
    peer.connection.control.finish(stream_id)
    peer.connection.out.end(peer.stream(stream_id))
    peer.data(stream_id, b"on its way")
    before = (peer.connection.is_leaving, peer.connection.is_over)
    if kind == frames.RST_STREAM:
        peer.frame(kind, 0, stream_id, b"\0\0\0\x08")
    elif kind == frames.DATA:
        peer.data(stream_id, b"", ends=True)
    else:
        peer.frame(kind, EH | ES, stream_id, peer.encoder.encode([("x-checksum", "1")]))
    after = (peer.connection.is_leaving, peer.connection.is_over)
    assert (before, after) == ((True, False), (False, True))


def test_undecided_half_messages_are_forgotten() -> None:
    """When they are too many, and when the time to leave is over."""
    peer = Peer(Limits(resets=Rate(burst=10**6, per_s=0)))
    for _ in range(5000):
        stream_id = peer.open()
        peer.stream(stream_id).method = Bidirectional(lambda messages, headers: echo(messages))
        peer.connection.out.end(peer.stream(stream_id))
    assert len(peer.connection.out.open_halves) == 4096
    peer.connection.control.finish(peer.connection.last_id)
    is_over = [peer.connection.is_over]
    peer.connection.leave()
    is_over.append(peer.connection.is_over)
    assert is_over == [False, True]


async def echo(messages: AsyncIterator[bytes]) -> AsyncGenerator[Sent, None]:
    """Say what was said."""
    async for message in messages:
        yield message


def test_nothing_is_written_after_the_end() -> None:
    """Answers of a handler that did not hear of the end change nothing."""
    peer = Peer()
    stream_id = peer.call()
    ((stream, _),) = peer.changed()
    peer.frame(frames.RST_STREAM, 0, stream_id, b"\0\0\0\x08")
    assert peer.changed() == [(stream, GONE)]
    out = peer.connection.out
    out.answer(stream, b"late")
    assert out.send(stream, b"late") is True
    out.end(stream, Status.INTERNAL)
    out.close(stream)
    assert peer.hear() == []


def test_trailers_of_a_request_end_it() -> None:
    """Nobody sends them with gRPC; they are legal."""
    peer = Peer()
    stream_id = peer.open()
    peer.frame(frames.HEADERS, EH | ES, stream_id, peer.encoder.encode([("x-checksum", "1")]))
    assert peer.stream(stream_id).is_ended


@pytest.mark.parametrize(
    ("flags", "fields"), [(EH, [("a", "1")]), (EH | ES, [(":path", "/")]), (EH | ES, [("connection", "close")])]
)
def test_trailers_that_are_none(flags: int, fields: list[tuple[str, str]]) -> None:
    """Without an end, or with a pseudo-header: the stream ends, and the table has seen the block."""
    peer = Peer()
    stream_id = peer.open()
    peer.frame(frames.HEADERS, flags, stream_id, peer.encoder.encode(fields))
    assert reset_of(peer, stream_id) is Code.PROTOCOL_ERROR
    peer.call()
    assert peer.connection.fault is None


def test_content_length_must_be_kept() -> None:
    """More or less DATA than announced ends the stream; the right number does not."""
    fields = [*REQUEST, ("content-length", "5")]
    for body, expected in ((b"12345", None), (b"1234", Code.PROTOCOL_ERROR), (b"123456", Code.PROTOCOL_ERROR)):
        peer = Peer()
        stream_id = peer.open(fields)
        peer.data(stream_id, body, ends=True)
        assert reset_of(peer, stream_id) is expected


@pytest.mark.parametrize(
    "field", [("content-length", "x"), ("content-length", "9" * 30), ("content-length", "-1"), ("te", "gzip")]
)
def test_malformed_values_end_the_stream(field: tuple[str, str]) -> None:
    """Values that HTTP itself gives a meaning are checked at once."""
    peer = Peer()
    stream_id = peer.open([*(one for one in REQUEST if one[0] != field[0]), field])
    assert reset_of(peer, stream_id) is Code.PROTOCOL_ERROR
    assert not peer.connection.streams


def test_malformed_names_end_the_stream_and_empty_paths_too() -> None:
    """The stream ends, the connection goes on."""
    peer = Peer()
    for fields in ([*REQUEST, ("Upper", "1")], [(name, "" if name == ":path" else value) for name, value in REQUEST]):
        assert reset_of(peer, peer.open(fields)) is Code.PROTOCOL_ERROR
    peer.call()
    assert len(peer.connection.streams) == 1


# -- header blocks -----------------------------------------------------------------------------------------------------


def test_block_in_pieces() -> None:
    """HEADERS and CONTINUATIONs are one block, padding and priority are no part of it."""
    peer = Peer()
    block = peer.encoder.encode(REQUEST)
    payload = b"\x03" + b"\0\0\0\0\x10" + block[:10] + b"\0\0\0"
    peer.frame(frames.HEADERS, frames.PADDED | frames.PRIORITISED | ES, 1, payload)
    assert not peer.connection.streams
    peer.frame(frames.CONTINUATION, 0, 1, block[10:20])
    peer.frame(frames.CONTINUATION, EH, 1, block[20:])
    assert peer.stream(1).headers.get(":path") == "/test.Test/Echo"
    assert peer.stream(1).is_ended


def test_block_of_a_refused_stream_is_decoded() -> None:
    """Danger: its entries are in the client's table. Refused for their number, or for coming too late."""
    peer = Peer(Limits(streams=1))
    peer.open()
    refused = peer.open([*REQUEST, ("x-new", "value")])
    assert reset_of(peer, refused) is Code.REFUSED_STREAM
    peer.connection.control.finish(peer.connection.last_id)
    peer.hear()
    late = peer.open([*REQUEST, ("x-newer", "value")])
    assert peer.hear() == []
    peer.data(late, b"on its way")
    peer.frame(frames.HEADERS, EH | ES, 1, peer.encoder.encode([("x-newer", "value"), ("x-new", "value")]))
    assert peer.connection.fault is None
    assert peer.stream(1).is_ended


def test_headers_over_the_bound_are_for_the_call_to_refuse() -> None:
    """A stream whose list was cut has no path; the next stream on the connection is served."""
    peer = Peer(Limits(header_list_max=1000))
    stream_id = peer.open([*REQUEST, ("x-large", "v" * 1000)])
    assert peer.stream(stream_id).shape.path == -1
    assert peer.stream(peer.open()).shape.path >= 0


def test_endless_header_block_ends_the_connection() -> None:
    """Danger: CONTINUATION without end, in bytes or in frames without a byte."""
    for piece in (b"\0" * 16_384, b""):
        peer = Peer()
        peer.frame(frames.HEADERS, 0, 1, b"\x83")
        for _ in range(65):
            peer.frame(frames.CONTINUATION, 0, 1, piece)
        assert fault_of(peer) is Code.ENHANCE_YOUR_CALM


# -- frames that may not be --------------------------------------------------------------------------------------------

Say = Callable[[Peer], object]


@pytest.mark.parametrize(
    ("say", "code"),
    [
        (lambda p: p.frame(frames.DATA, 0, 1, b"x"), Code.PROTOCOL_ERROR),
        (lambda p: p.frame(frames.DATA, 0, 0, b"x"), Code.PROTOCOL_ERROR),
        (lambda p: p.frame(frames.HEADERS, EH, 2, b"\x83"), Code.PROTOCOL_ERROR),
        (lambda p: p.frame(frames.HEADERS, EH, 0, b"\x83"), Code.PROTOCOL_ERROR),
        (lambda p: p.frame(frames.HEADERS, EH, 1, b"\xff"), Code.COMPRESSION_ERROR),
        (lambda p: p.frame(frames.HEADERS, EH | frames.PADDED, 1, b"\x05\x83"), Code.PROTOCOL_ERROR),
        (lambda p: p.frame(frames.HEADERS, EH | frames.PADDED, 1, b""), Code.PROTOCOL_ERROR),
        (lambda p: p.frame(frames.HEADERS, EH | frames.PRIORITISED, 1, b"\0\0\0\1\0"), Code.PROTOCOL_ERROR),
        (lambda p: p.frame(frames.HEADERS, EH | frames.PRIORITISED, 1, b"\0"), Code.FRAME_SIZE_ERROR),
        (lambda p: p.frame(frames.PRIORITY, 0, 0, b"\0\0\0\1\0"), Code.PROTOCOL_ERROR),
        (lambda p: p.frame(frames.RST_STREAM, 0, 1, b"\0\0\0\0"), Code.PROTOCOL_ERROR),
        (lambda p: p.frame(frames.RST_STREAM, 0, 1, b"\0"), Code.FRAME_SIZE_ERROR),
        (lambda p: p.frame(frames.SETTINGS, 0, 1), Code.PROTOCOL_ERROR),
        (lambda p: p.frame(frames.SETTINGS, 0, 0, b"\0"), Code.FRAME_SIZE_ERROR),
        (lambda p: p.frame(frames.SETTINGS, frames.ACK, 0, b"\0" * 6), Code.FRAME_SIZE_ERROR),
        (lambda p: p.say(frames.settings({frames.ENABLE_PUSH: 2})), Code.PROTOCOL_ERROR),
        (lambda p: p.say(frames.settings({frames.MAX_FRAME_SIZE: 100})), Code.PROTOCOL_ERROR),
        (lambda p: p.say(frames.settings({frames.MAX_FRAME_SIZE: 2**24})), Code.PROTOCOL_ERROR),
        (lambda p: p.say(frames.settings({frames.INITIAL_WINDOW_SIZE: 2**31})), Code.FLOW_CONTROL_ERROR),
        (lambda p: p.frame(frames.PUSH_PROMISE, EH, 1, b"\0\0\0\2"), Code.PROTOCOL_ERROR),
        (lambda p: p.frame(frames.PING, 0, 1, b"12345678"), Code.PROTOCOL_ERROR),
        (lambda p: p.frame(frames.PING, 0, 0, b"1234567"), Code.FRAME_SIZE_ERROR),
        (lambda p: p.frame(frames.GOAWAY, 0, 1, b"\0" * 8), Code.PROTOCOL_ERROR),
        (lambda p: p.frame(frames.GOAWAY, 0, 0, b"\0" * 7), Code.PROTOCOL_ERROR),
        (lambda p: p.frame(frames.WINDOW_UPDATE, 0, 0, b"\0\0\0\0"), Code.PROTOCOL_ERROR),
        (lambda p: p.frame(frames.WINDOW_UPDATE, 0, 0, b"\0\0\0"), Code.FRAME_SIZE_ERROR),
        (lambda p: p.frame(frames.WINDOW_UPDATE, 0, 1, b"\0\0\0\1"), Code.PROTOCOL_ERROR),
        (lambda p: p.frame(frames.WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff"), Code.FLOW_CONTROL_ERROR),
        (lambda p: p.frame(frames.CONTINUATION, EH, 1, b"\x83"), Code.PROTOCOL_ERROR),
        (lambda p: p.say(frames.head(16_385, frames.DATA, 0, 1)), Code.FRAME_SIZE_ERROR),
        (lambda p: (p.frame(frames.HEADERS, 0, 1, b"\x83"), p.frame(frames.PING, 0, 0, b"8" * 8)), Code.PROTOCOL_ERROR),
        (lambda p: (p.frame(frames.HEADERS, 0, 1), p.frame(frames.CONTINUATION, EH, 3)), Code.PROTOCOL_ERROR),
        (lambda p: (p.frame(frames.HEADERS, 0, 1), p.frame(99, 0, 3)), Code.PROTOCOL_ERROR),
    ],
)
def test_faults_of_the_connection(say: Say, code: Code) -> None:
    """Each ends the connection with GOAWAY and the code of the RFC; what comes behind is not read."""
    peer = Peer()
    say(peer)
    assert fault_of(peer) is code
    peer.call()
    assert (peer.hear(), peer.connection.streams) == ([], {})


@pytest.mark.parametrize(
    ("say", "code"),
    [
        (lambda p, at: p.data(at, b"more"), Code.STREAM_CLOSED),
        (lambda p, at: p.frame(frames.HEADERS, EH | ES, at, p.encoder.encode([("a", "1")])), Code.STREAM_CLOSED),
        (lambda p, at: p.frame(frames.PRIORITY, 0, at, b"\0\0"), Code.FRAME_SIZE_ERROR),
        (lambda p, at: p.frame(frames.PRIORITY, 0, at, at.to_bytes(4, "big") + b"\0"), Code.PROTOCOL_ERROR),
        (lambda p, at: p.frame(frames.WINDOW_UPDATE, 0, at, b"\0\0\0\0"), Code.PROTOCOL_ERROR),
        (lambda p, at: p.frame(frames.WINDOW_UPDATE, 0, at, b"\x7f\xff\xff\xff"), Code.FLOW_CONTROL_ERROR),
    ],
)
def test_faults_of_a_stream(say: Callable[[Peer, int], object], code: Code) -> None:
    """Each ends its stream, whose handler hears of it, and the next call is served."""
    peer = Peer()
    stream_id = peer.call()
    ((stream, _),) = peer.changed()
    say(peer, stream_id)
    assert reset_of(peer, stream_id) is code
    assert peer.changed() == [(stream, GONE)]
    peer.call()
    assert [news for _, news in peer.changed()] == [OPENED | ARRIVED | ENDED]


def test_frames_on_closed_streams() -> None:
    """DATA gets STREAM_CLOSED, HEADERS end the connection, the rest may have been on its way."""
    peer = Peer()
    stream_id = peer.call()
    peer.connection.out.answer(peer.stream(stream_id), b"")
    peer.hear()
    peer.frame(frames.WINDOW_UPDATE, 0, stream_id, b"\0\0\0\1")
    peer.frame(frames.RST_STREAM, 0, stream_id, b"\0\0\0\0")
    peer.frame(frames.PRIORITY, 0, stream_id, b"\0\0\0\0\0")
    assert peer.hear() == []
    peer.data(stream_id, b"more")
    assert reset_of(peer, stream_id) is Code.STREAM_CLOSED
    other = peer.call()
    peer.connection.out.answer(peer.stream(other), b"")
    peer.hear()
    peer.frame(frames.HEADERS, EH | ES, other, b"\x83")
    assert fault_of(peer) is Code.STREAM_CLOSED


def test_unknown_frames_and_settings_are_ignored() -> None:
    """Extensions, and the padding that clients send on purpose."""
    peer = Peer()
    peer.frame(99, 255, 7, b"anything")
    peer.say(frames.settings({0x4242: 1, frames.HEADER_TABLE_SIZE: 0}))
    assert peer.hear() == [ReceivedFrame(frames.SETTINGS, frames.ACK, 0, b"")]
    peer.frame(frames.SETTINGS, frames.ACK, 0)
    peer.frame(frames.GOAWAY, 0, 0, b"\0" * 8)
    assert peer.connection.fault is None


def test_ping_is_answered_with_its_bytes() -> None:
    """At once, and an answer to nothing is ignored."""
    peer = Peer()
    peer.say(frames.ping(b"abcdefgh") + frames.ping(b"whatever", is_answer=True))
    assert peer.hear() == [ReceivedFrame(frames.PING, frames.ACK, 0, b"abcdefgh")]


# -- the end -----------------------------------------------------------------------------------------------------------


def test_draining_serves_requests_in_flight() -> None:
    """GOAWAY for all streams and a PING; a call sent before the client heard is served, one after the answer is not."""
    peer = Peer()
    first = peer.call()
    peer.connection.control.drain()
    away, ping = peer.hear()
    assert away.payload[:8] == (2**31 - 1).to_bytes(4, "big") + bytes(4)
    second = peer.call()
    peer.say(frames.ping(ping.payload, is_answer=True))
    (final,) = peer.hear()
    assert final.payload[:8] == second.to_bytes(4, "big") + bytes(4)
    peer.call()
    assert set(peer.connection.streams) == {first, second}
    is_over = [peer.connection.is_over]
    for stream_id in (first, second):
        peer.connection.out.answer(peer.stream(stream_id), b"")
        is_over.append(peer.connection.is_over)
    assert is_over == [False, False, True]
    assert all(frame.kind != frames.RST_STREAM for frame in peer.hear())


def test_a_lost_connection_releases_all_streams() -> None:
    """Their handlers hear of it, and nothing counts as held any more."""
    peer = Peer()
    peer.call()
    peer.data(peer.open(), b"x" * 1000)
    peer.changed()
    assert peer.account.bytes_held > 1000
    peer.connection.lose()
    assert [news for _, news in peer.changed()] == [GONE, GONE]
    assert peer.account.bytes_held == 0


def test_long_blocks_of_ours_are_cut() -> None:
    """HEADERS of more than a frame continue in CONTINUATIONs."""
    found = split(frames.header_block(1, b"x" * 40_000, ends=True))
    assert [(frame.kind, frame.flags, len(frame.payload)) for frame in found] == [
        (frames.HEADERS, ES, 16_384),
        (frames.CONTINUATION, 0, 16_384),
        (frames.CONTINUATION, EH, 40_000 - 2 * 16_384),
    ]
