"""Clients of a ``PopBroker``, which leases messages, with the interface of clients that divide queues.

    PoppedBroker    broker interface for ``Producer``, and factory of consumers
     +- PopConsumer receive loops, handlers, and the settlement of each delivery

``opening`` connects to Apache RocketMQ 5 and ``dmq serve`` by the gRPC protocol; importing it loads gRPC.
"""

from __future__ import annotations

from broker_adapter.runtime.extras import require

require("a RocketMQ cluster behind its proxies", "client", "google.protobuf")

from broker_adapter.popping.broker import PoppedBroker  # noqa: E402 - after the check of the dependencies
from broker_adapter.popping.consumer import PopConsumer  # noqa: E402

__all__ = ["PopConsumer", "PoppedBroker"]
