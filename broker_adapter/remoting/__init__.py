"""Client for Apache RocketMQ 4 and 5 over the classic protocol (remoting) of brokers and name servers.

    RemotingBroker    producers and consumers that divide queues among themselves; implements ``ClassicBroker``
    RemotingAdmin     administration of topics, groups and consumer positions
    Survey            state of a whole cluster, complete even if some brokers do not answer
    RemotingClient    read-only access: routes, offset ranges, messages
     +- Calls         addresses, signed requests, timeouts, error codes mapped to our errors
         +- Connection  matches answers with requests; a broken peer costs one error and a new connection
             +- frames  bytes of a frame, in both header encodings

Pure modules: ``stored`` (message format of a broker), ``properties``, ``packing`` (compressed bodies), ``sending``,
``pulling``, ``transactions``, ``bodies``, ``running``, ``routes``, ``ids``. A RocketMQ 5 proxy offers no read by
offset over gRPC. Importing this package loads neither gRPC nor protobuf.
"""

from __future__ import annotations

from broker_adapter.remoting.admin import RemotingAdmin
from broker_adapter.remoting.broker import RemotingBroker
from broker_adapter.remoting.calls import RemotingOptions
from broker_adapter.remoting.client import Pull, Queue, RemotingClient
from broker_adapter.remoting.packing import Compression
from broker_adapter.remoting.stored import StoredMessage, UnreadableMessage, to_message
from broker_adapter.remoting.survey import Survey

__all__ = [
    "Compression",
    "Pull",
    "Queue",
    "RemotingAdmin",
    "RemotingBroker",
    "RemotingClient",
    "RemotingOptions",
    "StoredMessage",
    "Survey",
    "UnreadableMessage",
    "to_message",
]
