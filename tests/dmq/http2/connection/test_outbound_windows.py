"""Flow control, both ways: what may go goes, what may not waits, and nobody is kept waiting by another."""

from __future__ import annotations

import pytest

from dmq.http2.admission.limits import Limits
from dmq.http2.codec import frames
from dmq.http2.connection.stream import DRAINED
from dmq.http2.errors import Code, Status
from dmq.http2.testing.peer import Peer, ReceivedFrame, grpc_message

MIB = 2**20


def narrow(window: int, limits: Limits | None = None) -> Peer:
    """A client whose streams take ``window`` bytes."""
    peer = Peer(limits)
    peer.say(frames.settings({frames.INITIAL_WINDOW_SIZE: window}))
    peer.hear()
    return peer


def widen(peer: Peer, stream_id: int, size: int) -> None:
    peer.frame(frames.WINDOW_UPDATE, 0, stream_id, size.to_bytes(4, "big"))


def data_of(peer: Peer) -> list[tuple[int, bytes]]:
    return [(frame.stream_id, frame.payload) for frame in peer.hear() if frame.kind == frames.DATA]


# -- sending -----------------------------------------------------------------------------------------------------------


def test_answer_waits_for_the_window_of_its_stream() -> None:
    """It goes as far as the window, and its trailers go behind its last byte."""
    peer = narrow(10)
    stream_id = peer.call()
    peer.connection.out.answer(peer.stream(stream_id), b"0123456789")
    assert data_of(peer) == [(stream_id, grpc_message(b"0123456789")[:10])]
    widen(peer, stream_id, 4)
    assert data_of(peer) == [(stream_id, b"5678")]
    widen(peer, stream_id, 4)
    last, trailers = peer.hear()
    assert last.payload == b"9"
    assert trailers.flags & frames.END_STREAM
    assert not peer.connection.streams
    assert peer.account.bytes_held == 0


def test_window_may_turn_negative() -> None:
    """Danger: SETTINGS take back 90 of 100 bytes after 60 were sent; nothing goes until the debt of 50 is paid."""
    peer = narrow(100)
    stream_id = peer.call()
    stream = peer.stream(stream_id)
    assert peer.connection.out.send(stream, b"x" * 55)
    peer.say(frames.settings({frames.INITIAL_WINDOW_SIZE: 10}))
    assert stream.granted + peer.connection.out.window == -50
    assert not peer.connection.out.send(stream, b"y" * 5)
    peer.hear()
    widen(peer, stream_id, 50)
    assert data_of(peer) == []
    widen(peer, stream_id, 1)
    assert data_of(peer) == [(stream_id, b"\0")]
    peer.say(frames.settings({frames.INITIAL_WINDOW_SIZE: 100}))
    ack, rest = peer.hear()
    assert (ack.kind, rest.payload) == (frames.SETTINGS, grpc_message(b"y" * 5)[1:])


def test_settings_are_acknowledged_before_the_data_they_release() -> None:
    """A client that reads the DATA first would think us ahead of its window."""
    peer = narrow(0)
    stream_id = peer.call()
    peer.connection.out.answer(peer.stream(stream_id), b"answer")
    peer.hear()
    peer.say(frames.settings({frames.INITIAL_WINDOW_SIZE: 100}))
    assert [frame.kind for frame in peer.hear()] == [frames.SETTINGS, frames.DATA, frames.HEADERS]


def test_settings_that_widen_a_window_too_far_end_the_connection() -> None:
    """The sum counts, not the setting."""
    peer = Peer()
    stream_id = peer.call()
    widen(peer, stream_id, 2**31 - 1 - 65_535)
    peer.say(frames.settings({frames.INITIAL_WINDOW_SIZE: 65_536}))
    assert peer.connection.fault is not None
    assert peer.connection.fault.code is Code.FLOW_CONTROL_ERROR


def test_streams_take_turns_on_the_window_of_the_connection() -> None:
    """One frame each: a large answer does not keep the small one behind it waiting."""
    peer = narrow(MIB)
    large, small = peer.call(), peer.call()
    peer.connection.out.answer(peer.stream(large), b"L" * 300_000)
    assert len(data_of(peer)) == 4  # 65 535 bytes
    peer.connection.out.answer(peer.stream(small), b"S" * 100)
    assert data_of(peer) == []
    widen(peer, 0, 20_000)
    assert [(stream_id, len(payload)) for stream_id, payload in data_of(peer)] == [
        (large, 16_384),
        (small, 105),
        (large, 20_000 - 16_384 - 105),
    ]


def test_messages_of_a_stream_wait_one_at_a_time() -> None:
    """The second is not made before the first is gone: DRAINED says when."""
    peer = narrow(8)
    stream_id = peer.call()
    stream = peer.stream(stream_id)
    out = peer.connection.out
    assert out.send(stream, b"123")
    assert not out.send(stream, b"456")
    peer.changed()
    widen(peer, stream_id, 3)
    assert peer.changed() == []
    widen(peer, stream_id, 5)
    assert peer.changed() == [(stream, DRAINED)]
    assert out.send(stream, b"") is False
    out.end(stream)
    widen(peer, stream_id, 5)
    assert not peer.connection.streams


def test_messages_that_go_together_share_frames() -> None:
    """Several messages in one piece are the bytes of each behind the other, cut where the window says so."""
    peer = narrow(20)
    stream_id = peer.call()
    stream = peer.stream(stream_id)
    whole = grpc_message(b"123") + grpc_message(b"") + grpc_message(b"4567890")
    assert not peer.connection.out.send(stream, [b"123", b"", b"4567890"])
    (head,) = data_of(peer)
    assert head == (stream_id, whole[:20])
    peer.changed()
    widen(peer, stream_id, 100)
    assert data_of(peer) == [(stream_id, whole[20:])]
    assert peer.changed() == [(stream, DRAINED)]


def test_peer_that_does_not_read_gets_nothing_more_and_streams_stay() -> None:
    """Danger: what cannot be written waits in its stream, which counts; after the pause everything goes."""
    peer = Peer()
    out = peer.connection.out
    out.is_paused = True
    ids = [peer.call() for _ in range(3)]
    for stream_id in ids:
        out.answer(peer.stream(stream_id), b"x" * 100)
    assert data_of(peer) == []
    assert len(peer.connection.streams) == 3
    assert peer.account.bytes_held >= 300
    widen(peer, 0, 1000)
    assert data_of(peer) == []
    out.is_paused = False
    out.pump()
    assert [stream_id for stream_id, _ in data_of(peer)] == ids
    assert not peer.connection.streams


def test_error_drops_waiting_data() -> None:
    """A part of a message with an error behind it is worth nothing, and holds nothing."""
    peer = narrow(8)
    stream_id = peer.call()
    stream = peer.stream(stream_id)
    peer.connection.out.send(stream, b"x" * 1000)
    peer.hear()
    peer.connection.out.end(stream, Status.DEADLINE_EXCEEDED)
    (trailers,) = peer.hear()
    assert peer.fields(trailers.payload) == [("grpc-status", "4")]
    assert peer.account.bytes_held == 0


def test_frames_grow_with_the_peers_setting_within_reason() -> None:
    """Larger frames where they are welcome; never so large that one stream keeps the others waiting."""
    peer = narrow(2**24)
    widen(peer, 0, 2**24)
    peer.say(frames.settings({frames.MAX_FRAME_SIZE: 2**24 - 1}))
    peer.hear()
    peer.connection.out.answer(peer.stream(peer.call()), b"x" * 200_000)
    assert max(len(payload) for _, payload in data_of(peer)) == 65_536


# -- receiving ---------------------------------------------------------------------------------------------------------


def test_window_of_the_connection_is_refilled_by_halves() -> None:
    """One WINDOW_UPDATE for many frames, also for frames that nobody waits for."""
    peer = Peer(Limits(connection_window=100_000, stream_window=MIB))
    stream_id = peer.open()
    updates: list[ReceivedFrame] = []
    for _ in range(20):
        peer.data(stream_id, b"x" * 10_000)
        updates += peer.hear()
    assert all((frame.kind, frame.stream_id) == (frames.WINDOW_UPDATE, 0) for frame in updates)
    assert len(updates) == 3
    assert all(int.from_bytes(frame.payload, "big") > 50_000 for frame in updates)


def test_unread_bytes_are_not_granted_again() -> None:
    """The peer may send one window; what the handler takes comes back by halves of it."""
    peer = Peer(Limits(stream_window=1000))
    stream_id = peer.open()
    stream = peer.stream(stream_id)
    peer.data(stream_id, b"x" * 1000)
    assert peer.hear() == []
    stream.body = b""
    peer.connection.consume(stream, 400)
    assert peer.hear() == []
    peer.connection.consume(stream, 100)
    assert peer.hear() == [ReceivedFrame(frames.WINDOW_UPDATE, 0, stream_id, (500).to_bytes(4, "big"))]


def test_more_than_the_window_of_a_stream_ends_it() -> None:
    """The connection goes on."""
    peer = Peer(Limits(stream_window=1000))
    stream_id = peer.open()
    peer.data(stream_id, b"x" * 1001)
    (frame,) = peer.hear()
    assert (frame.kind, frame.payload) == (frames.RST_STREAM, Code.FLOW_CONTROL_ERROR.to_bytes(4, "big"))
    assert peer.account.bytes_held == 0
    assert peer.connection.fault is None


def test_inexpressible_windows_are_refused() -> None:
    """Every connection begins with 65 535 bytes, and no window is above 31 bits."""
    for window in (0, 65_535, 2**31):
        with pytest.raises(ValueError, match="connection_window"):
            Limits(connection_window=window)
    for window in (0, 2**31):
        with pytest.raises(ValueError, match="stream_window"):
            Limits(stream_window=window)


def test_padding_counts_in_the_windows_and_is_not_kept() -> None:
    """As the RFC wants it."""
    peer = Peer()
    stream_id = peer.open()
    peer.frame(frames.DATA, frames.PADDED, stream_id, b"\x03abc\0\0\0")
    stream = peer.stream(stream_id)
    assert stream.body == b"abc"
    assert stream.receive_left == MIB - 7
    assert stream.unread == 3


def test_a_message_larger_than_the_window_is_admitted() -> None:
    """What lacks of it is granted at once, and one byte more, for clients that stop where no room is left."""
    peer = Peer(Limits(stream_window=1000))
    stream_id = peer.open()
    peer.data(stream_id, grpc_message(b"x" * 5000)[:1000])
    stream = peer.stream(stream_id)
    peer.connection.expect(stream, 5005)
    assert peer.hear() == [ReceivedFrame(frames.WINDOW_UPDATE, 0, stream_id, (4006).to_bytes(4, "big"))]
    peer.connection.expect(stream, 5005)
    assert peer.hear() == []
