"""Apache RocketMQ 5 behind its gRPC proxies, as a ``PopBroker``.

    RocketMQBroker  what a broker promises, as far as a proxy offers it; the rest is refused by name
     +- Polls       long polls at several proxies, shared by receives
     +- Gathered    messages that are sent at the same time, in one call
     +- Routes      where the queues of a topic are, remembered for 30 s
     +- Sessions    who this client is: a telemetry stream to each proxy it uses, for each group
         +- Proxies one connection to each proxy, signed calls, deadlines; one that fails is left alone for a while

Importing this package loads gRPC and the wire definitions.
"""

from __future__ import annotations

from broker_adapter.runtime.extras import require

require("a RocketMQ cluster behind its proxies", "client", "grpc", "google.protobuf")

from broker_adapter.rocketmq.broker import RocketMQBroker  # noqa: E402 - nothing before it is known to be there
from broker_adapter.rocketmq.proxies import ClusterOptions  # noqa: E402

__all__ = ["ClusterOptions", "RocketMQBroker"]
