"""Periodic backups and snapshots of a running daemon.

Imports: ``dmq.store``, ``dmq.trail`` and below. Interface: the backup folder, snapshots.
"""

from __future__ import annotations

from dmq.recovery.backups.folder import DAMAGED
from dmq.recovery.backups.snapshots import Snapshots

__all__ = ["DAMAGED", "Snapshots"]
