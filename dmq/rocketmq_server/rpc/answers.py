"""Answers that carry messages, in pieces: all messages of a piece are sent at once.

A piece ends with the message that brings it to ``PIECE_BYTES`` or more. An unreadable message is left out and logged,
so that the others are delivered. A received one is redelivered until its attempts are used up. A pulled one stays in
its queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, Generic, TypeVar

import structlog
from google.protobuf.message import DecodeError

from broker_adapter.contracts.adapter import Pulled, PulledMessage
from broker_adapter.contracts.errors import Overloaded
from broker_adapter.contracts.message import Delivery
from broker_adapter.wire import rocketmq_v2 as wire
from broker_adapter.wire.mapping import set_timestamp
from dmq.http2 import Account
from dmq.rocketmq_server.codec import mapping
from dmq.rocketmq_server.codec.codes import OK_STATUS

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

log = structlog.get_logger("dmq.rocketmq_server")


def received(
    deliveries: Sequence[Delivery],
    topic: wire.Resource,
    store_host: str,
    now_ms: Callable[[], int],
    account: Account | None = None,
    over: Callable[[bool], None] = lambda _: None,
) -> Iterator[list[wire.ReceiveMessageResponse]]:
    """Yield the status, each message, and last the delivery time; call ``over`` with True if all were consumed."""
    fill = partial(_filled, wire.ReceiveMessageResponse, mapping.fill, topic, store_host)
    first = _RECEIVED if deliveries else _NOTHING_RECEIVED
    waiting = _Waiting(deliveries, account)
    del deliveries
    is_taken = False
    try:
        yield from _in_pieces(first, waiting, fill, lambda: _delivered_at(now_ms()))
        is_taken = True
    finally:
        waiting.drop()
        over(is_taken)


def pulled(
    found: Pulled, topic: wire.Resource, store_host: str, account: Account | None = None
) -> Iterator[list[wire.PullMessageResponse]]:
    """Yield the status, then each message, then the offset of the next pull."""
    fill = partial(_filled, wire.PullMessageResponse, mapping.fill_pulled, topic, store_host)
    first = _PULLED if found.messages else _NOTHING_PULLED
    waiting, last = _Waiting(found.messages, account), wire.PullMessageResponse(next_offset=found.next_offset)
    del found
    try:
        yield from _in_pieces(first, waiting, fill, lambda: last)
    finally:
        waiting.drop()


def check_room(messages: Sequence[Delivery] | Sequence[PulledMessage], account: Account | None) -> None:
    """Raise Overloaded if the account has no room for these messages, whose answer may wait for a slow client."""
    size = sum(len(each.payload) for each in messages)
    if account is None or size <= PIECE_BYTES:
        return
    account.hold(size)
    pool = account.has_room()
    account.hold(-size)
    if pool is not None:
        raise Overloaded(f"bytes of requests and answers that wait ({pool})", limit=pool.bytes_max)


class _Waiting(Generic[_Message]):
    """Messages of an answer that are not encoded yet. The account counts their bytes until then."""

    def __init__(self, messages: Sequence[_Message], account: Account | None) -> None:
        self._messages: deque[_Message] = deque(messages)
        self._account = account
        self._hold(sum(len(each.payload) for each in messages))

    def __bool__(self) -> bool:
        return bool(self._messages)

    def take(self) -> _Message:
        """Return the next message and remove it from the account."""
        message = self._messages.popleft()
        self._hold(-len(message.payload))
        return message

    def drop(self) -> None:
        """Discard the remaining messages."""
        while self._messages:
            self.take()

    def _hold(self, size: int) -> None:
        if self._account is not None:
            self._account.hold(size)


def _in_pieces(
    first: _Answer, waiting: _Waiting[_Message], fill: Callable[[_Message], list[_Answer]], last: Callable[[], _Answer]
) -> Iterator[list[_Answer]]:
    """Yield lists of answers. No variable references a message during a yield, because the receiver clears the list."""
    piece: list[_Answer] = [first]
    piece_bytes = 0
    while waiting:
        message = waiting.take()
        filled = fill(message)
        piece += filled
        piece_bytes += len(message.payload) if filled else 0
        del message, filled
        if piece_bytes >= PIECE_BYTES:
            yield piece
            piece = []
            piece_bytes = 0
    piece.append(last())
    yield piece


def _filled(
    answer_class: type[_Answer],
    fill: Callable[[wire.Message, _Message, wire.Resource, str], None],
    topic: wire.Resource,
    store_host: str,
    message: _Message,
) -> list[_Answer]:
    """Return the answer with one message; log an unreadable message and return an empty list."""
    answer = answer_class()
    try:
        fill(answer.message, message, topic, store_host)
    except DecodeError:
        log.exception(
            "message_unreadable",
            topic=topic.name,
            message_id=message.message_id,
            queue_id=message.queue_id,
            queue_offset=message.queue_offset,
        )
        return []
    return [answer]


def _delivered_at(now_ms: int) -> wire.ReceiveMessageResponse:
    last = wire.ReceiveMessageResponse()
    set_timestamp(last.delivery_timestamp, now_ms)
    return last
