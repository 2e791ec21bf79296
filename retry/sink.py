"""Contract of a sink: durable storage for messages that the hook sends later.

The hook decides when, how often and whether a message is sent; a sink stores it. ``dmq.producer_store.Spool`` stores
it in RocksDB in this process, ``dmq.client.SidecarClient`` in the daemon. ``retry.testing.MemorySink`` is for tests.
One contract suite runs against all of them.

SinkError
 +- SinkFull         a bound is reached and its policy is to refuse; nothing was kept
 +- SinkUnavailable  the storage cannot be reached or has failed; whether the entry was kept is in doubt
 +- SinkClosed       used after ``close``, or in a child of the process that opened it
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from broker_adapter.runtime.clock import Clock

UID_BYTES = 16
KEY_BYTES_MAX = 255
ERROR_CHARS_MAX = 500


class SinkError(Exception):
    """The sink cannot perform the call."""


class SinkFull(SinkError):
    """A bound is reached. ``limit`` names the setting."""

    def __init__(self, text: str, *, limit: str) -> None:
        super().__init__(text)
        self.limit = limit


class SinkUnavailable(SinkError):
    """The storage of the sink cannot be reached, or has failed."""


class SinkClosed(SinkError):
    """The sink is closed, or belongs to another process."""


class Death(IntEnum):
    """Reason why an entry is in the dead set. The numbers are on disk: a number is never reused."""

    EXHAUSTED = 1  # all attempts that its policy allows failed
    TOO_OLD = 2  # its next attempt would exceed the policy's maximum age
    PERMANENT = 3  # its handler reported that it can never succeed
    UNREADABLE = 4  # it could not be decoded; its bytes are kept
    OPERATOR = 5  # an operator ended its retries


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One message to send later, or again."""

    type_name: str  # selects the handler; has the syntax of topic names
    uid: bytes  # UID_BYTES, the same in every attempt
    payload: bytes
    key: str = ""  # entries of one type and key keep their order; empty: no order
    created_at_ms: int
    due_at_ms: int
    attempts: int = 0  # failed attempts that count
    is_uncertain: bool = False  # an attempt may have succeeded without a confirmation
    error: str = ""  # of the last attempt
    # The uid was made for this entry and never put before, so the sink need not search for it. Not stored.
    is_new: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """An entry held by this process until it is finished, rescheduled or buried. ``ticket`` belongs to the sink."""

    entry: Entry
    ticket: object


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadEntry:
    """An entry without further attempts."""

    entry: Entry
    death: Death
    died_at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkStats:
    """Contents of a sink. ``oldest_at_ms`` is the creation time of the oldest waiting entry, ``None`` if none."""

    waiting: int
    waiting_bytes: int
    held: int
    dead: int
    oldest_at_ms: int | None


class DelaySink(Protocol):
    """Stores entries durably and returns them when they are due. All methods may be called from any thread.

    Every future completes when its change is durable, or fails with a ``SinkError``; a call in doubt does not count as
    kept. An entry is returned at least once: after a crash held entries are due again, with their durable attempt
    counts.
    """

    @property
    def clock(self) -> Clock:
        """The clock that determines which entries are due."""
        ...

    @property
    def types(self) -> Sequence[str]:
        """The types of entries stored here so far, as far as known. Types with waiting entries are always included."""
        ...

    @property
    def can_hold(self) -> bool:
        """Whether ``put`` can store an entry and leave it held by the caller (write-ahead)."""
        ...

    def put(self, entry: Entry, *, is_held: bool = False) -> Future[Held | None]:
        """Store ``entry`` until it is due. An entry with a key queues after the waiting entries of that key.

        An entry whose uid is already waiting or held under its type and key is stored once, in its first form. (A
        remote sink guarantees this only for a time, and only for entries without a key.)

        Raise ``ValueError`` for an invalid entry (its uid, key or times).

        With ``is_held`` the caller holds the entry from the start, and the future's result is the ``Held``. Its due
        time matters only in the next run, if this one ends first. The result is ``None`` if the entry queues after
        others or is already waiting: ``take`` returns it in its turn.
        """
        ...

    def has_waiting(self, type_name: str, key: str) -> bool:
        """Return True if entries of ``key`` are waiting or held, so that a new one must queue after them."""
        ...

    def take(self, type_name: str, limit: int, timeout_s: float) -> Sequence[Held]:
        """Return up to ``limit`` due entries of ``type_name``, earliest due time first; wait up to ``timeout_s`` for
        one.

        Of the entries of one key only the first is returned. The result is empty after the timeout, or on ``close``.
        """
        ...

    def finish(self, held: Held) -> Future[None]:
        """Remove the entry: it was sent."""
        ...

    def again(
        self, held: Held, due_at_ms: int, *, is_counted: bool, error: str = "", is_uncertain: bool = False
    ) -> Future[None]:
        """Release the entry until ``due_at_ms``; an attempt that counts is added to its ``attempts``.

        Later entries of its key wait with it.
        """
        ...

    def bury(self, held: Held, death: Death, error: str, *, is_counted: bool = True) -> Future[None]:
        """Move the entry to the dead set. This unblocks the next entry of its key."""
        ...

    def dead(self, type_name: str, *, after: bytes = b"", limit: int = 100) -> Sequence[DeadEntry]:
        """Return the dead set of ``type_name`` in the order of uids, starting after ``after``."""
        ...

    def requeue(self, type_name: str, uids: Sequence[bytes]) -> int:
        """Make dead entries wait again, due now and with no attempts counted; return how many of ``uids`` existed."""
        ...

    def stats(self, type_name: str = "") -> SinkStats:
        """Return counts of one type, or of all types if ``type_name`` is empty."""
        ...

    def close(self) -> None:
        """Close the sink. Waiting callers return, accepted entries become durable, and held entries are due in the next
        run.
        """
        ...
