"""What a hostile client may send: each attack is a function that keeps one daemon busy for a while.

``python -m bench.attacks NAME HOST:PORT SECONDS`` runs one against a daemon on this machine and prints what it sent, as
JSON. Loopback addresses are the only ones it takes.

An attacker keeps to no rule of the protocol, opens a new connection whenever one is closed, and is one process: what it
costs the daemon is measured beside it (``bench.hostile``).
"""

from __future__ import annotations

import gzip
import ipaddress
import json
import resource
import selectors
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from typing import Final

from broker_adapter.runtime.clock import SystemClock
from broker_adapter.wire import rocketmq_v2 as wire
from dmq.http2.codec import frames
from dmq.http2.testing.peer import grpc_message, integer, text

SERVICE: Final = "/apache.rocketmq.v2.MessagingService/"
_BIG_VALUE: Final = b"a" * 3900  # nearly the whole table of a decoder
_MIB: Final = 2**20
_WRITE_BYTES: Final = 64 * 1024
_CLOSED_PAUSE_S: Final = 0.01


class Closed(Exception):
    """The daemon closed the connection."""


class Connection:
    """A connection to the daemon. What comes back is read and thrown away, unless ``reads`` says no."""

    def __init__(self, attack: Attack, *, greets: bool = True, reads: bool = True, settings: bytes = b"") -> None:
        self._attack = attack
        self._reads = reads
        self._socket = socket.socket()
        self._socket.settimeout(5)
        try:
            self._socket.connect(attack.address)
        except OSError as error:
            self._socket.close()
            raise Closed from error
        self._socket.setblocking(False)
        self._selector = selectors.PollSelector()  # no descriptor of its own
        self._selector.register(self._socket, selectors.EVENT_READ | selectors.EVENT_WRITE)
        self._next_id = 1
        attack.connections += 1
        if greets:
            self.send(frames.PREFACE + frames.frame(frames.SETTINGS, 0, 0, settings))

    def send(self, data: bytes) -> None:
        """Send bytes; raises Closed once the daemon is no longer there, and TimeIsUp when the attack ends."""
        view = memoryview(data)
        while view:
            self._attack.check_time()
            for _, ready in self._selector.select(0.1):
                try:
                    if ready & selectors.EVENT_READ and self._reads and not self._socket.recv(_MIB):
                        self.close()
                        raise Closed
                    if ready & selectors.EVENT_WRITE:
                        sent = self._socket.send(view[:_WRITE_BYTES])
                        self._attack.sent_bytes += sent
                        view = view[sent:]
                except BlockingIOError:
                    continue
                except OSError as error:
                    self.close()
                    raise Closed from error

    def close(self) -> None:
        """Close the socket."""
        self._selector.close()
        self._socket.close()

    def open_stream(self, path: str, *fields: tuple[bytes, bytes], ends: bool = False, client_id: str = "evil") -> int:
        """Begin a call and return its stream."""
        stream_id = self.next_stream()
        self.send(frames.header_block(stream_id, head_of(path, *fields, client_id=client_id), ends=ends))
        return stream_id

    def next_stream(self) -> int:
        """Return a stream id that was not used."""
        stream_id, self._next_id = self._next_id, self._next_id + 2
        return stream_id

    def send_data(self, stream_id: int, payload: bytes, *, ends: bool = False) -> None:
        """Send DATA; windows are ignored."""
        self.send(data_frames(stream_id, payload, ends=ends))

    def call(self, rpc: str, body: bytes, *fields: tuple[bytes, bytes], flag: int = 0, client_id: str = "evil") -> int:
        """Send a whole call of the public protocol."""
        stream_id = self.next_stream()
        path = rpc if rpc.startswith("/") else SERVICE + rpc
        head = frames.header_block(stream_id, head_of(path, *fields, client_id=client_id), ends=False)
        self.send(head + data_frames(stream_id, grpc_message(body, flag=flag), ends=True))
        return stream_id


class TimeIsUp(Exception):
    """The attack has lasted as long as it was to."""


class Attack:
    """One run of an attack: where it goes, until when, and what it has sent."""

    def __init__(self, address: tuple[str, int], seconds: float) -> None:
        self.address = address
        self.sent_bytes = 0
        self.connections = 0
        self._clock = SystemClock()
        self._until_s = self._clock.monotonic_s() + seconds

    def check_time(self) -> None:
        """Raise TimeIsUp if so."""
        if self._clock.monotonic_s() >= self._until_s:
            raise TimeIsUp

    def again(self) -> Iterator[None]:
        """Yield until the time is up, not too quickly: for what begins anew with each connection."""
        while True:
            self.check_time()
            self.pause(_CLOSED_PAUSE_S)
            yield

    def pause(self, seconds: float) -> None:
        """Wait, and raise TimeIsUp in time."""
        self.check_time()
        with selectors.PollSelector() as nothing:
            nothing.select(min(seconds, max(0.0, self._until_s - self._clock.monotonic_s())))

    def hold(self, held: list[Connection]) -> None:
        """Do nothing but hold connections until the time is up."""
        while held:
            self.pause(0.1)


def head_of(path: str, *fields: tuple[bytes, bytes], client_id: str = "evil") -> bytes:
    """Return the header block of a call, nothing of it kept in the decoder's table."""
    plain = (
        (b":path", path.encode()),
        (b":authority", b"localhost"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        (b"x-mq-client-id", client_id.encode()),
        (b"x-mq-language", b"JAVA"),
        *fields,
    )
    return b"\x83\x86" + b"".join(literal(name, value) for name, value in plain)  # POST, http


def literal(name: bytes, value: bytes, *, is_kept: bool = False) -> bytes:
    """Return one header field as HPACK writes it in full."""
    first = b"\x40" if is_kept else b"\x00"
    return first + text(name, is_huffman=False) + text(value, is_huffman=False)


def data_frames(stream_id: int, payload: bytes, *, ends: bool) -> bytes:
    """Return DATA frames with ``payload``."""
    pieces = [payload[at : at + frames.FRAME_BYTES] for at in range(0, len(payload) or 1, frames.FRAME_BYTES)]
    flags = [0] * (len(pieces) - 1) + [frames.END_STREAM if ends else 0]
    return b"".join(
        frames.frame(frames.DATA, flag, stream_id, piece) for flag, piece in zip(flags, pieces, strict=True)
    )


# -- frames ------------------------------------------------------------------------------------------------------------


def _repeat(make: Callable[[Connection, int], bytes], *, calls: int = 1) -> Callable[[Attack], None]:
    """Return an attack that opens ``calls`` calls on each connection, then repeats what ``make`` makes of the last."""

    def run(attack: Attack) -> None:
        for _ in attack.again():
            with suppress(Closed):
                connection = Connection(attack)
                stream_id = 0
                for _ in range(calls):
                    stream_id = connection.open_stream(SERVICE + "SendMessage")
                repeated = make(connection, stream_id)
                while True:
                    connection.send(repeated)

    return run


def _setting(kind: int, value: int) -> bytes:
    return frames.SETTING.pack(kind, value)


def _window_changes(_: Connection, __: int) -> bytes:
    changes = b"".join(_setting(frames.INITIAL_WINDOW_SIZE, 65_535 + at % 2) for at in range(2_730))
    return frames.frame(frames.SETTINGS, 0, 0, changes)


def _header_references(attack: Attack) -> None:
    """Blocks of one-byte references to a header of 4 KB."""
    for _ in attack.again():
        with suppress(Closed):
            connection = Connection(attack)
            kept = literal(b"x-big", _BIG_VALUE, is_kept=True)
            connection.send(frames.header_block(connection.next_stream(), kept, ends=True))
            reference = integer(62, 7, 0x80) * 16_000
            while True:
                block = frames.header_block(connection.next_stream(), reference, ends=True)
                connection.send(block)


def _small_references(attack: Attack) -> None:
    """Blocks of one-byte references to a short header: many fields for few bytes, within the bound of a list."""
    reference = b"\x83\x86" + b"\x84" * 1_500  # POST, http, :path /
    for _ in attack.again():
        with suppress(Closed):
            connection = Connection(attack)
            while True:
                connection.send(frames.header_block(connection.next_stream(), reference, ends=True))


def _endless_header_block(attack: Attack) -> None:
    """A header block that comes byte by byte, on many connections."""
    held: list[Connection] = []
    for _ in attack.again():
        with suppress(Closed):
            if len(held) < 200:
                connection = Connection(attack)
                connection.send(frames.frame(frames.HEADERS, 0, 1, literal(b"x", b"y")))
                held.append(connection)
        for each in list(held):
            try:
                each.send(frames.frame(frames.CONTINUATION, 0, 1, b"\x00"))
            except Closed:
                held.remove(each)


def _continuation_flood(attack: Attack) -> None:
    """Header blocks without an end, as large as may be; the sockets stay open afterwards."""
    held: list[Connection] = []
    filler = literal(b"x-filler", b"a" * 16_300)
    for _ in attack.again():
        with suppress(Closed):
            connection = Connection(attack)
            held.append(connection)
            connection.send(frames.frame(frames.HEADERS, 0, 1, filler))
            for _ in range(15):
                connection.send(frames.frame(frames.CONTINUATION, 0, 1, filler[: frames.FRAME_BYTES]))
        if len(held) > 800:
            held.pop(0).close()


def _rapid_reset(attack: Attack) -> None:
    for _ in attack.again():
        with suppress(Closed):
            connection = Connection(attack)
            head = head_of(SERVICE + "SendMessage")
            while True:
                stream_id = connection.next_stream()
                reset = frames.frame(frames.RST_STREAM, 0, stream_id, b"\0\0\0\x08")
                connection.send(frames.header_block(stream_id, head, ends=False) + reset)


# -- connections -------------------------------------------------------------------------------------------------------


def _sockets(*, greets: bool, many: int) -> Callable[[Attack], None]:
    def run(attack: Attack) -> None:
        held: list[Connection] = []
        while True:
            try:
                if len(held) < many:
                    held.append(Connection(attack, greets=greets))
                else:
                    attack.pause(0.1)
            except Closed:
                attack.pause(_CLOSED_PAUSE_S)

    return run


# -- memory ------------------------------------------------------------------------------------------------------------


def _held(begin: Callable[[Connection], None], *, connections: int, reads: bool = True) -> Callable[[Attack], None]:
    """Return an attack that does ``begin`` on many connections, opened anew as they are closed, and then waits."""
    windows = _setting(frames.INITIAL_WINDOW_SIZE, frames.WINDOW_MAX)

    def run(attack: Attack) -> None:
        held: list[Connection] = []
        while True:
            attack.check_time()
            try:
                if len(held) >= connections:
                    attack.pause(0.1)
                    held = [each for each in held if _is_open(each)]
                    continue
                connection = Connection(attack, reads=reads, settings=windows)
                begin(connection)
                held.append(connection)
            except Closed:
                attack.pause(_CLOSED_PAUSE_S)

    return run


def _is_open(connection: Connection) -> bool:
    try:
        connection.send(frames.frame(0xEE, 0, 0))  # of no type that anybody knows
    except Closed:
        return False
    return True


def _unfinished_requests(connection: Connection) -> None:
    connection.send(frames.window_update(0, 2**30))
    for _ in range(8):
        stream_id = connection.open_stream(SERVICE + "SendMessage")
        connection.send_data(stream_id, b"\0" + (8 * _MIB - 6).to_bytes(4, "big") + b"x" * (_MIB - 100))


def _header_lists(connection: Connection) -> None:
    big = literal(b"x-big", b"a" * 16_000)
    for _ in range(2_040):
        head = head_of(SERVICE + "SendMessage") + big * 3
        connection.send(frames.header_block(connection.next_stream(), head, ends=False))


def _unread_answers(connection: Connection) -> None:
    body = wire.QueryRouteRequest(topic=wire.Resource(name="bench-wire")).SerializeToString()
    for _ in range(20_000):
        connection.call("QueryRoute", body)


def _unread_reflection(connection: Connection) -> None:
    list_services = b"\x3a\x00"  # ServerReflectionRequest.list_services
    by_symbol = b"\x22" + bytes([len(SERVICE) - 2]) + SERVICE.strip("/").encode()
    stream_id = connection.open_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    for _ in range(5_000):
        connection.send_data(stream_id, grpc_message(by_symbol) + grpc_message(list_services))


def _health_watches(connection: Connection) -> None:
    for _ in range(2_000):
        connection.call("/grpc.health.v1.Health/Watch", b"")


def _settings_command(names: int) -> bytes:
    settings = wire.Settings(client_type=wire.PUSH_CONSUMER)
    settings.subscription.group.name = "evil"
    for number in range(names):
        entry = settings.subscription.subscriptions.add()
        entry.topic.name = f"t{number}"
        entry.expression.expression = "*"
    return wire.TelemetryCommand(settings=settings).SerializeToString()


def _telemetry_settings(connection: Connection) -> None:
    command = grpc_message(_settings_command(20_000))
    stream_id = connection.open_stream(SERVICE + "Telemetry")
    for _ in range(60):
        connection.send_data(stream_id, command)


def _telemetry_streams(connection: Connection) -> None:
    command = grpc_message(_settings_command(1))
    for _ in range(1_000):
        client_id = f"evil-{id(connection)}-{connection.next_stream()}"
        stream_id = connection.open_stream(SERVICE + "Telemetry", client_id=client_id)
        connection.send_data(stream_id, command)


# -- requests ----------------------------------------------------------------------------------------------------------


def _many_calls(make: Callable[[], tuple[str, bytes, bytes]]) -> Callable[[Attack], None]:
    """Return an attack that makes one call after the other: RPC, body, and its encoding if it has one."""

    def run(attack: Attack) -> None:
        for _ in attack.again():
            with suppress(Closed):
                connection = Connection(attack)
                for _ in range(100_000):
                    rpc, body, encoding = make()
                    if encoding:
                        connection.call(rpc, body, (b"grpc-encoding", encoding), flag=1)
                    else:
                        connection.call(rpc, body)

    return run


def _zipped_messages() -> tuple[str, bytes, bytes]:
    return "SendMessage", _ZIPPED_MESSAGES, b"gzip"


def _zipped_zeros() -> tuple[str, bytes, bytes]:
    return "SendMessage", _ZIPPED_ZEROS, b"gzip"


_ZIPPED_MESSAGES: Final = gzip.compress(b"\x0a\x00" * (4 * _MIB))  # empty messages
_ZIPPED_ZEROS: Final = gzip.compress(bytes(8 * _MIB - 1))
_EMPTY_MESSAGES: Final = b"\x0a\x00" * (2 * _MIB)
_NUMBERS: Final = count()


def _plain_messages() -> tuple[str, bytes, bytes]:
    return "SendMessage", _EMPTY_MESSAGES, b""


def _new_topics() -> tuple[str, bytes, bytes]:
    request = wire.QueryRouteRequest(topic=wire.Resource(name=f"evil-{next(_NUMBERS)}"))
    return "QueryRoute", request.SerializeToString(), b""


def _new_groups() -> tuple[str, bytes, bytes]:
    request = wire.HeartbeatRequest(client_type=wire.PUSH_CONSUMER)
    request.group.name = f"evil-{next(_NUMBERS)}"
    return "Heartbeat", request.SerializeToString(), b""


ATTACKS: Final[dict[str, Callable[[Attack], None]]] = {
    "window-changes": _repeat(_window_changes, calls=2_040),
    "header-references": _header_references,
    "small-references": _small_references,
    "endless-header-block": _endless_header_block,
    "continuation-flood": _continuation_flood,
    "window-updates": _repeat(lambda _, stream_id: frames.window_update(stream_id, 1) * 1_000),
    "connection-window-updates": _repeat(lambda *_: frames.window_update(0, 1) * 1_000),
    "one-byte-data": _repeat(lambda _, stream_id: frames.frame(frames.DATA, 0, stream_id, b"\0") * 1_000),
    "empty-data": _repeat(lambda _, stream_id: frames.frame(frames.DATA, 0, stream_id) * 1_000),
    "pings": _repeat(lambda *_: frames.ping(b"12345678") * 1_000),
    "settings": _repeat(lambda *_: frames.settings({}) * 1_000),
    "priorities": _repeat(lambda _, stream_id: frames.frame(frames.PRIORITY, 0, stream_id, bytes(5)) * 1_000),
    "unknown-frames": _repeat(lambda *_: frames.frame(0xEE, 0, 0) * 1_000),
    "rapid-reset": _rapid_reset,
    "idle-sockets": _sockets(greets=True, many=6_000),
    "silent-sockets": _sockets(greets=False, many=6_000),
    "unfinished-requests": _held(_unfinished_requests, connections=40),
    "header-lists": _held(_header_lists, connections=20),
    "unread-answers": _held(_unread_answers, connections=40, reads=False),
    "unread-reflection": _held(_unread_reflection, connections=40, reads=False),
    "health-watches": _held(_health_watches, connections=40),
    "telemetry-settings": _held(_telemetry_settings, connections=4),
    "telemetry-streams": _held(_telemetry_streams, connections=12),
    "zipped-messages": _many_calls(_zipped_messages),
    "zipped-zeros": _many_calls(_zipped_zeros),
    "empty-messages": _many_calls(_plain_messages),
    "new-topics": _many_calls(_new_topics),
    "new-groups": _many_calls(_new_groups),
}


def main(name: str, address: str, seconds: str) -> None:
    """Run one attack and print what it sent."""
    host, _, port = address.rpartition(":")
    if not ipaddress.ip_address(host).is_loopback:
        raise SystemExit(f"attacks go to a loopback address only; got {host}")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    attack = Attack((host, int(port)), float(seconds))
    with suppress(TimeIsUp):
        ATTACKS[name](attack)
    print(json.dumps({"sent_bytes": attack.sent_bytes, "connections": attack.connections}))


if __name__ == "__main__":
    main(*sys.argv[1:])
