"""Messages as a classic broker stores them, made by their layout."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping

NOW = 1_700_000_000_123
COMPRESSED, V6_HOSTS, INNER_BATCH = 1, 16 | 32, 128


def a_stored(
    body: bytes = b"hello",
    *,
    topic: str = "orders",
    message_id: str = "M1",
    properties: Mapping[str, str] | None = None,
    queue_id: int = 3,
    offset: int = 41,
    stored_at_ms: int = NOW,
    bits: int = 0,
    crc: int | None = None,
    form: int = 1,
) -> bytes:
    """A message as a broker would store it; no ``message_id``: that of a client that makes none."""
    host = bytes(15) + b"\1" if bits & V6_HOSTS else bytes((127, 0, 0, 1))
    named = {**({"UNIQ_KEY": message_id} if message_id else {}), **(properties or {})}
    text, name = "".join(f"{key}\x01{value}\x02" for key, value in named.items()).encode(), topic.encode()
    rest = struct.pack(">I", zlib.crc32(body) & 0x7FFFFFFF if crc is None else crc)
    rest += struct.pack(">iiqqiq", queue_id, 0, offset, 9000, bits, 1_700_000_000_000) + host + struct.pack(">i", 5)
    rest += struct.pack(">q", stored_at_ms) + host + struct.pack(">i", 10911) + struct.pack(">iq", 2, 0)
    rest += struct.pack(">i", len(body)) + body
    rest += struct.pack(">B" if form == 1 else ">H", len(name)) + name + struct.pack(">H", len(text)) + text
    magic = 0xDAA320A7 if form == 1 else 0xDAA320AB
    return struct.pack(">iI", 8 + len(rest), magic) + rest
