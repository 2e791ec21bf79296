"""Recovery of the store of a stopped process, and periodic backups and snapshots of a running daemon.

    reading    a damaged store as far as it can be read: copies, rows, names, offsets, losses
    check      every row of a store, and the rules between them
    salvage    replay of the readable entries into a new store
    backups    the folder of periodic backups, snapshots
    audits     audits that operators start, reports of audits

One check and one salvage serve the daemon's store and the directories of the producer store. Imports:
``dmq.producer_store``, ``dmq.broker``, ``dmq.trail``, ``dmq.store`` and below. Interface: the names below, each loaded
at its first use: a running daemon needs few of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker_adapter.runtime.exports import lazy_exports

if TYPE_CHECKING:
    from dmq.recovery.audits.reports import (
        PAGE,
        PAGE_BYTES_MAX,
        SUMMARY,
        SUMMARY_BYTES_MAX,
        FoundReport,
        ReportUnreadable,
        newest_report,
        read_bounded,
    )
    from dmq.recovery.audits.runs import AuditRun, AuditRuns
    from dmq.recovery.backups.folder import BackupFolder, check_backup_dir, size_of
    from dmq.recovery.backups.snapshots import Snapshots
    from dmq.recovery.check.check import check_store
    from dmq.recovery.check.ledger import SHOWN_MAX, LedgerVerifier, Verification, no_ledger
    from dmq.recovery.check.spool import SpoolCheck
    from dmq.recovery.reading.findings import CheckReport
    from dmq.recovery.reading.log_repair import Tell
    from dmq.recovery.reading.look import How
    from dmq.recovery.reading.spool import FoundEntry, SpoolLook, TypeFigures, figures_of
    from dmq.recovery.salvage.salvage import salvage_store
    from dmq.recovery.salvage.spool import Report, looked_through, salvage_spool

__all__ = [
    "PAGE",
    "PAGE_BYTES_MAX",
    "SHOWN_MAX",
    "SUMMARY",
    "SUMMARY_BYTES_MAX",
    "AuditRun",
    "AuditRuns",
    "BackupFolder",
    "CheckReport",
    "FoundEntry",
    "FoundReport",
    "How",
    "LedgerVerifier",
    "Report",
    "ReportUnreadable",
    "Snapshots",
    "SpoolCheck",
    "SpoolLook",
    "Tell",
    "TypeFigures",
    "Verification",
    "check_backup_dir",
    "check_store",
    "figures_of",
    "looked_through",
    "newest_report",
    "no_ledger",
    "read_bounded",
    "salvage_spool",
    "salvage_store",
    "size_of",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "dmq.recovery.audits.reports": "PAGE PAGE_BYTES_MAX SUMMARY SUMMARY_BYTES_MAX FoundReport ReportUnreadable "
        "newest_report read_bounded",
        "dmq.recovery.audits.runs": "AuditRun AuditRuns",
        "dmq.recovery.backups.folder": "BackupFolder check_backup_dir size_of",
        "dmq.recovery.backups.snapshots": "Snapshots",
        "dmq.recovery.check.check": "check_store",
        "dmq.recovery.check.ledger": "SHOWN_MAX LedgerVerifier Verification no_ledger",
        "dmq.recovery.check.spool": "SpoolCheck",
        "dmq.recovery.reading.findings": "CheckReport",
        "dmq.recovery.reading.log_repair": "Tell",
        "dmq.recovery.reading.look": "How",
        "dmq.recovery.reading.spool": "FoundEntry SpoolLook TypeFigures figures_of",
        "dmq.recovery.salvage.salvage": "salvage_store",
        "dmq.recovery.salvage.spool": "Report looked_through salvage_spool",
    },
)
