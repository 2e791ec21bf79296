"""What takes snapshots for operators, as the admin service sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class SnapshotTaken(Protocol):
    """A snapshot that is in the audit trail; fields as in ``admin_v1.proto``."""

    @property
    def sequence(self) -> int:
        """That of the last event whose effects it contains."""
        ...

    @property
    def path(self) -> Path:
        """Its directory."""
        ...

    @property
    def entries(self) -> int:
        """How many wait."""
        ...

    @property
    def taken_ms(self) -> int:
        """When it was taken."""
        ...

    @property
    def took_ms(self) -> float:
        """How long that took."""
        ...

    @property
    def is_new(self) -> bool:
        """Whether something happened since the one before."""
        ...


class SnapshotSource(Protocol):
    """What takes snapshots of the store into the audit trail."""

    async def snapshot(self) -> SnapshotTaken:
        """Take one, durable on return; an error that is ``retriable`` if it cannot be done now."""
        ...
