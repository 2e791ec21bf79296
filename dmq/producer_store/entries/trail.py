"""Audit trail of a spool: each directory is exported under its own cell id, as docs/reference/trail.md describes.

Disabled unless ``SpoolOptions.trail_path`` is set, because it needs pyarrow, which the hook does not.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from broker_adapter.runtime.extras import require
from dmq.errors import StoreError
from dmq.store import Store
from dmq.store.writer.operations import Emit
from dmq.trail.events import EventKind, cell_event

if TYPE_CHECKING:
    from dmq.trail.export import Exporter

CLOSE_S = 10.0
_LIBRARIES = ("pyarrow", "numpy")


class SpoolTrail:
    """Exports the audit events of a spool's directories; without a path it does nothing."""

    def __init__(self, path: str | os.PathLike[str] | None = None, every_s: float = 60.0) -> None:
        """Raise ImportError with the install command if a library required by the trail is missing."""
        self.path = Path(path).absolute() if path is not None else None
        self._every_s = every_s
        self._exporter: Exporter | None = None
        self._is_threaded = False
        if path is not None:
            require("a spool's trail_path", "server", *_LIBRARIES)

    def begin(self, store: Store, *, is_threaded: bool) -> None:
        """Continue the trail of an opened directory, before any other change in it."""
        self._exporter = self._made(store)
        if self._exporter is None:
            return
        self._exporter.recover()
        with suppress(StoreError):
            store.commit([Emit(cell_event(EventKind.OPENED))], is_urgent=True)
        self._is_threaded = is_threaded
        if is_threaded:
            self._exporter.start()

    def flush(self) -> int:
        """Export all durable events; return the last exported sequence, 0 without a trail."""
        return self._exporter.flush() if self._exporter is not None else 0

    def end(self, store: Store, *, is_orderly: bool) -> None:
        """Export the remaining events before the store is closed. Never raises: the next run exports the rest."""
        exporter, self._exporter = self._exporter, None
        if exporter is None:
            return
        if is_orderly and store.failure is None:
            with suppress(StoreError):
                store.commit([Emit(cell_event(EventKind.CLOSED))], is_urgent=True)
            if not self._is_threaded:
                exporter.turn(is_wanted=True, is_last=True)
        exporter.close(CLOSE_S)

    def export_rest(self, store: Store) -> None:
        """Export the remaining events of a directory before its removal; raise ``TrailUnavailable`` on failure."""
        exporter = self._made(store)
        if exporter is not None:
            exporter.flush()

    def _made(self, store: Store) -> Exporter | None:
        if self.path is None:
            return None
        from dmq.trail.export import Exporter, ExportOptions

        return Exporter(store, self.path, ExportOptions(role="spool", every_s=self._every_s))
