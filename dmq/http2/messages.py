"""Messages of gRPC in the bytes of a stream: a flag, a length of four bytes, and the message; compressed or not."""

from __future__ import annotations

import zlib
from typing import Final

from dmq.http2.connection import Connection
from dmq.http2.errors import CallEnded, Status
from dmq.http2.outbound import PREFIX_BYTES
from dmq.http2.stream import Stream

_GZIP: Final = 16 + zlib.MAX_WBITS
_NOT_COMPRESSED: Final = ("", "identity")


def check_growing(connection: Connection, stream: Stream) -> None:
    """Look at a request that is on its way: refuse what is too large, and let the rest of its message come.

    Raises CallEnded.
    """
    check_held(connection)
    body = stream.body
    if len(body) >= PREFIX_BYTES:
        size = _size(connection, body) + PREFIX_BYTES
        if len(body) <= size:
            connection.expect(stream, size)


def check_held(connection: Connection) -> None:
    """Refuse a call whose bytes would be too much for us. Raises CallEnded."""
    out = connection.out
    if out.held > connection.limits.held_per_connection or out.account.bytes_held > out.account.bytes_max:
        raise CallEnded(Status.RESOURCE_EXHAUSTED, "too many bytes of requests and answers are waiting")


def only_message(connection: Connection, stream: Stream, encoding: str) -> bytes:
    """Return the one message of a request that is whole. Raises CallEnded."""
    body = stream.body
    size = len(body)
    if size < PREFIX_BYTES:
        raise CallEnded(Status.INTERNAL, "a request without a message")
    length = _size(connection, body)
    if length != size - PREFIX_BYTES:
        raise CallEnded(Status.INTERNAL, "a request of other than one message")
    message = body[PREFIX_BYTES:] if isinstance(body, bytes) else bytes(memoryview(body)[PREFIX_BYTES:])
    flag = body[0]
    stream.body = b""
    return _plain(message, encoding, connection.limits.request_max) if flag else message


def next_message(connection: Connection, stream: Stream, encoding: str) -> bytes | None:
    """Take the next message from a stream; None if it is not whole yet. Raises CallEnded."""
    body = stream.body
    if len(body) < PREFIX_BYTES:
        return None
    end = _size(connection, body) + PREFIX_BYTES
    if len(body) < end:
        connection.expect(stream, end)
        return None
    if isinstance(body, bytes):
        body = stream.body = bytearray(body)  # many small messages in one piece: cut them off in constant time
    message = bytes(memoryview(body)[PREFIX_BYTES:end])
    flag = body[0]
    del body[:end]
    connection.consume(stream, end)
    return _plain(message, encoding, connection.limits.request_max) if flag else message


def _size(connection: Connection, body: bytes | bytearray) -> int:
    if body[0] > 1:
        raise CallEnded(Status.INTERNAL, "a message with an unknown flag")
    size = int.from_bytes(body[1:PREFIX_BYTES], "big")
    if size > connection.limits.request_max:
        raise CallEnded(
            Status.RESOURCE_EXHAUSTED, f"a message of {size} bytes; {connection.limits.request_max} are taken"
        )
    return size


def _plain(message: bytes, encoding: str, size_max: int) -> bytes:
    """Decompress a message; never into more than ``size_max`` bytes, whatever it claims to be."""
    if encoding in _NOT_COMPRESSED:
        raise CallEnded(Status.INTERNAL, "a compressed message of a call that names no compression")
    inflate = zlib.decompressobj(_GZIP)
    try:
        plain = inflate.decompress(message, size_max + 1)
    except zlib.error as error:
        raise CallEnded(Status.INTERNAL, "a message that is not gzip") from error
    if len(plain) > size_max:
        raise CallEnded(Status.RESOURCE_EXHAUSTED, f"a message of more than {size_max} bytes when decompressed")
    if not inflate.eof or inflate.unused_data:
        raise CallEnded(Status.INTERNAL, "a message that is not whole gzip")
    return plain
