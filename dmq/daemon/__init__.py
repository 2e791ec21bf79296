"""The daemon: wiring of its parts and its life cycle from open to close, without logic of its own.

    process    settings of the process, final log line
    run        life cycle of a daemon
    checks     faults that prevent a start
    embedded   the broker in an application's own process
    opening    the store and the parts on it: broker, quotas, periodic work
    replica    the second copy, the port of a standby
    cluster    clients of a RocketMQ cluster, the forwarder
    server     the transport, front processes, web processes, their files
    telemetry  metrics, spans

Imports: every other package of ``dmq`` except ``dmq.cli`` and ``dmq.demo``. Interface: ``run``, and ``checks`` as a
namespace.
"""

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
