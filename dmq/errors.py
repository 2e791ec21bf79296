"""Errors of the daemon's own parts.

DmqError
 +- StoreError
 |   +- StoreFailed        storage failed under us; what was in flight is in doubt; the process must end
 |   +- StoreCorrupt       the store is damaged, and says where; it never looks like an empty one
 |   +- StoreLocked        another process owns the directory
 |   +- StoreReadOnly      the directory cannot be written
 |   +- FormatUnsupported  written by a newer Rock-DMQ
 |   +- StoreForked        used in a child of the process that opened it
 |   +- StoreClosed        used after close
 |   +- StoreBusy          too much waits for the disk already; nothing was done
 |   +- UnitRefused        a part of the unit was done before, so nothing of it may be done again; nothing was done
 +- AddressInUse           a port the daemon was told to listen on is taken
"""

from __future__ import annotations

from typing import ClassVar


class DmqError(Exception):
    """Something in the daemon failed."""

    retriable: ClassVar[bool] = False


class StoreError(DmqError):
    """The store cannot do what was asked."""


class StoreFailed(StoreError):
    """Storage failed: writes that were under way are in doubt, nothing more is accepted. Restart recovers the WAL."""

    retriable = True


class StoreCorrupt(StoreError):
    """The store is damaged."""


class StoreLocked(StoreError):
    """Another process uses this directory."""


class StoreReadOnly(StoreError):
    """The directory cannot be written."""


class FormatUnsupported(StoreError):
    """The store was written in a format this version does not know."""


class StoreForked(StoreError):
    """The store was opened before a fork; only the process that opened it may use it."""


class StoreClosed(StoreError):
    """The store is closed."""


class StoreBusy(StoreError):
    """Too much waits to be written already; nothing was done."""

    retriable = True


class UnitRefused(StoreError):
    """An op was passed over beside others that rely on it: nothing of its unit was done."""


class AddressInUse(DmqError):
    """The address to listen on is taken."""
