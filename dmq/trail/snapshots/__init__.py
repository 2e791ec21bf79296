"""Snapshots of a store as Parquet files: layout, rows, writing and retention.

Imports: ``dmq.store`` and below. Interface: taking a snapshot of a running or a stopped store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker_adapter.runtime.exports import lazy_exports

if TYPE_CHECKING:
    from dmq.trail.snapshots.layout import MANIFEST, open_quiet, read_cut
    from dmq.trail.snapshots.taking import SnapshotExporter, SnapshotResult, Taker, cell_of, list_snapshots, snapshot_of

__all__ = [
    "MANIFEST",
    "SnapshotExporter",
    "SnapshotResult",
    "Taker",
    "cell_of",
    "list_snapshots",
    "open_quiet",
    "read_cut",
    "snapshot_of",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "dmq.trail.snapshots.layout": "MANIFEST open_quiet read_cut",
        "dmq.trail.snapshots.taking": "SnapshotExporter SnapshotResult Taker cell_of list_snapshots snapshot_of",
    },
)
