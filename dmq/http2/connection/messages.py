"""gRPC messages in the bytes of a stream: a flag, a length of four bytes, and the message, compressed or not."""

from __future__ import annotations

import zlib
from typing import Final

from dmq.http2.connection.connection import Connection
from dmq.http2.connection.outbound import PREFIX_BYTES
from dmq.http2.connection.stream import Stream
from dmq.http2.errors import CallEnded, Status

_GZIP: Final = 16 + zlib.MAX_WBITS
_NOT_COMPRESSED: Final = ("", "identity")
# A connection that holds no more than this is served even if its address, its key or the server has no room.
SMALL_BYTES: Final = 4 * 1024
# Bounds of a decompressed gzip message: the larger of a fixed size and a ratio. Text expands 3 to 20 times.
INFLATED_FREE_BYTES: Final = 256 * 1024
INFLATED_RATIO: Final = 100


def check_growing(connection: Connection, stream: Stream) -> None:
    """Check an incomplete request: refuse one that is too large, and widen the window for the rest of its message.

    Raises CallEnded.
    """
    check_held(connection, stream)
    body = stream.body
    if len(body) >= PREFIX_BYTES:
        size = _size(stream) + PREFIX_BYTES
        if len(body) <= size:
            connection.expect(stream, size)


def check_held(connection: Connection, stream: Stream) -> None:
    """Refuse a call whose bytes would exceed the memory limits. Raises CallEnded."""
    limits, out = connection.limits, connection.out
    if out.held > limits.held_per_connection:
        why = f"too many bytes of requests and answers are waiting on this connection: {out.held}"
        raise CallEnded(Status.RESOURCE_EXHAUSTED, f"{why}, {limits.held_per_connection} are allowed")
    account = stream.account
    if (
        account.everyone.bytes_held <= account.ceiling
        and account.address.bytes_held <= account.address.bytes_max
        and account.key.bytes_held <= account.key.bytes_max
    ):
        return  # the same checks as ``crowded``, inlined because every call makes them
    pool = account.has_room()
    if pool is not None and out.held > SMALL_BYTES:
        why = f"too many bytes of requests and answers are waiting ({pool}): {pool.bytes_held}"
        raise CallEnded(Status.RESOURCE_EXHAUSTED, f"{why}, {pool.bytes_max} are allowed")


def only_message(connection: Connection, stream: Stream, encoding: str) -> bytes:
    """Return the single message of a complete request. Raises CallEnded."""
    body = stream.body
    size = len(body)
    if size < PREFIX_BYTES:
        raise CallEnded(Status.INTERNAL, "request without a message")
    length = _size(stream)
    if length != size - PREFIX_BYTES:
        raise CallEnded(Status.INTERNAL, "request with more than one message")
    message = body[PREFIX_BYTES:] if isinstance(body, bytes) else bytes(memoryview(body)[PREFIX_BYTES:])
    flag = body[0]
    stream.body = b""
    if not flag:
        return message
    plain = _plain(message, encoding, stream.request_max)
    stream.headers.packed_bytes = len(message)
    stream.unread += len(plain) - len(message)  # count the decompressed size
    connection.out.hold(stream, len(plain) - len(message))
    return plain


def next_message(connection: Connection, stream: Stream, encoding: str) -> bytes | None:
    """Remove and return the next message of a stream; None if it is incomplete. Raises CallEnded."""
    body = stream.body
    if len(body) < PREFIX_BYTES:
        return None
    end = _size(stream) + PREFIX_BYTES
    if len(body) < end:
        connection.expect(stream, end)
        return None
    if isinstance(body, bytes):
        body = stream.body = bytearray(body)  # many small messages in one piece: cut them off in constant time
    message = bytes(memoryview(body)[PREFIX_BYTES:end])
    flag = body[0]
    del body[:end]
    connection.consume(stream, end)
    stream.waits_since_s = 0.0
    return _plain(message, encoding, stream.request_max) if flag else message


def _size(stream: Stream) -> int:
    body = stream.body
    if body[0] > 1:
        raise CallEnded(Status.INTERNAL, "message with an unknown flag")
    size = int.from_bytes(body[1:PREFIX_BYTES], "big")
    if size > stream.request_max:
        raise CallEnded(Status.RESOURCE_EXHAUSTED, f"message of {size} bytes; the maximum is {stream.request_max}")
    return size


def _plain(message: bytes, encoding: str, size_max: int) -> bytes:
    """Decompress a message into at most ``size_max`` bytes, and at most a plausible multiple of its size."""
    if encoding in _NOT_COMPRESSED:
        raise CallEnded(Status.INTERNAL, "compressed message in a call without grpc-encoding")
    size_max = min(size_max, max(INFLATED_FREE_BYTES, len(message) * INFLATED_RATIO))
    inflate = zlib.decompressobj(_GZIP)
    try:
        plain = inflate.decompress(message, size_max + 1)
    except zlib.error as error:
        raise CallEnded(Status.INTERNAL, "message is not gzip") from error
    if len(plain) > size_max:
        raise CallEnded(
            Status.RESOURCE_EXHAUSTED, f"{len(message)} bytes that become more than {size_max} when decompressed"
        )
    if not inflate.eof or inflate.unused_data:
        raise CallEnded(Status.INTERNAL, "truncated gzip message")
    return plain
