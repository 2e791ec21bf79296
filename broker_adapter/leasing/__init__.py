"""Messages of a cluster's queues handed out under leases, one by one, by a client that divides queues with others.

RocketMQ 4 has no POP: a consumer owns whole queues, and says how far it has come in each. Here the owner of the queues
is this process, and what it pulled waits in its memory for whoever receives.

    LeasingBroker   what a broker promises (``PopBroker``, ``TransactionalBroker``), over any ``ClassicBroker``
     +- GroupMember a consumer group: the queues that are this process's own, and who waits for their messages
     +- Leases      what is handed out, to whom, until when; what fails is sent back to its broker
     +- handles     what a client is given to name a delivery or a half message by
"""

from __future__ import annotations

from broker_adapter.leasing.broker import LeasingBroker, LeasingOptions

__all__ = ["LeasingBroker", "LeasingOptions"]
