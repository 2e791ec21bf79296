"""The daemon: wiring of its parts and its life cycle from open to close, without logic of its own."""

from __future__ import annotations

from broker_adapter.runtime.extras import require

require(
    "the daemon",
    "server",
    *("uvloop", "pydantic_settings", "prometheus_client", "grpc", "grpc_health", "google.protobuf"),
    *("lark", "cryptography"),
)

from dmq.daemon.process import run as run  # noqa: E402 - nothing before it is known to be there
