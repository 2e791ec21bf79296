"""What a front is told when it starts: its part of the daemon's configuration, in plain values."""

from __future__ import annotations

from typing import Literal

import msgspec

from dmq.http2 import PlainServedTo


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
