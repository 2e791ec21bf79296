"""Errors of the daemon's own parts.

DmqError
 +- StoreError
 |   +- StoreFailed        storage failed under us; what was in flight is in doubt; the process must end
 |   |   +- StoreFull           there is no room, or no quota
 |   |   +- StoreNoDescriptors  too many files are open; a read that met it may be tried again
 |   |   +- StoreBroken         the disk reports an error of its own
 |   +- StoreCorrupt       the store is damaged, and says where; it never looks like an empty one
 |   |   +- SpoolCorrupt        the store is a directory of a spool
 |   +- StoreLocked        another process owns the directory
 |   +- StoreReadOnly      the directory cannot be written
 |   +- FormatUnsupported  written by a newer Rock-DMQ
 |   +- StoreForked        used in a child of the process that opened it
 |   +- StoreClosed        used after close
 |   +- StoreBusy          too much waits for the disk already; nothing was done
 |   |   +- StoreStalled   the disk stalls, or is full; nothing was done
 |   +- OverBound          more would wait than a topic may have waiting; nothing was done
 |   +- MessageIdTaken     a half message and another message of a topic would share an id; nothing was done
 |   +- UnitRefused        a part of the unit was done before, so nothing of it may be done again; nothing was done
 +- StartRefused           it is known before the store is opened that the daemon cannot start
 +- AddressInUse           a port the daemon was told to listen on is taken
"""

from __future__ import annotations

from typing import ClassVar


class DmqError(Exception):
    """Something in the daemon failed."""

    retriable: ClassVar[bool] = False


class StoreError(DmqError):
    """The store cannot do what was asked."""

    advice: ClassVar[str] = ""  # what to do about it, said behind the text


class StoreFailed(StoreError):
    """Storage failed: writes that were under way are in doubt, nothing more is accepted. Restart recovers the WAL."""

    retriable = True


class StoreFull(StoreFailed):
    """There is no room on the file system, or no quota."""

    advice = "make room on that file system, then start again: nothing that was acknowledged is lost"


class StoreNoDescriptors(StoreFailed):
    """Too many files are open, in this process or on this machine."""

    advice = "raise the limit of open files (ulimit -n, LimitNOFILE=), then start again"


class StoreBroken(StoreFailed):
    """The disk, or what stands for it, reports an error of its own."""

    advice = (
        "look at the kernel's log and replace the disk; 'dmq store salvage' saves what can be read, "
        "of a spool 'dmq spool salvage'"
    )


class StoreCorrupt(StoreError):
    """The store is damaged."""

    advice = "'dmq store check' lists the damage; restore a backup, or 'dmq store salvage' saves what can be read"


class SpoolCorrupt(StoreCorrupt):
    """A directory of a spool is damaged."""

    advice = "'dmq spool check' lists the damage, 'dmq spool salvage' saves what can be read"


class StoreLocked(StoreError):
    """Another process uses this directory."""

    advice = "one process at a time can have it: end that one, or choose another directory"


class StoreReadOnly(StoreError):
    """The directory cannot be written."""

    advice = "check who owns it and how it is mounted: the user that serves must own it, on a file system it can write"


class FormatUnsupported(StoreError):
    """The store was written in a format this version does not know."""


class StoreForked(StoreError):
    """The store was opened before a fork; only the process that opened it may use it."""


class StoreClosed(StoreError):
    """The store is closed."""


class StoreBusy(StoreError):
    """Too much waits to be written already; nothing was done."""

    retriable = True


class StoreStalled(StoreBusy):
    """The disk accepts no writes now: it stalls, or it is full. Nothing was done."""


class OverBound(StoreError):
    """A unit would leave more waiting than its ``Bound`` allows: nothing of it was done."""

    retriable = True

    def __init__(self, scope: int, what: str, *, waiting: int, more: int, limit: int, next_due_ms: int | None) -> None:
        """``what`` is ``"entries"``, ``"bytes"`` or ``"closed"``; ``next_due_ms``: about when the next entry is due."""
        super().__init__(f"scope {scope}: {waiting} {what} wait, {more} more would be above {limit}")
        self.scope = scope
        self.what = what
        self.waiting = waiting
        self.more = more
        self.limit = limit
        self.next_due_ms = next_due_ms


class MessageIdTaken(StoreError):
    """A half message and another message of a topic would share an id: nothing of the unit was done."""

    def __init__(self, message_id: bytes, *, by_half: bool) -> None:
        """``message_id`` is packed; ``by_half``: it is the id of a half message."""
        super().__init__(f"the id {message_id!r} is that of {'a half' if by_half else 'another'} message of the topic")
        self.message_id = message_id
        self.by_half = by_half


class UnitRefused(StoreError):
    """An op was passed over beside others that rely on it: nothing of its unit was done."""


class AddressInUse(DmqError):
    """The address to listen on is taken."""


class StartRefused(DmqError):
    """The daemon cannot start; nothing was touched."""


def told(kind: type[StoreError], text: str) -> StoreError:
    """Return the error with its text and, in the same line, what to do."""
    return kind(f"{text} ({kind.advice})" if kind.advice else text)


def with_advice(error: BaseException) -> str:
    """Return what an error says, in one line, and what to do about it, if that is known and not said yet."""
    text = " ".join(str(error).split()) or type(error).__name__
    advice = error.advice if isinstance(error, StoreError) else ""
    return f"{text} ({advice})" if advice and advice not in text else text
