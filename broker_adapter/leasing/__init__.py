"""Leases on single messages of a cluster's queues, for a client that divides the queues with others.

RocketMQ 4 has no POP: a consumer owns whole queues and commits an offset in each. Here this process owns the queues,
and keeps pulled messages in memory for receivers.

    LeasingBroker   broker contract (``PopBroker``, ``TransactionalBroker``), over any ``ClassicBroker``
     +- GroupMember a consumer group: the queues assigned to this process, and its receivers
     +- Leases      leased messages, their clients and expiry; failed messages are sent back to their broker
     +- handles     handles of deliveries and half messages for clients
"""

from __future__ import annotations

from broker_adapter.leasing.broker import LeasingBroker, LeasingOptions

__all__ = ["LeasingBroker", "LeasingOptions"]
