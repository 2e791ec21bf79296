"""Spool: an implementation of ``retry.sink.DelaySink`` on RocksDB, with the store and the timeline of the daemon.

The spool survives a storage error. Calls in progress are in doubt and raise an error to their callers. The directory
is then opened again (``dmq.producer_store.directories.running``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from broker_adapter.runtime.clock import Clock, SystemClock
from dmq.errors import StoreClosed, StoreCorrupt, StoreError
from dmq.producer_store.directories.adopt import Adopter
from dmq.producer_store.directories.bounds import WAIT_S, SpoolOptions, StoreBounds, store_options
from dmq.producer_store.directories.root import Damaged, Root
from dmq.producer_store.directories.running import Running
from dmq.producer_store.entries.entries import Entries, settling
from dmq.producer_store.entries.plan import Ticket
from dmq.producer_store.entries.trail import SpoolTrail
from dmq.store.schema.spool import TypeTotals
from dmq.store.writer.writer import Unit
from retry.sink import (
    KEY_BYTES_MAX,
    UID_BYTES,
    DeadEntry,
    Death,
    Entry,
    Held,
    SinkClosed,
    SinkError,
    SinkStats,
    SinkUnavailable,
)

__all__ = ["Spool", "SpoolOptions"]

_TIME_END_MS = 2**48
_CLOSED = "the spool is closed"
_FORKED = "the spool was opened before this process was forked: open it in the worker"


class Spool:
    """Stores entries in its own directory under ``root``; see ``DelaySink`` for the contract of its methods.

    Raise the store's errors (``dmq.errors``) if no directory can be opened. Damaged directories are not touched; they
    are logged and listed in ``damaged``.
    """

    can_hold = True

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        options: SpoolOptions | None = None,
        clock: Clock | None = None,
        is_driven: bool = False,
    ) -> None:
        """Open or create a directory under ``root``. With ``is_driven`` no thread reads due entries, only ``turn``
        does.
        """
        self.options = options or SpoolOptions()
        self._pid = os.getpid()
        self._trail = SpoolTrail(self.options.trail_path, self.options.trail_every_s)
        self._root = Root(Path(root), clock or SystemClock(), store_options(self.options))
        self._is_closed = False
        self._running = Running(self._root, is_driven=is_driven, trail=self._trail)
        self._bounds = StoreBounds(self.options, self._running)
        self._adopter = Adopter(self._root, self._running, self._trail)
        self._adopter.start(self.options.adopt_every_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def clock(self) -> Clock:
        """The clock that determines due entries: the host's, but it never goes back."""
        return self._root.clock

    @property
    def path(self) -> Path:
        """The current directory; it changes if the directory is found to be damaged."""
        return self._running.path

    @property
    def entries(self) -> Entries:
        """The entries of the directory, in the store that is open now."""
        return self._running.entries

    @property
    def reopened_total(self) -> int:
        """Number of recoveries from a storage error."""
        return self._running.reopened_total

    @property
    def refused_total(self) -> int:
        """Number of puts refused with ``SinkFull``."""
        return self._bounds.refused_total

    @property
    def dropped_total(self) -> int:
        """Number of entries dropped, old or new."""
        return self._bounds.dropped_total

    @property
    def adopted_total(self) -> int:
        """Number of entries adopted from directories of dead processes."""
        return self._adopter.adopted_total

    @property
    def damaged(self) -> list[str]:
        """Unreadable directories of the root, and unreadable ranges and entries of the current one. Empty means
        healthy.
        """
        whole = [f"{each.path}: {each.error}" for each in self._root.damaged.values()]
        parts = [f"{self.path}: {each}: {each.error}" for each in list(self._running.reader.damaged.values())]
        unreadable = [
            f"{self.path}: entry {mark:032x} cannot be read: {error}"
            for mark, error in list(self._running.reader.unreadable.items())
        ]
        return whole + parts + unreadable

    @property
    def damaged_directories(self) -> list[Damaged]:
        """Directories of the root that could not be opened."""
        return list(self._root.damaged.values())

    # -- keeping ------------------------------------------------------------------------------------------------------

    def put(self, entry: Entry, *, is_held: bool = False) -> Future[Held | None]:
        _check(entry)
        done: Future[Held | None] = _promise()
        entries = self._usable()

        def settled(unit: Unit, ticket: Ticket | None) -> None:
            if unit.error is not None:
                done.set_exception(self._of_ours(unit.error))
            else:
                done.set_result(Held(entry, ticket) if ticket is not None else None)

        try:
            with entries.lock:
                if not entries.keeps(entry):
                    self._bounds.make_room(entries, entry, self._usable)
                entries.put(entry, settled, is_held=is_held)
        except StoreError as error:
            done.set_exception(self._of_ours(error))
        except SinkError as error:
            done.set_exception(error)
        return done

    def has_waiting(self, type_name: str, key: str) -> bool:
        entries = self._usable()
        with self._as_ours(), entries.lock:
            return entries.has_waiting(type_name, key)

    def take(self, type_name: str, limit: int, timeout_s: float) -> Sequence[Held]:
        until_s = self.clock.monotonic_s() + timeout_s
        while not self._is_closed:
            self._usable(even_down=True)
            entries, reader = self._running.entries, self._running.reader
            with entries.lock:
                taken = reader.pop(type_name, limit)
                left_s = until_s - self.clock.monotonic_s()
                if taken or left_s <= 0 or self._is_closed:
                    return taken
                entries.changed.wait(min(left_s, WAIT_S))  # the wait may end with another reader
        return []

    def finish(self, held: Held) -> Future[None]:
        return self._change(held, lambda entries, ticket, settle: entries.finish(ticket, held.entry, settle))

    def again(
        self, held: Held, due_at_ms: int, *, is_counted: bool, error: str = "", is_uncertain: bool = False
    ) -> Future[None]:
        _check_time(due_at_ms)
        entry = replace(
            held.entry,
            due_at_ms=due_at_ms,
            attempts=held.entry.attempts + is_counted,
            error=error or held.entry.error,
            is_uncertain=is_uncertain or held.entry.is_uncertain,
        )
        return self._change(
            held, lambda entries, ticket, settle: entries.again(ticket, entry, settle, is_counted=is_counted)
        )

    def bury(self, held: Held, death: Death, error: str, *, is_counted: bool = True) -> Future[None]:
        entry = replace(held.entry, attempts=held.entry.attempts + is_counted, error=error or held.entry.error)
        return self._change(held, lambda entries, ticket, settle: entries.bury(ticket, entry, death, settle))

    def _change(self, held: Held, change: Callable[[Entries, Ticket, Callable[[Unit], None]], None]) -> Future[None]:
        """Submit the last change of a held entry. If it is called twice, the first change counts and both get its
        result.
        """
        done: Future[None] = _promise()
        ticket = held.ticket
        assert isinstance(ticket, Ticket)
        entries = self._usable()

        def settled(unit: Unit) -> None:
            with entries.lock:
                if unit.error is not None:
                    ticket.ending = None
                else:
                    self._running.reader.gone(ticket)
                    entries.room.notify_all()
            if unit.error is not None:
                done.set_exception(self._of_ours(unit.error))
            else:
                done.set_result(None)

        try:
            with entries.lock:
                if ticket.ending is not None:
                    return ticket.ending
                if ticket.is_lost:
                    raise StoreCorrupt(f"the directory of the entry is damaged: {self.damaged}")
                if ticket.is_gone or entries.out.get(ticket.mark) is not ticket:
                    done.set_result(None)
                else:
                    change(entries, ticket, settled)
                    ticket.ending = done
        except StoreError as error:
            done.set_exception(self._of_ours(error))
        return done

    # -- the dead set and figures -------------------------------------------------------------------------------------

    def dead(self, type_name: str, *, after: bytes = b"", limit: int = 100) -> Sequence[DeadEntry]:
        entries = self._usable()
        with self._as_ours(), entries.lock:
            return entries.dead(type_name, after, limit)

    def requeue(self, type_name: str, uids: Sequence[bytes]) -> int:
        entries = self._usable()
        waiting: list[Future[None]] = []
        with self._as_ours():
            for uid in uids:
                done: Future[None] = Future()
                with entries.lock:
                    if entries.requeue(type_name, uid, settling(done)):
                        waiting.append(done)
            for done in waiting:
                done.result()
        return len(waiting)

    def stats(self, type_name: str = "") -> SinkStats:
        """Return counts of one type, or of all; while the directory is down, the last known counts.

        ``waiting`` excludes entries held by workers. A parked entry (after another one of its key) does not count for
        ``oldest_at_ms``.
        """
        entries = self._usable(even_down=True)
        with entries.lock:
            known = entries.type_id(type_name) if type_name else None
            totals = (
                entries.totals if not type_name else {known: entries.totals.get(known, TypeTotals())} if known else {}
            )
            held = [each for each in entries.out.values() if not each.is_ready and each.type_id in totals]
            oldest_at_ms: int | None = None
            with suppress(StoreError):
                oldest = [entries.oldest(type_id, entries.is_free) for type_id, each in totals.items() if each.waiting]
                oldest_at_ms = min((found[1].created_at_ms for found in oldest if found is not None), default=None)
            return SinkStats(
                waiting=max(0, sum(each.waiting for each in totals.values()) - len(held)),
                waiting_bytes=max(
                    0, sum(each.waiting_bytes for each in totals.values()) - sum(each.size_bytes for each in held)
                ),
                held=len(held),
                dead=sum(each.dead for each in totals.values()),
                oldest_at_ms=oldest_at_ms,
            )

    def turn(self) -> None:
        """Make all due entries ready, in the caller's thread: for tests, with ``is_driven``."""
        while self._running.reader.turn() == 0:
            pass

    @property
    def types(self) -> list[str]:
        """All types with entries stored here now or in the past."""
        entries = self._usable(even_down=True)
        with entries.lock:
            return sorted(entries.names.topics)

    def close(self) -> None:
        """Close the spool. Held entries are due in the next run. Idempotent; does nothing in a forked child."""
        if os.getpid() != self._pid or self._is_closed:
            return
        self._is_closed = True
        with self._running.entries.lock:
            self._running.entries.room.notify_all()
        self._adopter.close()
        self._running.close()

    # -- parts --------------------------------------------------------------------------------------------------------

    def _usable(self, *, even_down: bool = False) -> Entries:
        if os.getpid() != self._pid:
            raise SinkClosed(_FORKED)
        if self._is_closed:
            raise SinkClosed(_CLOSED)
        entries = self._running.entries
        if entries.store.failure is not None and not even_down:
            raise SinkUnavailable(f"{self.path} has failed and is being opened again: {entries.store.failure}")
        return entries

    def _of_ours(self, error: StoreError) -> SinkError:
        """Return the ``SinkError`` for an error of the store: the call is in doubt."""
        made: SinkError = SinkUnavailable(str(error))
        if self._is_closed and isinstance(error, StoreClosed):
            made = SinkClosed(_CLOSED)
        made.__cause__ = error
        return made

    @contextmanager
    def _as_ours(self) -> Iterator[None]:
        try:
            yield
        except StoreError as error:
            raise self._of_ours(error) from error


def _check(entry: Entry) -> None:
    if len(entry.uid) != UID_BYTES:
        raise ValueError(f"a uid has {UID_BYTES} bytes, not {len(entry.uid)}")
    if len(entry.key.encode()) > KEY_BYTES_MAX:
        raise ValueError(f"a key has at most {KEY_BYTES_MAX} bytes: {entry.key[:40]!r}...")
    if entry.attempts < 0:
        raise ValueError(f"invalid number of attempts {entry.attempts}")
    _check_time(entry.created_at_ms)
    _check_time(entry.due_at_ms)


def _check_time(at_ms: int) -> None:
    if not 0 <= at_ms < _TIME_END_MS:
        raise ValueError(f"{at_ms} is not a time in milliseconds since 1970")


def _promise() -> Future[Any]:
    """Return a future that cannot be cancelled, because the store operation cannot be either."""
    done: Future[Any] = Future()
    done.set_running_or_notify_cancel()
    return done
