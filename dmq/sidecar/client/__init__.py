"""The daemon as a sink of the producers' hook: many processes share its store."""

from __future__ import annotations

from dmq.sidecar.client.sink import SidecarClient

__all__ = ["SidecarClient"]
