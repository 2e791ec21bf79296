"""Apache RocketMQ 4 and 5 over the classic protocol (remoting), which brokers and name servers speak themselves.

    RemotingBroker    producers and consumers that divide queues among themselves: it fits ``ClassicBroker``
    RemotingAdmin     topics, groups and who reads what, as an operator sees them
    Survey            a whole cluster as it is now, though some of its brokers do not answer
    RemotingClient    where queues are, where they begin and end, what is in them: it reads, and changes nothing
     +- Calls         who is where, requests signed and answered in time, codes as our errors
         +- Connection  answers matched with requests; a broken peer costs an error and a new connection
             +- frames  bytes of a frame, in both forms of its header

Beside them, pure: ``stored`` messages as they lie in a broker, ``properties``, ``packing`` bodies that are compressed,
``sending``, ``pulling``, ``transactions``, ``bodies``, ``running``, ``routes``, ``ids``. A proxy of RocketMQ 5 offers
no reading by offset over gRPC. Importing this package loads neither gRPC nor protobuf.
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
