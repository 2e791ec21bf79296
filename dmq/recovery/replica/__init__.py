"""Bases of a running store: made, verified and pruned at intervals, by processes of their own.

Imports: ``dmq.replication``, ``dmq.recovery.check``. Interface: the names below.
"""

from __future__ import annotations

from dmq.recovery.replica.keeper import BaseKeeper, BaseStatus, KeeperOptions, Worker, make_base, sweep

__all__ = ["BaseKeeper", "BaseStatus", "KeeperOptions", "Worker", "make_base", "sweep"]
