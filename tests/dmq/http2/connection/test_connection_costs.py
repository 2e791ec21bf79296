"""What input costs in the loop and in memory: work is counted, not timed. Each of these once held one of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.forges.wire import http2_attacks as attacks

from dmq.http2.admission.bounds import Shares
from dmq.http2.admission.connection_admission import AdmissionPlace, ConnectionAdmission, ConnectionUse
from dmq.http2.admission.limits import Limits
from dmq.http2.codec import frames
from dmq.http2.codec.headers import RequestHeaders
from dmq.http2.codec.hpack import NAME_BYTES_MAX, value_of
from dmq.http2.connection.stream import Stream
from dmq.http2.errors import Code, HpackFault
from dmq.http2.testing.peer import REQUEST, Encoder, Peer, grpc_message, integer

_READ_BYTES = 256 * 1024


class Counted(dict[int, Stream]):
    """Streams that count how often they are walked over."""

    walks = 0

    def values(self) -> object:  # type: ignore[override]
        self.walks += 1
        return super().values()


# -- slices ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attack", attacks.ATTACKS, ids=lambda attack: attack.__name__)
def test_one_turn_reads_a_slice(attack: Callable[[], bytes]) -> None:
    """However much came in one read, what is read of it at once costs no more than a slice and one frame."""
    peer = Peer(Limits(slice_cost=500), greets=False)  # so small that no attack fits one slice
    connection = peer.connection
    connection.receive(attack()[:_READ_BYTES], 0.0)
    turns = 0
    while connection.is_behind:
        assert connection._left <= 0
        assert connection._left > -connection.limits.header_block_max // 4
        connection.read_on(0.0)
        for stream, _ in peer.changed():
            if not stream.is_closed and stream.is_ended:
                connection.out.answer(stream, bytes(1000))
        peer.hear()
        turns += 1
    assert turns or connection.fault
    if connection.fault is None:
        connection.lose()
    assert connection.out.account.bytes_held == connection.out.held == 0
    assert connection.out.lists_held == connection.out.lists.held == 0


def test_fields_count_in_a_slice_for_any_bytes() -> None:
    """Danger: references of a byte each, 1,500 in a block that costs a third of a millisecond."""
    peer = Peer(greets=False)
    block = b"\x83\x86" + b"\x84" * 1_500
    peer.connection.receive(
        b"".join(
            (
                frames.PREFACE,
                frames.settings({}),
                *(frames.header_block(1 + 2 * n, block, ends=True) for n in range(50)),
            )
        ),
        0.0,
    )
    assert peer.connection.last_id <= 2 * 4


@pytest.mark.parametrize(
    "attack",
    [
        attacks.window_updates,
        attacks.trickled_windows,
        attacks.one_byte_data,
        attacks.data_after_reset,
        attacks.endless_header_block,
        attacks.empty_continuations,
        attacks.header_references,
    ],
    ids=lambda attack: attack.__name__,
)
def test_flood_without_use_ends_the_connection(attack: Callable[[], bytes]) -> None:
    """ENHANCE_YOUR_CALM, and not a byte of its input is kept."""
    peer = Peer(greets=False)
    peer.say(attack())
    fault = peer.connection.fault
    assert fault is not None
    assert fault.code is Code.ENHANCE_YOUR_CALM
    assert not peer.connection._rest
    assert peer.connection._block is None
    assert not peer.connection.is_behind


def test_windows_of_an_honest_client_are_no_flood() -> None:
    """A call brings a few WINDOW_UPDATEs with it, a long answer one for each of its frames."""
    peer = Peer()
    for _ in range(5000):
        peer.connection.control.served()
        stream = peer.stream(peer.call())
        peer.connection.out.answer(stream, b"x")
        peer.say(frames.window_update(0, 100) + frames.window_update(stream.id, 100))
        peer.hear()
    assert peer.connection.fault is None


# -- windows -----------------------------------------------------------------------------------------------------------


def test_a_change_of_the_window_touches_no_stream() -> None:
    """2,730 changes in a frame, over many streams: the last one counts, and streams are not walked over."""
    peer = Peer()
    stream_ids = [peer.open(ends=True) for _ in range(200)]
    counted = peer.connection.out.streams = Counted(peer.connection.streams)
    peer.say(attacks.window_changes(2730) + frames.settings({frames.INITIAL_WINDOW_SIZE: 3}))
    assert counted.walks == 0
    peer.hear()
    out = peer.connection.out
    out.streams = peer.connection.streams
    for stream_id in stream_ids[:2]:
        out.send(peer.stream(stream_id), b"hello")
    assert [len(frame.payload) for frame in peer.hear() if frame.kind == frames.DATA] == [3, 3]


def test_a_change_that_a_frame_takes_back_is_none() -> None:
    """Windows within a frame add up to the last one, however large one was in between."""
    peer = Peer()
    peer.frame(frames.WINDOW_UPDATE, 0, peer.open(), (2**31 - 1 - 65_535).to_bytes(4, "big"))
    pairs = frames.SETTING.pack(frames.INITIAL_WINDOW_SIZE, 65_536), frames.SETTING.pack(frames.INITIAL_WINDOW_SIZE, 5)
    peer.frame(frames.SETTINGS, 0, 0, b"".join(pairs))
    assert not peer.connection.is_over
    peer.say(frames.settings({frames.INITIAL_WINDOW_SIZE: 65_536}))
    assert peer.connection.fault is not None
    assert peer.connection.fault.code is Code.FLOW_CONTROL_ERROR


def test_streams_that_wait_are_not_walked_over_for_a_byte() -> None:
    """A byte for the connection lets one stream send a byte, and the others are not looked at."""
    peer = Peer()
    peer.say(frames.settings({frames.INITIAL_WINDOW_SIZE: 2**30}))
    out = peer.connection.out
    for _ in range(70):
        out.send(peer.stream(peer.open(ends=True)), bytes(1000))
    waiting = list(out.blocked)
    peer.hear()
    peer.say(frames.window_update(0, 1))
    (sent,) = peer.hear()
    assert (sent.stream_id, len(sent.payload)) == (waiting[0], 1)
    assert list(out.blocked) == [*waiting[1:], waiting[0]]


# -- headers -----------------------------------------------------------------------------------------------------------


def fat(size: int) -> bytes:
    """Return a block with a value of so many bytes."""
    return Encoder().encode(REQUEST, is_kept=False) + b"\0\x01x" + integer(size, 7, 0) + b"v" * size


def test_header_lists_stand_in_an_account() -> None:
    """Of a connection, of an address, of all; what is over is refused by stream, and all of it is given back."""
    limits = Limits(lists_per_connection=100_000, lists_per_address=150_000, lists_in_all=200_000)
    shares = Shares(limits.lists_in_all, limits.lists_per_address)
    peers = [Peer(limits, lists=shares.join(address)) for address in ("a", "a", "b")]
    for peer in peers:
        for number in range(20):
            peer.say(frames.header_block(2 * number + 1, fat(15_000), ends=False))
    assert [len(peer.connection.streams) for peer in peers] == [6, 3, 3]
    assert shares.held <= limits.lists_in_all
    refused = peers[0].hear()[0]
    assert (refused.kind, refused.payload[-1]) == (frames.RST_STREAM, Code.ENHANCE_YOUR_CALM)
    for peer in peers:
        peer.connection.lose()
    assert shares.held == 0


def test_values_shared_by_the_table_count_for_each_stream() -> None:
    """Three bytes that refer to a long value count as that value: the table may lose it while the stream is open."""
    peer = Peer()
    value = ("x", "v" * 3000)
    peer.open([*REQUEST, value])
    before = peer.connection.out.lists_held
    peer.open([*REQUEST, value])
    assert peer.connection.out.lists_held - before > 3000


def test_new_names_cost_no_more_than_a_bound() -> None:
    """Names are decoded at once; a block brings 4 KiB of them that nobody has seen before, or it is not read."""
    peer = Peer()
    peer.say(frames.header_block(1, b"\0" + integer(NAME_BYTES_MAX, 7, 0x80) + b"\x1f" * NAME_BYTES_MAX, ends=True))
    assert peer.connection.fault is not None
    assert peer.connection.fault.code is Code.ENHANCE_YOUR_CALM


def test_values_too_long_to_decode_count_as_absent() -> None:
    """Each byte of Huffman code costs; plain text of the same length is taken."""
    wire = integer(10_000, 7, 0x80) + b"\x1f" * 10_000
    with pytest.raises(HpackFault, match="too long"):
        value_of(wire)
    assert RequestHeaders(("x",), (wire,), "").get("x") is None
    assert len(value_of(integer(10_000, 7, 0) + b"v" * 10_000)) == 10_000


def test_ended_connection_keeps_nothing() -> None:
    """A block that was not whole, input ahead, half a frame: let go at once, not when the socket is closed."""
    peer = Peer()
    peer.frame(frames.HEADERS, 0, 1, bytes(16_000))
    peer.say(frames.frame(frames.CONTINUATION, 0, 1, bytes(16_000)))
    out = peer.connection.out
    assert out.lists.held == out.lists_held == 32_000
    peer.frame(frames.DATA, 0, 1, grpc_message(b""))
    assert peer.connection.fault is not None
    assert peer.connection._block is None
    assert out.lists.held == out.lists_held == 0


# -- connections -------------------------------------------------------------------------------------------------------


class Guest:
    """A connection as the doors see it."""

    def __init__(
        self,
        address: str,
        use: ConnectionUse,
        since_s: float = 0.0,
        *,
        is_local: bool = False,
        is_operators: bool = False,
    ) -> None:
        self.address, self.is_local, self._use = address, is_local, (use, since_s)
        self.is_operators = is_operators
        self.looks = 0

    def use(self) -> tuple[ConnectionUse, float]:
        self.looks += 1
        return self._use


class House:
    """Doors, and who is inside."""

    def __init__(self, *, connections: int, connections_reserved: int) -> None:
        self.inside: list[Guest] = []
        limits = Limits(connections=connections, connections_reserved=connections_reserved)
        self.doors = ConnectionAdmission[Guest](limits, lambda: self.inside)

    def come(self, guest: Guest, now_s: float = 0.0) -> bool:
        """Let a guest in, if there is room or somebody to close."""
        place, victim = self.doors.admit(guest, now_s)
        if victim is not None:
            self.inside.remove(victim)
            self.doors.left(victim)
        if place is not AdmissionPlace.NOWHERE:
            self.inside.append(guest)
        return place is not AdmissionPlace.NOWHERE


def test_no_address_keeps_more_than_its_share_while_others_are_refused() -> None:
    """One that has taken everything loses it to newcomers of others, busy or not, down to a quarter."""
    house = House(connections=40, connections_reserved=0)
    assert [house.come(Guest("greedy", ConnectionUse.BUSY)) for _ in range(41)] == [True] * 40 + [False]
    assert all(house.come(Guest(f"other-{number}", ConnectionUse.BUSY), now_s=1.0) for number in range(30))
    assert not house.come(Guest("another", ConnectionUse.BUSY), now_s=2.0)
    assert sum(guest.address == "greedy" for guest in house.inside) == 10


def test_an_address_over_its_share_makes_room_among_its_own() -> None:
    """A flood of connections closes its own idle ones, and nobody else's."""
    house = House(connections=40, connections_reserved=0)
    for number in range(20):
        house.come(Guest("calm", ConnectionUse.IDLE, -number))
    for number in range(100):
        assert house.come(Guest("flood", ConnectionUse.SILENT, number), now_s=number)
    assert sum(guest.address == "calm" for guest in house.inside) >= 20 - 10


def test_a_search_for_room_visits_some_connections_only() -> None:
    """Danger: thousands of idle connections that are all looked at for a newcomer, again and again."""
    house = House(connections=4000, connections_reserved=0)
    for number in range(4000):
        house.come(Guest("flood", ConnectionUse.IDLE, number))
    assert house.come(Guest("calm", ConnectionUse.BUSY))
    assert sum(guest.looks for guest in house.inside) <= 600


def test_one_of_a_crowd_makes_room_wherever_it_stands() -> None:
    """Before those who are few from their address, even if these are idle and are looked at first."""
    house = House(connections=4000, connections_reserved=0)
    calm = [Guest(f"calm-{number}", ConnectionUse.IDLE, number) for number in range(2000)]
    flood = [Guest("flood", ConnectionUse.IDLE, 9_000.0 + number) for number in range(2000)]
    assert all(house.come(guest) for guest in calm + flood)
    assert all(house.come(Guest(f"new-{number}", ConnectionUse.BUSY)) for number in range(500))
    assert set(calm) <= set(house.inside)


def test_the_reserve_is_for_this_machine() -> None:
    """Whatever others do, on this machine too, operators and health checks get in; who is neither makes room."""
    house = House(connections=40, connections_reserved=4)
    count = 0
    while house.come(Guest(f"far-{count}", ConnectionUse.BUSY)):
        count += 1
    assert count == 36
    strangers = [Guest("127.0.0.1", ConnectionUse.BUSY, is_local=True) for _ in range(4)]
    assert all(house.come(guest) for guest in strangers)
    operators = [Guest("127.0.0.1", ConnectionUse.BUSY, is_local=True, is_operators=True) for _ in range(4)]
    assert all(house.come(guest) for guest in operators)
    assert not house.come(Guest("127.0.0.1", ConnectionUse.BUSY, is_local=True))
    assert house.inside[-4:] == operators
    assert not set(strangers) & set(house.inside)
