"""Admin API for operators: ``rockdmq.admin.v1``, on the same port as the public protocol.

``api``         the service: access from the options of the RPCs, dispatch, masks, transports
``operations``  a class with a method per RPC for each subject: ``daemon``, ``objects``, ``messages``, ``trail``
``requests``    validation, and the mapping of values of ``retry`` to the wire, for both ends
``client``      synchronous client, used by the command line and the hook
``admin_v1``    wire classes, in the private protobuf pool
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker_adapter.runtime.extras import require

require("AdminClient, and what it asks,", "client", "grpc", "google.protobuf")

if TYPE_CHECKING:
    from dmq.admin import admin_v1  # noqa: TC004 - a namespace, loaded at its first import

__all__ = ["admin_v1"]
