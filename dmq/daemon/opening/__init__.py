"""Opening the store of a daemon or an embedded broker, and the parts on it: broker, quotas, periodic work.

Imports: ``dmq.daemon.replica``, ``dmq.daemon.server`` (types), ``dmq.admin``, ``dmq.broker``, ``dmq.store`` and below.
Interface: functions that open and start each part.
"""

from __future__ import annotations

from dmq.daemon.opening.broker import open_broker
from dmq.daemon.opening.periodic import backups_of, start_notifications, start_periodic
from dmq.daemon.opening.quotas import keep_quotas, quotas_of
from dmq.daemon.opening.store import open_all, require_replica, require_trail, watch_disk

__all__ = [
    "backups_of",
    "keep_quotas",
    "open_all",
    "open_broker",
    "quotas_of",
    "require_replica",
    "require_trail",
    "start_notifications",
    "start_periodic",
    "watch_disk",
]
