"""Producers of clients, protected by one line: ``durable``.

Imports: all other parts of the hook. Interface: the proxy, and the codecs of the arguments of a send.
"""

from __future__ import annotations

from retry.hook.producers.codecs import Arguments, Codec, Encoded, PlainCodec
from retry.hook.producers.durable_producer import durable

__all__ = ["Arguments", "Codec", "Encoded", "PlainCodec", "durable"]
