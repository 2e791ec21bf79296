"""Primary's side of the direct link: it sends batches to a standby, and keeps the register of its member.

Acknowledgements count while the connection is up and the register names the standby for the epoch. If the link has been
down for a while, the member is removed, once the object store has all batches that were answered on its word.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from broker_adapter.runtime.clock import Clock
from broker_adapter.runtime.log import LibraryLog
from dmq.errors import DmqError
from dmq.replication.link.frames import (
    HELLO_BYTES_MAX,
    VERSION,
    LinkBroken,
    LinkChannel,
    LinkFrame,
    LinkHello,
    LinkWelcome,
    decode,
    encode,
)
from dmq.replication.link.record import LINK, LinkRecord, is_nameable
from dmq.replication.objects import ObjectStore, ReplicaUnavailable

log = LibraryLog("dmq.replication")

ANSWER_S = 3.0
_SIGN_OF_LIFE_S = 1.0
_AGAIN_S = 1.0


class Unstored(NamedTuple):
    """Batches that the object store may lack."""

    stored: int  # last batch that it certainly has
    first: int
    batches: list[bytes]
    time_ms: int


class LinkedLog(Protocol):
    """Replication log, as the link uses it."""

    def unstored(self, after: int, wait_s: float) -> Unstored | None:
        """Return batches after ``after`` for one frame, none after the wait; None if the log accepts no batch."""
        ...

    def note_link(self, batch: int | None) -> None:
        """Note that the member has the batches up to ``batch``; None: the link is down."""
        ...


class LinkState(Enum):
    """State of the direct link of a primary."""

    WAITING = "waiting"  # no standby offers a link
    DOWN = "down"
    IN_SYNC = "in_sync"
    SEALED = "sealed"  # a takeover began: this epoch has no link any more


class LinkStatus(NamedTuple):
    """Figures of the link."""

    state: LinkState
    address: str  # of the standby
    batches: int  # acknowledged since the start
    error: str  # why the link is down


class _Sealed(DmqError):
    """A takeover began."""


class LinkSender:
    """Thread that holds the direct link to a standby."""

    def __init__(
        self,
        linked_log: LinkedLog,
        registers: ObjectStore,
        clock: Clock,
        dial: Callable[[str], LinkChannel],
        *,
        store: int,
        epoch: int,
        patience_s: float,
    ) -> None:
        """``dial`` connects to an address. A member is removed if its link is down for ``patience_s``."""
        self._log = linked_log
        self._registers = registers
        self._clock = clock
        self._dial = dial
        self._hello = LinkHello(VERSION, store, epoch)
        self._epoch = epoch
        self._patience_s = patience_s
        self._addresses: Sequence[str] = ()
        self._member = ""  # the register may name it
        self._acknowledged = 0  # last batch that counted
        self._lost_s: float | None = None  # since when the link of the member is down
        self._closed = threading.Event()
        self._status = LinkStatus(LinkState.WAITING, "", 0, "")
        self._thread = threading.Thread(target=self._run, name="dmq-link", daemon=True)

    def start(self) -> None:
        """Begin to connect."""
        self._thread.start()

    def offer(self, addresses: Sequence[str]) -> None:
        """Use the addresses of the current standbys; from any thread."""
        self._addresses = addresses

    def status(self) -> LinkStatus:
        """Return the current figures; from any thread."""
        return self._status

    def close(self) -> None:
        """End the link; the register stays."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join()

    def leave(self) -> None:
        """Remove the member from the register. The link is closed, and the object store has every batch."""
        if self._member:
            try:
                self._remove_member()
            except (ReplicaUnavailable, _Sealed) as error:
                log.warning("link_member_stays", address=self._status.address, error=str(error))

    def _run(self) -> None:
        while not self._closed.is_set():
            addresses = self._addresses
            if not addresses and not self._member:
                self._set(LinkState.WAITING, "", "")
            try:
                for address in addresses:
                    self._attempt(address)
                self._remove_lost()
            except _Sealed as error:
                self._set(LinkState.SEALED, self._status.address, str(error))
                log.warning("link_sealed", why=str(error))
                return
            except ReplicaUnavailable as error:
                self._set(LinkState.DOWN, self._status.address, error.reason)
            self._closed.wait(_AGAIN_S)

    def _attempt(self, address: str) -> None:
        """Hold the link to a standby for as long as possible."""
        was_in_sync = False
        try:
            channel = self._dial(address)
            try:
                self._hold(channel, address)
            finally:
                channel.close()
        except (LinkBroken, ReplicaUnavailable) as error:
            was_in_sync = self._status.state is LinkState.IN_SYNC
            if was_in_sync or str(error) != self._status.error:
                log.warning("link_down", address=address, error=str(error))
            self._set(LinkState.DOWN, address, str(error))
        finally:
            self._log.note_link(None)
            if self._member and self._lost_s is None:
                self._lost_s = self._clock.monotonic_s()

    def _hold(self, channel: LinkChannel, address: str) -> None:
        channel.send(encode(self._hello), ANSWER_S)
        welcome = decode(channel.receive(HELLO_BYTES_MAX, ANSWER_S), LinkWelcome)
        if welcome.refusal:
            raise LinkBroken(welcome.refusal)
        if self._member not in ("", welcome.member):
            raise LinkBroken("another standby is the member until the object store has its batches")
        received, is_member, wait_s = welcome.received, False, 0.0
        while (unstored := self._log.unstored(received, wait_s)) is not None and not self._closed.is_set():
            expected = max(received, unstored.stored) + 1
            if unstored.first != expected:
                raise LinkBroken(f"the standby has batch {received}, which this primary did not write")
            frame = LinkFrame(unstored.first, unstored.stored, unstored.time_ms, unstored.batches)
            channel.send(encode(frame), ANSWER_S)
            received = decode(channel.receive(HELLO_BYTES_MAX, ANSWER_S), int)
            if unstored.batches and received != frame.last:
                raise LinkBroken(f"the standby acknowledged batch {received} instead of {frame.last}")
            if not is_member:
                self._make_member(welcome.member, address)
                is_member, wait_s = True, _SIGN_OF_LIFE_S
                log.info("link_in_sync", address=address, batch=received)
            self._lost_s = None
            self._acknowledged = max(self._acknowledged, received)
            self._log.note_link(received)
            batches = self._status.batches + len(unstored.batches)
            self._status = LinkStatus(LinkState.IN_SYNC, address, batches, "")

    def _make_member(self, member: str, address: str) -> None:
        """Write the member to the register; return once it certainly names it."""
        self._member = member
        while True:
            found = self._registers.read(LINK)
            record = LinkRecord.decode(found)
            self._require_nameable(record)
            is_own = record is not None and record.epoch == self._epoch
            if is_own and record is not None and record.member == member:
                return
            if is_own and record is not None and record.member:
                raise LinkBroken("another standby is the member")
            wanted = LinkRecord(self._epoch, member, address)
            if self._registers.replace(LINK, wanted.encode(), found[1] if found is not None else None) is not None:
                return

    def _remove_lost(self) -> None:
        """Remove the member if its link is down for long and the object store has the batches that it acknowledged."""
        lost_s = self._lost_s
        if not self._member or lost_s is None or self._clock.monotonic_s() - lost_s < self._patience_s:
            return
        unstored = self._log.unstored(self._acknowledged, 0.0)
        if unstored is not None and unstored.stored >= self._acknowledged:
            self._remove_member()

    def _remove_member(self) -> None:
        """Write a record without a member; return once the register certainly has none of this primary."""
        while True:
            found = self._registers.read(LINK)
            record = LinkRecord.decode(found)
            self._require_nameable(record)
            if found is None or record is None or record.epoch != self._epoch or not record.member:
                break
            if self._registers.replace(LINK, LinkRecord(self._epoch).encode(), found[1]) is not None:
                break
        log.info("link_member_removed", address=self._status.address)
        self._member, self._lost_s = "", None

    def _require_nameable(self, record: LinkRecord | None) -> None:
        if not is_nameable(record, self._epoch):
            raise _Sealed(f"a takeover from epoch {self._epoch} began")

    def _set(self, state: LinkState, address: str, error: str) -> None:
        self._status = LinkStatus(state, address, self._status.batches, error)
