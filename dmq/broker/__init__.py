"""Embedded broker: a full message broker on the store, inside the daemon's process and without a JVM.

Imports: ``dmq.store``, ``dmq.trail``, ``retry`` and below. Interface: the broker and its in-process client, and
the exports of each package in here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker_adapter.runtime.exports import lazy_exports

if TYPE_CHECKING:
    from dmq.broker.broker import EmbeddedBroker
    from dmq.broker.in_process_client import EmbeddedClassic
    from dmq.broker.message_spans import MessageSpans

__all__ = ["EmbeddedBroker", "EmbeddedClassic", "MessageSpans"]

__getattr__ = lazy_exports(
    __name__,
    {
        "dmq.broker.broker": "EmbeddedBroker",
        "dmq.broker.in_process_client": "EmbeddedClassic",
        "dmq.broker.message_spans": "MessageSpans",
    },
)
