"""Settings of a web process, which the daemon encodes. They load no web library."""

from __future__ import annotations

from typing import Literal

import msgspec


class CertificateFiles(msgspec.Struct, frozen=True):
    """The server's certificate and its key (PEM)."""

    certificate: str
    key: str


class WebSettings(msgspec.Struct, frozen=True):
    """Settings of a web process of the daemon. ``sockets`` are the descriptors that listen, ``daemon`` its address."""

    sockets: list[int]
    daemon: str
    tls: CertificateFiles | None
    parent_pid: int
    log_level: str
    log_format: Literal["auto", "json", "console"]
