"""One connection, without a socket and a clock: bytes in, events and bytes out.

Imports: ``dmq.http2.admission`` and below. Interface: the connection, its streams, their messages, the methods by path.
"""

from __future__ import annotations

from pkgutil import extend_path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dmq.http2.connection import connection, messages, methods, stream  # noqa: TC004 - namespaces

__all__ = ["connection", "messages", "methods", "stream"]
__path__ = extend_path(__path__, __name__)[::-1]  # compiled modules first
