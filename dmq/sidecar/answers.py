"""The answer to a receive, in pieces: what is there at once goes out at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import structlog
from google.protobuf.message import DecodeError

from broker_adapter.message import Delivery
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.mapping import set_timestamp
from dmq.sidecar import mapping
from dmq.sidecar.codes import OK_STATUS

PIECE_BYTES: Final = 64 * 1024

_FOUND = wire.ReceiveMessageResponse(status=OK_STATUS)
_NOTHING_FOUND = wire.ReceiveMessageResponse(
    status=wire.Status(code=wire.MESSAGE_NOT_FOUND, message="no message came while waiting")
)

log = structlog.get_logger("dmq.sidecar")


def received(
    deliveries: Sequence[Delivery], topic: wire.Resource, store_host: str, now_ms: Callable[[], int]
) -> Iterator[list[wire.ReceiveMessageResponse]]:
    """Give the status first, each message, the time of delivery last.

    A piece ends with the message that makes it ``PIECE_BYTES`` or larger. A message that cannot be read is left out and
    logged: the others are good, and it comes back until its attempts are used up.
    """
    piece = [_FOUND if deliveries else _NOTHING_FOUND]
    piece_bytes = 0
    for delivery in deliveries:
        response = wire.ReceiveMessageResponse()
        try:
            mapping.fill(response.message, delivery, topic, store_host)
        except DecodeError:
            log.exception(
                "delivery_unreadable",
                topic=delivery.topic,
                message_id=delivery.message_id,
                queue_id=delivery.queue_id,
                queue_offset=delivery.queue_offset,
            )
            continue
        piece.append(response)
        piece_bytes += len(delivery.payload)
        if piece_bytes >= PIECE_BYTES:
            yield piece
            piece, piece_bytes = [], 0
    last = wire.ReceiveMessageResponse()
    set_timestamp(last.delivery_timestamp, now_ms())
    yield [*piece, last]
