"""Consumer groups whose members divide the queues among themselves: what RocketMQ calls a push consumer.

    Consumer     membership of a group: which queues are its own, one task of pulls for each, offsets, leaving
     +- service  hands out what was pulled: Concurrent, or InOrder with a lock for each queue
     +- offsets  how far the group has come: at the broker, or in a file for broadcasting

``options`` has every default, ``outcome`` what a handler may answer.
"""

from __future__ import annotations

from broker_adapter.queue_client.consumer.consumer import Consumer
from broker_adapter.queue_client.consumer.options import ConsumerOptions
from broker_adapter.queue_client.consumer.outcome import Handler, Later, Outcome, Suspend

__all__ = ["Consumer", "ConsumerOptions", "Handler", "Later", "Outcome", "Suspend"]
