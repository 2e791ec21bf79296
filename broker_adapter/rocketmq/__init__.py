"""``PopBroker`` for Apache RocketMQ 5 through its gRPC proxies.

    RocketMQBroker  the broker contract, as far as a proxy supports it; other requests are refused
     +- Polls       long polls at several proxies, shared by receives
     +- Gathered    concurrent messages of a topic, batched into one call
     +- Routes      queues of a topic, cached for 30 s
     +- Sessions    identity of this client: one telemetry stream for each proxy and group
         +- Proxies one connection to each proxy, signed calls, deadlines; a failing proxy is isolated

Importing this package loads gRPC and the wire definitions.
"""

from __future__ import annotations

from broker_adapter.runtime.extras import require

require("a RocketMQ cluster behind its proxies", "client", "grpc", "google.protobuf")

from broker_adapter.rocketmq.broker import RocketMQBroker  # noqa: E402 - after the check of the dependencies
from broker_adapter.rocketmq.proxies import ClusterOptions, Proxies  # noqa: E402

__all__ = ["ClusterOptions", "Proxies", "RocketMQBroker"]
