"""Codecs of HTTP/2 and gRPC: frames, header blocks, status trailers. Pure functions and tables.

Imports: ``dmq.http2.errors``; of admission the types of a request's state. Interface: all modules, one format each.
"""

from __future__ import annotations

from pkgutil import extend_path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dmq.http2.codec import frames, headers, hpack, huffman, status  # noqa: TC004 - namespaces

__all__ = ["frames", "headers", "hpack", "huffman", "status"]
__path__ = extend_path(__path__, __name__)[::-1]  # compiled modules first
