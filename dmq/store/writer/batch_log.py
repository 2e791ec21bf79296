"""Contract of a replication log with the store: a second copy of all batches, in their order.

The log comes first. The writer appends a batch to the log before it writes the batch to the engine, so the engine never
has a batch that the log cannot get, and a restart applies the end of the log to the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from dmq.errors import StoreError
from dmq.store.engines.engine import Batch, Engine


class LogMoved(Exception):
    """The log got a batch of an earlier run after ``begin``: begin again."""


class LogStart(NamedTuple):
    """Store that opens with a log. ``boot`` is the number of its last run, 0 if the store is new."""

    store: int  # number of its identity
    boot: int
    directory: Path | None  # for temporary files on the store's file system; None for a store in memory
    checkpoint: Callable[[Path], None] | None  # None if the engine has none


class BatchLog(Protocol):
    """Replication log. The thread that opens and closes the store, and the writer's thread, use it in turn."""

    def begin(self, engine: Engine, start: LogStart) -> None:
        """Compare the store with the log, and apply the batches that only the log has. May be repeated.

        Raise a ``StoreError`` if the log is damaged, newer, or of another store.
        """
        ...

    def append(self, batch: Batch, *, opens: int = 0) -> None:
        """Hand ``batch`` over to the log, and put the position row into it.

        On return the batch may be written to the engine. ``opens`` is the boot number of a run, with its first batch.
        Raise ``ReplicaFenced`` once another process writes the log. Raise ``StoreFailed`` if the log cannot get the
        batch before the store is closed. Raise ``LogMoved`` for the first batch of a run only.
        """
        ...

    def obstacle(self) -> str:
        """Return the reason why batches wait for the log at present; empty if they do not. Thread-safe."""
        ...

    def watch(self, on_failure: Callable[[StoreError], None]) -> None:
        """Call ``on_failure`` from another thread when the log finds that it is fenced."""
        ...

    def end_soon(self) -> None:
        """Note that the store closes: from now on ``append`` waits no longer than the grace time of a shutdown."""
        ...

    def close(self) -> None:
        """Send the batches that wait, within the grace time, and release all resources. Idempotent."""
        ...
