"""Clients of a ``PopBroker``, which hands messages out under leases, with the surface of those that divide queues.

    PoppedBroker    what ``Producer`` needs of a broker, and who makes consumers
     +- PopConsumer loops of receives, handlers, and what becomes of each delivery

``opening`` reaches Apache RocketMQ 5 and ``dmq serve`` by the gRPC protocol; importing it loads gRPC.
"""

from __future__ import annotations

from broker_adapter.runtime.extras import require

require("a RocketMQ cluster behind its proxies", "client", "google.protobuf")

from broker_adapter.popping.broker import PoppedBroker  # noqa: E402 - nothing before it is known to be there
from broker_adapter.popping.consumer import PopConsumer  # noqa: E402

__all__ = ["PopConsumer", "PoppedBroker"]
