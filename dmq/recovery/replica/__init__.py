"""Bases of a running store: made, verified and pruned at intervals, by processes of their own. Diverged tails.

Imports: ``dmq.replication``, ``dmq.recovery.check``. Interface: the names below.
"""

from __future__ import annotations

from dmq.recovery.replica.diverged import DivergedMessage, DivergedTail, diverged_tails
from dmq.recovery.replica.keeper import BaseKeeper, BaseStatus, KeeperOptions, Worker, make_base, sweep

__all__ = [
    "BaseKeeper",
    "BaseStatus",
    "DivergedMessage",
    "DivergedTail",
    "KeeperOptions",
    "Worker",
    "diverged_tails",
    "make_base",
    "sweep",
]
