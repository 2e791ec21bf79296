"""Wire definitions of the public protocol, loaded into a private descriptor pool.

``rocketmq_v2``  messages, enums and the method table of ``apache.rocketmq.v2.MessagingService``
``pool``         the pool itself, and the loader for all our descriptor sets
"""

from __future__ import annotations

from broker_adapter.runtime.extras import require

require("the protocol of RocketMQ 5", "client", "google.protobuf")
