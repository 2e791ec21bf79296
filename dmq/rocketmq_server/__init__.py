"""The public RocketMQ 5 protocol on top of a ``PopBroker``.

A request passes through these modules from top to bottom, and its answer returns the same way:

``http2_server``, ``grpc_server``  the transports; only the second one imports grpc
``dispatch``     bytes to messages and back; converts every error to a status of the protocol
``service``      one method per RPC: validate, map, call the broker, map
``pulls``, ``transactions``  the same for reads by offset and for half messages
``validate``, ``delay``  request limits and delivery times
``mapping``      broker values to wire messages
``settings``, ``sessions``  client settings and the table of connected clients
``codes``        the only table from errors to codes
"""

from __future__ import annotations
