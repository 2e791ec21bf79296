"""A gRPC server over HTTP/2 in Python; README.md states its purpose and its limits.

    server = Http2Server({"/echo.Echo/Say": Unary(say)}, host="127.0.0.1", port=0, monotonic_s=clock.monotonic_s)
    port = await server.start()
    ...
    await server.stop(grace_s=5)

Handlers accept and return bytes: ``async def say(message: bytes, headers: RequestHeaders) -> bytes``. To end a call
with another status than OK, they raise ``CallEnded``.
"""

from __future__ import annotations

from typing import Final

from dmq.runtime.compiled import compiled_first

_sources = list(__path__)
__path__ = compiled_first(_sources)  # before any module of the package is imported
is_compiled: Final = __path__ != _sources

from dmq.http2.admission.admission import Admission, Admit
from dmq.http2.admission.bounds import LOOPBACK, SHARES, Account, Accounts, Allowance, address_of
from dmq.http2.admission.limits import Limits, Rate
from dmq.http2.codec.headers import RequestHeaders
from dmq.http2.connection.messages import SMALL_BYTES
from dmq.http2.connection.methods import Bidirectional, Method, Streaming, Unary
from dmq.http2.errors import CallEnded, Status
from dmq.http2.server.listener import SocketListener, open_sockets
from dmq.http2.server.protocol import PlainServedTo
from dmq.http2.server.server import Http2Server, ServerFigures
from dmq.http2.server.tls import CertificateFault, make_context, no_certificate_fault

__all__ = [
    "LOOPBACK",
    "SHARES",
    "SMALL_BYTES",
    "Account",
    "Accounts",
    "Admission",
    "Admit",
    "Allowance",
    "Bidirectional",
    "CallEnded",
    "CertificateFault",
    "Http2Server",
    "Limits",
    "Method",
    "PlainServedTo",
    "Rate",
    "RequestHeaders",
    "ServerFigures",
    "SocketListener",
    "Status",
    "Streaming",
    "Unary",
    "address_of",
    "is_compiled",
    "make_context",
    "no_certificate_fault",
    "open_sockets",
]
