"""The store: one RocksDB per cell, one writer thread, and every state change with its audit event in one atomic batch.

Other packages describe changes as ``Ops`` (``dmq.store.writer.operations``), which are plain values. Only the writer
commits them. Only ``dmq.store.engines.rocks`` depends on RocksDB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker_adapter.runtime.exports import lazy_exports

if TYPE_CHECKING:
    from dmq.store.backup import TargetTaken, back_up, back_up_stopped, check_place, database_files, place, sweep
    from dmq.store.store import Store, StoreOptions

__all__ = [
    "Store",
    "StoreOptions",
    "TargetTaken",
    "back_up",
    "back_up_stopped",
    "check_place",
    "database_files",
    "place",
    "sweep",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "dmq.store.backup": "TargetTaken back_up back_up_stopped check_place database_files place sweep",
        "dmq.store.store": "Store StoreOptions",
    },
)
