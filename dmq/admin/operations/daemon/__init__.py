"""Operations on the whole daemon: its status and settings, its clock, backups on demand and periodic ones.

Imports: objects, recovery, the broker, the cluster, metrics and below. Interface: the running daemon, a class with a
method per RPC for each subject, and the parts that the daemon starts.
"""

from __future__ import annotations

from dmq.admin.operations.daemon.backups import BackupCalls, Backups
from dmq.admin.operations.daemon.clock import ClockCalls
from dmq.admin.operations.daemon.overdue import OverdueCount
from dmq.admin.operations.daemon.periodic_backups import PeriodicBackups, rule_of
from dmq.admin.operations.daemon.status import RunningDaemon

__all__ = ["BackupCalls", "Backups", "ClockCalls", "OverdueCount", "PeriodicBackups", "RunningDaemon", "rule_of"]
