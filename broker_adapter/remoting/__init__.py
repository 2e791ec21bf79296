"""Apache RocketMQ 4 and 5 over the classic protocol (remoting), which brokers and name servers speak themselves.

    RemotingClient  where queues are, where they begin and end, what is in them: it reads, and changes nothing
     +- Connection  answers matched with requests, deadlines; a broken peer costs an error and a new connection
         +- frames  bytes of a frame, in both forms of its header; stored: bytes of messages as they lie in a broker

A proxy of RocketMQ 5 offers no reading by offset over gRPC. Importing this package loads neither gRPC nor protobuf.
"""

from __future__ import annotations

from broker_adapter.remoting.client import Pull, Queue, RemotingClient, RemotingOptions
from broker_adapter.remoting.stored import StoredMessage, UnreadableMessage, to_message

__all__ = ["Pull", "Queue", "RemotingClient", "RemotingOptions", "StoredMessage", "UnreadableMessage", "to_message"]
