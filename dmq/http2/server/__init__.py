"""The server: sockets, TLS, the protocol of the event loop, and calls of handlers.

Imports: ``dmq.http2.connection`` and below, ``asyncio``. Interface: the names in ``dmq.http2``, for tests these.
"""

from __future__ import annotations

from pkgutil import extend_path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dmq.http2.server import protocol, server  # noqa: TC004 - namespaces

__all__ = ["protocol", "server"]
__path__ = extend_path(__path__, __name__)[::-1]  # compiled modules first
