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

if getattr(_retry, "DISTRIBUTION", None) != "rock-dmq":
    raise ImportError(
        "files of PyPI's package 'retry' lie over those of Rock-DMQ's package of that name, or were removed with it; "
        "mend it with: pip install --force-reinstall --no-deps rock-dmq (which offers all that 'retry' does)"
    )

if TYPE_CHECKING:
    from dmq.admin.client.client import AdminClient
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

_HOMES = {
    "AdminClient": "dmq.admin.client.client",
    "SidecarClient": "dmq.client",
    "Spool": "dmq.producer_store",
    "SpoolOptions": "dmq.producer_store",
    "durable": "dmq.producer_store",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'dmq' has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(_HOMES.get(name, "retry")), name)
    globals()[name] = value
    return value
