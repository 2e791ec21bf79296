"""Standby's side of the direct link: refused primaries and frames."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from support.rigs.replica.objects import MemoryObjects

from dmq.replication.link import LINK, LinkBroken, LinkRecord, ReceivedBatches
from dmq.replication.link.frames import FRAME_BYTES_MAX, VERSION, LinkFrame, LinkHello, LinkWelcome, decode, encode
from dmq.replication.link.receiver import LinkReceiver
from dmq.replication.link.sockets import SocketChannel
from dmq.store.schema.cell.position import Position

pytestmark = pytest.mark.integration
WAIT_S = 30.0
HELLO = LinkHello(VERSION, 7, 3)


class Peer:
    """Primary with a connection to a receiver."""

    def __init__(self, receiver: LinkReceiver) -> None:
        left, right = socket.socketpair()
        self.channel = SocketChannel(left)
        self._thread = threading.Thread(target=receiver.serve, args=(SocketChannel(right),))
        self._thread.start()

    def greet(self, hello: LinkHello = HELLO) -> LinkWelcome:
        """Send a hello and return the answer."""
        self.channel.send(encode(hello), WAIT_S)
        return decode(self.channel.receive(FRAME_BYTES_MAX, WAIT_S), LinkWelcome)

    def send(self, frame: LinkFrame) -> int:
        """Send a frame and return the acknowledged batch."""
        self.channel.send(encode(frame), WAIT_S)
        return decode(self.channel.receive(FRAME_BYTES_MAX, WAIT_S), int)

    def close(self) -> None:
        self.channel.close()
        self._thread.join(WAIT_S)


class Rig:
    """Receiver of a standby that follows epoch 2 of store 7."""

    def __init__(self, folder: Path) -> None:
        self.objects = MemoryObjects()
        self.received = ReceivedBatches(folder, makes=True)
        position = Position(7, 2, 10, 100, bytes(16))
        self.receiver = LinkReceiver(self.received, self.objects, lambda: position)
        self._peers: list[Peer] = []

    def peer(self) -> Peer:
        """Return a new connection."""
        self._peers.append(Peer(self.receiver))
        return self._peers[-1]

    def close(self) -> None:
        for each in self._peers:
            each.close()
        self.received.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """Return a receiver."""
    found = Rig(tmp_path)
    yield found
    found.close()


@pytest.mark.parametrize(
    ("hello", "refusal"),
    [
        (LinkHello(VERSION + 1, 7, 3), "upgrade both"),
        (LinkHello(VERSION, 8, 3), "follows store 0000000000000007, not 0000000000000008"),
        (LinkHello(VERSION, 7, 1), "the log has epoch 2, and this primary epoch 1"),
    ],
)
def test_another_primary_is_refused_with_the_reason(rig: Rig, hello: LinkHello, refusal: str) -> None:
    """Of another version, of another store, or of an earlier epoch."""
    welcome = rig.peer().greet(hello)
    assert refusal in welcome.refusal
    assert welcome.member == ""


def test_a_sealed_epoch_is_refused(rig: Rig) -> None:
    """The takeover may have begun in an earlier process. The next epoch is accepted."""
    rig.objects.replace(LINK, LinkRecord(3, rig.received.member, is_sealed=True).encode(), None)
    assert "a takeover from epoch 3 began" in rig.peer().greet().refusal
    assert rig.peer().greet(LinkHello(VERSION, 7, 4)).refusal == ""


def test_frames_follow_the_stored_or_the_received_batches(rig: Rig) -> None:
    """A gap is accepted if the object store has its batches; a hole ends the connection and is not acknowledged."""
    peer = rig.peer()
    assert peer.greet() == LinkWelcome(VERSION, rig.received.member, 0, "")
    assert peer.send(LinkFrame(1, 0, 1, [b"a", b"b"])) == 2
    assert peer.send(LinkFrame(3, 0, 1, [])) == 2
    assert peer.send(LinkFrame(8, 7, 1, [b"c"])) == 8
    with pytest.raises(LinkBroken):
        peer.send(LinkFrame(10, 7, 1, [b"d"]))
    assert rig.received.last(7, 3) == 8
    assert rig.peer().greet().received == 8


@pytest.mark.parametrize(
    "body",
    [b"", b"\xc1", encode([1]), encode(["a", 0, 0, []]), encode([-1, 0, 0, []]), encode([1, 0, 0, [1]]), b"\x94\xcf"],
)
def test_an_invalid_frame_ends_the_connection(rig: Rig, body: bytes) -> None:
    """Nothing is written."""
    peer = rig.peer()
    peer.greet()
    peer.channel.send(body, WAIT_S)
    with pytest.raises(LinkBroken):
        peer.channel.receive(FRAME_BYTES_MAX, WAIT_S)
    assert rig.received.last(7, 3) == 0


def test_a_long_hello_ends_the_connection(rig: Rig) -> None:
    """An unknown peer may send a few bytes only."""
    peer = rig.peer()
    peer.channel.send(msgspec.msgpack.encode([VERSION, 7, 3, "x" * 2_000]), WAIT_S)
    with pytest.raises(LinkBroken):
        peer.channel.receive(FRAME_BYTES_MAX, WAIT_S)


def test_a_new_connection_replaces_the_earlier_one(rig: Rig) -> None:
    """A primary whose connection died silently connects again at once."""
    first, second = rig.peer(), rig.peer()
    first.greet()
    assert first.send(LinkFrame(1, 0, 1, [b"a"])) == 1
    assert second.greet().received == 1
    with pytest.raises(LinkBroken):
        first.send(LinkFrame(2, 0, 1, [b"b"]))
    assert second.send(LinkFrame(2, 0, 1, [b"b"])) == 2


def test_a_closed_receiver_acknowledges_nothing(rig: Rig) -> None:
    """Neither on a connection nor on a new one; ``open`` ends that."""
    peer = rig.peer()
    peer.greet()
    rig.receiver.close()
    with pytest.raises(LinkBroken):
        peer.send(LinkFrame(1, 0, 1, [b"a"]))
    with pytest.raises(LinkBroken):
        rig.peer().greet()
    assert rig.received.last(7, 3) == 0
    rig.receiver.open()
    assert rig.peer().greet().refusal == ""
