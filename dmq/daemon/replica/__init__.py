"""The second copy of a daemon's store, and the port of a daemon that waits as its standby.

Imports: ``dmq.daemon.server``, ``dmq.daemon.telemetry``, ``dmq.recovery``, ``dmq.replication`` and below. Interface:
the port, and the second copy: its libraries are loaded at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker_adapter.runtime.exports import lazy_exports

if TYPE_CHECKING:
    from dmq.daemon.replica.replica import Replica
    from dmq.daemon.replica.standby import StandbyPort

__all__ = ["Replica", "StandbyPort"]

__getattr__ = lazy_exports(
    __name__, {"dmq.daemon.replica.replica": "Replica", "dmq.daemon.replica.standby": "StandbyPort"}
)
