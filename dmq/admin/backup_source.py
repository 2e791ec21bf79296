"""What copies the store for operators, as the admin service sees it, and the call about it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

from broker_adapter.errors import Refused, Rule
from dmq.admin import admin_v1 as wire

_PATH_CHARS_MAX = 4_096


class BackupTaken(NamedTuple):
    """A backup that is whole; fields as in ``admin_v1.proto``."""

    folder: Path
    sequence: int
    size_bytes: int
    linked_bytes: int
    took_ms: float


class BackupSource(Protocol):
    """What copies the store while it runs."""

    async def back_up(self, folder: Path) -> BackupTaken:
        """Copy it to an absolute path, durable on return; ``Refused(REQUEST)`` if that cannot take a backup."""
        ...


class BackupCalls:
    """The call. Raises ``Refused`` for input that breaks a rule; what the source raises passes through."""

    def __init__(self, source: BackupSource | None) -> None:
        self._source = source

    async def back_up_store(self, request: wire.BackUpStoreRequest) -> wire.BackUpStoreResponse:
        """Copy the store."""
        folder = request.folder
        if self._source is None:
            raise Refused(Rule.REQUEST, "this daemon has no store on disk to back up")
        if not Path(folder).is_absolute() or "\0" in folder or len(folder) > _PATH_CHARS_MAX:
            raise Refused(Rule.REQUEST, "the folder must be an absolute path on the daemon's host", value=folder)
        taken = await self._source.back_up(Path(folder))
        return wire.BackUpStoreResponse(
            folder=str(taken.folder),
            sequence=taken.sequence,
            size_bytes=taken.size_bytes,
            linked_bytes=taken.linked_bytes,
            took_ms=taken.took_ms,
        )
