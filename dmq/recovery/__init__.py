"""Recovery of the store of a stopped process, and periodic backups and snapshots of a running daemon.

    reading    a damaged store as far as it can be read: copies, rows, names, offsets, losses
    check      every row of a store, and the rules between them
    salvage    replay of what can be read into a new store
    backups    the folder of periodic backups, snapshots

One check and one salvage serve the daemon's store and the directories of the producer store. Imports:
``dmq.producer_store``, ``dmq.broker``, ``dmq.trail``, ``dmq.store`` and below. Interface: the names below, each loaded
at its first use: a running daemon needs few of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dmq.recovery.backups.folder import BackupFolder, check_backup_dir, size_of
    from dmq.recovery.backups.snapshots import Snapshots
    from dmq.recovery.check.check import check_store
    from dmq.recovery.check.ledger import SHOWN_MAX, LedgerVerifier, Verification, no_ledger
    from dmq.recovery.check.spool import SpoolCheck
    from dmq.recovery.reading.findings import Checked
    from dmq.recovery.reading.log_repair import Tell
    from dmq.recovery.reading.look import How
    from dmq.recovery.reading.spool import Found, SpoolLook, TypeFigures, figures_of
    from dmq.recovery.salvage.salvage import salvage_store
    from dmq.recovery.salvage.spool import Report, looked_through, salvage_spool

__all__ = [
    "SHOWN_MAX",
    "BackupFolder",
    "Checked",
    "Found",
    "How",
    "LedgerVerifier",
    "Report",
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
    "no_ledger",
    "salvage_spool",
    "salvage_store",
    "size_of",
]

_HOMES = {
    "backups.folder": ("BackupFolder", "check_backup_dir", "size_of"),
    "backups.snapshots": ("Snapshots",),
    "check.check": ("check_store",),
    "check.ledger": ("SHOWN_MAX", "LedgerVerifier", "Verification", "no_ledger"),
    "check.spool": ("SpoolCheck",),
    "reading.findings": ("Checked",),
    "reading.log_repair": ("Tell",),
    "reading.look": ("How",),
    "reading.spool": ("Found", "SpoolLook", "TypeFigures", "figures_of"),
    "salvage.salvage": ("salvage_store",),
    "salvage.spool": ("Report", "looked_through", "salvage_spool"),
}


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            from importlib import import_module

            value: object = getattr(import_module(f"{__name__}.{home}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
