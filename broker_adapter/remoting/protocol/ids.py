"""Ids of messages: unique keys made by clients, and offset ids by which a broker finds a message.

    unique key   address 4 | process 2 | loader 4 | ms since the month began 4 | number 2    16 bytes, the format of
                 RocketMQ's clients; ``loader`` is random here, so that containers with one address do not collide
    offset id    address 4 or 16 | port 4 | offset in the log 8

A recall handle is encoded text that contains the broker of a delayed message.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import os
import socket
import struct
from datetime import UTC, datetime
from typing import NamedTuple

from broker_adapter.contracts.errors import Refused, Rule

_LOADER_BYTES, _NUMBERS, _MS_BITS = 4, 2**16, 2**32
_PLACE = struct.Struct(">iq")  # port, offset in the log
_ADDRESS_BYTES = (4, 16)


class OffsetId(NamedTuple):
    """Broker address and log offset of a message."""

    host: str  # broker that stored it, with its port
    log_offset: int


class UniqueKeys:
    """Generator of unique message ids."""

    def __init__(self, address: bytes, process_id: int, random: bytes) -> None:
        assert len(address) == 4
        assert len(random) == _LOADER_BYTES
        self._head = address + struct.pack(">H", process_id % _NUMBERS) + random
        self._number = 0

    def new(self, now_ms: int) -> str:
        """Return an id of 32 hex digits for a message born at ``now_ms``."""
        self._number = (self._number + 1) % _NUMBERS
        began = datetime.fromtimestamp(now_ms / 1000, UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
        passed_ms = (now_ms - int(began.timestamp()) * 1000) % _MS_BITS
        return (self._head + struct.pack(">IH", passed_ms, self._number)).hex().upper()


def unique_keys() -> UniqueKeys:
    """Return an id generator for this process."""
    return UniqueKeys(_own_address(), os.getpid(), os.urandom(_LOADER_BYTES))


def encode_offset_id(host: bytes, log_offset: int) -> str:
    """Return an offset id from the packed address and port of a stored message and an offset in the log."""
    return (host + struct.pack(">q", log_offset)).hex().upper()


def decode_offset_id(offset_id: str) -> OffsetId:
    """Decode an offset id; ``Refused(MESSAGE_ID)`` for an invalid one."""
    try:
        packed = binascii.unhexlify(offset_id)
    except ValueError:
        packed = b""
    size = len(packed) - _PLACE.size
    if size not in _ADDRESS_BYTES:
        why = "a broker finds a message by an offset id, of 32 hex digits, or 56 where its address is one of IPv6"
        raise Refused(Rule.MESSAGE_ID, why, value=offset_id)
    port, log_offset = _PLACE.unpack_from(packed, size)
    address = ipaddress.ip_address(packed[:size])
    return OffsetId(f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}", log_offset)


def broker_of_handle(recall_handle: str) -> str:
    """Return the broker of a delayed message from its recall handle; ``Refused(REQUEST)`` for an invalid handle."""
    try:
        form, _, broker, _, _ = base64.urlsafe_b64decode(recall_handle).decode().split(" ")
    except ValueError:
        form = broker = ""
    if form != "v1":
        raise Refused(Rule.REQUEST, "the recall handle is not one of RocketMQ 5", value=recall_handle)
    return broker


def _own_address() -> bytes:
    """Return the IPv4 address of this host on its default route; sends no packet."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # address reserved for documentation
            return socket.inet_aton(probe.getsockname()[0])
        except OSError:
            return socket.inet_aton("127.0.0.1")
