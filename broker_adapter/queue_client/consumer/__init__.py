"""Consumer groups whose members divide the queues among themselves: RocketMQ's push consumer.

    Consumer     membership of a group: assigned queues, one pull task for each, offsets, shutdown
     +- service  delivers pulled messages: Concurrent, or InOrder with a lock for each queue
     +- offsets  committed offsets: at the broker, or in a file for broadcasting

``options`` has every default, ``outcome`` the possible results of a handler.
"""

from __future__ import annotations

from broker_adapter.queue_client.consumer.consumer import Consumer
from broker_adapter.queue_client.consumer.options import ConsumerOptions
from broker_adapter.queue_client.consumer.outcome import Handler, Later, Outcome, Suspend
from broker_adapter.queue_client.consumer.owned import OwnedQueue
from broker_adapter.queue_client.consumer.services import Busy, DeliveryService, Work, by_handler, handled

__all__ = [
    "Busy",
    "Consumer",
    "ConsumerOptions",
    "DeliveryService",
    "Handler",
    "Later",
    "Outcome",
    "OwnedQueue",
    "Suspend",
    "Work",
    "by_handler",
    "handled",
]
