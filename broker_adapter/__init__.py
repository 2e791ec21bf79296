"""Message model, contracts of brokers, and clients that divide the queues of a cluster.

    from broker_adapter import Message, connect

Names are loaded on first use: importing this package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from broker_adapter.contracts.classic import Decision, Filter, QueueReceipt, ReceivedMessage, Start
    from broker_adapter.contracts.message import Message
    from broker_adapter.queue_client.client import Client, connect
    from broker_adapter.queue_client.consumer import Consumer, ConsumerOptions, Later, Suspend
    from broker_adapter.queue_client.producer import Producer, ProducerOptions

_HOMES = {
    "broker_adapter.contracts.classic": ("Decision", "Filter", "QueueReceipt", "ReceivedMessage", "Start"),
    "broker_adapter.queue_client.client": ("Client", "connect"),
    "broker_adapter.queue_client.consumer": ("Consumer", "ConsumerOptions", "Later", "Suspend"),
    "broker_adapter.contracts.message": ("Message",),
    "broker_adapter.queue_client.producer": ("Producer", "ProducerOptions"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Client",
    "Consumer",
    "ConsumerOptions",
    "Decision",
    "Filter",
    "Later",
    "Message",
    "Producer",
    "ProducerOptions",
    "QueueReceipt",
    "ReceivedMessage",
    "Start",
    "Suspend",
    "connect",
]


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'broker_adapter' has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value
