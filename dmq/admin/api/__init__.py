"""The admin service ``rockdmq.admin.v1`` and its transports: access, dispatch, masks of contents.

Imports: operations, requests and below. Interface: the service, its access table, both transports, each loaded at its
first use: a front process needs the access table only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker_adapter.runtime.exports import lazy_exports

if TYPE_CHECKING:
    from dmq.admin.api.access import entrances, lacking
    from dmq.admin.api.http2 import methods
    from dmq.admin.api.server import grpc_handler
    from dmq.admin.api.service import AdminService, refusal_of

__all__ = ["AdminService", "entrances", "grpc_handler", "lacking", "methods", "refusal_of"]

__getattr__ = lazy_exports(
    __name__,
    {
        "dmq.admin.api.access": "entrances lacking",
        "dmq.admin.api.http2": "methods",
        "dmq.admin.api.server": "grpc_handler",
        "dmq.admin.api.service": "AdminService refusal_of",
    },
)
