"""Where the hook leaves what must be sent later.

The hook decides (when, how often, whether at all), a sink keeps. ``dmq.producer_store.Spool`` keeps in RocksDB in
this process, ``dmq.client.SidecarClient`` in the daemon; ``retry.testing.MemorySink`` is for tests. One contract
suite runs against all of them.

SinkError
 +- SinkFull         a bound is reached and its policy is to refuse; nothing was kept
 +- SinkUnavailable  what keeps entries cannot be reached, or has failed; whether it was kept is in doubt
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
    """The sink cannot do what was asked."""


class SinkFull(SinkError):
    """A bound is reached. ``limit`` names the setting."""

    def __init__(self, text: str, *, limit: str) -> None:
        super().__init__(text)
        self.limit = limit


class SinkUnavailable(SinkError):
    """What keeps entries cannot be reached, or has failed."""


class SinkClosed(SinkError):
    """The sink is closed, or belongs to another process."""


class Death(IntEnum):
    """Why an entry is in the dead set. Numbers are on disk: never used again for something else."""

    EXHAUSTED = 1  # it failed as often as its policy allows
    TOO_OLD = 2  # its next attempt would come after the policy's maximum age
    PERMANENT = 3  # its handler said that it can never succeed
    UNREADABLE = 4  # it could not be decoded; its bytes are kept
    OPERATOR = 5  # an operator ended it


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One message that is to be sent later, or again."""

    type_name: str  # which handler sends it; fits the rules of topic names
    uid: bytes  # UID_BYTES, the same in every attempt
    payload: bytes
    key: str = ""  # entries of one type and key keep their order; empty: no order
    created_at_ms: int
    due_at_ms: int
    attempts: int = 0  # that failed and counted
    is_uncertain: bool = False  # an attempt may have succeeded without our knowing
    error: str = ""  # of the last attempt
    # The uid was made for this entry and never put before: it need not be looked for. Not kept.
    is_new: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """An entry that is in this process's hands until it is finished, sent again or buried. ``ticket`` is the sink's."""

    entry: Entry
    ticket: object


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadEntry:
    """An entry that is tried no more."""

    entry: Entry
    death: Death
    died_at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkStats:
    """What a sink holds. ``oldest_at_ms`` is when the oldest waiting entry was made, ``None`` if none waits."""

    waiting: int
    waiting_bytes: int
    held: int
    dead: int
    oldest_at_ms: int | None


class DelaySink(Protocol):
    """Keeps entries durably and gives them back when they are due. All methods may be called from any thread.

    Every future is done when what was asked is durable, or set to a ``SinkError``; in doubt is not kept. An entry is
    given back at least once: after a crash those that were held come again, with the attempts that were durable.
    """

    @property
    def clock(self) -> Clock:
        """The clock that decides what is due."""
        ...

    @property
    def types(self) -> Sequence[str]:
        """The types of which something was ever kept here, as far as that is known: none that waits is missing."""
        ...

    @property
    def can_hold(self) -> bool:
        """Whether ``put`` can keep an entry and leave it in the caller's hands (write-ahead)."""
        ...

    def put(self, entry: Entry, *, is_held: bool = False) -> Future[Held | None]:
        """Keep ``entry`` until it is due. An entry with a key goes behind those of its key that wait already.

        One whose uid waits already, or is held, under its type and key is kept once, as it was put first. (A sink
        behind a network does so for a time, and for entries without a key.)

        ``ValueError`` for an entry that cannot be (its uid, key or times).

        With ``is_held`` the caller has it in hand from the start, and the future's result is that; the due time counts
        from the next run on only, should this one end. The result is ``None`` if it goes behind others, or waits
        already: then it comes in its turn.
        """
        ...

    def has_waiting(self, type_name: str, key: str) -> bool:
        """Say whether entries of ``key`` wait or are held, so that a new one must go behind them."""
        ...

    def take(self, type_name: str, limit: int, timeout_s: float) -> Sequence[Held]:
        """Return up to ``limit`` entries of ``type_name`` that are due, the longest due first; wait for one if need be.

        Of entries with a key at most the first of its key. Empty when time is up, or on ``close``.
        """
        ...

    def finish(self, held: Held) -> Future[None]:
        """The entry was sent: forget it."""
        ...

    def again(
        self, held: Held, due_at_ms: int, *, is_counted: bool, error: str = "", is_uncertain: bool = False
    ) -> Future[None]:
        """Give the entry back until ``due_at_ms``; an attempt that counts is added to its ``attempts``.

        Entries behind it that have its key wait with it.
        """
        ...

    def bury(self, held: Held, death: Death, error: str, *, is_counted: bool = True) -> Future[None]:
        """Move the entry to the dead set. The next one of its key may go."""
        ...

    def dead(self, type_name: str, *, after: bytes = b"", limit: int = 100) -> Sequence[DeadEntry]:
        """Return the dead set of ``type_name`` in the order of the uids, from the one behind ``after`` on."""
        ...

    def requeue(self, type_name: str, uids: Sequence[bytes]) -> int:
        """Let dead entries wait again, due now, with no attempts behind them; say how many of ``uids`` were there."""
        ...

    def stats(self, type_name: str = "") -> SinkStats:
        """Return figures of one type, or of all."""
        ...

    def close(self) -> None:
        """Let go: waiters return, what was accepted becomes durable, what is held comes again in the next run."""
        ...
