"""Cluster side of a daemon: the clients of the cluster, the forwarder, and the kind of server at each address.

It loads gRPC's client, so others import it for a cluster only. Imports: ``dmq.cluster``, ``dmq.broker``,
``dmq.admin``, ``broker_adapter`` and below. Interface: the cluster side, the kind of a server.
"""

from __future__ import annotations

from dmq.daemon.cluster.cluster import ClusterSide
from dmq.daemon.cluster.kind import ServerKind, kind_of, misplaced

__all__ = ["ClusterSide", "ServerKind", "kind_of", "misplaced"]
