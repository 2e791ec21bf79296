"""The front door: the public RocketMQ 5 protocol in front of a ``PopBroker``.

A request goes down this list and its answer comes back up:

``grpc_server``  the transport, and the only module here that knows grpc
``dispatch``     bytes to messages and back; every error becomes the protocol's own answer
``service``      one method per RPC: validate, map, call the broker, map
``pulls``, ``transactions``  the same for reading by offset, and for half messages
``validate``, ``delay``  what a client may send, and when its message is due
``mapping``      broker values to wire messages
``settings``, ``sessions``  what clients are told, and who they are
``codes``        the one table from errors to codes
"""

from __future__ import annotations
