"""HttpApiSettings of the process, which the daemon encodes. They load no library of the HTTP API."""

from __future__ import annotations

from typing import Literal

import msgspec


class CertificateFiles(msgspec.Struct, frozen=True):
    """The server's certificate and its key (PEM)."""

    certificate: str
    key: str


class HttpApiSettings(msgspec.Struct, frozen=True):
    """HttpApiSettings of a process that the daemon starts."""

    sockets: list[int]
    daemon: str
    tls: CertificateFiles | None
    log_level: str
    log_format: Literal["auto", "json", "console"]
