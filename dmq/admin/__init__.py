"""Admin API for operators: ``rockdmq.admin.v1``, on the same port as the public protocol.

``api``         the service: access table, dispatch, one method per RPC, transports
``operations``  the work of each call, on the store and the broker
``requests``    validation, status values, and their mapping to the wire, for both ends
``client``      synchronous client, used by the command line and the hook
``admin_v1``    wire classes, in the private protobuf pool
"""

from __future__ import annotations

from broker_adapter.runtime.extras import require

require("AdminClient, and what it asks,", "client", "grpc", "google.protobuf")
