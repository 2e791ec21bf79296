"""Direct link of a standby: its port, its received batches, and its part of a takeover."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from typing import Protocol

from broker_adapter.runtime.log import LibraryLog
from dmq.replication.link.frames import LinkChannel
from dmq.replication.link.received import ReceivedBatch, ReceivedBatches, following
from dmq.replication.link.receiver import LinkReceiver
from dmq.replication.link.record import LINK, LinkRecord, is_reserved, sealed
from dmq.replication.objects import ObjectStore
from dmq.replication.segment import NONCE_BYTES, SegmentHead, encode_segment, segment_name
from dmq.store.schema.cell.position import Position

log = LibraryLog("dmq.replication")

_SEGMENT_BYTES_MAX = 8 * 1024 * 1024
_SEGMENT_BATCHES_MAX = 65_536


class LinkEndpoint(Protocol):
    """Port of the direct link."""

    def start(self, serve: Callable[[LinkChannel], None]) -> str:
        """Listen, serve each connection in a thread of its own, and return the address for the primary."""
        ...

    def close(self) -> None:
        """Close the port and all connections."""
        ...


class Follower(Protocol):
    """Standby, as the link uses it."""

    @property
    def position(self) -> Position:
        """Position after the last applied batch."""
        ...

    @property
    def own_nonces(self) -> set[bytes]:
        """Nonces of the segments that this standby writes: their time is older than their appearance."""
        ...

    @property
    def written_ms(self) -> int:
        """Time of the last applied segment."""
        ...

    def catch_up(self) -> int:
        """Apply the new segments."""
        ...


class StandbyLink:
    """Direct link of one standby. ``address`` is empty while it does not listen."""

    def __init__(
        self,
        objects: ObjectStore,
        registers: ObjectStore,
        received: ReceivedBatches,
        follower: Follower,
        listener: LinkEndpoint | None,
    ) -> None:
        """Without a ``listener`` it receives nothing, and only knows the batches of an earlier process."""
        self._objects = objects
        self._registers = registers
        self._received = received
        self._follower = follower
        self._listener = listener
        self._receiver = LinkReceiver(received, registers, lambda: follower.position)
        self.address = ""

    @property
    def is_connected(self) -> bool:
        """Return True while a primary is connected."""
        return self._receiver.is_connected

    def look(self) -> None:
        """Listen, once the standby has followed the log; without a primary, put the received batches into the log."""
        self._receiver.open()  # after a takeover that was given up
        if self._listener is not None and not self.address:
            self.address = self._listener.start(self._receiver.serve)
        if not self.is_connected:
            self.put_tail()

    def reserved_for(self) -> str:
        """Return the address of another standby that alone may take over; empty if this one may."""
        record = LinkRecord.decode(self._registers.read(LINK))
        is_other = is_reserved(record, self._received.member, self._follower.position.epoch)
        return record.address or record.member if record is not None and is_other else ""

    def begin_takeover(self) -> int | None:
        """Acknowledge no batch any more, and seal the register; return None if another standby has to take over.

        On success the log has all received batches. Return the sealed epoch: a takeover from a later one would lack
        the batches of its member.
        """
        if self.reserved_for():
            return None
        self._receiver.close()
        while True:
            found = self._registers.read(LINK)
            record, epoch = LinkRecord.decode(found), self._follower.position.epoch
            if is_reserved(record, self._received.member, epoch):
                return None
            etag = found[1] if found is not None else None
            if self._registers.replace(LINK, sealed(record, epoch).encode(), etag) is not None:
                break
        self.put_tail()
        return epoch

    def put_tail(self) -> None:
        """Put the received batches that the log lacks into segments of their epoch.

        The primary may write the same batches at the same time. Then one of both segments is in the log, and its other
        writer continues after it.
        """
        while True:
            before = self._follower.position
            if self._received.last(before.store, before.epoch) <= before.batch:
                return
            received = self._received.after(before.store, before.epoch, before.batch)
            self._follower.catch_up()
            position = self._follower.position
            tail = _one_segment(following(received, position.batch)) if position.epoch == before.epoch else []
            if not tail:
                continue
            head = SegmentHead(
                position.store,
                position.epoch,
                position.number + 1,
                tail[0].number,
                max(self._follower.written_ms, *(each.time_ms for each in tail)),
                secrets.token_bytes(NONCE_BYTES),
                position.checksum,
            )
            data, _ = encode_segment(head, [each.data for each in tail])
            self._follower.own_nonces.add(head.nonce)
            if self._objects.create(segment_name(head.number), data):
                log.info("link_segment_written", number=head.number, batches=len(tail))
            self._follower.catch_up()

    def close(self) -> None:
        """Close the port, and acknowledge no batch any more."""
        self._receiver.close()
        if self._listener is not None:
            self._listener.close()
        self._received.close()


def _one_segment(batches: Iterable[ReceivedBatch]) -> list[ReceivedBatch]:
    """Return the batches of the next segment."""
    taken: list[ReceivedBatch] = []
    size = 0
    for each in batches:
        size += len(each.data)
        if taken and (size > _SEGMENT_BYTES_MAX or len(taken) >= _SEGMENT_BATCHES_MAX):
            break
        taken.append(each)
    return taken
