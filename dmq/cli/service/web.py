"""Sockets and certificate of a web process in the foreground: ``dmq console`` and ``dmq http-api``."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dmq.cli.output.errors import CommandFailed, ExitCode, refused, refusing
from dmq.config.contexts import Target
from dmq.config.units import is_loopback, parse_address

if TYPE_CHECKING:
    from dmq.runtime.web_settings import CertificateFiles

CertificateOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Certificate (PEM) for HTTPS; required on external addresses.")
]
CertificateKeyOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Its private key (PEM).  [default: in the same file]")
]


def listening(
    listen: str,
    target: Target,
    timeout_s: float,
    certificate: Path | None,
    certificate_key: Path | None,
    *,
    insecure: bool = False,
    hint: str = "",
) -> tuple[list[socket.socket], CertificateFiles | None]:
    """Listen, and return the sockets and the certificate.

    Raise a usage error if other hosts would be served without HTTPS, or a daemon without access keys; ``insecure``
    allows it, and ``hint`` names that option.
    """
    with refusing("--listen", listen):
        address = parse_address(listen)
    if not insecure and not is_loopback(address.host):
        if certificate is None:
            raise refused(f"it is required beyond this host{hint}", "--certificate")
        _require_keys(target, timeout_s, hint)
    from dmq.http2 import open_sockets
    from dmq.runtime.web_settings import CertificateFiles

    try:
        sockets = asyncio.run(open_sockets(address.host, address.port))
    except OSError as error:
        raise CommandFailed(f"cannot listen on {address}: {error.strerror or error}") from error
    if certificate is None:
        return sockets, None
    return sockets, CertificateFiles(str(certificate), str(certificate_key or certificate))


def _require_keys(target: Target, timeout_s: float, hint: str) -> None:
    """Raise a usage error if the daemon serves callers without an access key."""
    from dmq.admin.client import AdminClient, NotAllowed

    with AdminClient(target.address, timeout_s=timeout_s, tls=target.tls) as client:
        try:
            client.status()
        except NotAllowed:
            return
    text = f"the daemon at {target.address} has no access keys: set acl, or listen on 127.0.0.1{hint}"
    raise CommandFailed(text, ExitCode.USAGE)
