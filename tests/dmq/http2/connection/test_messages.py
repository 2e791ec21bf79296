"""Messages of gRPC: cut out of whatever DATA they came in, decompressed within bounds, refused when too large."""

from __future__ import annotations

import gzip
import zlib

import pytest

from dmq.http2.admission.bounds import Account
from dmq.http2.admission.limits import Limits
from dmq.http2.codec import frames
from dmq.http2.connection.messages import check_growing, check_held, next_message, only_message
from dmq.http2.connection.stream import Stream
from dmq.http2.errors import CallEnded, Status
from dmq.http2.testing.peer import Peer, grpc_message

MIB = 2**20


def whole(body: bytes, limits: Limits | None = None) -> tuple[Peer, Stream]:
    """A request that has come whole."""
    peer = Peer(limits)
    stream_id = peer.open()
    peer.data(stream_id, body, ends=True)
    return peer, peer.stream(stream_id)


def refusal(body: bytes, encoding: str = "", limits: Limits | None = None) -> Status:
    peer, stream = whole(body, limits)
    with pytest.raises(CallEnded) as caught:
        only_message(peer.connection, stream, encoding)
    assert isinstance(caught.value.status, Status)
    return caught.value.status


@pytest.mark.parametrize("size", [0, 1, 16_379, 16_380, 100_000])
def test_one_message(size: int) -> None:
    """In one frame or many."""
    peer, stream = whole(grpc_message(b"x" * size))
    assert only_message(peer.connection, stream, "") == b"x" * size


@pytest.mark.parametrize(
    "body", [b"", b"\0\0\0", grpc_message(b"abc")[:-1], grpc_message(b"abc") + b"x", grpc_message(b"a") * 2]
)
def test_other_than_one_message(body: bytes) -> None:
    """None, a part of one, or more than one."""
    assert refusal(body) is Status.INTERNAL


def test_unknown_flag() -> None:
    """Only the lowest bit has a meaning."""
    assert refusal(grpc_message(b"abc", flag=2)) is Status.INTERNAL


def test_gzip() -> None:
    """As clients send it when told to compress."""
    peer, stream = whole(grpc_message(gzip.compress(b"text" * 10_000), flag=1))
    assert only_message(peer.connection, stream, "gzip") == b"text" * 10_000


def test_gzip_without_its_name_and_bad_gzip() -> None:
    """A flag without an encoding, other compression, cut short, something behind it."""
    packed = gzip.compress(b"text")
    assert refusal(grpc_message(packed, flag=1)) is Status.INTERNAL
    assert refusal(grpc_message(packed, flag=1), "identity") is Status.INTERNAL
    for wrong in (zlib.compress(b"text"), packed[:-1], packed + b"x", b""):
        assert refusal(grpc_message(wrong, flag=1), "gzip") is Status.INTERNAL


def test_gzip_bomb() -> None:
    """Danger: 100 MiB in 100 KiB; one byte more than the bound is made, not more."""
    bomb = gzip.compress(b"\0" * (100 * MIB), 9)
    assert refusal(grpc_message(bomb, flag=1), "gzip") is Status.RESOURCE_EXHAUSTED


def test_gzip_up_to_the_bound() -> None:
    """The bound itself is allowed."""
    limits = Limits(request_max=1000)
    peer, stream = whole(grpc_message(gzip.compress(b"x" * 1000), flag=1), limits)
    assert len(only_message(peer.connection, stream, "gzip")) == 1000
    assert refusal(grpc_message(gzip.compress(b"x" * 1001), flag=1), "gzip", limits) is Status.RESOURCE_EXHAUSTED


def test_large_message_is_refused_by_its_prefix() -> None:
    """Before its bytes are here."""
    peer = Peer(Limits(request_max=1000))
    stream_id = peer.open()
    peer.data(stream_id, grpc_message(b"x" * 1001)[:5])
    with pytest.raises(CallEnded, match="1001 bytes") as caught:
        check_growing(peer.connection, peer.stream(stream_id))
    assert caught.value.status is Status.RESOURCE_EXHAUSTED


def test_growing_message_gets_the_window_it_needs() -> None:
    """As soon as its prefix is known, and only once."""
    peer = Peer(Limits(stream_window=1000))
    stream_id = peer.open()
    stream = peer.stream(stream_id)
    peer.data(stream_id, grpc_message(b"x" * 5000)[:4])
    check_growing(peer.connection, stream)
    assert peer.hear() == []
    peer.data(stream_id, grpc_message(b"x" * 5000)[4:1000])
    check_growing(peer.connection, stream)
    assert [(f.kind, int.from_bytes(f.payload, "big")) for f in peer.hear()] == [(frames.WINDOW_UPDATE, 4006)]
    peer.data(stream_id, grpc_message(b"x" * 5000)[1000:], ends=True)
    assert only_message(peer.connection, stream, "") == b"x" * 5000


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_message_as_large_as_the_window_leaves_room_for_its_end(lacking: int) -> None:
    """A client that looks for the end of its request only while it may send more gets to it."""
    said = grpc_message(b"x" * 995)
    peer = Peer(Limits(stream_window=len(said)))
    stream_id = peer.open()
    stream = peer.stream(stream_id)
    peer.data(stream_id, said[: len(said) - lacking])
    check_growing(peer.connection, stream)
    assert stream.receive_left == lacking + 1


def test_messages_one_by_one() -> None:
    """Cut as they come, across frames, with room given back for what was taken."""
    peer = Peer(Limits(stream_window=1000))
    stream_id = peer.open()
    stream = peer.stream(stream_id)
    said = grpc_message(b"one") + grpc_message(b"") + grpc_message(b"x" * 500)
    peer.data(stream_id, said[:10])
    assert next_message(peer.connection, stream, "") == b"one"
    assert next_message(peer.connection, stream, "") is None
    peer.data(stream_id, said[10:])
    assert next_message(peer.connection, stream, "") == b""
    assert next_message(peer.connection, stream, "") == b"x" * 500
    assert next_message(peer.connection, stream, "") is None
    assert stream.unread == 0
    assert [frame.kind for frame in peer.hear()] == [frames.WINDOW_UPDATE]


def test_many_small_messages_in_one_piece_take_linear_time() -> None:
    """Danger: cutting from the front of bytes is quadratic; 100 000 messages in a megabyte are taken in no time."""
    peer = Peer()
    stream_id = peer.open()
    peer.data(stream_id, grpc_message(b"12345") * 100_000)
    stream = peer.stream(stream_id)
    count = 0
    while next_message(peer.connection, stream, "") is not None:
        count += 1
    assert count == 100_000


def test_too_much_held_on_one_connection_or_in_all() -> None:
    """The call that brings it over the bound is refused."""
    peer = Peer(Limits(held_per_connection=1000))
    peer.data(first_id := peer.open(), b"\0" * 1000)
    check_held(peer.connection, peer.stream(first_id))
    peer.data(second_id := peer.open(), b"\0")
    with pytest.raises(CallEnded) as caught:
        check_held(peer.connection, peer.stream(second_id))
    assert caught.value.status is Status.RESOURCE_EXHAUSTED
    account = Account.alone(1500)
    first, second = Peer(account=account), Peer(account=account)
    first.data(first.open(), b"\0" * 1000)
    second.data(small_id := second.open(), b"\0" * 500)
    check_held(second.connection, second.stream(small_id))
    second.data(third_id := second.open(), b"\0" * 5000)
    with pytest.raises(CallEnded):
        check_held(second.connection, second.stream(third_id))


def test_gzip_that_is_no_honest_text_is_refused_by_its_ratio() -> None:
    """Danger: 20 KB of nothing that become 20 MB, within the bound of a message. 256 KiB are allowed in any case."""
    assert refusal(grpc_message(gzip.compress(b"\0" * (20 * MIB)), flag=1), "gzip") is Status.RESOURCE_EXHAUSTED
    peer, stream = whole(grpc_message(gzip.compress(b"\0" * (MIB // 4)), flag=1))
    assert len(only_message(peer.connection, stream, "gzip")) == MIB // 4
    assert peer.account.bytes_held == stream.unread > MIB // 4  # what it became is what counts


def test_the_bound_of_a_message_is_that_of_its_call() -> None:
    """A call whose headers admitted smaller messages than the server takes is refused a larger one."""
    peer = Peer()
    stream_id = peer.open()
    peer.stream(stream_id).request_max = 1000
    peer.data(stream_id, grpc_message(b"x" * 1001), ends=True)
    with pytest.raises(CallEnded, match="maximum is 1000"):
        only_message(peer.connection, peer.stream(stream_id), "")
