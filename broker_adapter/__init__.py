"""Message model, contracts of brokers, and clients that divide the queues of a cluster.

    from broker_adapter import Message, connect

Names are loaded on first use: importing this package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker_adapter.runtime.exports import lazy_exports

if TYPE_CHECKING:
    from broker_adapter.contracts.classic import Decision, Filter, QueueReceipt, ReceivedMessage, Start
    from broker_adapter.contracts.message import Message
    from broker_adapter.queue_client import Client, connect
    from broker_adapter.queue_client.consumer import Consumer, ConsumerOptions, Later, Suspend
    from broker_adapter.queue_client.producer import Producer, ProducerOptions

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

__getattr__ = lazy_exports(
    __name__,
    {
        "broker_adapter.contracts.classic": "Decision Filter QueueReceipt ReceivedMessage Start",
        "broker_adapter.contracts.message": "Message",
        "broker_adapter.queue_client": "Client connect",
        "broker_adapter.queue_client.consumer": "Consumer ConsumerOptions Later Suspend",
        "broker_adapter.queue_client.producer": "Producer ProducerOptions",
    },
)
