"""The methods of a server: handlers by path, of three kinds; and the checks before a handler is called."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

from dmq.http2.codec.headers import RequestHeaders
from dmq.http2.codec.hpack import literal, value_of, value_of_once, wires_of
from dmq.http2.codec.status import ACCEPTED, timeout_s
from dmq.http2.connection.stream import Stream
from dmq.http2.errors import CallEnded, HpackFault, Http2Error, Status

_CONTENT_TYPE: Final = "application/grpc"
_POST: Final = wires_of("POST")
_GRPC: Final = wires_of(_CONTENT_TYPE)
_ENCODINGS: Final = frozenset({"", "identity", "gzip"})


@dataclass(frozen=True, slots=True)
class Unary:
    """One message in, one out. A coroutine runs in a task; a ``Deferred`` needs no task and cannot be cancelled.

    ``is_frequent``, here and below, marks methods that regular clients call continually: see ``calls``.
    """

    handle: Callable[[bytes, RequestHeaders], Awaitable[bytes]]
    is_frequent: bool = False


# One message, or several that are sent in one piece, at the cost of one send. The list is cleared when it is sent.
Sent = bytes | list[bytes]


@dataclass(frozen=True, slots=True)
class Streaming:
    """One message in, any number out. The generator is advanced when the peer's window has accepted its last output."""

    handle: Callable[[bytes, RequestHeaders], AsyncGenerator[Sent, None]]
    is_frequent: bool = False


@dataclass(frozen=True, slots=True)
class Bidirectional:
    """Any number of messages in and out. The peer may send at most one window that the handler has not read."""

    handle: Callable[[AsyncIterator[bytes], RequestHeaders], AsyncGenerator[Sent, None]]
    is_frequent: bool = False


Method = Unary | Streaming | Bidirectional


class NotGrpc(Http2Error):
    """A request that is answered in plain HTTP: a header block and a body."""

    def __init__(self, block: bytes, body: bytes) -> None:
        super().__init__(body)
        self.block = block
        self.body = body


class Unserved(CallEnded):
    """UNIMPLEMENTED, with header fields that name the supported alternatives."""

    def __init__(self, text: str, extra: bytes = b"") -> None:
        super().__init__(Status.UNIMPLEMENTED, text)
        self.extra = extra


class Methods:
    """The lookup of methods. Paths are looked up in wire form; each spelling is decoded once."""

    def __init__(self, methods: Mapping[str, Method]) -> None:
        self._by_path = dict(methods)
        self._by_wire: dict[bytes, tuple[Method, str]] = {}
        self._wires_max = 4 * len(self._by_path)  # plain and Huffman, and a length has several encodings

    def admit(self, stream: Stream) -> tuple[Method, str, str]:
        """Return the method, the path and the compression of a request, and set its deadline.

        Raises CallEnded or NotGrpc.
        """
        shape, headers = stream.shape, stream.headers
        if shape.path < 0:
            raise CallEnded(Status.RESOURCE_EXHAUSTED, "the headers are too large")
        values = headers.values
        encoding = ""
        try:
            if values[shape.method] not in _POST and value_of(values[shape.method]) != "POST":
                raise _not_grpc(405, "POST is the only method here.", literal("allow", b"POST"))
            if not _is_grpc(stream):
                raise _not_grpc(415, "Only gRPC is served here: application/grpc.")
            if shape.te < 0:
                raise CallEnded(Status.INTERNAL, "te: trailers is missing; a proxy in between may have dropped it")
            method, path = self._by_wire.get(values[shape.path]) or self._find(values[shape.path])
            if shape.timeout >= 0:
                headers.deadline_s = timeout_s(value_of_once(values[shape.timeout]))
                if headers.deadline_s is None:
                    raise CallEnded(Status.INTERNAL, "an invalid grpc-timeout")
            if shape.encoding >= 0:
                encoding = value_of(values[shape.encoding])
        except HpackFault as fault:
            raise CallEnded(Status.INTERNAL, "header that cannot be decoded") from fault
        if encoding not in _ENCODINGS:
            raise Unserved("unknown compression", ACCEPTED)
        return method, path, encoding

    def _find(self, wire: bytes) -> tuple[Method, str]:
        path = value_of(wire)
        method = self._by_path.get(path)
        if method is None:
            raise Unserved("unknown method")
        if len(self._by_wire) < self._wires_max:
            self._by_wire[wire] = method, path
        return method, path


def _is_grpc(stream: Stream) -> bool:
    if stream.shape.content_type < 0:
        return False
    wire = stream.headers.values[stream.shape.content_type]
    if wire in _GRPC:
        return True
    text = value_of(wire)
    return text.startswith(_CONTENT_TYPE) and text[len(_CONTENT_TYPE) :][:1] in ("", "+", ";")


def _not_grpc(code: int, text: str, extra: bytes = b"") -> NotGrpc:
    body = text.encode() + b"\n"
    block = b"\x08\x03%d" % code + literal("content-type", b"text/plain")  # index 8 is a :status
    return NotGrpc(block + literal("content-length", b"%d" % len(body)) + extra, body)
