"""Standby's side of the direct link: it writes batches to its directory, syncs them, and acknowledges them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from broker_adapter.runtime.log import LibraryLog
from dmq.errors import DmqError
from dmq.replication.link.frames import (
    FRAME_BYTES_MAX,
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
from dmq.replication.link.received import ReceivedBatches
from dmq.replication.link.record import LINK, LinkRecord, is_nameable
from dmq.replication.objects import ObjectStore
from dmq.store.schema.cell.position import Position

log = LibraryLog("dmq.replication")

HELLO_S = 5.0
SILENCE_S = 15.0  # the primary sends a sign of life every second
_SEND_S = 5.0


class LinkReceiver:
    """Receives batches from one primary at a time, until ``close``."""

    def __init__(self, received: ReceivedBatches, registers: ObjectStore, position: Callable[[], Position]) -> None:
        """``position`` returns the current position of the standby, from any thread."""
        self._received = received
        self._registers = registers
        self._position = position
        self._changed = threading.Condition()
        self._is_closed = False
        self._channel: LinkChannel | None = None

    @property
    def is_connected(self) -> bool:
        """Return True while a primary is connected."""
        return self._channel is not None

    def serve(self, channel: LinkChannel) -> None:
        """Serve a connection to its end."""
        try:
            hello = decode(channel.receive(HELLO_BYTES_MAX, HELLO_S), LinkHello)
            if refusal := self._refusal(hello):
                channel.send(encode(LinkWelcome(VERSION, "", 0, refusal)), _SEND_S)
                log.warning("link_refused", epoch=hello.epoch, why=refusal)
                return
            self._follow(channel, hello)
        except (DmqError, OSError) as error:
            log.warning("link_ended", error=str(error))
        finally:
            channel.close()
            with self._changed:
                if self._channel is channel:
                    self._channel = None

    def close(self) -> None:
        """Acknowledge no batch from now on."""
        with self._changed:
            self._is_closed = True
            channel = self._channel
        if channel is not None:
            channel.close()

    def open(self) -> None:
        """Accept connections again: the takeover did not begin."""
        with self._changed:
            self._is_closed = False

    def _refusal(self, hello: LinkHello) -> str:
        position = self._position()
        if hello.version != VERSION:
            return f"this standby has version {VERSION} of the direct link, the primary {hello.version}: upgrade both"
        if hello.store != position.store:
            return f"this standby follows store {position.store:016x}, not {hello.store:016x}"
        if hello.epoch < position.epoch:
            return f"the log has epoch {position.epoch}, and this primary epoch {hello.epoch}"
        # An earlier process of this standby may have sealed the epoch.
        if not is_nameable(LinkRecord.decode(self._registers.read(LINK)), hello.epoch):
            return f"a takeover from epoch {hello.epoch} began"
        return ""

    def _follow(self, channel: LinkChannel, hello: LinkHello) -> None:
        with self._changed:
            if self._is_closed:
                raise LinkBroken("this standby takes over")
            earlier, self._channel = self._channel, channel
            last = self._received.begin(hello.store, hello.epoch)
        if earlier is not None:
            earlier.close()
        channel.send(encode(LinkWelcome(VERSION, self._received.member, last, "")), _SEND_S)
        log.info("link_connected", epoch=hello.epoch, batch=last)
        while True:
            body = channel.receive(FRAME_BYTES_MAX, SILENCE_S)
            frame = decode(body, LinkFrame)
            if frame.batches and frame.first != max(last, frame.stored) + 1:
                raise LinkBroken(f"batch {frame.first} does not follow batch {max(last, frame.stored)}")
            with self._changed:
                self._require_current(channel)
                last = self._received.add(frame, body)
            channel.send(encode(last), _SEND_S)

    def _require_current(self, channel: LinkChannel) -> None:
        if self._is_closed or self._channel is not channel:
            raise LinkBroken("this standby takes over, or has another connection")
