"""Role of a process: it waits as a standby until it may be the primary, and keeps the lease while it is.

The lease and the log decide the role, not a setting. The directory that wrote the newest epoch continues at once: its
lock proves that its last process is dead. Any other directory follows the log until the lease is free. It is free if a
process of the same directory holds it: each process records its id in the directory first.

A standby with a direct link that the register names has batches that the log may lack. Then no other one takes over.

A standby registers itself in the object store. While one is registered, the primary is *bound*: it stops when it cannot
renew its lease, and never continues without the log. A standby takes over after a bound primary only. Without a
standby, a primary serves without renewing, and an operator decides (``release_lease``).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from uuid import uuid4

from broker_adapter.runtime.clock import Clock
from broker_adapter.runtime.log import LibraryLog
from dmq.errors import ReplicaForeign, StartRefused
from dmq.replication.base import list_bases, read_base
from dmq.replication.following import last_segment
from dmq.replication.lease import LEASE, Lease, LeaseKeeper, LeaseRecord
from dmq.replication.link import LINK, LinkEndpoint, LinkRecord, ReceivedBatches, StandbyLink
from dmq.replication.objects import ObjectStore, ReplicaUnavailable
from dmq.replication.segment import SegmentHead
from dmq.replication.standby import DirectoryState, Standby, publish_cell, read_directory
from dmq.store.files.cell import Cell
from dmq.store.schema.cell.position import NO_CHECKSUM, Position

log = LibraryLog("dmq.replication")

_STANDBYS = "standbys/"
_LOOK_S = 1.0
_ALIVE_TERMS = 3  # since the last change of a registration


@dataclass(frozen=True, slots=True)
class StandbyFigures:
    """State of a standby. ``complete_s`` is the monotonic time when it had the whole log; at first, of its start."""

    position: Position
    written_ms: int  # when the last applied segment was written; 0: none was applied
    complete_s: float
    error: str = ""  # why the object store does not answer; empty if it does
    is_linked: bool = False  # the primary is connected by the direct link
    reserved_for: str = ""  # address of the only standby that may take over, if it is another one


class Role(Enum):
    """Role of a process at its start."""

    CONTINUE = "continue"  # the directory wrote the newest epoch
    BEGIN = "begin"  # the log is empty, or the directory was served without it
    STANDBY = "standby"


def role_of(directory: DirectoryState | None, end: SegmentHead | None, *, is_copy: bool, place: str) -> Role:
    """Return the role of a directory for a log that ends with ``end``.

    Raise ``ReplicaForeign`` if the directory has another store than the log. ``place`` is the URL, for people.
    """
    if end is None:
        return Role.BEGIN
    if directory is None:
        return Role.STANDBY
    if is_copy or directory.identity.number != end.store:
        raise ReplicaForeign(f"the log at {place} is that of store {end.store:016x}, not of this one")
    if directory.is_original and directory.position is not None and directory.position.epoch == end.epoch:
        return Role.CONTINUE
    if directory.is_original and directory.position is None and directory.boot >= end.epoch:
        return Role.BEGIN
    return Role.STANDBY


def link_member(objects: ObjectStore) -> LinkRecord | None:
    """Return the record of the standby that alone may take over, because the log may lack its batches; None if any may.

    Members of an earlier epoch than the last one have no such batches.
    """
    record = LinkRecord.decode(objects.read(LINK))
    if record is None or not record.member:
        return None
    last = last_segment(objects)
    return record if last is not None and record.epoch >= last.head.epoch else None


def release_link(objects: ObjectStore) -> None:
    """Allow every standby to take over, without the batches that only the member of the direct link has."""
    found = objects.read(LINK)
    record = LinkRecord.decode(found)
    if found is None or record is None:
        return
    last = last_segment(objects)
    epoch = last.head.epoch if last is not None else 0
    if objects.replace(LINK, LinkRecord(epoch, is_sealed=True).encode(), found[1]) is None:
        raise StartRefused("the register of the direct link changed meanwhile: repeat the command")


def release_lease(objects: ObjectStore) -> LeaseRecord | None:
    """Release the lease in the name of its holder, so that a standby takes over; return the record, None if none is.

    A holder that is alive stops when it notices. Raise ``StartRefused`` if the lease changed meanwhile.
    """
    found = objects.read(LEASE)
    if found is None:
        return None
    record = LeaseRecord.decode(found[0])
    released = replace(record, renewal=record.renewal + 1, is_released=True)
    if objects.replace(LEASE, released.encode(), found[1]) is None:
        raise StartRefused("the holder renewed its lease meanwhile: repeat the command")
    return record


class Primacy:
    """Way of one process to the role of the primary, and its lease while it has the role."""

    def __init__(
        self,
        objects: ObjectStore,
        registers: ObjectStore,
        clock: Clock,
        data: Path,
        *,
        address: str,
        term_ms: int,
        on_lost: Callable[[str], None],
        on_follow: Callable[[], None] = lambda: None,
        listener: LinkEndpoint | None = None,
    ) -> None:
        """``registers`` are the same objects, with calls that time out well within the term.

        ``on_lost`` is called once, from another thread, when this process must stop to be the primary. ``on_follow``
        is called after each look of a standby at the log. ``listener`` is the port of the direct link of a standby.
        """
        self._objects = objects
        self._clock = clock
        self._data = data
        self._address = address
        self._term_s = term_ms / 1000
        self._holder = uuid4().hex
        self._registers = registers
        self._keeper = LeaseKeeper(registers, clock, Lease(self._holder, address, term_ms=term_ms), on_lost)
        self._on_follow = on_follow
        self._listener = listener
        self._link: StandbyLink | None = None
        self.standby: StandbyFigures | None = None  # None: this process is no standby; from any thread
        self._etag: str | None = None  # of the own registration
        self._registrations = 0
        self._closed = threading.Event()
        self._has_left = threading.Event()  # it is no standby any more
        self._seen: dict[str, tuple[str, float]] = {}  # ETag of a standby, and when it changed
        self._thread: threading.Thread | None = None

    def lease(self) -> LeaseRecord | None:
        """Return the last known record of the lease; from any thread."""
        return self._keeper.record()

    def wait(self, *, may_begin: bool, on_standby: Callable[[], None] = lambda: None) -> bool:
        """Return once this process may open the store as the primary; True if it took over.

        ``on_standby`` is called once it is a standby. Raise ``StartRefused`` for an empty log unless ``may_begin``, and
        ``ReplicaForeign``.
        """
        self._keeper.start()
        cell = Cell(self._data)
        try:
            return self._wait(cell, on_standby, cell.add_holder(self._holder), may_begin=may_begin)
        finally:
            cell.close()

    def leave(self) -> None:
        """Remove the registration as standby: the primary does not depend on its lease for this process any more."""
        self._has_left.set()
        with suppress(ReplicaUnavailable):
            self._registers.delete([_STANDBYS + self._holder])

    def lead(
        self,
        epoch: int,
        cell_id: str,
        bind: Callable[[bool], None],
        stalled_s: Callable[[], float],
        offer: Callable[[Sequence[str]], None] = lambda _: None,
    ) -> None:
        """Publish the open store. ``bind`` is called with True before a standby may take over.

        The lease is renewed only while ``stalled_s``, as of ``Store.stalled_s``, is less than its term.
        ``offer`` is called with the addresses of the direct links of the standbys.
        """
        self._keeper.depend_on(stalled_s)
        arguments = (epoch, cell_id, bind, offer)
        self._thread = threading.Thread(target=self._watch, args=arguments, name="dmq-standbys", daemon=True)
        self._thread.start()

    def close(self, *, is_complete: bool) -> None:
        """Release the lease if the log ``is_complete``; otherwise a standby waits for the end of its term."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        if is_complete:
            self._keeper.close()

    def _wait(self, cell: Cell, on_standby: Callable[[], None], dead_holders: list[str], *, may_begin: bool) -> bool:
        standby: Standby | None = None
        is_reported = False
        try:
            while True:
                try:
                    if standby is None:
                        end = self._end()
                        role = role_of(read_directory(cell), end, is_copy=cell.is_copy, place=self._objects.url)
                        if role is Role.BEGIN and not may_begin:
                            raise StartRefused(f"the log at {self._objects.url} is empty, and --standby begins none")
                        dead_epoch = end.epoch if end is not None and role is Role.CONTINUE else -1
                        self._keeper.acquire(dead_epoch=dead_epoch, dead_holders=dead_holders)
                        if role is not Role.STANDBY:
                            if self._keeper.wait_held(_LOOK_S):
                                return False
                            if not is_reported and (record := self._keeper.record()) is not None:
                                is_reported = True
                                log.warning("lease_awaited", url=self._objects.url, holder=record.address)
                            continue
                        standby = self._begin_standby(cell, on_standby)
                    looked_s = self._clock.monotonic_s()
                    standby.catch_up()
                    self._look_at_link(standby, looked_s)
                    self._on_follow()
                    if self._keeper.wait_held(min(_LOOK_S, self._term_s / 5)) and self._take_over(standby):
                        self.standby = None
                        log.warning(
                            "taken_over", url=self._objects.url, **standby.position._asdict() | {"checksum": ""}
                        )
                        return True
                except ReplicaUnavailable as error:
                    log.warning("standby_waiting", url=self._objects.url, error=error.reason)
                    if self.standby is not None:
                        self.standby = replace(self.standby, error=error.reason)
                    self._closed.wait(_LOOK_S)
        finally:
            if self._link is not None:
                self._link.close()
            if standby is not None:
                standby.close()
                self.leave()

    def _begin_standby(self, cell: Cell, on_standby: Callable[[], None]) -> Standby:
        received = ReceivedBatches(self._data, makes=self._listener is not None)
        standby = Standby(self._objects, cell, self._clock, received)
        self._link = StandbyLink(self._objects, self._registers, received, standby, self._listener)
        self.standby = StandbyFigures(Position(0, 0, 0, 0, NO_CHECKSUM), 0, self._clock.monotonic_s())
        on_standby()
        log.info("standby_started", url=self._objects.url)
        threading.Thread(target=self._stay_registered, name="dmq-standby", daemon=True).start()
        return standby

    def _take_over(self, standby: Standby) -> bool:
        """Promote the standby, or leave the lease to the one that alone may take over."""
        assert self._link is not None
        epoch = self._link.begin_takeover()
        if epoch is None:
            self._keeper.decline()
        elif self._keeper.is_held():  # the object store may have been slow
            standby.promote(epoch, self._keeper.is_held)
            return True
        return False

    def _look_at_link(self, standby: Standby, looked_s: float) -> None:
        """Put received batches into the log if the link is down, and want the lease unless it is another standby's."""
        link, earlier = self._link, self.standby
        assert link is not None
        link.look()
        reserved_for = ""
        if self._keeper.has_declined:
            reserved_for = link.reserved_for()
            if not reserved_for:
                self._keeper.acquire()
            elif earlier is not None and not earlier.reserved_for:
                log.warning("takeover_reserved", url=self._objects.url, standby=reserved_for)
        self.standby = StandbyFigures(
            *(standby.position, standby.written_ms, looked_s),
            is_linked=link.is_connected,
            reserved_for=reserved_for,
        )

    def _end(self) -> SegmentHead | None:
        names = list_bases(self._objects)
        after = max(read_base(self._objects, names[-1]).number - 1, 0) if names else 0
        last = last_segment(self._objects, after)
        return last.head if last is not None else None

    def _stay_registered(self) -> None:
        """Renew the registration as standby, also while the standby reads a long log."""
        while not self._has_left.is_set():
            pause_s = self._term_s / 3
            try:
                self._register()
            except ReplicaUnavailable:
                pause_s = min(pause_s, _LOOK_S)
            self._has_left.wait(pause_s)

    def _register(self) -> None:
        name = _STANDBYS + self._holder
        self._registrations += 1
        link = self._link.address if self._link is not None else ""
        content = {"address": self._address, "registration": self._registrations, "link": link}
        data = json.dumps(content).encode()
        self._etag = self._registers.replace(name, data, self._etag)
        if self._etag is None:  # an answer was lost: the next attempt replaces what is there
            found = self._registers.read(name)
            self._etag = found[1] if found is not None else None

    def _watch(
        self, epoch: int, cell_id: str, bind: Callable[[bool], None], offer: Callable[[Sequence[str]], None]
    ) -> None:
        is_bound: bool | None = None
        while not self._closed.is_set():
            with suppress(ReplicaUnavailable):
                if is_bound is None:
                    publish_cell(self._objects, cell_id)
                links = self._standbys()
                offer([each for each in links if each])
                found = bool(links)
                record = self._keeper.record()
                if found:
                    bind(True)
                elif record is not None and record.holder == self._holder and not record.is_bound:
                    bind(False)  # no standby takes over after this record
                if found != is_bound:
                    self._keeper.hold(epoch, is_bound=found)
                    if self._keeper.wait_published(is_bound=found, timeout_s=self._term_s / 3):
                        if found:
                            log.info("standby_registered", url=self._objects.url)
                        else:
                            log.info("standby_missing", url=self._objects.url)
                        is_bound = found
            self._closed.wait(self._term_s / 3)

    def _standbys(self) -> list[str]:
        """Return the addresses of the direct links of the standbys that are alive; empty for one without a link."""
        now_s = self._clock.monotonic_s()
        seen: dict[str, tuple[str, float]] = {}
        links: dict[str, str] = {}
        for name in self._registers.list(_STANDBYS):
            if name.endswith(self._holder):  # written late, after this process had taken over
                self._registers.delete([name])
            elif (found := self._registers.read(name)) is not None:
                known = self._seen.get(name)
                links[name] = _link_of(found[0])
                seen[name] = known if known is not None and known[0] == found[1] else (found[1], now_s)
        self._seen = seen
        dead = [name for name, (_, since_s) in seen.items() if now_s - since_s > 2 * _ALIVE_TERMS * self._term_s]
        self._registers.delete(dead)
        return [links[name] for name, (_, since_s) in seen.items() if now_s - since_s < _ALIVE_TERMS * self._term_s]


def _link_of(registration: bytes) -> str:
    """Return the address of the direct link in a registration; empty if it has none."""
    try:
        return str(json.loads(registration)["link"])
    except (ValueError, KeyError, TypeError):
        return ""
