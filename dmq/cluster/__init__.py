"""A broker in front of a cluster: stores delayed messages until they are due, and relays all other calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker_adapter.runtime.exports import lazy_exports

if TYPE_CHECKING:
    from dmq.cluster.broker import ClusterBroker
    from dmq.cluster.cluster import Cluster
    from dmq.cluster.forwarder import Forwarder
    from dmq.cluster.inner import Fate, InnerTopic, TakenMessage
    from dmq.cluster.retries_here import RetriesHere
    from dmq.cluster.topic_migration import MovedTopics

__all__ = ["Cluster", "ClusterBroker", "Fate", "Forwarder", "InnerTopic", "MovedTopics", "RetriesHere", "TakenMessage"]

__getattr__ = lazy_exports(
    __name__,
    {
        "dmq.cluster.broker": "ClusterBroker",
        "dmq.cluster.cluster": "Cluster",
        "dmq.cluster.forwarder": "Forwarder",
        "dmq.cluster.inner": "Fate InnerTopic TakenMessage",
        "dmq.cluster.retries_here": "RetriesHere",
        "dmq.cluster.topic_migration": "MovedTopics",
    },
)
