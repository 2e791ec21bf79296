"""What a front is told when it starts: its part of the daemon's configuration, in plain values."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from dmq.http2 import PlainServedTo

# What one answer of a receive takes: 8 MiB, the message above that, and what surrounds it.
_HOLDER_BYTES_MIN: Final = 13 * 2**20


class RelayedMethod(msgspec.Struct, array_like=True, frozen=True):
    """A method that is served by the store process."""

    path: str
    kind: Literal["unary", "streaming", "bidirectional"]
    is_frequent: bool


class TlsFiles(msgspec.Struct, frozen=True):
    """Paths of PEM files."""

    certificate: str
    key: str
    client_ca: str | None


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How a front serves. What all fronts share is divided already; ``shares`` says into how many parts."""

    log_level: str
    log_format: Literal["auto", "json", "console"]
    delay_levels_ms: tuple[int, ...]
    delay_max_ms: int | None
    broker_name: str
    sends_in_flight_max: int
    sends_busy: int
    connections: int
    connections_per_address: int | None
    idle_s: float | None
    request_s: float
    bytes_held: int  # of the whole daemon, as are the two below
    bytes_reserve: int
    limits: bytes  # of keys and addresses, as the store keeps them
    shares: int
    acl: str | None
    tls: TlsFiles | None
    plain_served_to: PlainServedTo
    host: str
    relayed: list[RelayedMethod]
    wall_less_boot_ms: int


def part_of(limit: int | None, shares: int) -> int | None:
    """Return how many bytes of its ``limit`` an address or a key may hold in one of so many processes.

    It is an equal part, but never too little for one answer: a client has one connection, and that is at one front.
    """
    return None if limit is None else min(limit, max(limit // shares, _HOLDER_BYTES_MIN))
