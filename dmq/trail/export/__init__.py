"""Export of the audit outbox to trail files: exporter, recovery after a kill, retention, verification.

Imports: ``dmq.trail`` and below. Interface: the exporter, its values, recovery, readers of a trail.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker_adapter.runtime.exports import lazy_exports

if TYPE_CHECKING:
    from dmq.trail.export.exporter import Exporter, export_all
    from dmq.trail.export.fetched import Spared, spared_by
    from dmq.trail.export.uploads import TrailUploads
    from dmq.trail.export.values import ExportOptions, TrailUnavailable
    from dmq.trail.export.verification import read_back

__all__ = [
    "ExportOptions",
    "Exporter",
    "Spared",
    "TrailUnavailable",
    "TrailUploads",
    "export_all",
    "read_back",
    "spared_by",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "dmq.trail.export.exporter": "Exporter export_all",
        "dmq.trail.export.fetched": "Spared spared_by",
        "dmq.trail.export.uploads": "TrailUploads",
        "dmq.trail.export.values": "ExportOptions TrailUnavailable",
        "dmq.trail.export.verification": "read_back",
    },
)
