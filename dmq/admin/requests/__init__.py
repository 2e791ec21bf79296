"""Admin requests: validation, and the mapping of values to the wire.

Imports: ``dmq.admin.admin_v1`` and below. Interface: the modules ``mapping``, ``message_query`` and ``validate`` as
namespaces, and the source of clients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dmq.admin.requests.client_source import ClientSilent, ClientSource

if TYPE_CHECKING:
    from dmq.admin.requests import mapping, message_query, validate  # noqa: TC004 - loaded at their first import

__all__ = ["ClientSilent", "ClientSource", "mapping", "message_query", "validate"]
