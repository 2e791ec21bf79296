"""The second copy of a daemon's store, and the port of a daemon that waits as its standby.

The replication log is loaded only if a second copy is configured. Imports: ``dmq.daemon.server``,
``dmq.daemon.telemetry``, ``dmq.recovery``, ``dmq.replication`` and below. Interface: the second copy, the port.
"""

from __future__ import annotations

from dmq.daemon.replica.replica import Replica, replica_of, require_replica
from dmq.daemon.replica.standby import StandbyPort

__all__ = ["Replica", "StandbyPort", "replica_of", "require_replica"]
