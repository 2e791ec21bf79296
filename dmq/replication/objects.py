"""Access to the object store that has the second copy.

Two kinds of objects: ``create`` writes immutable ones (segments, tables, trail files), ``replace`` writes registers
(the lease). A name is written by one of the two, never by both. All calls block, and all threads may call.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Protocol
from urllib.parse import urlsplit
from uuid import uuid4

from dmq.errors import DmqError, StartRefused

_SERVICES = ("s3", "gs", "az")
_TIMEOUT_S = 60.0


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
        """Return the names in the folder ``prefix`` that sort after ``after``, sorted.

        ``prefix`` is empty or ends with ``/``.
        """
        ...

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; a missing one is no error."""
        ...


def open_objects(url: str, *, timeout_s: float = _TIMEOUT_S) -> ObjectStore:
    """Return the objects under ``s3://``, ``gs://``, ``az://`` or ``file:///``; no call is made to the store.

    Credentials, region and endpoint come from the environment. ``timeout_s`` bounds one call to a service. A process
    that has called a service cannot fork: start children with spawn.
    """
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ReplicaRefused(
            f"the replica URL of scheme {parts.scheme!r} has credentials or options; "
            "expected SCHEME://BUCKET/PREFIX, with credentials in the environment"
        )
    if parts.scheme == "file":
        from dmq.replication.directory_objects import DirectoryObjects

        return DirectoryObjects(url)
    if parts.scheme in _SERVICES:
        try:
            from dmq.replication.service_objects import ServiceObjects
        except ImportError as missing:
            if missing.name != "obstore":
                raise
            raise ReplicaRefused(f"{url} needs obstore: pip install 'rock-dmq[replica]'") from missing
        return ServiceObjects(url, timeout_s=timeout_s)
    raise ReplicaRefused(
        f"unknown scheme in the replica URL {url!r}; expected s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, "
        "az://CONTAINER/PREFIX or file:///DIRECTORY"
    )


def probe(objects: ObjectStore) -> None:
    """Check that the store accepts our writes and refuses a second create and a replace with an old ETag.

    Raise ``ReplicaRefused`` if it does not, or ``ReplicaUnavailable`` if it cannot be reached now. Nothing is left in
    the store.
    """
    name = f"probe/{uuid4().hex}"
    names = (f"{name}-create", f"{name}-replace")
    try:
        missing = _missing_condition(objects, *names)
    except ReplicaUnavailable as failed:
        if not failed.is_setup:
            raise
        raise ReplicaRefused(f"cannot write to {objects.url}: {failed.reason}") from failed
    finally:
        with suppress(ReplicaUnavailable):
            objects.delete(names)
    if missing:
        raise ReplicaRefused(
            f"{objects.url} {missing}, so two primaries could write at once; "
            "use a store with conditional writes (If-None-Match and If-Match)"
        )


def _missing_condition(objects: ObjectStore, immutable: str, register: str) -> str:
    """Return the conditional write that the store lacks, or an empty text."""
    objects.read(immutable)  # also the answer to a missing object must be clear
    objects.create(immutable, b"first")
    if objects.create(immutable, b"second"):
        return "overwrites an object that exists"
    first = objects.replace(register, b"first", None)
    if first is None or objects.replace(register, b"second", first) is None:
        return "does not replace an object by its ETag"
    if objects.replace(register, b"third", first) is not None:
        return "replaces an object by an old ETag"
    return ""
