"""Compression of message bodies by clients; brokers store them as they are. Pure.

LZ4 and Zstandard require the extra ``classic``; without it their bodies can be neither written nor read.
"""

from __future__ import annotations

import zlib
from enum import IntEnum

from broker_adapter.contracts.limits import BODY_BYTES_MAX
from broker_adapter.runtime.extras import command, require

COMPRESS_FROM_BYTES = 4096  # default of RocketMQ's clients
_LEVEL = 5  # default of RocketMQ's clients, of all methods
_BITS_AT, _BITS = 8, 7  # position and mask of the method in a message's bits
_DEFLATE_OR_GZIP = 47  # zlib wbits that detect the format; gRPC clients call both GZIP
_STEP_BYTES = 256  # a block of Zstandard has at least 4 bytes and expands to at most 128 KiB
_WINDOW_BYTES_MAX = 8 * 1024 * 1024


class Compression(IntEnum):
    """Compression method of a body. Numbers of RocketMQ 5; RocketMQ 4 supports zlib only and sets no number."""

    LZ4 = 1
    ZSTD = 2
    ZLIB = 3


def method_bits(method: Compression) -> int:
    """Return the flag bits for a compression method."""
    return method << _BITS_AT


def pack(body: bytes, method: Compression) -> bytes:
    """Return a compressed body; raise ``ImportError`` if the library is not installed."""
    if method is Compression.LZ4:
        require("compression by LZ4", "classic", "lz4")
        from lz4 import frame

        # the Java client does not read linked blocks
        return bytes(frame.compress(body, compression_level=_LEVEL, block_linked=False))
    if method is Compression.ZSTD:
        require("compression by Zstandard", "classic", "zstandard")
        import zstandard

        return zstandard.ZstdCompressor(level=_LEVEL).compress(body)
    return zlib.compress(body, _LEVEL)


def unpack(body: bytes, bits: int) -> bytes:
    """Return a decompressed body; raise ``ValueError`` with the reason if it is invalid.

    The output buffer is bounded: it never grows much beyond 4 MiB.
    """
    number = bits >> _BITS_AT & _BITS
    try:
        method = Compression(number) if number else Compression.ZLIB
    except ValueError:
        raise ValueError(f"its body is compressed with method {number}, which is not supported") from None
    try:
        unpacked, is_whole = _UNPACKED[method](body)
    except ImportError:
        raise ValueError(f"its body is compressed with {method.name}: {command('classic')} to read it") from None
    if len(unpacked) > BODY_BYTES_MAX:
        raise ValueError(f"its decompressed body has more than {BODY_BYTES_MAX} bytes")
    if not is_whole:
        raise ValueError("its compressed body is truncated")
    return unpacked


def _zlib(body: bytes) -> tuple[bytes, bool]:
    unpacking = zlib.decompressobj(_DEFLATE_OR_GZIP)
    try:
        unpacked = unpacking.decompress(body, BODY_BYTES_MAX + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    return unpacked, unpacking.eof


def _lz4(body: bytes) -> tuple[bytes, bool]:
    from lz4 import frame

    unpacking = frame.LZ4FrameDecompressor()
    try:
        unpacked = unpacking.decompress(body, BODY_BYTES_MAX + 1)
    except RuntimeError as error:
        raise ValueError(f"its body is not LZ4: {error}") from None
    return bytes(unpacked), bool(unpacking.eof)


def _zstd(body: bytes) -> tuple[bytes, bool]:
    import zstandard

    unpacking = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES_MAX).decompressobj()
    unpacked = bytearray()
    try:
        for at in range(0, len(body), _STEP_BYTES):
            unpacked += unpacking.decompress(body[at : at + _STEP_BYTES])
            if unpacking.eof or len(unpacked) > BODY_BYTES_MAX:
                break
    except zstandard.ZstdError as error:
        raise ValueError(f"its body is not Zstandard: {error}") from None
    return bytes(unpacked), unpacking.eof


_UNPACKED = {Compression.ZLIB: _zlib, Compression.LZ4: _lz4, Compression.ZSTD: _zstd}
