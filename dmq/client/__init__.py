"""The daemon as a sink of the producers' hook: many processes share its store."""

from __future__ import annotations

from broker_adapter.runtime.extras import require

require("SidecarClient", "client", "grpc", "google.protobuf")

from dmq.client.sink import SidecarClient  # noqa: E402 - nothing before it is known to be there

__all__ = ["SidecarClient"]
