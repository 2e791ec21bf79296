"""Report of the probable contents of damaged records in the write-ahead log."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from dmq.errors import StoreCorrupt
from dmq.recovery.reading.log_repair import Dropped, puts_of
from dmq.recovery.reading.loss_report import LossReport
from dmq.recovery.reading.rows import read_waiting
from dmq.recovery.salvage.names import RequiredNames
from dmq.store.schema.keys import QUEUE_KEY_BYTES, TIMELINE_KEY_BYTES, unpack_queue_key
from dmq.store.schema.messages.record import decode_queued


def tell_dropped(dropped: Sequence[Dropped], lost: LossReport, needed: RequiredNames) -> None:
    """Report each damaged part, and the messages that its untrusted bytes seem to contain."""
    for each in dropped:
        lost.tell("log", log=each.log, at=each.at, bytes=each.size_bytes)
        for key, value in (puts_of(each.data) if each.data is not None else None) or ():
            with suppress(StoreCorrupt):
                if len(key) == TIMELINE_KEY_BYTES:
                    waiting = read_waiting(key, value)
                    _tell(lost, needed, waiting.entry.topic_id, waiting.message_id)
                elif len(key) == QUEUE_KEY_BYTES:
                    _tell(lost, needed, unpack_queue_key(key)[0], decode_queued(value).message_id)


def _tell(lost: LossReport, needed: RequiredNames, topic_id: int, message_id: bytes) -> None:
    shown = needed.shown_id(message_id)
    lost.tell("message", topic=needed.name(topic_id), message_id=shown, was="in a damaged record of the log")
