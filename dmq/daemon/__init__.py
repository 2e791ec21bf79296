"""The daemon: wiring of its parts and its life cycle from open to close, without logic of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker_adapter.runtime.extras import require

require(
    "the daemon",
    "server",
    *("uvloop", "pydantic_settings", "prometheus_client", "grpc", "grpc_health", "google.protobuf"),
    *("lark", "cryptography"),
)

from dmq.daemon.process import run  # noqa: E402 - nothing before it is known to be there

if TYPE_CHECKING:
    from dmq.daemon import checks  # noqa: TC004 - a namespace, loaded at its first import

__all__ = ["checks", "run"]
