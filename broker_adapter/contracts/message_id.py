"""Message ids in the official clients' format.

    01 | node (6) | process (2) | seconds since 2021-01-01 UTC (4) | sequence (4)

17 bytes, big-endian, as 34 upper-case hex digits.

The official clients put the MAC address in ``node``. A command line runs one process per message, in containers with
equal process ids and addresses. Therefore ``node`` and ``sequence`` are random here.
"""

from __future__ import annotations

_EPOCH_S = 1_609_459_200  # 2021-01-01T00:00:00Z


def new_message_id(now_ms: int, process_id: int, random: bytes) -> str:
    """Return an id for a message born at ``now_ms``; ``random`` is 10 bytes from a source without repetitions."""
    assert len(random) == 10
    seconds = (now_ms // 1000 - _EPOCH_S) & 0xFFFF_FFFF
    node = bytes((random[0] | 1,)) + random[1:6]  # the multicast bit: no hardware address has it
    packed = b"\x01" + node + (process_id & 0xFFFF).to_bytes(2) + seconds.to_bytes(4) + random[6:]
    return packed.hex().upper()
