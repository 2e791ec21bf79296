"""Access to the object store that has the second copy.

Two kinds of objects: ``create`` writes immutable ones (segments, tables, trail files), ``replace`` writes registers
(the lease). A name is written by one of the two, never by both. All calls block, and all threads may call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from dmq.errors import DmqError, StartRefused


class ReplicaUnavailable(DmqError):
    """The object store did not complete the call: unreachable, throttled, full or access denied. Retry later.

    A write is in doubt. ``is_setup`` is True if the cause is likely the configuration: credentials, a missing bucket.
    """

    retriable = True

    def __init__(self, reason: str, *, is_setup: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_setup = is_setup


class ReplicaRefused(StartRefused):
    """The object store cannot have the second copy: no conditional writes, a missing bucket, wrong credentials."""


class ObjectStore(Protocol):
    """Objects under one URL. Names are relative to it: words separated by ``/``, without ``.`` at the front."""

    @property
    def url(self) -> str:
        """Return the URL without credentials, for people."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Write an object unless the name exists; durable on return. Return False if the name exists.

        After ``ReplicaUnavailable`` the object may exist: repeat the call, and compare the content on False.
        """
        ...

    def replace(self, name: str, data: bytes, etag: str | None) -> str | None:
        """Write a register if its ETag is still ``etag`` (None: if absent); durable on return.

        Return the new ETag, or None if another writer was faster. Equal content may have an equal ETag, so callers
        change the content with each write. After ``ReplicaUnavailable`` the write is in doubt: read, and compare.
        """
        ...

    def read(self, name: str) -> tuple[bytes, str] | None:
        """Return content and ETag, or None if the object does not exist."""
        ...

    def list(self, prefix: str, after: str = "") -> list[str]:
        """Return the names that start with ``prefix`` and sort after ``after``, sorted."""
        ...

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; a missing one is no error."""
        ...
