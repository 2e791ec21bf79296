"""The answers that carry messages, in pieces: what is there at once goes out at once.

A piece ends with the message that makes it ``PIECE_BYTES`` or larger. A message that cannot be read is left out and
logged, for the others are good: one that was received comes back until its attempts are used up, one that was pulled
stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

import structlog
from google.protobuf.message import DecodeError

from broker_adapter.adapter import Pulled, PulledMessage
from broker_adapter.errors import Overloaded
from broker_adapter.message import Delivery
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.mapping import set_timestamp
from dmq.http2 import Account
from dmq.sidecar import mapping
from dmq.sidecar.codes import OK_STATUS

PIECE_BYTES: Final = 64 * 1024

_RECEIVED = wire.ReceiveMessageResponse(status=OK_STATUS)
_NOTHING_RECEIVED = wire.ReceiveMessageResponse(
    status=wire.Status(code=wire.MESSAGE_NOT_FOUND, message="no new message came while waiting")
)
_PULLED = wire.PullMessageResponse(status=OK_STATUS)
_NOTHING_PULLED = wire.PullMessageResponse(
    status=wire.Status(code=wire.MESSAGE_NOT_FOUND, message="no new message between the offset and the next one")
)

_Answer = TypeVar("_Answer", wire.ReceiveMessageResponse, wire.PullMessageResponse)
_Message = TypeVar("_Message", Delivery, PulledMessage)

log = structlog.get_logger("dmq.sidecar")


def received(
    deliveries: Sequence[Delivery],
    topic: wire.Resource,
    store_host: str,
    now_ms: Callable[[], int],
    account: Account | None = None,
    over: Callable[[bool], None] = lambda _: None,
) -> Iterator[list[wire.ReceiveMessageResponse]]:
    """Give the status first, each message, the time of delivery last; tell ``over`` whether all of it was taken."""
    is_taken = False
    try:
        with _counted(deliveries, account):
            yield from _in_pieces(
                _RECEIVED if deliveries else _NOTHING_RECEIVED,
                _filled(wire.ReceiveMessageResponse, mapping.fill, deliveries, topic, store_host),
                lambda: _delivered_at(now_ms()),
            )
        is_taken = True
    finally:
        over(is_taken)


def pulled(
    found: Pulled, topic: wire.Resource, store_host: str, account: Account | None = None
) -> Iterator[list[wire.PullMessageResponse]]:
    """Give the status first, each message, the offset to go on from last."""
    with _counted(found.messages, account):
        yield from _in_pieces(
            _PULLED if found.messages else _NOTHING_PULLED,
            _filled(wire.PullMessageResponse, mapping.fill_pulled, found.messages, topic, store_host),
            lambda: wire.PullMessageResponse(next_offset=found.next_offset),
        )


def check_room(messages: Sequence[Delivery] | Sequence[PulledMessage], account: Account | None) -> None:
    """Raise Overloaded if there is no room for an answer with these messages, which may have to wait for its client."""
    size = sum(len(each.payload) for each in messages)
    if account is None or size <= PIECE_BYTES:
        return
    account.hold(size)
    pool = account.has_room()
    account.hold(-size)
    if pool is not None:
        raise Overloaded(f"bytes of requests and answers that wait ({pool})", limit=pool.bytes_max)


@contextmanager
def _counted(messages: Sequence[Delivery] | Sequence[PulledMessage], account: Account | None) -> Iterator[None]:
    """Count messages as held while they wait for the client to take those before them."""
    size = sum(len(each.payload) for each in messages)
    if account is None or not size:
        yield
        return
    account.hold(size)
    try:
        yield
    finally:
        account.hold(-size)


def _in_pieces(
    first: _Answer, filled: Iterable[tuple[_Answer, int]], last: Callable[[], _Answer]
) -> Iterator[list[_Answer]]:
    piece: list[_Answer] = [first]
    piece_bytes = 0
    for answer, size in filled:
        piece.append(answer)
        piece_bytes += size
        if piece_bytes >= PIECE_BYTES:
            yield piece
            piece = []
            piece_bytes = 0
    piece.append(last())
    yield piece


def _filled(
    answer_class: type[_Answer],
    fill: Callable[[wire.Message, _Message, wire.Resource, str], None],
    messages: Sequence[_Message],
    topic: wire.Resource,
    store_host: str,
) -> Iterator[tuple[_Answer, int]]:
    for each in messages:
        answer = answer_class()
        try:
            fill(answer.message, each, topic, store_host)
        except DecodeError:
            log.exception(
                "message_unreadable",
                topic=topic.name,
                message_id=each.message_id,
                queue_id=each.queue_id,
                queue_offset=each.queue_offset,
            )
            continue
        yield answer, len(each.payload)


def _delivered_at(now_ms: int) -> wire.ReceiveMessageResponse:
    last = wire.ReceiveMessageResponse()
    set_timestamp(last.delivery_timestamp, now_ms)
    return last
