"""Client for Apache RocketMQ 4 and 5 over the classic protocol (remoting) of brokers and name servers.

    RemotingBroker    producers and consumers that divide queues among themselves; implements ``ClassicBroker``
    RemotingAdmin     administration of topics, groups and consumer positions
    Survey            state of a whole cluster, complete even if some brokers do not answer
    RemotingClient    read-only access: routes, offset ranges, messages
     +- Calls         addresses, signed requests, timeouts, error codes mapped to our errors
         +- Connection  matches answers with requests; a broken peer costs one error and a new connection
             +- frames  bytes of a frame, in both header encodings

Pure package: ``protocol`` (frames, properties, ids, stored messages; requests and answers in ``protocol.requests``). A
RocketMQ 5 proxy offers no read by offset over gRPC. Importing this package loads neither gRPC nor protobuf.
"""

from __future__ import annotations

from broker_adapter.remoting.admin import RemotingAdmin
from broker_adapter.remoting.broker import RemotingBroker
from broker_adapter.remoting.calls import RemotingCalls, RemotingOptions
from broker_adapter.remoting.client import Pull, Queue, RemotingClient
from broker_adapter.remoting.protocol.codes import Operation, Result
from broker_adapter.remoting.protocol.packing import Compression, unpack
from broker_adapter.remoting.protocol.properties import DELIVER_AT_MS, SYSTEM_PROPERTIES
from broker_adapter.remoting.protocol.requests.routes import READABLE, WRITABLE, Part
from broker_adapter.remoting.protocol.stored import StoredMessage, UnreadableMessage, to_message
from broker_adapter.remoting.reading import Reading
from broker_adapter.remoting.survey import (
    BrokerSeen,
    GroupPosition,
    GroupSeen,
    MemberSeen,
    QueueShares,
    Survey,
    TopicSeen,
    version_text,
)

__all__ = [
    "DELIVER_AT_MS",
    "READABLE",
    "SYSTEM_PROPERTIES",
    "WRITABLE",
    "BrokerSeen",
    "Compression",
    "GroupPosition",
    "GroupSeen",
    "MemberSeen",
    "Operation",
    "Part",
    "Pull",
    "Queue",
    "QueueShares",
    "Reading",
    "RemotingAdmin",
    "RemotingBroker",
    "RemotingCalls",
    "RemotingClient",
    "RemotingOptions",
    "Result",
    "StoredMessage",
    "Survey",
    "TopicSeen",
    "UnreadableMessage",
    "to_message",
    "unpack",
    "version_text",
]
