"""Producers and consumers of a cluster by its address: routes, heartbeats, balance, offsets.

Imports: contracts, runtime, popping, remoting. Interface: ``connect`` and its blocking variant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker_adapter.runtime.exports import lazy_exports

if TYPE_CHECKING:
    from broker_adapter.queue_client.client import Client, connect
    from broker_adapter.queue_client.membership import GroupTaken, Membership

__all__ = ["Client", "GroupTaken", "Membership", "connect"]

__getattr__ = lazy_exports(
    __name__,
    {
        "broker_adapter.queue_client.client": "Client connect",
        "broker_adapter.queue_client.membership": "GroupTaken Membership",
    },
)
