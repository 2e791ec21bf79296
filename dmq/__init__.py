"""Rock-DMQ: a delay and retry service for message queues that loses no message and proves it.

    from dmq import Spool                 # stores unsent messages, in RocksDB in this process
    from dmq import SidecarClient         # the same in the daemon
    from dmq import durable               # one line around a producer
    from dmq import AdminClient           # operators' queries of a daemon, and changes of pending messages
    from retry import Redelivery          # typed handlers, outcomes

The import of this package is cheap: it loads neither gRPC nor RocksDB nor pydantic. The names above are loaded at their
first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import retry as _retry
from broker_adapter.runtime.exports import lazy_exports

if getattr(_retry, "DISTRIBUTION", None) != "rock-dmq":
    raise ImportError(
        "PyPI's package 'retry' has overwritten or removed files of Rock-DMQ's package 'retry'; "
        "fix it with: pip install --force-reinstall --no-deps rock-dmq (it has the whole API of 'retry')"
    )

if TYPE_CHECKING:
    from dmq.admin.client import AdminClient
    from dmq.client import SidecarClient
    from dmq.producer_store import Spool, SpoolOptions, durable
    from retry import Delivered, Redelivery, Rejected, Spooled

__all__ = [
    "AdminClient",
    "Delivered",
    "Redelivery",
    "Rejected",
    "SidecarClient",
    "Spool",
    "SpoolOptions",
    "Spooled",
    "durable",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "dmq.admin.client": "AdminClient",
        "dmq.client": "SidecarClient",
        "dmq.producer_store": "durable Spool SpoolOptions",
        "retry": "Delivered Redelivery Rejected Spooled",
    },
)
