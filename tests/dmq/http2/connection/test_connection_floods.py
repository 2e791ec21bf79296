"""Floods, each of which once took a server down: the connection ends with ENHANCE_YOUR_CALM, honest clients do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dmq.http2.admission.bounds import Allowance
from dmq.http2.admission.limits import Limits, Rate
from dmq.http2.codec import frames
from dmq.http2.errors import Code, ConnectionFault
from dmq.http2.testing.peer import Peer, grpc_message

FLOODED = Limits(
    resets=Rate(burst=100, per_s=10),
    pings=Rate(burst=100, per_s=10),
    settings=Rate(burst=100, per_s=10),
    idle_frames=Rate(burst=100, per_s=10),
)


def rapid_reset(peer: Peer) -> None:
    """CVE-2023-44487: streams that are opened and reset at once."""
    peer.frame(frames.RST_STREAM, 0, peer.open(), b"\0\0\0\x08")


def provoked_reset(peer: Peer) -> None:
    """CVE-2025-8671: the same, but the server is made to reset."""
    peer.frame(frames.WINDOW_UPDATE, 0, peer.open(ends=True), b"\0\0\0\0")


def data_after_the_end(peer: Peer) -> None:
    """A cheap frame for each of our RST_STREAMs."""
    stream_id = peer.next_id - 2
    if stream_id < 1:
        stream_id = peer.open(ends=True)
        peer.connection.out.close(peer.stream(stream_id))
    peer.data(stream_id, b"")


def ping(peer: Peer) -> None:
    """CVE-2019-9512."""
    peer.frame(frames.PING, 0, 0, b"12345678")


def ping_answer(peer: Peer) -> None:
    """Answers to PINGs that we never sent."""
    peer.frame(frames.PING, frames.ACK, 0, b"12345678")


def settings(peer: Peer) -> None:
    """CVE-2019-9515."""
    peer.say(frames.settings({frames.INITIAL_WINDOW_SIZE: 100_000}))


def settings_answer(peer: Peer) -> None:
    """Acknowledgements of nothing."""
    peer.say(frames.SETTINGS_ACK)


def empty_data(peer: Peer) -> None:
    """CVE-2019-9518: DATA without a byte, without an end."""
    if not peer.connection.streams:
        peer.open()
    peer.data(1, b"")


def padding_alone(peer: Peer) -> None:
    """The same, in disguise."""
    if not peer.connection.streams:
        peer.open()
    peer.frame(frames.DATA, frames.PADDED, 1, b"\x10" + bytes(16))


def priority(peer: Peer) -> None:
    """CVE-2019-9513: the tree of priorities, shuffled; we have none."""
    peer.frame(frames.PRIORITY, 0, 1, b"\0\0\0\0\0")


def unknown(peer: Peer) -> None:
    """Frames of an extension that nobody knows."""
    peer.frame(200, 0, 0, b"")


def goaway(peer: Peer) -> None:
    """A client that says goodbye, and again, and again."""
    peer.frame(frames.GOAWAY, 0, 0, bytes(8))


FLOODS = (
    rapid_reset,
    provoked_reset,
    data_after_the_end,
    ping,
    ping_answer,
    settings,
    settings_answer,
    empty_data,
    padding_alone,
    priority,
    unknown,
    goaway,
)


@pytest.mark.parametrize("flood", FLOODS, ids=lambda flood: flood.__name__)
def test_flood_ends_the_connection(flood: Callable[[Peer], None]) -> None:
    """Soon after the burst that is allowed; no stream is left, and nothing more is read."""
    peer = Peer(FLOODED)
    done = 0
    while peer.connection.fault is None and done < 110:
        flood(peer)
        peer.hear()
        done += 1
    assert peer.connection.fault is not None, "the flood went on"
    assert peer.connection.fault.code is Code.ENHANCE_YOUR_CALM
    assert 95 <= done <= 105
    assert not peer.connection.streams
    assert peer.account.bytes_held == 0


@pytest.mark.parametrize("flood", FLOODS, ids=lambda flood: flood.__name__)
def test_the_same_at_an_honest_pace_continues(flood: Callable[[Peer], None]) -> None:
    """Ten in a second for twenty seconds: what a client with a bad day does."""
    peer = Peer(FLOODED)
    for _ in range(200):
        peer.now_s += 0.1
        flood(peer)
        peer.hear()
        peer.changed()
    assert peer.connection.fault is None


def test_pings_between_calls_are_no_flood() -> None:
    """Clients that estimate bandwidth ping once per round trip while they send."""
    peer = Peer(FLOODED)
    for _ in range(500):
        peer.call()
        peer.connection.control.served()
        ping(peer)
        for stream, _ in peer.changed():
            peer.connection.out.answer(stream, b"")
    assert peer.connection.fault is None


def test_streams_have_a_number() -> None:
    """What exceeds it is refused, one by one, and served once there is room."""
    peer = Peer(Limits(streams=10))
    ids = [peer.open() for _ in range(15)]
    refused = [frame.stream_id for frame in peer.hear() if frame.kind == frames.RST_STREAM]
    assert refused == ids[10:]
    assert len(peer.connection.streams) == 10
    peer.frame(frames.RST_STREAM, 0, ids[0], b"\0\0\0\x08")
    peer.open()
    assert peer.hear() == []


def test_resets_of_unknown_streams_are_remembered_within_bounds() -> None:
    """Streams that we ended early are known for a while, and not for ever."""
    peer = Peer(Limits(resets=Rate(burst=10**6, per_s=0)))
    for _ in range(5000):
        peer.connection.out.close(peer.stream(peer.open()))
    assert len(peer.connection.out.let_go) == 4096


def test_held_bytes_are_counted_over_all_connections() -> None:
    """What comes in is held until the stream is over, on whichever connection."""
    first = Peer()
    second = Peer(account=first.account)
    for peer in (first, second):
        peer.data(peer.open(), grpc_message(b"x" * 995))
    assert first.account.bytes_held == 2000
    second.connection.lose()
    assert first.account.bytes_held == 1000


def test_allowance_refills_with_time() -> None:
    """The burst, then the rate."""
    allowance = Allowance("words", Rate(burst=2, per_s=1), 0.0)
    allowance.spend(0.0)
    allowance.spend(0.0)
    with pytest.raises(ConnectionFault, match="too many words"):
        allowance.spend(0.5)
    allowance.spend(1.0)
    with pytest.raises(ConnectionFault):
        allowance.spend(1.5)
    allowance.spend(100.0)
    allowance.spend(100.0)
    with pytest.raises(ConnectionFault):
        allowance.spend(100.0)
