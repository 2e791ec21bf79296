"""Errors of the daemon's own parts.

DmqError
 +- StoreError
 |   +- StoreFailed        storage failed; writes in flight are in doubt; the process must end
 |   |   +- StoreFull           no space or no quota left
 |   |   +- StoreNoDescriptors  too many open files; a failed read may be retried
 |   |   +- StoreBroken         the disk reports an error of its own
 |   +- StoreCorrupt       the store is damaged, with the place; it is never treated as empty
 |   |   +- SpoolCorrupt        the store is a directory of a spool
 |   +- StoreLocked        another process uses the directory
 |   +- StoreReadOnly      the directory is not writable
 |   +- FormatUnsupported  written by a newer Rock-DMQ
 |   +- StoreForked        used in a child of the process that opened it
 |   +- StoreClosed        used after close
 |   +- StoreBusy          too many pending writes; nothing was done
 |   |   +- StoreStalled   the disk stalls or is full; nothing was done
 |   +- OverBound          the topic would exceed its quota of pending messages; nothing was done
 |   +- MessageIdTaken     a half message and another message of a topic would share an id; nothing was done
 |   +- UnitRefused        a part of the unit was done before, so none of it may be repeated; nothing was done
 |   +- ReplicaFenced      another process writes the replication log
 |   +- ReplicaDamaged     the replication log has a hole, or an object with other bytes than were written
 |   +- ReplicaForeign     the replication log is that of another store
 +- StartRefused           the daemon cannot start, detected before the store is opened
 +- AddressInUse           a configured port is in use
"""

from __future__ import annotations

from typing import ClassVar


class DmqError(Exception):
    """Failure in the daemon."""

    retriable: ClassVar[bool] = False


class StoreError(DmqError):
    """The store cannot complete the operation."""

    advice: ClassVar[str] = ""  # remedy, appended to the text


class StoreFailed(StoreError):
    """Storage failed: writes in flight are in doubt, and no more are accepted. A restart recovers the WAL."""

    retriable = True


class StoreFull(StoreFailed):
    """No space or no quota is left on the file system."""

    advice = "free space on that file system, then start again; no acknowledged data is lost"


class StoreNoDescriptors(StoreFailed):
    """Too many files are open, in this process or on this machine."""

    advice = "raise the limit of open files (ulimit -n, LimitNOFILE=), then start again"


class StoreBroken(StoreFailed):
    """The disk, or the device in its place, reports an error of its own."""

    advice = (
        "check the kernel's log and replace the disk; 'dmq store salvage' recovers the readable rows, "
        "for a spool 'dmq spool salvage'"
    )


class StoreCorrupt(StoreError):
    """The store is damaged."""

    advice = (
        "'dmq store check' lists the damage; restore a backup, or use 'dmq store salvage' to recover the readable rows"
    )


class SpoolCorrupt(StoreCorrupt):
    """A directory of a spool is damaged."""

    advice = "'dmq spool check' lists the damage, 'dmq spool salvage' recovers the readable entries"


class StoreLocked(StoreError):
    """Another process uses this directory."""

    advice = "only one process can use a directory: end the other one, or choose another directory"


class StoreReadOnly(StoreError):
    """The directory is not writable."""

    advice = "check owner and mount options: the user of the daemon must own it, on a writable file system"


class FormatUnsupported(StoreError):
    """The store has a format that this version does not support."""


class StoreForked(StoreError):
    """The store was opened before a fork; only the process that opened it may use it."""


class StoreClosed(StoreError):
    """The store is closed."""


class StoreBusy(StoreError):
    """Too many writes are pending; nothing was done."""

    retriable = True


class StoreStalled(StoreBusy):
    """The disk accepts no writes at present: it stalls or is full. Nothing was done."""


class OverBound(StoreError):
    """A unit would exceed its ``Bound`` of pending messages: none of it was done."""

    retriable = True

    def __init__(self, scope: int, what: str, *, waiting: int, more: int, limit: int, next_due_ms: int | None) -> None:
        """``what`` is ``"entries"``, ``"bytes"`` or ``"closed"``; ``next_due_ms`` is the approximate due time of the
        next entry.
        """
        super().__init__(f"scope {scope}: {waiting} {what} pending, {more} more would exceed {limit}")
        self.scope = scope
        self.what = what
        self.waiting = waiting
        self.more = more
        self.limit = limit
        self.next_due_ms = next_due_ms


class MessageIdTaken(StoreError):
    """A half message and another message of a topic would share an id: none of the unit was done."""

    def __init__(self, message_id: bytes, *, by_half: bool) -> None:
        """``message_id`` is packed; ``by_half`` is True if it is the id of a half message."""
        super().__init__(f"the id {message_id!r} is that of {'a half' if by_half else 'another'} message of the topic")
        self.message_id = message_id
        self.by_half = by_half


class UnitRefused(StoreError):
    """An op was skipped although others of its unit depend on it: none of the unit was done."""


class ReplicaFenced(StoreError):
    """Another process writes the replication log: this one must end, and has answered OK to no write since."""

    advice = "another daemon serves this store now: point clients at it, and keep this one stopped"


class ReplicaDamaged(StoreError):
    """The replication log or a base is damaged, with the name of the object; it is never treated as shorter."""

    advice = "'dmq replica check' lists the damage; a daemon whose disk is whole can begin a log at a new replica_url"


class ReplicaForeign(StoreError):
    """The objects are those of another store."""

    advice = "set replica_url to a prefix of this store's own, or restore the other store with 'dmq replica restore'"


class AddressInUse(DmqError):
    """The address to listen on is in use."""


class StartRefused(DmqError):
    """The daemon cannot start; nothing was changed."""


def told(kind: type[StoreError], text: str) -> StoreError:
    """Return the error with its text and the advice, on one line."""
    return kind(f"{text} ({kind.advice})" if kind.advice else text)


def with_advice(error: BaseException) -> str:
    """Return the text of an error on one line, followed by its advice unless the text contains it."""
    text = " ".join(str(error).split()) or type(error).__name__
    advice = error.advice if isinstance(error, StoreError) else ""
    return f"{text} ({advice})" if advice and advice not in text else text
